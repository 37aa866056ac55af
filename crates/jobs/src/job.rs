//! A job (`Job`): its state, its progress, and the requests of an operator to pause or cancel it.
//!
//! ```text
//!   created ─► running ◄─► paused
//!                 │ ▲         │
//!                 ▼ │         │
//!               ready ────────┤
//!                 │           ▼
//!                 ├──────► aborting ─► concluded
//!                 └──────────────────► concluded
//! ```
//!
//! States and their names are those of QEMU (`JobStatus` in its qapi/job.json), without those that
//! exist for transactions. The operation runs on one thread; any thread may read and control it.
//!
//! Never does I/O, and never decides when an operation is complete.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use event_listener::Event;
use policy::time::{Duration, Instant};

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// It has not started.
    Created,
    /// It is working.
    Running,
    /// An operator has paused it.
    Paused,
    /// It has reached its goal and waits for an operator to complete it.
    Ready,
    /// It has failed or was cancelled, and is about to end.
    Aborting,
    /// It has ended.
    Concluded,
}

/// The transitions: from each state to these.
const TRANSITIONS: [(JobState, &[JobState]); 6] = [
    (JobState::Created, &[JobState::Running, JobState::Aborting]),
    (JobState::Running, &[JobState::Paused, JobState::Ready, JobState::Aborting, JobState::Concluded]),
    (JobState::Paused, &[JobState::Running, JobState::Aborting]),
    (JobState::Ready, &[JobState::Running, JobState::Aborting, JobState::Concluded]),
    (JobState::Aborting, &[JobState::Concluded]),
    (JobState::Concluded, &[]),
];

impl JobState {
    /// Name, which is QEMU's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Ready => "ready",
            Self::Aborting => "aborting",
            Self::Concluded => "concluded",
        }
    }

    /// True if a job in this state can change to `next`.
    pub fn may_become(self, next: Self) -> bool {
        TRANSITIONS.iter().any(|(from, to)| *from == self && to.contains(&next))
    }
}

/// Kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// See [`crate::backup`].
    Backup,
}

impl JobKind {
    /// Name, which is QEMU's (`JobType` in its qapi/job.json).
    pub const fn name(self) -> &'static str {
        match self {
            Self::Backup => "backup",
        }
    }
}

/// Reason why a request of an operator was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobRefusal {
    /// The state does not allow it.
    #[error("the job is {} and cannot be {action}", state.name())]
    State {
        /// Present state.
        state: JobState,
        /// The change, as a participle.
        action: &'static str,
    },
}

/// Progress of a job in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// Bytes that are done, of `total_bytes`.
    pub done_bytes: u64,
    /// Bytes to be done.
    pub total_bytes: u64,
    /// Bytes that were written to the target as data.
    pub copied_bytes: u64,
}

/// End of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobResult {
    /// It has reached its goal.
    Completed,
    /// An operator has cancelled it.
    Cancelled,
    /// It has failed, for this reason.
    Failed(String),
}

/// State of a job at one instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobStatus {
    /// State.
    pub state: JobState,
    /// Progress.
    pub progress: JobProgress,
    /// Time for which it has been running, without pauses, in nanoseconds.
    pub running_ns: u64,
    /// Result; `None` until it has concluded.
    pub result: Option<JobResult>,
}

/// A job. See the head of this file.
#[derive(Debug)]
pub struct Job {
    id: Arc<str>,
    kind: JobKind,
    life: Mutex<JobLife>,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    copied_bytes: AtomicU64,
    changed: Event,
}

#[derive(Debug)]
struct JobLife {
    state: JobState,
    is_cancelled: bool,
    result: Option<JobResult>,
    running_ns: u64,
    /// Since when it has been running.
    running_since: Option<Instant>,
}

impl Job {
    /// Creates a job.
    pub fn new(id: &str, kind: JobKind) -> Arc<Self> {
        Arc::new(Self {
            id: id.into(),
            kind,
            life: Mutex::new(JobLife {
                state: JobState::Created,
                is_cancelled: false,
                result: None,
                running_ns: 0,
                running_since: None,
            }),
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            copied_bytes: AtomicU64::new(0),
            changed: Event::new(),
        })
    }

    /// Id, unique among the jobs of the process.
    pub fn id(&self) -> &Arc<str> {
        &self.id
    }

    /// Kind.
    pub fn kind(&self) -> JobKind {
        self.kind
    }

    /// Notified after each change of the state.
    pub fn changed(&self) -> &Event {
        &self.changed
    }

    /// Current state.
    pub fn state(&self) -> JobState {
        self.lock().state
    }

