//! Exclusive access to an image: no request is in flight.
//!
//! Never writes: the caller decides which metadata must be in the file.

use super::Qcow2Image;
use storage::{RangeGuard, epoch_gate::ExclusiveGuard};

/// Guard of exclusive access: no request is in flight until it is dropped, not even one that its
/// client has cancelled.
#[derive(Debug)]
pub struct ExclusiveImage<'a> {
    pub(super) image: &'a Qcow2Image,
    _closed: ExclusiveGuard<'a>,
    _freeing: RangeGuard<'a>,
}

impl Qcow2Image {
    /// Blocks new requests and waits for those in flight. The future may be dropped, to wait for a
    /// limited time.
    pub async fn drain(&self) -> ExclusiveImage<'_> {
        // Before the gate: a task that frees clusters waits for requests, which the closed gate
        // would block.
        let freeing = self.freeing.exclusive(0..1).await;
        let closed = self.gate.close().await;
        ExclusiveImage { image: self, _closed: closed, _freeing: freeing }
    }
}
