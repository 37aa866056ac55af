//! A chunk's data, or the wait for it, shared by all workers that use it.

use std::sync::OnceLock;

use event_listener::Event;

use reactor::buffer::Frozen;

/// Result of a read-ahead.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// `Some(None)` if it failed.
    data: OnceLock<Option<Frozen>>,
    arrived: Event,
}

impl Chunk {
    /// Waits for the data; `None` if the read-ahead failed.
    pub(super) async fn data(&self) -> Option<&Frozen> {
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
    pub(super) fn arrive(&self, data: Option<Frozen>) {
        let is_first = self.data.set(data).is_ok();
        debug_assert!(is_first, "a chunk arrives once");
        self.arrived.notify(usize::MAX);
    }
}