    /// State, progress and result.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn status(&self) -> JobStatus {
        let life = self.lock();
        let running: Duration =
            life.running_since.map_or(Duration::from_nanos(0), |since| reactor::now() - since);
        JobStatus {
            state: life.state,
            progress: JobProgress {
                done_bytes: self.done_bytes.load(Relaxed),
                total_bytes: self.total_bytes.load(Relaxed),
                copied_bytes: self.copied_bytes.load(Relaxed),
            },
            running_ns: life.running_ns + running.as_nanos() as u64,
            result: life.result.clone(),
        }
    }

    /// Pauses the job: it begins no more work.
    ///
    /// # Errors
    /// [`JobRefusal`]: it is not running.
    pub fn pause(&self) -> Result<(), JobRefusal> {
        self.request(JobState::Running, JobState::Paused, "paused")
    }

    /// Resumes a paused job.
    ///
    /// # Errors
    /// [`JobRefusal`]: it is not paused.
    pub fn resume(&self) -> Result<(), JobRefusal> {
        self.request(JobState::Paused, JobState::Running, "resumed")
    }

    fn request(&self, from: JobState, to: JobState, action: &'static str) -> Result<(), JobRefusal> {
        let mut life = self.lock();
        if life.state != from || life.is_cancelled {
            return Err(JobRefusal::State { state: life.state, action });
        }
        life.become_state(to);
        drop(life);
        self.changed.notify(usize::MAX);
        Ok(())
    }

    /// Cancels the job. It ends soon; [`Job::concluded`] waits for that. A second call has no
    /// effect.
    ///
    /// # Errors
    /// [`JobRefusal`]: it has ended already.
    pub fn cancel(&self) -> Result<(), JobRefusal> {
        let mut life = self.lock();
        let has_failed = life.state == JobState::Aborting && !life.is_cancelled;
        if has_failed || life.state == JobState::Concluded {
            return Err(JobRefusal::State { state: life.state, action: "cancelled" });
        }
        life.is_cancelled = true;
        drop(life);
        self.changed.notify(usize::MAX);
        Ok(())
    }

    /// Waits until the job has ended, and returns its result.
    pub async fn concluded(&self) -> JobResult {
        self.wait_for(|life| life.result.clone()).await
    }

    /// Begins the work on `total_bytes`.
    ///
    /// # Panics
    /// Panics outside a reactor, or if the job has started before.
    pub fn start(&self, total_bytes: u64) {
        self.total_bytes.store(total_bytes, Relaxed);
        self.lock().become_state(JobState::Running);
        self.changed.notify(usize::MAX);
    }

    /// Adds to the progress.
    pub fn add_done(&self, bytes: u64, copied_bytes: u64) {
        self.done_bytes.fetch_add(bytes, Relaxed);
        self.copied_bytes.fetch_add(copied_bytes, Relaxed);
    }

    /// Waits while an operator has paused the job.
    pub async fn wait_while_paused(&self) {
        self.wait_for(|life| (life.state != JobState::Paused).then_some(())).await;
    }

    /// Waits until an operator cancels the job.
    pub async fn cancelled(&self) {
        self.wait_for(|life| life.is_cancelled.then_some(())).await;
    }

    /// True if an operator has cancelled the job.
    pub fn is_cancelled(&self) -> bool {
        self.lock().is_cancelled
    }

    /// The work has failed or was cancelled, and its effects are about to be undone.
    pub fn abort(&self) {
        self.lock().become_state(JobState::Aborting);
        self.changed.notify(usize::MAX);
    }

    /// Ends the job.
    pub fn conclude(&self, result: JobResult) {
        let mut life = self.lock();
        // A pause in the last moment has no effect.
        if life.state == JobState::Paused {
            life.become_state(JobState::Running);
        }
        if life.state == JobState::Created
            || (life.state != JobState::Aborting && result != JobResult::Completed)
        {
            life.become_state(JobState::Aborting);
        }
        life.become_state(JobState::Concluded);
        life.result = Some(result);
        drop(life);
        self.changed.notify(usize::MAX);
    }

    async fn wait_for<T>(&self, seen: impl Fn(&JobLife) -> Option<T>) -> T {
        loop {
            let listener = self.changed.listen();
            if let Some(value) = seen(&self.lock()) {
                return value;
            }
            listener.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, JobLife> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl JobLife {
    /// Changes the state.
    ///
    /// # Panics
    /// Panics if the transition does not exist: a bug of the operation.
    fn become_state(&mut self, next: JobState) {
        assert!(self.state.may_become(next), "a job cannot become {next:?} from {:?}", self.state);
        if let Some(since) = self.running_since.take() {
            let running: Duration = reactor::now() - since;
            self.running_ns += running.as_nanos() as u64;
        }
        if next == JobState::Running {
            self.running_since = Some(reactor::now());
        }
        self.state = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::sim;

    #[test]
    fn each_state_has_one_row_and_only_concluded_is_final() {
        for (index, (from, to)) in TRANSITIONS.iter().enumerate() {
            assert_eq!(TRANSITIONS.iter().filter(|(other, _)| other == from).count(), 1, "{index}");
            assert_eq!(to.is_empty(), *from == JobState::Concluded);
            assert!(!to.contains(from), "{from:?}");
        }
    }

    #[test]
    fn operators_control_a_job_in_the_states_that_allow_it() {
        sim::run(1, async {
            let job = Job::new("backup-vm1", JobKind::Backup);
            let refused = |state, action| Err(JobRefusal::State { state, action });
            assert_eq!(job.pause(), refused(JobState::Created, "paused"));
            job.start(100);
            assert_eq!(job.resume(), refused(JobState::Running, "resumed"));
            assert_eq!(job.pause(), Ok(()));
            assert_eq!(job.pause(), refused(JobState::Paused, "paused"));
            assert_eq!(job.resume(), Ok(()));
            assert_eq!(job.cancel(), Ok(()));
            assert_eq!(job.cancel(), Ok(()), "cancelling twice has no further effect");
            assert_eq!(job.pause(), refused(JobState::Running, "paused"));
            job.abort();
            job.conclude(JobResult::Cancelled);
            assert_eq!(job.concluded().await, JobResult::Cancelled);
            assert_eq!(job.cancel(), refused(JobState::Concluded, "cancelled"));
        });
    }

    #[test]
    fn only_running_time_counts() {
        sim::run(1, async {
            let job = Job::new("backup-vm1", JobKind::Backup);
            job.start(1);
            let wait = async |ms| reactor::sleep_until(reactor::now() + Duration::from_millis(ms)).await;
            wait(10).await;
            job.pause().expect("it is running");
            wait(1000).await;
            job.resume().expect("it is paused");
            wait(5).await;
            job.conclude(JobResult::Completed);
            wait(1000).await;
            let ms = job.status().running_ns / 1_000_000;
            assert!((15..20).contains(&ms), "{ms}");
        });
    }
}
