//! Notifies an observer when a reactor wakes up, so that it need not poll statistics while all
//! reactors sleep.
//!
//! Costs each waking thread one load.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Relaxed, Release},
};

use event_listener::{Event, EventListener};

static IS_OBSERVED: AtomicBool = AtomicBool::new(false);
static WAKE_UP: Event = Event::new();

/// Completes when any reactor's thread next wakes up after this call, including the caller's own.
/// For one observer. Never completes in simulation, where reactors do not sleep.
pub fn next_wake_up() -> EventListener {
    let listener = WAKE_UP.listen();
    IS_OBSERVED.store(true, Release);
    listener
}

/// Called after this thread has slept.
pub(super) fn notify_wake_up() {
    if IS_OBSERVED.load(Relaxed) && IS_OBSERVED.swap(false, AcqRel) {
        WAKE_UP.notify(usize::MAX);
    }
}
