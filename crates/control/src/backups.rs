//! Backups: their start, their work on a worker, and the reports of their changes.
//!
//! ```text
//!   start ─► open the target ─► Backup::begin ─► a worker: run ─► close the target ─► concluded
//!                                                  │ state                              │
//!                         events, log, QMP events ◄┴────────────────────────────────────┘
//! ```
//!
//! Runs on the main thread, except for the work itself. Never creates or removes a target.

use std::{
    path::{Path, PathBuf},
    rc::{Rc, Weak},
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use block::{disk::Disk, layer::throttle::BackgroundSettings};
use image::{Image, open::ImageOptions};
use jobs::{
    backup::{Backup, BackupSizes, BackupTarget},
    job::{Job, JobKind, JobResult, JobState},
};
use policy::time::Duration;
use reactor::operation::PassedFd;
use settings::ImageLocation;
use storage::{FileIdentity, ImageFormat, OpenOptions};

use crate::{
    change::RegistryChange,
    events::{Kind, NewEvent},
    image_opening::{ImageOpenAttempt, ImageOpenRequest},
    registry::{Registry, RegistryError, RunningJob, StartingJob},
};

/// Time that the end of a backup waits for its target to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for opening a target at a server.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);

/// Request for a backup.
#[derive(Debug)]
pub(crate) struct BackupRequest {
    /// Id; chosen from the name of the disk if there is none.
    pub(crate) id: Option<String>,
    pub(crate) disk: String,
    pub(crate) target: ImageLocation,
    /// The target's file, which the client has opened.
    pub(crate) descriptor: Option<PassedFd>,
    pub(crate) format: Option<ImageFormat>,
    /// True if the target was just created, and reads as zeroes.
    pub(crate) is_new: bool,
    pub(crate) settings: BackgroundSettings,
}

/// Starts a backup of a disk; returns the id of its job. The content is that of an instant during
/// this call.
///
/// # Errors
/// Reason why it cannot start; nothing has changed.
pub(crate) async fn start_backup(registry: &Rc<Registry>, request: BackupRequest) -> anyhow::Result<String> {
    let BackupRequest { id, disk: name, target, descriptor, format, is_new, settings } = request;
    let starting = reserve(registry, id, &name).await?;
    let shown = target.to_string();
    check_server(registry, &target)?;
    // Without the lock: the answer of a storage server may take long.
    let image = Arc::new(open_target(registry, &target, descriptor, format).await?);
    let own_devices = own_devices(registry).await;
    let _guard = registry.lock_structure().await?;
    let disk = Arc::clone(&registry.disks.get(&name)?.disk);
    check_target(&disk, &image, &own_devices, &shown)?;
    check_settings(&disk, settings)?;
    let job = Job::new(&starting.id, JobKind::Backup);
    let backup_target = BackupTarget { image: Arc::clone(&image), is_zero: is_new };
    let backup = Backup::begin(&job, &disk, backup_target, settings, BackupSizes::default()).await;
    let backup = backup.with_context(|| format!("disk {name}: no backup to {shown}"))?;
    // Not before: all listed jobs are cancelled when the end of the daemon begins.
    ensure!(!registry.lifecycle.is_ending.get(), "weir is stopping");
    let number = registry.jobs.next_number();
    let member = Arc::clone(backup.member());
    let running = Rc::new(RunningJob { job: Arc::clone(&job), disk: name, target: shown, member, number });
    for id in registry.jobs.insert(&running) {
        notify_dismissal(registry, id);
    }
    drop(starting);
    reactor::spawn(watch(Rc::downgrade(registry), running));
    let id = job.id().to_string();
    let work = move || run_backup(backup, image, job);
    match registry.exports.endpoint_parameters() {
        Ok(parameters) if !parameters.workers.is_empty() => {
            parameters.workers[number % parameters.workers.len()].spawn(work);
        }
        // Without workers, as in tests.
        _ => reactor::spawn(work()),
    }
    Ok(id)
}

/// Reserves the disk and the id of a backup, unless a command changes the disk at this moment.
async fn reserve<'a>(
    registry: &'a Registry,
    id: Option<String>,
    disk: &str,
) -> anyhow::Result<StartingJob<'a>> {
    // A reload in progress may have found the disk without a job already.
    let _guard = registry.lock_structure().await?;
    registry.disks.get(disk)?;
    let is_changing = registry.disks.is_incomplete(disk) || registry.disks.is_migrating(disk);
    ensure!(!is_changing, RegistryError::Busy(disk.to_owned()));
    registry.jobs.reserve(id, disk)
}

/// Checks settings of a job of this disk.
///
/// # Errors
/// A weight without a group.
pub(crate) fn check_settings(disk: &Disk, settings: BackgroundSettings) -> anyhow::Result<()> {
    ensure!(
        settings.weight.is_none() || disk.throttle().group().is_some(),
        "weight: the disk {} is in no group, so there is no member to share with (leave it out, or \
         move the disk into a group)",
        disk.name()
    );
    Ok(())
}

