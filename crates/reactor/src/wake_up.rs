//! Notifies an observer when a reactor wakes up. While all reactors sleep, no counter changes, so
//! the observer waits for this instead of reading the counters each second.
//!
//! A waking thread loads one flag; only if the observer waits, it also clears the flag.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Relaxed, Release},
};

use event_listener::{Event, EventListener};

static IS_OBSERVED: AtomicBool = AtomicBool::new(false);
static WAKE_UP: Event = Event::new();

/// Returns a listener that completes when any reactor's thread next wakes up after this call,
/// including the caller's own. For one observer. Never completes in simulation, where reactors do
/// not sleep.
pub fn next_wake_up() -> EventListener {
    let listener = WAKE_UP.listen();
    IS_OBSERVED.store(true, Release);
    listener
}

/// Notifies the observer, if one waits. A reactor's thread calls this after it has waited.
pub(super) fn notify_wake_up() {
    if IS_OBSERVED.load(Relaxed) && IS_OBSERVED.swap(false, AcqRel) {
        WAKE_UP.notify(usize::MAX);
    }
}
