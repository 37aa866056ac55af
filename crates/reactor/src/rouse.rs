//! Notifies an observer when a reactor wakes up, so that it need not poll statistics while all
//! reactors sleep.
//!
//! Costs each waking thread one load.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Relaxed, Release},
};

use event_listener::{Event, EventListener};

static IS_AWAITED: AtomicBool = AtomicBool::new(false);
static ROUSED: Event = Event::new();

/// Completes when any reactor's thread next wakes up after this call, including the caller's own.
/// For one observer. Never completes in simulation, where reactors do not sleep.
pub fn next_to_wake() -> EventListener {
    let roused = ROUSED.listen();
    IS_AWAITED.store(true, Release);
    roused
}

/// Called after this thread has slept.
pub(super) fn woken() {
    if IS_AWAITED.load(Relaxed) && IS_AWAITED.swap(false, AcqRel) {
        ROUSED.notify(usize::MAX);
    }
}
