//! Registry of jobs: operations that clients of the control socket started on disks.
//!
//! A disk has at most one job, or is the target of one. While it runs, the disk is not removed,
//! moved, opened again or transferred to another process, and a target is not exported:
//! [`JobRegistry::check_idle`] and [`JobRegistry::check_no_target`] refuse these. While a disk is
//! being removed, [`JobRegistry::block_starts`] refuses jobs. A concluded job stays listed until it
//! is dismissed, or [`MAX_CONCLUDED`] others have concluded after it.
//!
//! Holds state only; `job_start` starts jobs and reports their changes.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::{Arc, Weak},
};

use anyhow::{Context as _, ensure};
use api::{JobReport, ThrottleCause};
use block::layer::throttle::{BackgroundCause, BackgroundMember, BackgroundSettings, CauseOwner};
use image::Image;
use jobs::job::{Job, JobKind, JobResult, JobState, JobStatus};
use policy::time::Duration;
use settings::ImageLocation;
use storage::ImageFormat;

use super::{DiskRegistry, RegistryError};

/// Number of concluded jobs that are listed at most.
const MAX_CONCLUDED: usize = 32;
/// Longest id of a job in bytes.
const MAX_ID_BYTES: usize = 64;
/// Longest time that the end of the daemon waits for jobs, which close their targets.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// Jobs, by their ids.
#[derive(Default)]
pub struct JobRegistry {
    jobs: RefCell<BTreeMap<String, Rc<RunningJob>>>,
    /// Ids of jobs that are being started, with their disks: first the source.
    starting: Rc<RefCell<BTreeMap<String, StartingEntry>>>,
    /// Disks on which no job may start, once per [`BlockedStarts`].
    blocked: RefCell<Vec<String>>,
    /// Number of jobs so far.
    started: Cell<usize>,
    /// Number of jobs that have concluded, by kind and result.
    concluded: RefCell<BTreeMap<(&'static str, &'static str), u64>>,
}

/// What a job that is being started reserves.
#[derive(Debug)]
struct StartingEntry {
    disks: Vec<String>,
    /// True if it is a snapshot.
    is_snapshot: bool,
}

/// A job with its disk and its target.
#[derive(Debug)]
pub struct RunningJob {
    /// The job itself.
    pub job: Arc<Job>,
    /// Name of the disk.
    pub disk: String,
    /// Target, as its client named it.
    pub target: String,
    /// Format of the target.
    pub(crate) format: ImageFormat,
    /// Name of the disk that is the target.
    pub(crate) target_disk: RefCell<Option<String>>,
    /// Image that the disk can be switched to.
    pub(crate) switch: Option<SwitchTarget>,
    /// True if it is not listed any more once it has concluded.
    pub(crate) is_auto_dismissed: bool,
    /// Its limits and weight.
    pub(crate) member: Arc<BackgroundMember>,
    /// Order of the starts.
    pub(crate) number: usize,
}

/// Image that a job moves its disk to.
#[derive(Debug)]
pub(crate) struct SwitchTarget {
    pub(crate) location: ImageLocation,
    /// Weak, so that the end of the job can close it.
    pub(crate) image: Weak<Image>,
}

/// Reserves the id and the disk of a job until it is listed.
pub(crate) struct StartingJob {
    starting: Rc<RefCell<BTreeMap<String, StartingEntry>>>,
    pub(crate) id: String,
}

impl Drop for StartingJob {
    fn drop(&mut self) {
        self.starting.borrow_mut().remove(&self.id);
    }
}

/// Disk on which no job may start while this exists.
pub(crate) struct BlockedStarts<'a> {
    registry: &'a JobRegistry,
    disk: String,
}

impl Drop for BlockedStarts<'_> {
    fn drop(&mut self) {
        let mut blocked = self.registry.blocked.borrow_mut();
        if let Some(at) = blocked.iter().position(|disk| *disk == self.disk) {
            blocked.swap_remove(at);
        }
    }
}

impl JobRegistry {
    /// All jobs, by id.
    pub fn all(&self) -> Vec<Rc<RunningJob>> {
        self.jobs.borrow().values().cloned().collect()
    }

