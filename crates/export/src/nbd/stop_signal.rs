//! Stop signal of a connection, raised from another thread.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use event_listener::{Event, EventListener};

/// Raised once by a server, or by a connection that has failed.
#[derive(Debug, Default)]
pub(super) struct StopSignal {
    is_raised: AtomicBool,
    changed: Event,
}

impl StopSignal {
    /// Ends the connection.
    pub(super) fn raise(&self) {
        self.is_raised.store(true, SeqCst);
        self.interrupt();
    }

    /// Wakes the connection if it waits for memory.
    pub(super) fn interrupt(&self) {
        self.changed.notify(usize::MAX);
    }

    /// True once it was raised.
    pub(super) fn is_raised(&self) -> bool {
        self.is_raised.load(SeqCst)
    }

    /// Listener for the next [`Self::raise`] or [`Self::interrupt`].
    pub(super) fn listen(&self) -> EventListener {
        self.changed.listen()
    }
}
