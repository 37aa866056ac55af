//! Registry of jobs: operations that clients of the control socket started on disks.
//!
//! A disk has at most one job. While it runs, the disk is not removed, moved, opened again or
//! transferred to another process: [`JobRegistry::check_idle`] refuses these. A concluded job stays
//! listed until it is dismissed, or [`MAX_CONCLUDED`] others have concluded after it.
//!
//! Holds state only; `backups` starts jobs and reports their changes.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, ensure};
use api::JobReport;
use block::layer::throttle::{BackgroundMember, BackgroundSettings};
use jobs::job::{Job, JobResult, JobState, JobStatus};

use super::RegistryError;

/// Number of concluded jobs that are listed at most.
const MAX_CONCLUDED: usize = 32;
/// Longest id of a job in bytes.
const MAX_ID_BYTES: usize = 64;

/// Jobs, by their ids.
#[derive(Default)]
pub struct JobRegistry {
    jobs: RefCell<BTreeMap<String, Rc<RunningJob>>>,
    /// Ids of jobs that are being started, with their disks.
    starting: RefCell<BTreeMap<String, String>>,
    /// Number of jobs so far.
    started: Cell<usize>,
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
    /// Its limits and weight.
    pub(crate) member: Arc<BackgroundMember>,
    /// Order of the starts.
    pub(crate) number: usize,
}

/// Reserves the id and the disk of a job until it is listed.
pub(crate) struct StartingJob<'a> {
    registry: &'a JobRegistry,
    pub(crate) id: String,
}

impl Drop for StartingJob<'_> {
    fn drop(&mut self) {
        self.registry.starting.borrow_mut().remove(&self.id);
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
    /// [`RegistryError::HasJob`].
    pub(crate) fn check_idle(&self, disk: &str) -> Result<(), RegistryError> {
        let jobs = self.jobs.borrow();
        let running = jobs.values().find(|job| job.disk == disk && job.is_running());
        let running = running.map(|job| job.job.id().to_string());
        let starting = self.starting.borrow();
        let starting = || starting.iter().find(|(_, of)| *of == disk).map(|(id, _)| id.clone());
        match running.or_else(starting) {
            Some(job) => Err(RegistryError::HasJob { disk: disk.to_owned(), job }),
            None => Ok(()),
        }
    }

    /// Removes a concluded job from the list. False if it has not concluded.
    pub(crate) fn dismiss(&self, job: &RunningJob) -> bool {
        let has_concluded = job.job.state() == JobState::Concluded;
        if has_concluded {
            self.jobs.borrow_mut().remove(&**job.job.id());
        }
        has_concluded
    }

    /// Cancels all jobs, because the daemon ends. Their targets are incomplete.
    pub fn end_all(&self) {
        for RunningJob { job, disk, target, .. } in self.running().iter().map(|job| &**job) {
            tracing::warn!(
                %disk, job = %job.id(), target,
                "a job ends with the daemon: its target is incomplete"
            );
            // It may be concluding at this moment.
            let _ = job.cancel();
        }
    }

    /// Reserves an id and the disk for a job that is about to start. Without `id`, chooses one.
    ///
    /// # Errors
    /// A job uses the disk, or the id is invalid or in use.
    pub(crate) fn reserve(&self, id: Option<String>, disk: &str) -> anyhow::Result<StartingJob<'_>> {
        self.check_idle(disk)?;
        let is_taken =
            |id: &str| self.jobs.borrow().contains_key(id) || self.starting.borrow().contains_key(id);
        let id = match id {
            Some(id) => {
                ensure!(
                    !id.is_empty() && id.len() <= MAX_ID_BYTES && id.bytes().all(is_id_byte),
                    "job {id}: an id has 1 to {MAX_ID_BYTES} letters, digits, `.`, `_` and `-`"
                );
                ensure!(
                    !is_taken(&id),
                    "job {id}: another job has this id (choose another, or dismiss that job with \
                     `weir job dismiss {id}`)"
                );
                id
            }
            None => {
                let names = (1_usize..).map(|number| match number {
                    1 => format!("backup-{disk}"),
                    number => format!("backup-{disk}-{number}"),
                });
                names.into_iter().find(|id| !is_taken(id)).context("no id is free")?
            }
        };
        self.starting.borrow_mut().insert(id.clone(), disk.to_owned());
        Ok(StartingJob { registry: self, id })
    }

    /// Number of the next job.
    pub(crate) fn next_number(&self) -> usize {
        let number = self.started.get();
        self.started.set(number + 1);
        number
    }

    /// Lists a job.
    pub(crate) fn insert(&self, job: &Rc<RunningJob>) {
        let mut jobs = self.jobs.borrow_mut();
        jobs.insert(job.job.id().to_string(), Rc::clone(job));
        let mut concluded: Vec<_> = jobs.values().filter(|job| !job.is_running()).cloned().collect();
        concluded.sort_by_key(|job| job.number);
        let surplus = concluded.len().saturating_sub(MAX_CONCLUDED);
        for job in concluded.into_iter().take(surplus) {
            jobs.remove(&**job.job.id());
        }
    }
}

fn is_id_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte)
}

impl RunningJob {
    fn is_running(&self) -> bool {
        self.job.state() != JobState::Concluded
    }

    /// State, progress and settings for clients.
    pub fn report(&self) -> JobReport {
        let JobStatus { state, progress, running_ns, result } = self.job.status();
        let BackgroundSettings { bps_total, iops_total, weight } = self.member.settings();
        let rate = |bytes: u64| {
            (u128::from(bytes) * 1_000_000_000).checked_div(u128::from(running_ns)).unwrap_or(0) as u64
        };
        let left = progress.total_bytes.saturating_sub(progress.done_bytes);
        let remaining_s = left.checked_div(rate(progress.done_bytes));
        let given = |limit: u64| (limit > 0).then_some(limit);
        JobReport {
            id: self.job.id().to_string(),
            kind: self.job.kind().name().to_owned(),
            disk: self.disk.clone(),
            target: self.target.clone(),
            state: state.name().to_owned(),
            done_bytes: progress.done_bytes,
            total_bytes: progress.total_bytes,
            copied_bytes: progress.copied_bytes,
            running_ns,
            rate_bps: rate(progress.copied_bytes),
            remaining_s: remaining_s.filter(|_| state == JobState::Running),
            bps_total: given(bps_total),
            iops_total: given(iops_total),
            weight,
            is_cancelled: result == Some(JobResult::Cancelled),
            error: match result {
                Some(JobResult::Failed(error)) => Some(error),
                _ => None,
            },
        }
    }
}
