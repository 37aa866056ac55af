//! The thread that computes previews: one at a time, at the lowest priority.
//!
//! The recording is copied on that thread, so only one copy exists, however many clients ask.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use anyhow::Context as _;
use control::recording::Recent;
use policy::time::Duration;
use simulator::preview::{Felt, replay};
use tokio::sync::oneshot;

use super::desk::Then;

/// Most recent requests to replay: about a second of computation.
const MOST_REQUESTS: usize = 300_000;

pub(super) struct Previews {
    desk: Arc<Desk>,
    /// Started by the first preview.
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Desk {
    recent: Arc<Recent>,
    next: Mutex<Next>,
    is_other: Condvar,
}

#[derive(Default)]
struct Next {
    job: Option<Job>,
    /// Cancels the running job.
    stop: Arc<AtomicBool>,
    is_over: bool,
}

struct Job {
    then: Then,
    stop: Arc<AtomicBool>,
    tell: oneshot::Sender<anyhow::Result<Outcome>>,
}

/// Result of a preview.
pub(super) struct Outcome {
    /// Length of the replayed recording.
    pub(super) past: Duration,
    pub(super) was: Felt,
    pub(super) would: Felt,
}

/// Handle of a requested preview. Dropping it cancels the preview.
pub(super) struct Asked {
    stop: Arc<AtomicBool>,
    told: oneshot::Receiver<anyhow::Result<Outcome>>,
}

impl Asked {
    /// Result; `None` if a newer preview replaced this one.
    pub(super) async fn told(&mut self) -> Option<anyhow::Result<Outcome>> {
        (&mut self.told).await.ok()
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

impl Previews {
    pub(super) fn new(recent: Arc<Recent>) -> Self {
        let desk = Arc::new(Desk { recent, next: Mutex::default(), is_other: Condvar::new() });
        Self { desk, thread: Mutex::default() }
    }

    /// Starts a preview, which replaces a running or waiting one.
    pub(super) fn begin(&self, then: Then) -> anyhow::Result<Asked> {
        self.start()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, told) = oneshot::channel();
        let mut next = self.desk.next();
        // Relaxed: the flag guards no data. The job polls it.
        next.stop.store(true, Relaxed);
        next.job = Some(Job { then, stop: Arc::clone(&stop), tell });
        self.desk.is_other.notify_one();
        Ok(Asked { stop, told })
    }

    fn start(&self) -> anyhow::Result<()> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        // Also restarts a thread that panicked.
        if thread.as_ref().is_none_or(JoinHandle::is_finished) {
            let desk = Arc::clone(&self.desk);
            let started = thread::Builder::new().name("preview".to_owned()).spawn(move || {
                give_way();
                while let Some(job) = desk.job() {
                    desk.look(job);
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
        self.desk.is_other.notify_one();
        if let Some(thread) = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join();
        }
    }
}

impl Desk {
    fn next(&self) -> MutexGuard<'_, Next> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Next job; `None` at the end.
    fn job(&self) -> Option<Job> {
        let next = self.next();
        let waits = |next: &mut Next| next.job.is_none() && !next.is_over;
        let mut next = self.is_other.wait_while(next, waits).unwrap_or_else(PoisonError::into_inner);
        // After the end a waiting job is dropped, which fails its receiver.
        let job = next.job.take().filter(|_| !next.is_over)?;
        next.stop = Arc::clone(&job.stop);
        Some(job)
    }

    fn look(&self, Job { mut then, stop, tell }: Job) {
        // The client disconnected while the job waited.
        if stop.load(Relaxed) {
            return;
        }
        let names: Vec<Arc<str>> = then.disks.iter().map(|disk| disk.name.as_str().into()).collect();
        let now = reactor::real_time();
        // Copied here: the recording continues meanwhile.
        let (since, past) = self.recent.tell(&names, now, MOST_REQUESTS);
        let mut was = Felt::default();
        for (place, (disk, past)) in then.disks.iter_mut().zip(past).enumerate() {
            if then.of.contains(&place) {
                was.add(&Felt::was(&past));
            }
            disk.past = past;
        }
        let felt = match replay(&then.groups, &then.disks, &stop) {
            Ok(Some(felt)) => Ok(felt),
            // Cancelled: the dropped sender is the answer.
            Ok(None) => return,
            Err(error) => Err(error),
        };
        // The client may have disconnected.
        let _ = tell.send(felt.map(|felt| {
            let mut would = Felt::default();
            then.of.iter().filter_map(|place| felt.get(*place)).for_each(|felt| would.add(felt));
            Outcome { past: now - since, was, would }
        }));
    }
}

/// Lowest priority (sched(7)).
const NICE: i32 = 19;

/// Lowers the priority of this thread. On Linux it applies to the thread alone: setpriority(2).
fn give_way() {
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "a preview runs at normal priority");
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn of_many_that_are_asked_for_at_once_the_last_is_told_by_one_thread() {
        let previews = Previews::new(Arc::default());
        let nothing = || Then { groups: Vec::new(), of: Vec::new(), disks: Vec::new() };
        let mut asked: Vec<_> = (0..50).map(|_| previews.begin(nothing()).unwrap()).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let told = runtime.block_on(asked.last_mut().unwrap().told()).unwrap().unwrap();
        assert_eq!(told.would.requests(), 0);
        // All replaced previews end.
        for asked in &mut asked[..49] {
            let _ = runtime.block_on(asked.told());
        }
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        assert_eq!(names.filter(|name| name.trim_end() == "preview").count(), 1);
    }
}
