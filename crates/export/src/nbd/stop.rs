//! The request to a connection to end, from another thread.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use event_listener::{Event, EventListener};

/// Raised once by a server, or by a connection that has failed.
#[derive(Debug, Default)]
pub(super) struct StopSignal {
    is_raised: AtomicBool,
    news: Event,
}

impl StopSignal {
    /// Asks the connection to end.
    pub(super) fn raise(&self) {
        self.is_raised.store(true, SeqCst);
        self.interrupt();
    }

    /// Wakes the connection where it waits for memory.
    pub(super) fn interrupt(&self) {
        self.news.notify(usize::MAX);
    }

    /// True once it was raised.
    pub(super) fn is_raised(&self) -> bool {
        self.is_raised.load(SeqCst)
    }

    /// The next time that it is raised, or the connection is interrupted.
    pub(super) fn listen(&self) -> EventListener {
        self.news.listen()
    }
}
