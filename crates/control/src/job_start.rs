//! Start of jobs on workers, and reports of their changes.
//!
//! ```text
//!   start_job ─► a worker: the job's work ─► concluded
//!                  │ state, questions            │
//!                  └─► watch ◄───────────────────┘
//!                        └─► events, log, QMP events, answers (mirror_switch.rs)
//! ```
//!
//! Runs on the main thread, except for the work itself. Never opens or closes an image.

use std::{
    cell::RefCell,
    rc::{Rc, Weak},
    sync::Arc,
};

use anyhow::ensure;
use block::{
    disk::Disk,
    layer::throttle::{BackgroundMember, BackgroundSettings},
};
use jobs::job::{Job, JobKind, JobResult, JobState};
use storage::ImageFormat;

use crate::{
    change::RegistryChange,
    events::{Kind, NewEvent},
    mirror_switch::{answer_question, follow_switch},
    registry::{Registry, RunningJob, StartingJob, SwitchTarget},
};

/// A job that has begun, and that no worker runs yet.
pub(crate) struct StartedWork {
    pub(crate) job: Arc<Job>,
    pub(crate) disk: String,
    /// Target, as its client named it.
    pub(crate) target: String,
    pub(crate) format: ImageFormat,
    /// Name of the disk that is the target.
    pub(crate) target_disk: Option<String>,
    /// Image that the disk can be switched to.
    pub(crate) switch: Option<SwitchTarget>,
    pub(crate) is_auto_dismissed: bool,
    pub(crate) member: Arc<BackgroundMember>,
}

/// Lists a job and runs its work on a worker; returns its id.
pub(crate) fn start_job<F: Future<Output = ()> + 'static>(
    registry: &Rc<Registry>,
    starting: StartingJob,
    started: StartedWork,
    work: impl FnOnce() -> F + Send + 'static,
) -> String {
    let StartedWork { job, disk, target, format, target_disk, switch, is_auto_dismissed, member } = started;
    let number = registry.jobs.next_number();
    let id = job.id().to_string();
    let target_disk = RefCell::new(target_disk);
    let running = Rc::new(RunningJob {
        job,
        disk,
        target,
        format,
        target_disk,
        switch,
        is_auto_dismissed,
        member,
        number,
    });
    for id in registry.jobs.insert(&running) {
        notify_dismissal(registry, id);
    }
    drop(starting);
    reactor::spawn(watch(Rc::downgrade(registry), running));
    match registry.exports.endpoint_parameters() {
        Ok(parameters) if !parameters.workers.is_empty() => {
            parameters.workers[number % parameters.workers.len()].spawn(work);
        }
        // Without workers, as in tests.
        _ => reactor::spawn(work()),
    }
    id
}

/// Reserves the disks and the id of a job, unless a command changes a disk at this moment. Without
/// `id`, chooses one.
///
/// # Errors
/// As [`JobRegistry::reserve`](crate::registry::JobRegistry::reserve).
pub(crate) async fn reserve(
    registry: &Registry,
    kind: JobKind,
    id: Option<String>,
    disks: &[String],
) -> anyhow::Result<StartingJob> {
    // A reload in progress may have found a disk without a job already.
    let _guard = registry.lock_structure().await?;
    for disk in disks {
        registry.disks.get(disk)?;
        registry.disks.check_unchanging(disk)?;
    }
    registry.jobs.reserve(kind, id, disks)
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

/// Reports the changes of a job's state until it has concluded.
async fn watch(registry: Weak<Registry>, running: Rc<RunningJob>) {
    let (mut reported, mut remark) = (None, None);
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
        if running.job.is_asking() {
            answer_question(&registry, &running);
        }
        let now = running.job.status().remark;
        if let Some(now) = now.as_ref().filter(|now| Some(*now) != remark.as_ref()) {
            let RunningJob { job, disk, .. } = &*running;
            tracing::warn!(%disk, job = %job.id(), "a {} is delayed: {now}", job.kind().name());
        }
        remark = now;
        if state == JobState::Concluded {
            if running.job.is_switched() {
                follow_switch(&registry, &running).await;
            }
            report_end(&registry, &running);
            if let Some(direction) = running.job.status().failed_io {
                registry.notify(&RegistryChange::JobIoFailed { id: running.job.id().to_string(), direction });
            }
            // In QEMU's order.
            registry.notify(&RegistryChange::JobEnded { job: Box::new(running.report(&registry.disks)) });
            notify_state(&registry, &running, state);
            // The job has changed the image of its target past the disk.
            let target = running.target_disk.borrow().as_deref().map(|disk| registry.disks.get(disk));
            if let Some(Ok(target)) = target {
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
            if state == JobState::Ready {
                registry.notify(&RegistryChange::JobReady { job: Box::new(running.report(&registry.disks)) });
            }
            reported = Some(state);
        }
        drop(registry);
        changed.await;
    }
}

fn report_start(registry: &Registry, running: &RunningJob) {
    let RunningJob { job, disk, target, .. } = running;
    tracing::info!(%disk, job = %job.id(), target, "a {} has started", job.kind().name());
    let what = match job.kind() {
        JobKind::Backup | JobKind::Mirror => format!("copies it to {target}"),
        JobKind::Stream => format!("copies its backing files into {target}"),
    };
    let message = format!("disk {disk}: the job {} {what}", job.id());
    let event = NewEvent::new(Kind::JobStarted, message).of_disk(disk);
    registry.events.record(event.with("job", &**job.id()).with("target", &**target));
}

fn report_end(registry: &Registry, running: &RunningJob) {
    let RunningJob { job, disk, target, .. } = running;
    let (status, kind_name) = (job.status(), job.kind().name());
    let result = status.result.as_ref().unwrap_or(&JobResult::Completed);
    registry.jobs.count_conclusion(job.kind(), result);
    let (kind, reason, message) = match result {
        JobResult::Failed(error) => {
            tracing::error!(%disk, job = %job.id(), target, error, "a {kind_name} has failed");
            (
                Kind::JobFailed,
                error.as_str(),
                format!("disk {disk}: the job {} has failed: {error}", job.id()),
            )
        }
        JobResult::Cancelled => {
            tracing::info!(%disk, job = %job.id(), target, "a {kind_name} was cancelled");
            (Kind::JobEnded, result.name(), format!("disk {disk}: the job {} was cancelled", job.id()))
        }
        JobResult::Completed => {
            let bytes = status.progress.copied_bytes;
            tracing::info!(%disk, job = %job.id(), target, bytes, "a {kind_name} is complete");
            (Kind::JobEnded, result.name(), format!("disk {disk}: the job {} is complete", job.id()))
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
