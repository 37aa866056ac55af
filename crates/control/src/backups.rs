//! Backups: their start, their work on a worker, and the reports of their changes.
//!
//! ```text
//!   start ─► open the target ─► Backup::begin ─► a worker: run ─► close the target ─► concluded
//!                                                  │ state                              │
//!                         events, log, QMP events ◄┴────────────────────────────────────┘
//! ```
//!
//! A bitmap loses the marks of before a backup only after the target is closed.
//!
//! Runs on the main thread, except for the work itself. Never creates or removes a target.

use std::{
    path::{Path, PathBuf},
    rc::{Rc, Weak},
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use block::{
    disk::{Discards, Disk},
    layer::throttle::BackgroundSettings,
};
use image::{
    Image,
    open::{BackingChoice, ImageOptions},
    qcow2::bitmap::BitmapChange,
};
use jobs::{
    backup::{Backup, BackupBitmap, BackupOptions, BackupTarget},
    job::{Job, JobKind, JobResult, JobState},
};
use policy::time::Duration;
use reactor::operation::PassedFd;
use settings::ImageLocation;
use storage::{FileIdentity, ImageFormat, OpenOptions};

use crate::{
    bitmaps::{check_not_exported, prepare_for_backup},
    change::RegistryChange,
    events::{Kind, NewEvent},
    image_opening::{ImageOpenAttempt, ImageOpenRequest},
    registry::{Registry, RunningDisk, RunningJob, StartingJob},
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
    pub(crate) target: BackupTargetRequest,
    pub(crate) bitmap: Option<BackupBitmap>,
    /// True if a bitmap that does not exist is added.
    pub(crate) may_add_bitmap: bool,
    /// True if the bitmap has all of its marks again after a success too.
    pub(crate) keeps_marks: bool,
    /// True if the job is not listed any more once it has concluded.
    pub(crate) is_auto_dismissed: bool,
    pub(crate) settings: BackgroundSettings,
}

/// Target of a backup, as requested.
#[derive(Debug)]
pub(crate) enum BackupTargetRequest {
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

/// State of a backup that its end needs.
#[derive(Debug)]
struct BackupEnd {
    job: Arc<Job>,
    image: Arc<Image>,
    /// True if the target was opened for the backup.
    is_own_image: bool,
    keeps_marks: bool,
    /// Disk and bitmap that was added for the backup.
    added_bitmap: Option<(Arc<Disk>, String)>,
}

/// Starts a backup of a disk; returns the id of its job. The content is that of an instant during
/// this call.
///
/// # Errors
/// Reason why it cannot start; nothing has changed.
pub(crate) async fn start_backup(registry: &Rc<Registry>, request: BackupRequest) -> anyhow::Result<String> {
    let BackupRequest { id, disk: name, target, bitmap, settings, .. } = request;
    let BackupRequest { may_add_bitmap, keeps_marks, is_auto_dismissed, .. } = request;
    let mut disks = vec![name.clone()];
    let (shown, target_disk) = match &target {
        BackupTargetRequest::Image(image) => (image.location.to_string(), None),
        BackupTargetRequest::Disk(disk) => {
            disks.push(disk.clone());
            (disk.clone(), Some(disk.clone()))
        }
    };
    let starting = reserve(registry, id, &disks).await?;
    let is_own_image = target_disk.is_none();
    // Without the lock: the answer of a storage server may take long.
    let opened = match target {
        BackupTargetRequest::Image(image) => Ok(image.open(registry).await?),
        BackupTargetRequest::Disk(disk) => Err(disk),
    };
    let own_devices = own_devices(registry).await;
    let _guard = registry.lock_structure().await?;
    let target = opened.or_else(|disk| target_of_disk(registry, &name, &disk))?;
    let image = Arc::clone(&target.image);
    let listed = registry.disks.get(&name)?;
    let disk = Arc::clone(&listed.disk);
    check_target(&disk, &image, &own_devices, &shown)?;
    check_settings(&disk, settings)?;
    let is_added = match &bitmap {
        Some(bitmap) => prepare_for_backup(registry, &listed, bitmap, may_add_bitmap).await?,
        None => false,
    };
    let added_bitmap = bitmap.as_ref().filter(|_| is_added);
    let added_bitmap = added_bitmap.map(|bitmap| (Arc::clone(&disk), bitmap.name.clone()));
    let job = Job::new(&starting.id, JobKind::Backup);
    let options = BackupOptions { settings, bitmap, ..BackupOptions::default() };
    let backup = match Backup::begin(&job, &disk, target, options).await {
        Ok(backup) => backup,
        Err(error) => {
            remove_added(added_bitmap).await;
            return Err(error).with_context(|| format!("disk {name}: no backup to {shown}"));
        }
    };
    if let Err(error) = check_begun(registry, &listed, backup.bitmap_name()) {
        // The bitmap has its marks again.
        drop(backup);
        remove_added(added_bitmap).await;
        return Err(error);
    }
    let number = registry.jobs.next_number();
    let member = Arc::clone(backup.member());
    let running = Rc::new(RunningJob {
        job: Arc::clone(&job),
        disk: name,
        target: shown,
        target_disk,
        is_auto_dismissed,
        member,
        number,
    });
    for id in registry.jobs.insert(&running) {
        notify_dismissal(registry, id);
    }
    drop(starting);
    reactor::spawn(watch(Rc::downgrade(registry), running));
    let id = job.id().to_string();
    let work = move || run_backup(backup, BackupEnd { job, image, is_own_image, keeps_marks, added_bitmap });
    match registry.exports.endpoint_parameters() {
        Ok(parameters) if !parameters.workers.is_empty() => {
            parameters.workers[number % parameters.workers.len()].spawn(work);
        }
        // Without workers, as in tests.
        _ => reactor::spawn(work()),
    }
    Ok(id)
}

/// Checks what may have changed until the instant of a backup.
fn check_begun(registry: &Registry, disk: &RunningDisk, bitmap: Option<&str>) -> anyhow::Result<()> {
    // Not before: all listed jobs are cancelled when the end of the daemon begins.
    ensure!(!registry.lifecycle.is_ending.get(), "weir is stopping");
    bitmap.map_or(Ok(()), |bitmap| check_not_exported(registry, disk, bitmap))
}

/// Reserves the disks and the id of a backup, unless a command changes a disk at this moment.
async fn reserve(registry: &Registry, id: Option<String>, disks: &[String]) -> anyhow::Result<StartingJob> {
    // A reload in progress may have found a disk without a job already.
    let _guard = registry.lock_structure().await?;
    for disk in disks {
        registry.disks.get(disk)?;
        registry.disks.check_unchanging(disk)?;
    }
    registry.jobs.reserve(id, disks)
}

/// The image of another disk as the target.
fn target_of_disk(registry: &Registry, source: &str, name: &str) -> anyhow::Result<BackupTarget> {
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
    Ok(BackupTarget { image: target.disk.image(), is_zero: false, is_overlay: false, may_unmap })
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

impl TargetImage {
    async fn open(self, registry: &Registry) -> anyhow::Result<BackupTarget> {
        let Self { location: target, descriptor, format, is_new, is_overlay } = self;
        check_server(registry, &target)?;
        if descriptor.is_none() {
            registry.check_image(&target).await?;
        }
        let storage = OpenOptions {
            format,
            exclusive: true,
            root: registry.image_root().cloned(),
            descriptor: descriptor.map(Arc::new),
            ..OpenOptions::default()
        };
        // The backing file is not needed, and the daemon may lack the permission to read it.
        let backing = if is_overlay { BackingChoice::Nothing } else { BackingChoice::AsInImage };
        let options = ImageOptions { storage, backing, ..ImageOptions::default() };
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
        Ok(BackupTarget { image: Arc::new(image), is_zero, is_overlay, may_unmap: true })
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
async fn run_backup(mut backup: Backup, end: BackupEnd) {
    let BackupEnd { job, image, is_own_image, keeps_marks, added_bitmap } = end;
    let bitmap = backup.take_bitmap();
    let result = backup.run().await;
    let result = match is_own_image {
        true => close_target(image, result).await,
        false => {
            drain_target(&job, &image).await;
            result
        }
    };
    let is_complete = result == JobResult::Completed;
    if let Some(bitmap) = bitmap
        && is_complete
        && !keeps_marks
    {
        bitmap.drop_earlier();
    }
    // Otherwise the bitmap has the marks of before the backup again.
    remove_added(added_bitmap.filter(|_| !is_complete)).await;
    job.conclude(result);
}

/// Waits until no write of the backup can change the target any more, even if the backup was
/// cancelled: clients may use the disk once the job has concluded.
async fn drain_target(job: &Job, image: &Image) {
    let drained = async {
        if let Image::Qcow2(image) = image {
            drop(image.drain().await);
        }
        image.await_changes().await;
    };
    let mut drained = std::pin::pin!(drained);
    if reactor::timeout(CLOSE_TIMEOUT, &mut drained).await.is_err() {
        let seconds = CLOSE_TIMEOUT.as_secs();
        tracing::warn!(
            job = %job.id(),
            "writes to the target of a backup have not completed for {seconds} s; its job continues until then"
        );
        drained.await;
    }
}

/// Closes the target; returns the result of the backup with it.
async fn close_target(image: Arc<Image>, result: JobResult) -> JobResult {
    let closing = reactor::timeout(CLOSE_TIMEOUT, image.close()).await;
    let closed = image.closed();
    // The last reference: the files are closed and their locks released.
    drop(image);
    for file in closed {
        // The channel carries no values; it closes.
        let _ = reactor::timeout(CLOSE_TIMEOUT, file.recv()).await;
    }
    match (result, closing) {
        (JobResult::Completed, Ok(Err(error))) => {
            JobResult::Failed(format!("the target cannot be closed: {error}"))
        }
        (JobResult::Completed, Err(_)) => JobResult::Failed(format!(
            "the target has not answered for {} s when it was closed",
            CLOSE_TIMEOUT.as_secs()
        )),
        (result, _) => result,
    }
}

/// Removes a bitmap that was added for a backup that has failed.
async fn remove_added(added: Option<(Arc<Disk>, String)>) {
    let Some((disk, bitmap)) = added else { return };
    if let Err(error) = disk.change_bitmap(&BitmapChange::Remove(bitmap.clone())).await {
        let disk = disk.name();
        tracing::warn!(%disk, bitmap, %error, "a bitmap of a failed backup cannot be removed (remove it)");
    }
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
            // The job has changed the image of its target past the disk.
            if let Some(Ok(target)) = running.target_disk.as_deref().map(|disk| registry.disks.get(disk)) {
                target.disk.prefetch().invalidate_all();
            }
            if running.is_auto_dismissed && registry.jobs.dismiss(&running) {
                notify_dismissal(&registry, running.job.id().to_string());
            }
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