    /// Jobs that have not concluded.
    pub fn running(&self) -> Vec<Rc<RunningJob>> {
        self.jobs.borrow().values().filter(|job| job.is_running()).cloned().collect()
    }

    /// The job with this id.
    pub(crate) fn find(&self, id: &str) -> Option<Rc<RunningJob>> {
        self.jobs.borrow().get(id).cloned()
    }

    /// Fails if a job uses the disk.
    ///
    /// # Errors
    /// [`RegistryError::HasJob`] or [`RegistryError::HasStartingJob`].
    pub(crate) fn check_idle(&self, disk: &str) -> Result<(), RegistryError> {
        let jobs = self.jobs.borrow();
        let running = jobs.values().find(|job| job.uses(disk) && job.is_running());
        let disk = || disk.to_owned();
        if let Some(job) = running {
            return Err(RegistryError::HasJob { disk: disk(), job: job.job.id().to_string() });
        }
        let starting = self.starting.borrow();
        match starting.iter().find(|(_, of)| of.disks.contains(&disk())) {
            Some((job, _)) => Err(RegistryError::HasStartingJob { disk: disk(), job: job.clone() }),
            None => Ok(()),
        }
    }

    /// Fails if a job uses a disk of the daemon.
    ///
    /// # Errors
    /// As [`JobRegistry::check_idle`].
    pub(crate) fn check_all_idle(&self) -> Result<(), RegistryError> {
        let mut disks: BTreeSet<String> =
            self.starting.borrow().values().flat_map(|of| of.disks.clone()).collect();
        disks.extend(self.running().iter().map(|job| job.disk.clone()));
        disks.iter().try_for_each(|disk| self.check_idle(disk))
    }

    /// Fails if the disk is the target of a job: clients would see a part of its content.
    ///
    /// # Errors
    /// [`RegistryError::HasJob`].
    pub(crate) fn check_no_target(&self, disk: &str) -> Result<(), RegistryError> {
        let is_target = |job: &Rc<RunningJob>| job.target_disk.borrow().as_deref() == Some(disk);
        let running = self.running().into_iter().find(is_target).map(|job| job.job.id().to_string());
        let starting = self.starting.borrow();
        let starting = starting.iter().find(|(_, of)| of.disks.iter().skip(1).any(|target| target == disk));
        match running.or(starting.map(|(id, _)| id.clone())) {
            Some(job) => Err(RegistryError::HasJob { disk: disk.to_owned(), job }),
            None => Ok(()),
        }
    }

    /// Fails if a snapshot of the disk is being taken, after which its image may be another one.
    ///
    /// # Errors
    /// [`RegistryError::HasStartingJob`].
    pub(crate) fn check_no_snapshot(&self, disk: &str) -> Result<(), RegistryError> {
        let starting = self.starting.borrow();
        let is_of_disk = |of: &StartingEntry| of.is_snapshot && of.disks.iter().any(|name| name == disk);
        match starting.iter().find(|(_, of)| is_of_disk(of)) {
            Some((job, _)) => Err(RegistryError::HasStartingJob { disk: disk.to_owned(), job: job.clone() }),
            None => Ok(()),
        }
    }

