//! Tells when somebody has something to do again, to whoever watches what is done and need not look
//! while all sleep.
//!
//! It costs each thread that wakes up one load.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Relaxed, Release},
};

use event_listener::{Event, EventListener};

static IS_AWAITED: AtomicBool = AtomicBool::new(false);
static ROUSED: Event = Event::new();

/// Ends when a thread next wakes up in its reactor, from this call on, be it the caller's own. For
/// one watcher. In simulation nobody sleeps, and nobody wakes up.
pub fn next_to_wake() -> EventListener {
    let roused = ROUSED.listen();
    IS_AWAITED.store(true, Release);
    roused
}

/// This thread has slept.
pub(super) fn woken() {
    if IS_AWAITED.load(Relaxed) && IS_AWAITED.swap(false, AcqRel) {
        ROUSED.notify(usize::MAX);
    }
}
