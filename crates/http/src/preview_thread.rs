//! The thread that computes previews: one at a time, at the lowest priority.
//!
//! The recording is copied on that thread, so only one copy exists, however many clients request a
//! preview.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use anyhow::Context as _;
use control::recording::RecentRequests;
use policy::time::Duration;
use simulator::limit_preview::{PreviewResult, ReplayResult, replay};
use tokio::sync::oneshot;

use super::main_thread::PreviewInput;

/// Most recent requests to replay, which bounds the computation.
const MAX_REQUESTS: usize = 300_000;

pub(super) struct Previews {
    desk: Arc<PreviewQueue>,
    /// Started by the first preview.
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct PreviewQueue {
    recent: Arc<RecentRequests>,
    next: Mutex<PreviewQueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct PreviewQueueState {
    job: Option<PreviewJob>,
    /// Cancels the running job.
    stop: Arc<AtomicBool>,
    is_over: bool,
}

struct PreviewJob {
    then: PreviewInput,
    stop: Arc<AtomicBool>,
    sender: oneshot::Sender<anyhow::Result<PreviewOutcome>>,
}

/// Result of a preview.
pub(super) struct PreviewOutcome {
    /// Length of the replayed recording.
    pub(super) past: Duration,
    /// Virtual time that was measured in the replay.
    pub(super) replayed: Duration,
    pub(super) recorded: PreviewResult,
    pub(super) simulated: PreviewResult,
    /// As recorded and as simulated, of the other disks on devices with a latency target; `None`
    /// without them.
    pub(super) others: Option<[PreviewResult; 2]>,
}

/// Handle of a requested preview. Dropping it cancels the preview.
pub(super) struct PreviewHandle {
    stop: Arc<AtomicBool>,
    receiver: oneshot::Receiver<anyhow::Result<PreviewOutcome>>,
}

impl PreviewHandle {
    /// Result; `None` if a newer preview replaced this one.
    pub(super) async fn result(&mut self) -> Option<anyhow::Result<PreviewOutcome>> {
        (&mut self.receiver).await.ok()
    }
}

impl Drop for PreviewHandle {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

impl Previews {
    pub(super) fn new(recent: Arc<RecentRequests>) -> Self {
        let desk = Arc::new(PreviewQueue { recent, next: Mutex::default(), changed: Condvar::new() });
        Self { desk, thread: Mutex::default() }
    }

    /// Starts a preview, which replaces a running or waiting one.
    pub(super) fn begin(&self, then: PreviewInput) -> anyhow::Result<PreviewHandle> {
        self.start()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = oneshot::channel();
        let mut next = self.desk.next();
        // Relaxed: the flag guards no data. The job polls it.
        next.stop.store(true, Relaxed);
        next.job = Some(PreviewJob { then, stop: Arc::clone(&stop), sender });
        self.desk.changed.notify_one();
        Ok(PreviewHandle { stop, receiver })
    }

    fn start(&self) -> anyhow::Result<()> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        // Also restarts a thread that panicked.
        if thread.as_ref().is_none_or(JoinHandle::is_finished) {
            let desk = Arc::clone(&self.desk);
            let started = thread::Builder::new().name("preview".to_owned()).spawn(move || {
                lower_priority();
                while let Some(job) = desk.job() {
                    desk.run(job);
                }
            });
            *thread = Some(started.context("no thread can be started")?);
        }
        Ok(())
    }
}

impl Drop for Previews {
    fn drop(&mut self) {
        let mut next = self.desk.next();
        next.is_over = true;
        next.stop.store(true, Relaxed);
        drop(next);
        self.desk.changed.notify_one();
        if let Some(thread) = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

impl PreviewQueue {
    fn next(&self) -> MutexGuard<'_, PreviewQueueState> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Next job; `None` at the end.
    fn job(&self) -> Option<PreviewJob> {
        let next = self.next();
        let waits = |next: &mut PreviewQueueState| next.job.is_none() && !next.is_over;
        let mut next = self.changed.wait_while(next, waits).unwrap_or_else(PoisonError::into_inner);
        // After the end a waiting job is dropped, which fails its receiver.
        let job = next.job.take().filter(|_| !next.is_over)?;
        next.stop = Arc::clone(&job.stop);
        Some(job)
    }

    fn run(&self, PreviewJob { mut then, stop, sender: tell }: PreviewJob) {
        // The client disconnected while the job waited.
        if stop.load(Relaxed) {
            return;
        }
        let names: Vec<Arc<str>> = then.disks.iter().map(|disk| disk.name.as_str().into()).collect();
        let now = reactor::real_time();
        // Copied here: the recording continues meanwhile.
        let (since, histories) = self.recent.latest(&names, now, MAX_REQUESTS);
        let (mut recorded, mut recorded_others) = (PreviewResult::default(), PreviewResult::default());
        let others: Vec<usize> = (0..then.disks.len())
            .filter(|place| then.disks[*place].device.is_some() && !then.of.contains(place))
            .collect();
        for (place, (disk, history)) in then.disks.iter_mut().zip(histories).enumerate() {
            if then.of.contains(&place) {
                recorded.add(&PreviewResult::of_recorded(&history));
            } else if others.contains(&place) {
                recorded_others.add(&PreviewResult::of_recorded(&history));
            }
            disk.recording = history;
        }
        let results = match replay(&then.groups, &then.disks, &stop) {
            Ok(Some(results)) => Ok(results),
            // Cancelled: the dropped sender is the answer.
            Ok(None) => return,
            Err(error) => Err(error),
        };
        // The client may have disconnected.
        let _ = tell.send(results.map(|ReplayResult { disks: results, simulated_ns }| {
            let sum = |places: &[usize]| {
                let mut sum = PreviewResult::default();
                places.iter().filter_map(|place| results.get(*place)).for_each(|result| sum.add(result));
                sum
            };
            let simulated = sum(&then.of);
            let others = (!others.is_empty()).then(|| [recorded_others, sum(&others)]);
            let replayed = Duration::from_nanos(simulated_ns);
            PreviewOutcome { past: now - since, replayed, recorded, simulated, others }
        }));
    }
}

/// Lowest priority (sched(7)).
const NICE: i32 = 19;

/// Lowers the priority of this thread. On Linux it applies to the thread alone: setpriority(2).
fn lower_priority() {
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "a preview runs at normal priority");
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_last_of_many_previews_wins_on_one_thread() {
        let previews = Previews::new(Arc::default());
        let empty_input = || PreviewInput { groups: Vec::new(), of: Vec::new(), disks: Vec::new() };
        let mut handles: Vec<_> = (0..50).map(|_| previews.begin(empty_input()).unwrap()).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let outcome = runtime.block_on(handles.last_mut().unwrap().result()).unwrap().unwrap();
        assert_eq!(outcome.simulated.requests(), 0);
        // All replaced previews end.
        for handle in &mut handles[..49] {
            let _ = runtime.block_on(handle.result());
        }
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        assert_eq!(names.filter(|name| name.trim_end() == "preview").count(), 1);
    }
}