    /// Prevents that a job starts on the disk, which is about to be removed.
    ///
    /// # Errors
    /// As [`JobRegistry::check_idle`].
    pub(crate) fn block_starts(&self, disk: &str) -> Result<BlockedStarts<'_>, RegistryError> {
        self.check_idle(disk)?;
        self.blocked.borrow_mut().push(disk.to_owned());
        Ok(BlockedStarts { registry: self, disk: disk.to_owned() })
    }

    /// Removes a concluded job from the list. False if it has not concluded.
    pub(crate) fn dismiss(&self, job: &RunningJob) -> bool {
        let has_concluded = job.job.state() == JobState::Concluded;
        if has_concluded {
            self.jobs.borrow_mut().remove(&**job.job.id());
        }
        has_concluded
    }

    /// Cancels all jobs, because the daemon ends; returns those that were running.
    pub fn cancel_all(&self) -> Vec<Rc<RunningJob>> {
        let running = self.running();
        for running in &running {
            // It may be concluding at this moment.
            let _ = running.job.cancel();
        }
        running
    }

    /// Reserves an id and the disks for a job that is about to start on the first one. Without
    /// `id`, chooses one.
    ///
    /// # Errors
    /// A job uses a disk, or the id is invalid or in use.
    pub(crate) fn reserve(
        &self,
        kind: JobKind,
        id: Option<String>,
        disks: &[String],
    ) -> anyhow::Result<StartingJob> {
        self.reserve_as(Some(kind), id, disks)
    }

    /// Reserves a disk for a snapshot, as for a job that starts; see
    /// [`JobRegistry::check_no_snapshot`].
    ///
    /// # Errors
    /// As [`JobRegistry::reserve`].
    pub(crate) fn reserve_snapshot(&self, disk: &str) -> anyhow::Result<StartingJob> {
        self.reserve_as(None, Some(format!("snapshot-{disk}")), &[disk.to_owned()])
    }

    /// Without a kind, it is a snapshot.
    fn reserve_as(
        &self,
        kind: Option<JobKind>,
        id: Option<String>,
        disks: &[String],
    ) -> anyhow::Result<StartingJob> {
        for disk in disks {
            self.check_idle(disk)?;
            let is_blocked = self.blocked.borrow().iter().any(|blocked| blocked == disk);
            ensure!(!is_blocked, RegistryError::Busy(disk.to_owned()));
        }
        let is_taken =
            |id: &str| self.jobs.borrow().contains_key(id) || self.starting.borrow().contains_key(id);
        let id = match id {
            Some(id) => {
                ensure!(
                    !id.is_empty() && id.len() <= MAX_ID_BYTES && id.bytes().all(is_id_byte),
                    "job {id}: an id has 1 to {MAX_ID_BYTES} letters, digits, `.`, `_` and `-`"
                );
                let has_ended = self.find(&id).is_some_and(|job| !job.is_running());
                let remedy = match has_ended {
                    true => format!("choose another, or dismiss that job with `weir job dismiss {id}`"),
                    false => "choose another".to_owned(),
                };
                ensure!(!is_taken(&id), "job {id}: another job has this id ({remedy})");
                id
            }
            None => self
                .free_id(kind.map_or("snapshot", JobKind::name), disks.first().context("a job has a disk")?),
        };
        let entry = StartingEntry { disks: disks.to_vec(), is_snapshot: kind.is_none() };
        self.starting.borrow_mut().insert(id.clone(), entry);
        Ok(StartingJob { starting: Rc::clone(&self.starting), id })
    }

    /// An id that no job has.
    fn free_id(&self, kind: &str, disk: &str) -> String {
        let names = (1_usize..).map(|number| match number {
            1 => format!("{kind}-{disk}"),
            number => format!("{kind}-{disk}-{number}"),
        });
        let (jobs, starting) = (self.jobs.borrow(), self.starting.borrow());
        let mut free = names.filter(|id| !jobs.contains_key(id) && !starting.contains_key(id));
        free.next().expect("there are more numbers than jobs")
    }

    /// Number of the next job.
    pub(crate) fn next_number(&self) -> usize {
        let number = self.started.get();
        self.started.set(number + 1);
        number
    }

    /// Counts a job that has concluded.
    pub(crate) fn count_conclusion(&self, kind: JobKind, result: &JobResult) {
        *self.concluded.borrow_mut().entry((kind.name(), result.name())).or_default() += 1;
    }

    /// Names of kinds and results, with the number of jobs that have concluded so; for all results
    /// of each kind that has ever been listed.
    pub fn concluded(&self) -> Vec<((&'static str, &'static str), u64)> {
        self.concluded.borrow().iter().map(|(names, count)| (*names, *count)).collect()
    }

    /// Lists a job; returns the ids of concluded jobs that are not listed any more: those that
    /// concluded first.
    pub(crate) fn insert(&self, job: &Rc<RunningJob>) -> Vec<String> {
        for result in JobResult::NAMES {
            self.concluded.borrow_mut().entry((job.job.kind().name(), result)).or_default();
        }
        let mut jobs = self.jobs.borrow_mut();
        jobs.insert(job.job.id().to_string(), Rc::clone(job));
        let concluded = jobs.values().filter_map(|job| Some((job.job.concluded_at()?, job.number, job)));
        let mut concluded: Vec<_> =
            concluded.map(|(at, number, job)| (at, number, job.job.id().to_string())).collect();
        concluded.sort();
        let surplus = concluded.len().saturating_sub(MAX_CONCLUDED);
        let removed = concluded.into_iter().take(surplus).map(|(_, _, id)| id);
        removed.inspect(|id| drop(jobs.remove(id))).collect()
    }
}

