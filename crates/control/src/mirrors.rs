//! Mirrors: their start, and their work on a worker.
//!
//! ```text
//!   start ─► open the target ─► Mirror::begin ─► a worker: run ─► close the unused image ─► concluded
//!                                                   │  ▲                                       │
//!                                                asks  answer (mirror_switch.rs)          follow_switch
//! ```
//!
//! Runs on the main thread, except for the work itself. Never creates or removes a target.

use std::{rc::Rc, sync::Arc};

use anyhow::Context as _;
use block::layer::throttle::BackgroundSettings;
use image::{Image, open::ImageOptions};
use jobs::{
    job::{Job, JobKind},
    mirror::{Mirror, MirrorEnd, MirrorSizes},
};
use policy::time::{Duration, Instant};

use crate::{
    assemble::DiskAssembly,
    job_start::{StartedWork, check_settings, reserve, start_job},
    job_target::{
        TargetRequest, check_target, close_image, close_target, drain_target, own_devices, target_of_disk,
    },
    mirror_switch::{check_movable, check_node},
    registry::{Registry, RunningDisk, SwitchTarget},
};

/// Longest wait for requests in flight on a replaced image. Later it is left to the last of them.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which these requests are checked. There is no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Request for a mirror.
#[derive(Debug)]
pub(crate) struct MirrorRequest {
    /// Id; chosen from the name of the disk if there is none.
    pub(crate) id: Option<String>,
    pub(crate) disk: String,
    pub(crate) target: TargetRequest,
    /// True if the job is not listed any more once it has concluded.
    pub(crate) is_auto_dismissed: bool,
    pub(crate) settings: BackgroundSettings,
}

/// Starts a mirror of a disk; returns the id of its job.
///
/// # Errors
/// Reason why it cannot start; nothing has changed.
pub(crate) async fn start_mirror(registry: &Rc<Registry>, request: MirrorRequest) -> anyhow::Result<String> {
    let MirrorRequest { id, disk: name, target, is_auto_dismissed, settings } = request;
    let (shown, target_disk) = (target.shown(), target.disk().cloned());
    let disks = Vec::from_iter([&name].into_iter().chain(&target_disk).cloned());
    let starting = reserve(registry, JobKind::Mirror, id, &disks).await?;
    let options = {
        let running = registry.disks.get(&name)?;
        check_movable(registry, &running)?;
        target_options(registry, &running)
    };
    // Without the lock: the answer of a storage server may take long.
    let (opened, location) = match target {
        TargetRequest::Image(image) => {
            let location = image.location.clone();
            (Some(image.open(registry, options).await?), location)
        }
        TargetRequest::Disk(disk) => (None, registry.disks.get(&disk)?.config().image.clone()),
    };
    let own_devices = own_devices(registry).await;
    let _guard = registry.lock_structure().await?;
    let running = registry.disks.get(&name)?;
    check_movable(registry, &running)?;
    let target = match &target_disk {
        Some(disk) => target_of_disk(registry, &name, disk).and_then(|target| {
            check_node(registry, &running, disk)?;
            Ok(target)
        })?,
        None => opened.context("it is open")?,
    };
    let (disk, image) = (Arc::clone(&running.disk), Arc::clone(&target.image));
    drop(running);
    check_target(&disk, &image, &own_devices, &shown)?;
    check_settings(&disk, settings)?;
    let job = Job::new(&starting.id, JobKind::Mirror);
    let mirror = Mirror::begin(&job, &disk, target, settings, MirrorSizes::default()).await;
    let mirror = mirror.with_context(|| format!("disk {name}: no mirror to {shown}"))?;
    registry.lifecycle.check_not_ending()?;
    let is_own_image = target_disk.is_none();
    let started = StartedWork {
        job: Arc::clone(&job),
        disk: name,
        target: shown,
        format: image.format(),
        target_disk,
        switch: Some(SwitchTarget { location, image: Arc::downgrade(&image) }),
        is_auto_dismissed,
        member: Arc::clone(mirror.member()),
    };
    Ok(start_job(registry, starting, started, move || run_mirror(mirror, image, is_own_image, job)))
}

/// Options of an image that the disk is moved to: with its cache mode, since clients learn when
/// they connect whether they must flush.
fn target_options(registry: &Registry, running: &RunningDisk) -> ImageOptions {
    DiskAssembly::for_registry(registry).target_options(&running.current_config())
}

/// Runs a mirror to its end, on the thread that it belongs to.
async fn run_mirror(mirror: Mirror, target: Arc<Image>, is_own_image: bool, job: Arc<Job>) {
    let MirrorEnd { result, replaced, caches } = mirror.run().await;
    let result = match replaced {
        Some(replaced) => {
            drop(target);
            release(replaced).await;
            result
        }
        None if is_own_image => close_target(target, result).await,
        None => {
            drain_target(&job, &target).await;
            result
        }
    };
    drop(caches);
    job.conclude(result);
}

/// Closes the previous image of a disk when the last request on it has ended. All of its data is
/// durable, so a failure leaves unused clusters at worst.
async fn release(image: Arc<Image>) {
    let began: Instant = reactor::now();
    while Arc::strong_count(&image) > 1 || image.is_busy() {
        let waited: Duration = reactor::now() - began;
        if waited > RELEASE_TIMEOUT {
            tracing::warn!(
                "requests on the previous image of a disk have not ended: its files are closed after them"
            );
            return;
        }
        reactor::sleep_until(reactor::now() + POLL_INTERVAL).await;
    }
    if let Err(why) = close_image(image).await {
        tracing::warn!("the previous image of a disk: {why}");
    }
}
