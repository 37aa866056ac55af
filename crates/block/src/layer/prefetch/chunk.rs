//! A chunk's data, or the wait for it, as shared by all workers that use it.

use std::sync::OnceLock;

use event_listener::Event;

use reactor::buffer::Frozen;

/// What a read-ahead brings.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// `Some(None)` if it failed.
    data: OnceLock<Option<Frozen>>,
    arrived: Event,
}

impl Chunk {
    /// The data, once it is there; `None` if it could not be read.
    pub(super) async fn data(&self) -> Option<&Frozen> {
        loop {
            if let Some(data) = self.data.get() {
                return data.as_ref();
            }
            let arrived = self.arrived.listen();
            // It may have arrived before anybody listened.
            if self.data.get().is_none() {
                arrived.await;
            }
        }
    }

    /// Says how the read-ahead ended; once.
    pub(super) fn arrive(&self, data: Option<Frozen>) {
        let is_first = self.data.set(data).is_ok();
        debug_assert!(is_first, "a chunk arrives once");
        self.arrived.notify(usize::MAX);
    }
}
