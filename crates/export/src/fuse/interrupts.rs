//! Requests that wait for limits and may be interrupted: their process was killed or got a signal.
//! The kernel blocks the process until the request is answered.
//!
//! Shared by all queues, because any queue may receive the INTERRUPT of a request.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use event_listener::{Event, EventListener};

#[derive(Debug, Default)]
pub(super) struct Interrupts(Mutex<HashMap<u64, Arc<FuseInterruption>>>);

/// Interruptions of requests that wait together.
#[derive(Debug, Default)]
pub(super) struct FuseInterruption {
    requests: Mutex<Vec<u64>>,
    event: Event,
}

/// Makes requests interruptible until it is dropped.
pub(super) struct Interruptible<'a> {
    interrupts: &'a Interrupts,
    requests: Vec<u64>,
    interruption: Arc<FuseInterruption>,
}

impl Interrupts {
    /// Makes these requests interruptible from now on.
    pub(super) fn allow(&self, requests: Vec<u64>) -> Interruptible<'_> {
        let interruption = Arc::new(FuseInterruption::default());
        let mut all = lock(&self.0);
        all.extend(requests.iter().map(|request| (*request, Arc::clone(&interruption))));
        drop(all);
        Interruptible { interrupts: self, requests, interruption }
    }

    /// Interrupts a request if it waits for limits.
    pub(super) fn interrupt(&self, request: u64) {
        // Removed, so that a second INTERRUPT has no effect. Unknown requests do not wait any more.
        let interruption = lock(&self.0).remove(&request);
        if let Some(interruption) = interruption {
            lock(&interruption.requests).push(request);
            interruption.event.notify(usize::MAX);
        }
    }
}

impl Interruptible<'_> {
    pub(super) fn listen(&self) -> EventListener {
        self.interruption.event.listen()
    }

    /// Requests that were interrupted since the last call.
    pub(super) fn interrupted(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.interruption.requests))
    }
}

impl Drop for Interruptible<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.interrupts.0);
        for request in &self.requests {
            all.remove(request);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