async fn open_target(
    registry: &Registry,
    target: &ImageLocation,
    descriptor: Option<PassedFd>,
    format: Option<ImageFormat>,
) -> anyhow::Result<Image> {
    if descriptor.is_none() {
        registry.check_image(target).await?;
    }
    let storage = OpenOptions {
        format,
        exclusive: true,
        root: registry.image_root().cloned(),
        descriptor: descriptor.map(Arc::new),
        ..OpenOptions::default()
    };
    let options = ImageOptions { storage, ..ImageOptions::default() };
    let request = ImageOpenRequest {
        name: target.to_string(),
        spec: target.to_spec()?,
        options,
        qcow2_key_origin: None,
    };
    // Its own time limit is for images that a later attempt may open; a target is opened once.
    let attempt = ImageOpenAttempt::begin(request, target.path().is_none());
    match reactor::timeout(OPEN_TIMEOUT, attempt.outcome()).await {
        Ok(Ok(opened)) => opened.map_err(|error| registry.with_holder_if_lock_error(error, [])),
        Ok(Err(unavailable)) => bail!("{target}: {unavailable}"),
        Err(_) => bail!(
            "{target}: no answer in {} s (check the server, or use another target)",
            OPEN_TIMEOUT.as_secs()
        ),
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
async fn own_devices(registry: &Registry) -> Vec<String> {
    let endpoints = registry.exports.own_endpoints();
    let paths: Vec<PathBuf> =
        endpoints.iter().filter_map(|endpoint| endpoint.device().map(Path::to_owned)).collect();
    let identities = move || paths.iter().filter_map(|path| FileIdentity::of_path(path)).collect::<Vec<_>>();
    reactor::run_blocking(identities).await.iter().map(FileIdentity::to_string).collect()
}

/// Fails if the target is read-only, shares storage with the disk, or is one of these devices.
fn check_target(disk: &Disk, image: &Image, own_devices: &[String], shown: &str) -> anyhow::Result<()> {
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

/// Runs a backup to its end, on the thread that it belongs to.
async fn run_backup(backup: Backup, image: Arc<Image>, job: Arc<Job>) {
    let result = backup.run().await;
    let closing = reactor::timeout(CLOSE_TIMEOUT, image.close()).await;
    let closed = image.closed();
    // The last reference: the files are closed and their locks released.
    drop(image);
    for file in closed {
        // The channel carries no values; it closes.
        let _ = reactor::timeout(CLOSE_TIMEOUT, file.recv()).await;
    }
    let result = match (result, closing) {
        (JobResult::Completed, Ok(Err(error))) => {
            JobResult::Failed(format!("the target cannot be closed: {error}"))
        }
        (JobResult::Completed, Err(_)) => JobResult::Failed(format!(
            "the target has not answered for {} s when it was closed",
            CLOSE_TIMEOUT.as_secs()
        )),
        (result, _) => result,
    };
    job.conclude(result);
}

/// Reports the changes of a job's state until it has concluded.
async fn watch(registry: Weak<Registry>, running: Rc<RunningJob>) {
    let mut reported = None;
    loop {
        let changed = running.job.changed().listen();
        let state = running.job.state();
        let Some(registry) = registry.upgrade() else { return };
        // A short job may have passed through states between two looks.
        if reported.is_none() {
            report_start(&registry, &running);
            notify_state(&registry, &running, JobState::Created);
            notify_state(&registry, &running, JobState::Running);
            reported = Some(JobState::Running);
        }
        if state == JobState::Concluded {
            report_end(&registry, &running);
            // In QEMU's order.
            registry.notify(&RegistryChange::JobEnded { job: Box::new(running.report()) });
            notify_state(&registry, &running, state);
            registry.end_if_idle();
            return;
        }
        if state != JobState::Created && reported != Some(state) {
            notify_state(&registry, &running, state);
            reported = Some(state);
        }
        drop(registry);
        changed.await;
    }
}

fn report_start(registry: &Registry, running: &RunningJob) {
    let RunningJob { job, disk, target, .. } = running;
    tracing::info!(%disk, job = %job.id(), target, "a backup has started");
    let message = format!("disk {disk}: the job {} copies it to {target}", job.id());
    let event = NewEvent::new(Kind::JobStarted, message).of_disk(disk);
    registry.events.record(event.with("job", &**job.id()).with("target", &**target));
}

fn report_end(registry: &Registry, running: &RunningJob) {
    let RunningJob { job, disk, target, .. } = running;
    let status = job.status();
    let (kind, reason, message) = match &status.result {
        Some(JobResult::Failed(error)) => {
            tracing::error!(%disk, job = %job.id(), target, error, "a backup has failed");
            (
                Kind::JobFailed,
                error.as_str(),
                format!("disk {disk}: the job {} has failed: {error}", job.id()),
            )
        }
        Some(JobResult::Cancelled) => {
            tracing::info!(%disk, job = %job.id(), target, "a backup was cancelled");
            (Kind::JobEnded, "cancelled", format!("disk {disk}: the job {} was cancelled", job.id()))
        }
        Some(JobResult::Completed) | None => {
            let bytes = status.progress.copied_bytes;
            tracing::info!(%disk, job = %job.id(), target, bytes, "a backup is complete");
            (Kind::JobEnded, "complete", format!("disk {disk}: the job {} is complete", job.id()))
        }
    };
    let event = NewEvent::new(kind, message).of_disk(disk).with("job", &**job.id());
    registry.events.record(event.with("target", &**target).with("reason", reason));
}

/// Notifies clients that a job is not listed any more.
pub(crate) fn notify_dismissal(registry: &Registry, id: String) {
    registry.notify(&RegistryChange::JobChanged { id, state: "null" });
}

fn notify_state(registry: &Registry, running: &RunningJob, state: JobState) {
    registry.notify(&RegistryChange::JobChanged { id: running.job.id().to_string(), state: state.name() });
}
