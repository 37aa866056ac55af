//! The thread that looks what would have been: one at a time, and with what time others leave.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use anyhow::Context as _;
use lab::preview::{Felt, replay};
use tokio::sync::oneshot;

use super::desk::Then;
use crate::control::recording::Recent;

pub(super) struct Previews {
    pub(super) recent: Arc<Recent>,
    running: Mutex<Option<Running>>,
}

struct Running {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// What came of one.
pub(super) type Outcome = anyhow::Result<Option<Vec<Felt>>>;

impl Previews {
    pub(super) fn new(recent: Arc<Recent>) -> Self {
        Self { recent, running: Mutex::default() }
    }

    /// Begins one, once the one before has heard that it is over.
    pub(super) fn begin(&self, then: Then) -> anyhow::Result<(Arc<AtomicBool>, oneshot::Receiver<Outcome>)> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let before = running.take().inspect(|before| before.stop.store(true, Relaxed));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (tell, told) = oneshot::channel();
        let thread = thread::Builder::new().name("preview".to_owned()).spawn(move || {
            give_way();
            // It has nothing else to do than to look whether it is to stop.
            let _ = before.map(|before| before.thread.join());
            let felt = replay(&then.groups, &then.disks, &stopped);
            // Whoever asked may have gone.
            let _ = tell.send(felt);
        });
        let thread = thread.context("no thread can be started")?;
        *running = Some(Running { stop: Arc::clone(&stop), thread });
        Ok((stop, told))
    }
}

impl Drop for Previews {
    fn drop(&mut self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Running { stop, thread }) = running {
            stop.store(true, Relaxed);
            let _ = thread.join();
        }
    }
}

/// The nicest there is (sched(7)).
const NICE: i32 = 19;

/// From now on this thread has what time others leave. It is this thread's alone: setpriority(2).
fn give_way() {
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "a preview has as much time as other threads");
    }
}
