//! Log of the chains in flight, in memory that survives a crash: a file that the front end holds.
//!
//! Layouts and order of the stores are those of "Inflight I/O tracking" in the vhost-user
//! specification, so that devices of other programs can continue a queue, and vice versa. A process
//! that is killed has executed all stores up to some instruction and none after it, so the log
//! always shows which chains the driver waits for:
//!
//! - a chain is logged before it is executed, and a chain that is not logged is still available in
//!   the ring;
//! - its completion is logged before the store that publishes it in the ring, and the chain is
//!   cleared after that store. The log's index, compared with the ring, shows whether the store was
//!   executed.
//!
//! The front end could change the area, so it is validated like guest memory.

mod packed;
mod split;

use std::sync::atomic::Ordering;

use reactor::guest::GuestBytes;

pub(super) use self::{packed::PackedLog, split::SplitLog};
use super::{RingError, cells, cells::Cells, chain::RingDescriptor, position};

/// Alignment of each queue's area, as in libvhost-user.
const ALIGNMENT: usize = 64;
/// The only version. Zero: not in use yet.
const VERSION: u16 = 1;
/// Offsets of the version and the number of descriptors, equal in both formats.
const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;

/// The area of one queue. A zeroed area is new.
#[derive(Clone, Debug)]
pub struct InflightQueueArea(Cells);

impl InflightQueueArea {
    /// Size of the area of a queue with `size` descriptors, in bytes. The areas of a device's
    /// queues are adjacent.
    pub const fn bytes(size: u16, packed: bool) -> usize {
        let (header, entry) =
            if packed { (packed::HEADER, packed::ENTRY) } else { (split::HEADER, split::ENTRY) };
        (header + size as usize * entry).next_multiple_of(ALIGNMENT)
    }

    /// The area in `memory`, aligned to eight bytes.
    pub fn new(memory: GuestBytes) -> Self {
        Self(Cells::new(memory))
    }

    /// Validates the header; returns the words, and whether the area was in use.
    fn open(self, size: u16, packed: bool) -> Result<(Cells, bool), RingError> {
        let Self(cells) = self;
        if cells.bytes() < Self::bytes(size, packed) || !cells.is_aligned(8) {
            return Err(RingError::Inflight("it is too short for the ring, or not aligned"));
        }
        match cells.load_u16(VERSION_AT, Ordering::Relaxed) {
            0 => Ok((cells, false)),
            VERSION if cells.load_u16(SIZE_AT, Ordering::Relaxed) == size => Ok((cells, true)),
            VERSION => Err(RingError::Inflight("it is of a ring of another size")),
            _ => Err(RingError::Inflight("it has an unknown version")),
        }
    }
}

/// Resets the area, so that the front end's base is used when the ring starts again. No chain may
/// be in flight.
fn close(cells: &Cells) {
    cells.store_u16(VERSION_AT, 0, Ordering::Release);
}
