//! Chains of backing files of disks in use: the start of a stream, and its end.
//!
//! ```text
//!   start ─► find the file that stays below ─► Stream::begin ─► a worker: run ─► concluded
//! ```
//!
//! The disk keeps its image, so no config file changes. Runs on the main thread, except for the
//! work itself. Never opens, creates or removes an image.

use std::{
    path::{Path, absolute},
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use block::layer::throttle::BackgroundSettings;
use image::{Image, open::backing_name, qcow2::header::BackingReference};
use jobs::{
    job::{Job, JobKind},
    stream::{Stream, StreamBase},
};
use policy::time::Duration;
use storage::{FileIdentity, ImageFormat, Storage};

use crate::{
    job_start::{StartedWork, check_settings, reserve, start_job},
    registry::{Registry, RunningDisk},
    snapshots::{chain_files, check_state},
};

/// Time limit for looking up a file that a client names. No other change of the daemon is possible
/// meanwhile.
const STAT_TIMEOUT: Duration = Duration::from_secs(5);

/// Request for a stream.
#[derive(Debug)]
pub(crate) struct StreamRequest {
    /// Id; chosen from the name of the disk if there is none.
    pub(crate) id: Option<String>,
    pub(crate) disk: String,
    /// File of the chain that stays below the disk's image; without it, none does.
    pub(crate) base: Option<String>,
    /// True if the job is not listed any more once it has concluded.
    pub(crate) is_auto_dismissed: bool,
    pub(crate) settings: BackgroundSettings,
}

/// Starts a stream of a disk; returns the id of its job.
///
/// # Errors
/// Reason why it cannot start; nothing has changed.
pub(crate) async fn start_stream(registry: &Rc<Registry>, request: StreamRequest) -> anyhow::Result<String> {
    let StreamRequest { id, disk: name, base, is_auto_dismissed, settings } = request;
    let starting = reserve(registry, JobKind::Stream, id, std::slice::from_ref(&name)).await?;
    let _guard = registry.lock_structure().await?;
    let running = registry.disks.get(&name)?;
    let image = running.disk.image();
    check_disk(&running, &image)?;
    check_settings(&running.disk, settings)?;
    let base = match &base {
        Some(file) => Some(find_base(&running, &image, file).await?),
        None => None,
    };
    let job = Job::new(&starting.id, JobKind::Stream);
    let stream = Stream::begin(&job, &running.disk, base, settings).await;
    let stream = stream.with_context(|| format!("disk {name}"))?;
    registry.lifecycle.check_not_ending()?;
    let started = StartedWork {
        job: Arc::clone(&job),
        disk: name,
        target: running.config().image.to_string(),
        format: ImageFormat::Qcow2,
        target_disk: None,
        switch: None,
        is_auto_dismissed,
        member: Arc::clone(stream.member()),
    };
    Ok(start_job(registry, starting, started, move || async move {
        let result = stream.run().await;
        job.conclude(result);
    }))
}

/// Fails if the state of the disk does not permit a change of its chain.
fn check_disk(running: &RunningDisk, image: &Image) -> anyhow::Result<()> {
    let name = running.disk.name();
    ensure!(
        !running.disk.has_handover(),
        "disk {name}: handover: its image may pass to another process at any time (serve it without \
         handover)"
    );
    ensure!(
        image.backing().is_some(),
        "disk {name}: its image has no backing file, so its chain cannot be shortened"
    );
    ensure!(
        !image.is_read_only(),
        "disk {name}: it is read-only, and its image would be written (serve it for writing)"
    );
    check_state(running, image)
}

/// The image of the chain with this file, which is not the uppermost backing file.
async fn find_base(running: &RunningDisk, image: &Image, file: &str) -> anyhow::Result<StreamBase> {
    let name = running.disk.name();
    let files = chain_files(image);
    let path = absolute(file).with_context(|| format!("disk {name}: {file}"))?;
    let wanted = path.clone();
    // Another spelling, or a link.
    let identity = reactor::run_blocking(move || FileIdentity::of_path(&wanted));
    let identity = reactor::timeout(STAT_TIMEOUT, identity).await;
    let Ok(identity) = identity else {
        bail!("disk {name}: {file}: its file system does not answer (name a file of the chain)")
    };
    let is_wanted = |at: usize, image: &Image| {
        let own = image.files().next().and_then(Storage::file_identity);
        identity.is_some() && own == identity || Path::new(&files[at]) == path
    };
    let position = image.chain().enumerate().position(|(at, image)| is_wanted(at, image));
    let shown = || files.join(", ");
    let position = position.with_context(|| {
        format!("disk {name}: {file}: it is not in the chain of backing files ({})", shown())
    })?;
    ensure!(
        position >= 2,
        "disk {name}: {file}: no file is between it and the disk's image, so there is nothing to remove \
         (name one further below: {})",
        shown()
    );
    let paths = [&files[0], &files[position]].map(Path::new);
    ensure!(
        paths.iter().all(|path| path.is_absolute() && !path.starts_with("/dev/fdset")),
        "disk {name}: {file}: its image was not opened by a path, so it cannot name a backing file (leave \
         the file out to remove all)"
    );
    let mut below = shared_backing(image);
    for _ in 1..position {
        below = below.and_then(|image| shared_backing(image));
    }
    let base = below.with_context(|| format!("disk {name}: {file}: it is not in the chain"))?;
    Ok(StreamBase {
        image: Arc::clone(base),
        reference: BackingReference {
            name: backing_name(paths[0], paths[1]),
            format: Some(base.format().name().to_owned()),
        },
    })
}

fn shared_backing(image: &Image) -> Option<&Arc<Image>> {
    match image {
        Image::Qcow2(qcow2) => qcow2.shared_backing(),
        Image::Raw(_) => None,
    }
}