/// Waits until jobs that the end of the daemon has cancelled have closed their targets, and logs
/// the targets that are incomplete.
pub async fn await_ends(cancelled: &[Rc<RunningJob>]) {
    let all_ended = async {
        for running in cancelled {
            running.job.concluded().await;
        }
    };
    let _ = reactor::timeout(END_TIMEOUT, all_ended).await;
    for RunningJob { job, disk, target, .. } in cancelled.iter().map(|running| &**running) {
        let effect = match job.kind() {
            JobKind::Backup => "its target is incomplete",
            JobKind::Mirror => "its target is incomplete, and the disk stays on its image",
            JobKind::Stream => "the disk keeps its backing files",
        };
        match job.status().result {
            Some(JobResult::Completed) => {}
            Some(JobResult::Cancelled | JobResult::Failed(_)) => {
                tracing::warn!(%disk, job = %job.id(), target, "a job ends with the daemon: {effect}");
            }
            None => tracing::warn!(
                %disk, job = %job.id(), target, patience_s = END_TIMEOUT.as_secs(),
                "a job has not ended in time, and ends with the daemon: {effect}"
            ),
        }
    }
}

fn is_id_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte)
}

impl RunningJob {
    fn uses(&self, disk: &str) -> bool {
        self.disk == disk || self.target_disk.borrow().as_deref() == Some(disk)
    }

    fn is_running(&self) -> bool {
        self.job.state() != JobState::Concluded
    }

    /// State, progress and settings for clients; `disks` has the disk.
    pub fn report(&self, disks: &DiskRegistry) -> JobReport {
        let JobStatus { state, progress, running_ns, result, remark, is_completing, pause_ns, .. } =
            self.job.status();
        let BackgroundSettings { bps_total, iops_total, weight } = self.member.settings();
        let rate = |bytes: u64| {
            (u128::from(bytes) * 1_000_000_000).checked_div(u128::from(running_ns)).unwrap_or(0) as u64
        };
        let left = progress.total_bytes.saturating_sub(progress.done_bytes);
        let remaining_s = left.checked_div(rate(progress.done_bytes));
        let given = |limit: u64| (limit > 0).then_some(limit);
        // A disk whose job has concluded may be removed.
        let disk = disks.find(&self.disk);
        let member = disk.as_ref().map(|disk| disk.disk.throttle());
        let cause =
            member.filter(|_| self.is_running()).and_then(|member| self.member.throttle_cause(member));
        JobReport {
            id: self.job.id().to_string(),
            kind: self.job.kind().name().to_owned(),
            disk: self.disk.clone(),
            group: member.and_then(|member| Some(member.group()?.name().to_owned())),
            target: self.target.clone(),
            format: self.format.name().to_owned(),
            state: state.name().to_owned(),
            done_bytes: progress.done_bytes,
            total_bytes: progress.total_bytes,
            copied_bytes: progress.copied_bytes,
            old_data_bytes: self.job.old_data_bytes().filter(|_| state != JobState::Concluded),
            running_ns,
            rate_bps: rate(progress.copied_bytes),
            remaining_s: remaining_s.filter(|_| state == JobState::Running),
            bps_total: given(bps_total),
            iops_total: given(iops_total),
            weight,
            throttle_cause: cause.map(|cause| self.throttle_cause(cause)),
            is_cancelled: result == Some(JobResult::Cancelled),
            error: match result {
                Some(JobResult::Failed(error)) => Some(error),
                _ => None,
            },
            remark,
            is_completing,
            is_switched: self.job.is_switched(),
            pause_ns,
        }
    }

