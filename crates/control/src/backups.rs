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
use storage::{ImageFormat, OpenOptions};

use crate::{
    change::RegistryChange,
    events::{Kind, NewEvent},
    image_opening::{ImageOpenAttempt, ImageOpenRequest},
    registry::{Registry, RunningJob},
};

/// Time that the end of a backup waits for its target to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

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
    registry.disks.get(&name)?;
    let starting = registry.jobs.reserve(id, &name)?;
    let shown = target.to_string();
    // Without the lock: the answer of a storage server may take any time.
    let image = Arc::new(open_target(registry, &target, descriptor, format).await?);
    let _guard = registry.lock_structure().await?;
    ensure!(!registry.lifecycle.is_ending.get(), "weir is stopping");
    // It may have been removed in the meantime.
    let disk = Arc::clone(&registry.disks.get(&name)?.disk);
    check_target(&disk, &image, &shown)?;
    check_settings(&disk, settings)?;
    let job = Job::new(&starting.id, JobKind::Backup);
    let backup_target = BackupTarget { image: Arc::clone(&image), is_zero: is_new };
    let backup = Backup::begin(&job, &disk, backup_target, settings, BackupSizes::default()).await;
    let backup = backup.with_context(|| format!("disk {name}: no backup to {shown}"))?;
    let number = registry.jobs.next_number();
    let member = Arc::clone(backup.member());
    let running = Rc::new(RunningJob { job: Arc::clone(&job), disk: name, target: shown, member, number });
    registry.jobs.insert(&running);
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
    // The time limit covers files only: NBD servers and clusters have their own.
    let attempt = ImageOpenAttempt::begin(request, target.path().is_none());
    match attempt.outcome().await {
        Ok(opened) => opened.map_err(|error| registry.with_holder_if_lock_error(error, [])),
        Err(unavailable) => bail!("{target}: {unavailable}"),
    }
}

/// Fails if the target is read-only, or shares a file with the disk.
fn check_target(disk: &Disk, image: &Image, shown: &str) -> anyhow::Result<()> {
    ensure!(!image.is_read_only(), "{shown}: it is read-only (use a target that can be written)");
    let keys = |image: &Image| -> Vec<String> {
        image.layers().into_iter().flat_map(|layer| layer.files).map(|file| file.key).collect()
    };
    let own = keys(disk.image());
    // Memory and null disks are described by their size only.
    let is_shared = keys(image).iter().any(|key| own.contains(key) && !key.starts_with("memory"));
    ensure!(!is_shared, "{shown}: it is the image of the disk {} itself (use another target)", disk.name());
    Ok(())
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
        if state != JobState::Created && reported != Some(state) {
            notify_state(&registry, &running, state);
            reported = Some(state);
        }
        if state == JobState::Concluded {
            report_end(&registry, &running);
            registry.notify(&RegistryChange::JobEnded { job: Box::new(running.report()) });
            return;
        }
        drop(registry);
        changed.await;
    }
}

fn report_start(registry: &Registry, running: &RunningJob) {
    let RunningJob { job, disk, target, .. } = running;
    tracing::info!(%disk, job = %job.id(), target, "a backup has started");
    let message = format!("disk {disk}: the job {} copies it to {target}", job.id());
    registry.events.record(NewEvent::new(Kind::JobStarted, message).of_disk(disk).with("job", &**job.id()));
}

fn report_end(registry: &Registry, running: &RunningJob) {
    let RunningJob { job, disk, target, .. } = running;
    let status = job.status();
    let (kind, message) = match status.result {
        Some(JobResult::Failed(error)) => {
            tracing::error!(%disk, job = %job.id(), target, error, "a backup has failed");
            (Kind::JobFailed, format!("disk {disk}: the job {} has failed: {error}", job.id()))
        }
        Some(JobResult::Cancelled) => {
            tracing::info!(%disk, job = %job.id(), target, "a backup was cancelled");
            (Kind::JobEnded, format!("disk {disk}: the job {} was cancelled", job.id()))
        }
        Some(JobResult::Completed) | None => {
            let bytes = status.progress.copied_bytes;
            tracing::info!(%disk, job = %job.id(), target, bytes, "a backup is complete");
            (Kind::JobEnded, format!("disk {disk}: the job {} is complete", job.id()))
        }
    };
    registry.events.record(NewEvent::new(kind, message).of_disk(disk).with("job", &**job.id()));
}

fn notify_state(registry: &Registry, running: &RunningJob, state: JobState) {
    registry.notify(&RegistryChange::JobChanged { id: running.job.id().to_string(), state: state.name() });
}
