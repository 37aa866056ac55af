//! Targets of jobs: opened and checked before the job starts, and closed after it.
//!
//! A target is an image that the job opens, or the image of another disk of the daemon.
//!
//! Never creates or removes a target, and never writes to it.

use std::{
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
};

use anyhow::{bail, ensure};
use block::disk::{Discards, Disk};
use image::{
    Image,
    open::{BackingChoice, ImageOptions},
};
use jobs::{
    job::{Job, JobResult},
    target::JobTarget,
};
use policy::time::Duration;
use reactor::operation::PassedFd;
use settings::ImageLocation;
use storage::{FileIdentity, ImageFormat};

use crate::{
    image_opening::{ImageOpenAttempt, ImageOpenRequest},
    registry::Registry,
};

/// Time that the end of a job waits for an image to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for opening a target at a server.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);

/// Target of a job, as requested.
#[derive(Debug)]
pub(crate) enum TargetRequest {
    Image(TargetImage),
    /// Another disk of the daemon.
    Disk(String),
}

/// Target that is to be opened.
#[derive(Debug)]
pub(crate) struct TargetImage {
    pub(crate) location: ImageLocation,
    /// The target's file, which the client has opened.
    pub(crate) descriptor: Option<PassedFd>,
    pub(crate) format: Option<ImageFormat>,
    /// True if the target was just created, and reads as zeroes.
    pub(crate) is_new: bool,
    /// True if the target is a qcow2 image whose backing file has the last backup.
    pub(crate) is_overlay: bool,
}

impl TargetRequest {
    /// Name for messages and status.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Image(image) => image.location.to_string(),
            Self::Disk(disk) => disk.clone(),
        }
    }

    /// Name of the disk that is the target.
    pub(crate) fn disk(&self) -> Option<&String> {
        match self {
            Self::Image(_) => None,
            Self::Disk(disk) => Some(disk),
        }
    }
}

/// The image of another disk as the target.
pub(crate) fn target_of_disk(registry: &Registry, source: &str, name: &str) -> anyhow::Result<JobTarget> {
    ensure!(source != name, "{name}: it is the disk itself (use another target)");
    let target = registry.disks.get(name)?;
    ensure!(
        !target.disk.has_handover(),
        "disk {name}: handover: its image may pass to another process at any time (serve it without \
         handover, or use another target)"
    );
    ensure!(
        target.disk.failures().stopped_by().is_none(),
        "disk {name}: an error has stopped it (`weir resume` continues it)"
    );
    if let Some(export) = registry.exports.of_disk(name).first() {
        bail!("disk {name}: it is exported as {} (remove the export, or use another target)", export.id);
    }
    let may_unmap = target.disk.discards() == Discards::Unmap;
    Ok(JobTarget { image: target.disk.image(), is_zero: false, is_overlay: false, may_unmap })
}

impl TargetImage {
    /// Opens the target, which no other process may use, with `options` of an image. With a
    /// descriptor, its path is not opened.
    ///
    /// # Errors
    /// It cannot be opened, or is no overlay as requested.
    pub(crate) async fn open(
        self,
        registry: &Registry,
        mut options: ImageOptions,
    ) -> anyhow::Result<JobTarget> {
        let Self { location: target, descriptor, format, is_new, is_overlay } = self;
        check_server(registry, &target)?;
        if descriptor.is_none() {
            registry.check_image(&target).await?;
        }
        (options.storage.format, options.storage.exclusive) = (format, true);
        options.storage.root = registry.image_root().cloned();
        options.storage.descriptor = descriptor.map(Arc::new);
        // The backing file is not needed, and the daemon may lack the permission to read it.
        options.backing = if is_overlay { BackingChoice::Nothing } else { BackingChoice::AsInImage };
        let request = ImageOpenRequest {
            name: target.to_string(),
            spec: target.to_spec()?,
            options,
            qcow2_key_origin: None,
        };
        // Its own time limit is for images that a later attempt may open; a target is opened once.
        let attempt = ImageOpenAttempt::begin(request, target.path().is_none());
        let image = match reactor::timeout(OPEN_TIMEOUT, attempt.outcome()).await {
            Ok(Ok(opened)) => opened.map_err(|error| registry.with_holder_if_lock_error(error, []))?,
            Ok(Err(unavailable)) => bail!("{target}: {unavailable}"),
            Err(_) => bail!(
                "{target}: no answer in {} s (check the server, or use another target)",
                OPEN_TIMEOUT.as_secs()
            ),
        };
        let has_backing = matches!(&image, Image::Qcow2(image) if image.header().backing.is_some());
        ensure!(
            has_backing || !is_overlay,
            "{target}: it is no qcow2 image with a backing file (create one over the last backup)"
        );
        if let Image::Qcow2(overlay) = &image {
            ensure!(
                overlay.header().version >= 3 || !is_overlay,
                "{target}: version 2 of qcow2 cannot store zeroes over a backing file (create it with \
                 compat=1.1)"
            );
        }
        let is_zero = is_new && !is_overlay;
        Ok(JobTarget { image: Arc::new(image), is_zero, is_overlay, may_unmap: true })
    }
}