    fn throttle_cause(&self, BackgroundCause { owner, kind }: BackgroundCause) -> ThrottleCause {
        let (level, name) = match owner {
            CauseOwner::Work => ("job", self.job.id().to_string()),
            CauseOwner::Disk => ("disk", self.disk.clone()),
            CauseOwner::Group(group) => ("group", group.name().to_owned()),
            CauseOwner::Above(group) => ("above", group.name().to_owned()),
        };
        ThrottleCause { level: level.into(), name, limit: kind.name().into() }
    }
}

#[cfg(test)]
mod tests {
    use policy::time::Duration;
    use reactor::sim;

    use super::*;

    #[test]
    fn the_job_that_concluded_first_is_dropped_first() {
        sim::run(1, async {
            let jobs = JobRegistry::default();
            let start = |id: &str| {
                let job = Job::new(id, JobKind::Backup);
                job.start(1);
                let running = Rc::new(RunningJob {
                    job,
                    disk: id.to_owned(),
                    target: String::new(),
                    format: ImageFormat::Raw,
                    target_disk: RefCell::default(),
                    switch: None,
                    is_auto_dismissed: false,
                    member: Arc::new(BackgroundMember::new(BackgroundSettings::default()).expect("valid")),
                    number: jobs.next_number(),
                });
                (jobs.insert(&running), running)
            };
            let (_, long) = start("long");
            for number in 0..MAX_CONCLUDED {
                let (removed, running) = start(&format!("short-{number}"));
                assert_eq!(removed, Vec::<String>::new());
                reactor::sleep_until(reactor::now() + Duration::from_millis(1)).await;
                running.job.conclude(JobResult::Completed);
            }
            long.job.conclude(JobResult::Completed);
            let (removed, _) = start("next");
            assert_eq!(removed, ["short-0"], "the first of those that concluded, not of those that started");
        });
    }

    #[test]
    fn no_job_starts_while_its_disk_is_removed() {
        let jobs = JobRegistry::default();
        let first = jobs.block_starts("vm1").expect("it is idle");
        // A removal that disconnects clients may overtake one that waits for them.
        let second = jobs.block_starts("vm1").expect("it is idle");
        let refusal =
            || jobs.reserve(JobKind::Backup, None, &["vm1".to_owned()]).err().map(|error| error.to_string());
        let busy = Some(RegistryError::Busy("vm1".to_owned()).to_string());
        assert_eq!(refusal(), busy);
        drop(first);
        assert_eq!(refusal(), busy, "the second removal is in progress");
        let other = jobs.reserve(JobKind::Backup, None, &["vm2".to_owned()]).expect("another disk");
        drop((second, other));
        let starting =
            jobs.reserve(JobKind::Backup, None, &["vm1".to_owned()]).expect("no removal is in progress");
        let expected = RegistryError::HasStartingJob { disk: "vm1".to_owned(), job: starting.id.clone() };
        assert_eq!(jobs.check_idle("vm1"), Err(expected.clone()));
        assert_eq!(jobs.check_all_idle(), Err(expected.clone()));
        assert_eq!(jobs.block_starts("vm1").err(), Some(expected));
        assert_eq!(jobs.check_no_snapshot("vm1"), Ok(()), "it is a backup");
        drop(starting);
        assert_eq!(jobs.check_all_idle(), Ok(()));
        let snapshot = jobs.reserve_snapshot("vm1").expect("it is idle");
        let expected = RegistryError::HasStartingJob { disk: "vm1".to_owned(), job: snapshot.id.clone() };
        assert_eq!(jobs.check_no_snapshot("vm1"), Err(expected));
        assert_eq!(jobs.check_no_snapshot("vm2"), Ok(()));
    }
}
