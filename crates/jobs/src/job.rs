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
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use block::layer::copy_before_write::PointInTime;
use event_listener::Event;
use policy::{
    request::Direction,
    time::{Duration, Instant},
};

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
    /// See [`crate::stream`].
    Stream,
    /// See [`crate::mirror`].
    Mirror,
}

impl JobKind {
    /// Name, which is QEMU's (`JobType` in its qapi/job.json).
    pub const fn name(self) -> &'static str {
        match self {
            Self::Backup => "backup",
            Self::Stream => "stream",
            Self::Mirror => "mirror",
        }
    }
}

/// What a job does when an operator completes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The disk continues on the target.
    Switch,
    /// The disk stays on its image; the target has the content of this instant.
    Stay,
}

/// Question of a job whether its disk may be switched to the target.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SwitchQuestion {
    None,
    Asked,
    /// The effect of the job can no longer be prevented.
    Approved,
    Refused(String),
}

/// Answer of the owner of a disk to [`Job::ask`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwitchAnswer {
    /// The disk must be switched at once.
    Approved,
    /// It must not be switched, for this reason.
    Refused(String),
    /// The job was cancelled, or an operator wants another completion.
    Withdrawn,
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
    /// Its effect can no longer be prevented.
    #[error("the job is completing at this moment and cannot be cancelled")]
    Committed,
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

impl JobResult {
    /// All names.
    pub const NAMES: [&'static str; 3] = ["complete", "cancelled", "failed"];

    /// Name in events and metrics.
    pub const fn name(&self) -> &'static str {
        let [complete, cancelled, failed] = Self::NAMES;
        match self {
            Self::Completed => complete,
            Self::Cancelled => cancelled,
            Self::Failed(_) => failed,
        }
    }
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
    /// Condition that delays it, for an operator.
    pub remark: Option<String>,
    /// True if an operator has completed it, and it has not ended.
    pub is_completing: bool,
    /// Direction of the I/O that has failed and has ended it.
    pub failed_io: Option<Direction>,
    /// Time for which clients' changes have waited for the switch of the disk, in nanoseconds.
    pub pause_ns: Option<u64>,
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
    /// The point in time that it copies.
    point: OnceLock<Weak<PointInTime>>,
    changed: Event,
}

