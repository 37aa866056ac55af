//! Requests that are executed in pieces: large ones, up to 4 GiB, and those whose buffers are not
//! aligned for the device, so that they are copied.
//!
//! Each piece is charged to the process's memory, because it may be copied, and to the disk's
//! limits. Each queue executes one large request at a time, so that a large request does not delay
//! other tasks of the worker.

use std::mem;

use policy::{request::Direction, throttle::RequestCost};

use super::queue::{VhostUserQueue, VringRequest};
use crate::batch::Mergeable as _;
use ::virtio::block::{BlkOperation, Data, SECTOR_BYTES};
use reactor::{
    buffer::{ReadTarget, Segments},
    memory::MemoryAccount,
};

/// Maximum length of a piece. Common guests send no larger requests, and a copy of this length
/// takes one to two milliseconds. Smaller in simulation, so that small requests have several
/// pieces too.
const PIECE_BYTES: usize = if cfg!(test) { 4 << 10 } else { 4 << 20 };

/// True if a request with this data is executed as a whole.
pub(super) fn needs_no_split(data: &Data) -> bool {
    let sector = SECTOR_BYTES as usize;
    let mut bytes = 0;
    data.iter().all(|segment| {
        bytes += segment.bytes();
        bytes <= PIECE_BYTES && segment.is_aligned(sector) && segment.bytes().is_multiple_of(sector)
    })
}

/// Charged memory; returned on drop.
struct PieceMemoryCharge<'a>(&'a MemoryAccount, u64);

impl Drop for PieceMemoryCharge<'_> {
    fn drop(&mut self) {
        self.0.release(self.1);
    }
}

impl VhostUserQueue {
    /// Executes a read or write piece by piece.
    pub(super) async fn execute_in_pieces(&self, incoming: VringRequest) {
        let direction = match incoming.request.kind {
            BlkOperation::Read { .. } => Direction::Read,
            _ => Direction::Write,
        };
        let is_large = incoming.request.bytes() > PIECE_BYTES as u64;
        let _large = if is_large { Some(self.large.exclusive(0..1).await) } else { None };
        if self.is_stopping() && !incoming.must_complete {
            return self.return_request(incoming);
        }
        let mut offset = incoming.candidate().offset;
        let mut rest: Segments = incoming.buffers().iter().cloned().collect();
        let mut must_complete = incoming.must_complete;
        let mut outcome = Ok(());
        while !rest.is_empty() && outcome.is_ok() {
            let bytes = rest.len().min(PIECE_BYTES);
            // At most PIECE_BYTES; a segment across the border is split.
            let after = rest.split_off(bytes);
            let piece = mem::replace(&mut rest, after);
            let (disk, bytes) = (self.device.disk(), bytes as u64);
            if self.unless_stopping(disk.memory().acquire(&self.flow, bytes), must_complete).await.is_none() {
                return self.return_request(incoming);
            }
            let _charge = PieceMemoryCharge(disk.memory(), bytes);
            let Some(permit) = self.admit(direction, RequestCost::one(bytes), must_complete).await else {
                return self.return_request(incoming);
            };
            // The first piece has effects, so the request cannot go back into the ring any more.
            must_complete = true;
            outcome = match direction {
                Direction::Read => disk.read_to(permit, offset, ReadTarget::Segments(piece)).await.map(drop),
                Direction::Write => disk.write(permit, offset, piece, self.device.durability()).await,
            };
            offset += bytes;
            // Storage in memory completes without waiting, so other tasks would not run between
            // pieces.
            reactor::yield_now().await;
        }
        if direction == Direction::Read {
            // After the last piece: a dirty log that is set between pieces has to cover all of
            // them.
            incoming
                .buffers()
                .iter()
                .for_each(|segment| self.mark_dirty(segment.guest_address(), segment.bytes()));
        }
        self.complete_request(incoming, outcome);
    }
}
