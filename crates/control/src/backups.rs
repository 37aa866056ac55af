//! Backups: their start, and their work on a worker.
//!
//! ```text
//!   start ─► open the target ─► Backup::begin ─► a worker: run ─► close the target ─► concluded
//! ```
//!
//! A bitmap loses the marks of before a backup only after the target is closed.
//!
//! Runs on the main thread, except for the work itself. Never creates or removes a target.

use std::{rc::Rc, sync::Arc};

use anyhow::Context as _;
use block::{disk::Disk, layer::throttle::BackgroundSettings};
use image::{Image, open::ImageOptions, qcow2::bitmap::BitmapChange};
use jobs::{
    backup::{Backup, BackupBitmap, BackupOptions},
    job::{Job, JobKind, JobResult},
};

use crate::{
    bitmaps::{check_not_exported, prepare_for_backup},
    job_start::{StartedWork, check_settings, reserve, start_job},
    job_target::{TargetRequest, check_target, close_target, drain_target, own_devices, target_of_disk},
    registry::{Registry, RunningDisk},
};

/// Request for a backup.
#[derive(Debug)]
pub(crate) struct BackupRequest {
    /// Id; chosen from the name of the disk if there is none.
    pub(crate) id: Option<String>,
    pub(crate) disk: String,
    pub(crate) target: TargetRequest,
    pub(crate) bitmap: Option<BackupBitmap>,
    /// True if a bitmap that does not exist is added.
    pub(crate) may_add_bitmap: bool,
    /// True if the bitmap has all of its marks again after a success too.
    pub(crate) keeps_marks: bool,
    /// True if the job is not listed any more once it has concluded.
    pub(crate) is_auto_dismissed: bool,
    pub(crate) settings: BackgroundSettings,
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
    let (shown, target_disk) = (target.shown(), target.disk().cloned());
    let disks = Vec::from_iter([&name].into_iter().chain(&target_disk).cloned());
    let starting = reserve(registry, JobKind::Backup, id, &disks).await?;
    let is_own_image = target_disk.is_none();
    // Without the lock: the answer of a storage server may take long.
    let opened = match target {
        TargetRequest::Image(image) => Ok(image.open(registry, ImageOptions::default()).await?),
        TargetRequest::Disk(disk) => Err(disk),
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
    let started = StartedWork {
        job: Arc::clone(&job),
        disk: name,
        target: shown,
        format: image.format(),
        target_disk,
        switch: None,
        is_auto_dismissed,
        member: Arc::clone(backup.member()),
    };
    let end = BackupEnd { job, image, is_own_image, keeps_marks, added_bitmap };
    Ok(start_job(registry, starting, started, move || run_backup(backup, end)))
}

/// Checks what may have changed until the instant of a backup.
fn check_begun(registry: &Registry, disk: &RunningDisk, bitmap: Option<&str>) -> anyhow::Result<()> {
    registry.lifecycle.check_not_ending()?;
    bitmap.map_or(Ok(()), |bitmap| check_not_exported(registry, disk, bitmap))
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

/// Removes a bitmap that was added for a backup that has failed.
async fn remove_added(added: Option<(Arc<Disk>, String)>) {
    let Some((disk, bitmap)) = added else { return };
    if let Err(error) = disk.change_bitmap(&BitmapChange::Remove(bitmap.clone())).await {
        let disk = disk.name();
        tracing::warn!(%disk, bitmap, %error, "a bitmap of a failed backup cannot be removed (remove it)");
    }
}