#[derive(Debug)]
struct JobLife {
    state: JobState,
    is_cancelled: bool,
    completion: Option<Completion>,
    question: SwitchQuestion,
    remark: Option<String>,
    failed_io: Option<Direction>,
    pause_ns: Option<u64>,
    result: Option<JobResult>,
    running_ns: u64,
    /// Since when it has been running.
    running_since: Option<Instant>,
    /// Instant at which it has concluded.
    concluded_at: Option<Instant>,
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
                completion: None,
                question: SwitchQuestion::None,
                remark: None,
                failed_io: None,
                pause_ns: None,
                result: None,
                running_ns: 0,
                running_since: None,
                concluded_at: None,
            }),
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            copied_bytes: AtomicU64::new(0),
            point: OnceLock::new(),
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

    /// Sets the point in time that it copies, whose buffer [`Job::old_data_bytes`] reports.
    pub fn set_point(&self, point: &Arc<PointInTime>) {
        let _ = self.point.set(Arc::downgrade(point));
    }

    /// Bytes of old data that wait for the target; `None` without a point in time, and after its
    /// end.
    pub fn old_data_bytes(&self) -> Option<u64> {
        Some(self.point.get()?.upgrade()?.buffered_bytes())
    }

    /// Current state.
    pub fn state(&self) -> JobState {
        self.lock().state
    }

    /// Instant at which it has concluded; `None` before.
    pub fn concluded_at(&self) -> Option<Instant> {
        self.lock().concluded_at
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
            remark: life.remark.clone(),
            is_completing: life.completion.is_some() && life.result.is_none(),
            failed_io: life.failed_io,
            pause_ns: life.pause_ns,
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
        if life.question == SwitchQuestion::Approved {
            return Err(JobRefusal::Committed);
        }
        life.is_cancelled = true;
        drop(life);
        self.changed.notify(usize::MAX);
        Ok(())
    }

    /// Completes a job that is ready. It ends soon; [`Job::concluded`] waits for that. A later call
    /// replaces the completion of an earlier one that has not ended the job.
    ///
    /// # Errors
    /// [`JobRefusal`]: it is not ready, or is being cancelled.
    pub fn complete(&self, completion: Completion) -> Result<(), JobRefusal> {
        let mut life = self.lock();
        let is_committed = life.question == SwitchQuestion::Approved;
        if life.state != JobState::Ready || life.is_cancelled || is_committed {
            return Err(JobRefusal::State { state: life.state, action: "completed" });
        }
        life.completion = Some(completion);
        life.remark = None;
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

    /// Sets the progress, from the bytes that are missing at this moment.
    pub fn set_missing(&self, bytes: u64) {
        self.done_bytes.store(self.total_bytes.load(Relaxed).saturating_sub(bytes), Relaxed);
    }

    /// Sets or removes the remark about a condition that delays the job.
    pub fn set_remark(&self, remark: Option<String>) {
        let mut life = self.lock();
        if life.remark != remark {
            life.remark = remark;
            drop(life);
            self.changed.notify(usize::MAX);
        }
    }

    /// The job has reached its goal and waits to be completed. While it is paused, waits first.
    pub async fn reach_goal(&self) {
        let reach = |life: &mut JobLife| {
            let is_running = life.state == JobState::Running;
            if is_running {
                life.become_state(JobState::Ready);
            }
            is_running
        };
        loop {
            self.wait_while_paused().await;
            if reach(&mut self.lock()) {
                self.changed.notify(usize::MAX);
                return;
            }
        }
    }

    /// Waits until an operator completes the job.
    pub async fn completion(&self) -> Completion {
        self.wait_for(|life| life.completion).await
    }

    /// Gives up an attempt to complete the job, which remains ready, for this reason.
    pub fn give_up_completion(&self, reason: String) {
        let mut life = self.lock();
        life.completion = None;
        life.remark = Some(reason);
        drop(life);
        self.changed.notify(usize::MAX);
    }

    /// True if an operator still wants this completion.
    pub fn is_wanted(&self, completion: Completion) -> bool {
        let life = self.lock();
        !life.is_cancelled && life.completion == Some(completion)
    }

    /// Asks the owner of the disk whether it may be switched at this moment, and waits for the
    /// answer. Once the owner approves, the job cannot be cancelled, and must switch the disk at
    /// once. The caller [withdraws](Job::withdraw) the question before it drops the future.
    pub async fn ask(&self) -> SwitchAnswer {
        self.lock().question = SwitchQuestion::Asked;
        self.changed.notify(usize::MAX);
        self.wait_for(|life| match &life.question {
            SwitchQuestion::Asked => None,
            SwitchQuestion::Approved => Some(SwitchAnswer::Approved),
            SwitchQuestion::Refused(reason) => Some(SwitchAnswer::Refused(reason.clone())),
            SwitchQuestion::None => Some(SwitchAnswer::Withdrawn),
        })
        .await
    }

    /// Withdraws a question. False if the owner has approved already.
    pub fn withdraw(&self) -> bool {
        let mut life = self.lock();
        let is_approved = life.question == SwitchQuestion::Approved;
        if !is_approved {
            life.question = SwitchQuestion::None;
        }
        !is_approved
    }

    /// True if the job waits for [`Job::answer`].
    pub fn is_asking(&self) -> bool {
        self.lock().question == SwitchQuestion::Asked
    }

    /// Answers the question: approves the switch, or refuses it for a reason. True if the switch is
    /// approved; false also if the job does not ask any more, or was cancelled.
    pub fn answer(&self, answer: Result<(), String>) -> bool {
        let mut life = self.lock();
        if life.question != SwitchQuestion::Asked {
            return false;
        }
        life.question = match answer {
            _ if life.is_cancelled || life.completion != Some(Completion::Switch) => SwitchQuestion::None,
            Ok(()) => SwitchQuestion::Approved,
            Err(reason) => SwitchQuestion::Refused(reason),
        };
        let is_approved = life.question == SwitchQuestion::Approved;
        drop(life);
        self.changed.notify(usize::MAX);
        is_approved
    }

    /// Notes for how long clients' changes have waited for the switch of the disk.
    pub fn note_pause(&self, pause: Duration) {
        self.lock().pause_ns = Some(pause.as_nanos() as u64);
    }

    /// Notes that I/O of the job has failed, which ends it.
    pub fn note_failed_io(&self, direction: Direction) {
        self.lock().failed_io = Some(direction);
    }

    /// True if the job has completed by [`Completion::Switch`].
    pub fn is_switched(&self) -> bool {
        let life = self.lock();
        life.completion == Some(Completion::Switch) && life.result == Some(JobResult::Completed)
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
        life.concluded_at = Some(reactor::now());
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
    use reactor::{select::first, sim, timeout};

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
    fn a_ready_job_is_completed_or_cancelled() {
        sim::run(1, async {
            let job = Job::new("mirror-vm1", JobKind::Mirror);
            job.start(100);
            let refused = |state, action| Err(JobRefusal::State { state, action });
            assert_eq!(job.complete(Completion::Switch), refused(JobState::Running, "completed"));
            job.reach_goal().await;
            assert_eq!(job.pause(), refused(JobState::Ready, "paused"));
            assert_eq!(job.complete(Completion::Stay), Ok(()));
            assert_eq!(job.complete(Completion::Switch), Ok(()), "the last request counts");
            assert_eq!(job.completion().await, Completion::Switch);
            assert!(!job.is_wanted(Completion::Stay));
            assert!(!job.answer(Ok(())), "it has not asked");
            let mut asking = std::pin::pin!(job.ask());
            assert!(timeout(Duration::from_nanos(1), &mut asking).await.is_err());
            assert!(job.is_asking() && job.withdraw());
            assert!(!job.answer(Ok(())), "the question was withdrawn");
            let asking = async {
                let answer = job.ask().await;
                assert!(!job.withdraw(), "it is too late");
                answer
            };
            let answering = async {
                assert!(job.answer(Ok(())));
                assert_eq!(job.cancel(), Err(JobRefusal::Committed));
                assert_eq!(job.complete(Completion::Stay), refused(JobState::Ready, "completed"));
                std::future::pending().await
            };
            assert_eq!(first(asking, answering).await.into_output(), SwitchAnswer::Approved);
            job.conclude(JobResult::Completed);
            assert!(job.is_switched());
        });
        sim::run(1, async {
            let job = Job::new("mirror-vm1", JobKind::Mirror);
            job.start(100);
            job.reach_goal().await;
            job.complete(Completion::Switch).expect("it is ready");
            let answering = async {
                assert!(!job.answer(Err("not now".to_owned())));
                std::future::pending().await
            };
            let refused = SwitchAnswer::Refused("not now".to_owned());
            assert_eq!(first(job.ask(), answering).await.into_output(), refused);
            job.give_up_completion("not now".to_owned());
            assert!(!job.status().is_completing);
            job.complete(Completion::Switch).expect("it is still ready");
            assert_eq!(job.status().remark, None);
            job.cancel().expect("it has not been switched");
            let answering = async {
                assert!(!job.answer(Ok(())), "the cancellation came first");
                std::future::pending().await
            };
            assert_eq!(first(job.ask(), answering).await.into_output(), SwitchAnswer::Withdrawn);
            assert_eq!(job.complete(Completion::Switch), refused_when_ready());
        });
        fn refused_when_ready() -> Result<(), JobRefusal> {
            Err(JobRefusal::State { state: JobState::Ready, action: "completed" })
        }
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