/// Fails if the target is at an NBD server of this daemon: it could be an export of the disk, and
/// changes of clients would be overwritten with older data.
fn check_server(registry: &Registry, target: &ImageLocation) -> anyhow::Result<()> {
    let Some(uri) = target.remote() else { return Ok(()) };
    let is_own = registry.exports.servers().iter().any(|serving| serving.is_reached_at(&uri.server));
    ensure!(!is_own, "{target}: it is an NBD server of this daemon (use another target)");
    Ok(())
}

/// Identities of the devices of this host that are exports of this daemon.
pub(crate) async fn own_devices(registry: &Registry) -> Vec<String> {
    let endpoints = registry.exports.own_endpoints();
    let paths: Vec<PathBuf> =
        endpoints.iter().filter_map(|endpoint| endpoint.device().map(Path::to_owned)).collect();
    let identities = move || paths.iter().filter_map(|path| FileIdentity::of_path(path)).collect::<Vec<_>>();
    reactor::run_blocking(identities).await.iter().map(FileIdentity::to_string).collect()
}

/// Fails if the target is read-only, shares storage with the disk, or is one of these devices.
pub(crate) fn check_target(
    disk: &Disk,
    image: &Image,
    own_devices: &[String],
    shown: &str,
) -> anyhow::Result<()> {
    ensure!(!image.is_read_only(), "{shown}: it is read-only (use a target that can be written)");
    let (own, keys) = (storage_keys(&disk.image()), storage_keys(image));
    let is_own_image = keys.iter().any(|key| own.contains(key));
    ensure!(
        !is_own_image,
        "{shown}: it is the image of the disk {} itself (use another target)",
        disk.name()
    );
    let is_own_device = keys.iter().any(|key| own_devices.contains(key));
    ensure!(!is_own_device, "{shown}: it is an export of this daemon (use another target)");
    Ok(())
}

/// Identities of the storage of an image. That of an NBD export is its URI, for all cache modes;
/// memory has none.
fn storage_keys(image: &Image) -> Vec<String> {
    let layers = image.layers();
    let files = layers.into_iter().flat_map(|layer| layer.files);
    // Memory and null disks are described by their size only.
    let keys = files.map(|file| file.key).filter(|key| !key.starts_with("memory"));
    keys.map(|key| key.split(", cache=").next().unwrap_or_default().to_owned()).collect()
}

/// Waits until no write of the job can change the target any more, even if the job was cancelled:
/// clients may use the disk once the job has concluded.
pub(crate) async fn drain_target(job: &Job, image: &Image) {
    let drained = async {
        if let Image::Qcow2(image) = image {
            drop(image.drain().await);
        }
        image.await_changes().await;
    };
    let mut drained = pin!(drained);
    if reactor::timeout(CLOSE_TIMEOUT, &mut drained).await.is_err() {
        let seconds = CLOSE_TIMEOUT.as_secs();
        tracing::warn!(
            job = %job.id(),
            "writes to the target of a job have not completed for {seconds} s; its job continues until then"
        );
        drained.await;
    }
}

/// Closes an image that no disk uses, and waits until its locks are released.
///
/// # Errors
/// Reason why it may be incomplete.
pub(crate) async fn close_image(image: Arc<Image>) -> Result<(), String> {
    let closing = reactor::timeout(CLOSE_TIMEOUT, image.close()).await;
    let closed = image.closed();
    // The last reference: the files are closed and their locks released.
    drop(image);
    closed.within(CLOSE_TIMEOUT).await;
    match closing {
        Ok(closed) => closed.map_err(|error| format!("it cannot be closed: {error}")),
        Err(_) => Err(format!("it has not answered for {} s when it was closed", CLOSE_TIMEOUT.as_secs())),
    }
}

/// Closes a target that was opened for a job; returns the result of the job with it.
pub(crate) async fn close_target(image: Arc<Image>, result: JobResult) -> JobResult {
    match (result, close_image(image).await) {
        (JobResult::Completed, Err(why)) => JobResult::Failed(format!("the target: {why}")),
        (result, _) => result,
    }
}
