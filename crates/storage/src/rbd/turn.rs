//! Whose turn it is to write to an image: this process's, or another's that may go on with it.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use event_listener::Event;

/// One of an image.
#[derive(Debug)]
pub(super) struct Turn {
    is_ours: AtomicBool,
    taken: Event,
}

impl Turn {
    pub(super) fn new(is_ours: bool) -> Self {
        Self { is_ours: AtomicBool::new(is_ours), taken: Event::new() }
    }

    pub(super) fn is_ours(&self) -> bool {
        self.is_ours.load(SeqCst)
    }

    /// Whoever asks from now on waits.
    pub(super) fn give(&self) {
        self.is_ours.store(false, SeqCst);
    }

    /// Whoever waits goes on.
    pub(super) fn take(&self) {
        self.is_ours.store(true, SeqCst);
        self.taken.notify(usize::MAX);
    }

    /// Waits until it is this process's.
    pub(super) async fn come(&self) {
        while !self.is_ours() {
            let taken = self.taken.listen();
            // It may have come in between.
            if self.is_ours() {
                return;
            }
            taken.await;
        }
    }
}
