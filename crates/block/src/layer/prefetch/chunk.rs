//! A chunk's data, or the wait for it, shared by all workers that use it.

use std::sync::OnceLock;

use event_listener::Event;

use reactor::buffer::FrozenBuffer;

/// Result of a read-ahead.
#[derive(Debug, Default)]
pub(super) struct PrefetchChunk {
    /// `Some(None)` if it failed.
    data: OnceLock<Option<FrozenBuffer>>,
    arrived: Event,
}

impl PrefetchChunk {
    /// Waits for the data; `None` if the read-ahead failed.
    pub(super) async fn data(&self) -> Option<&FrozenBuffer> {
        loop {
            if let Some(data) = self.data.get() {
                return data.as_ref();
            }
            let arrived = self.arrived.listen();
            // It may have arrived between the check and the listener.
            if self.data.get().is_none() {
                arrived.await;
            }
        }
    }

    /// Sets the result of the read-ahead; called once.
    pub(super) fn set(&self, data: Option<FrozenBuffer>) {
        let is_first = self.data.set(data).is_ok();
        debug_assert!(is_first, "a chunk arrives once");
        self.arrived.notify(usize::MAX);
    }
}
