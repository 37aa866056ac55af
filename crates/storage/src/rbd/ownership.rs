//! Ownership of an image during an upgrade: this process may write to it, or another process that
//! can resume it.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use event_listener::Event;

/// Ownership of one image.
#[derive(Debug)]
pub(super) struct ImageOwnership {
    is_ours: AtomicBool,
    acquired: Event,
}

impl ImageOwnership {
    pub(super) fn new(is_ours: bool) -> Self {
        Self { is_ours: AtomicBool::new(is_ours), acquired: Event::new() }
    }

    pub(super) fn is_ours(&self) -> bool {
        self.is_ours.load(SeqCst)
    }

    /// Gives the ownership up: writes wait from now on.
    pub(super) fn release(&self) {
        self.is_ours.store(false, SeqCst);
    }

    /// Takes the ownership: waiting writes continue.
    pub(super) fn acquire(&self) {
        self.is_ours.store(true, SeqCst);
        self.acquired.notify(usize::MAX);
    }

    /// Waits until this process has the ownership.
    pub(super) async fn wait(&self) {
        while !self.is_ours() {
            let acquired = self.acquired.listen();
            // Taken between the check and the listener.
            if self.is_ours() {
                return;
            }
            acquired.await;
        }
    }
}
