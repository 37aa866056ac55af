//! Which chains are out, kept where a crash does not reach: a file that the front end holds for us.
//!
//! The layouts and the order of the stores are those of "Inflight I/O tracking" in the vhost-user
//! specification, so that another device can take over from us and we from it. A process that is
//! killed has made all stores up to some instruction and none behind it, so what is here always
//! tells which chains the driver waits for:
//!
//! - a chain is noted before it is served, and what is not noted is still available in the ring;
//! - giving it back is noted before the ring's index moves, forgotten after it. Whoever finds the
//!   note beside the index knows on which side of that store the end was.
//!
//! The front end could change it. It is checked as what a guest writes is.

mod packed;
mod split;

use std::sync::atomic::Ordering;

use reactor::guest::Place;

pub(super) use self::{packed::PackedLog, split::SplitLog};
use super::{Broken, cells, cells::Cells, chain::Descriptor, position};

/// Queues' areas follow each other at multiples of this many bytes, as libvhost-user's do.
const ALIGNMENT: usize = 64;
/// The only version that there is. Zero: not in use yet.
const VERSION: u16 = 1;
/// Where both kinds of area have their version, and the number of descriptors.
const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;

/// The area of one queue. All zeroes is a new one.
#[derive(Clone, Debug)]
pub struct Inflight(Cells);

impl Inflight {
    /// Bytes of the area of a queue with `size` descriptors. The areas of a device's queues follow
    /// each other.
    pub const fn bytes(size: u16, packed: bool) -> usize {
        let (header, entry) =
            if packed { (packed::HEADER, packed::ENTRY) } else { (split::HEADER, split::ENTRY) };
        (header + size as usize * entry).next_multiple_of(ALIGNMENT)
    }

    /// The area at `place`, aligned to eight bytes.
    pub fn new(place: Place) -> Self {
        Self(Cells::new(place))
    }

    /// Its words, and whether they were in use.
    fn open(self, size: u16, packed: bool) -> Result<(Cells, bool), Broken> {
        let Self(cells) = self;
        if cells.bytes() < Self::bytes(size, packed) || !cells.is_aligned(8) {
            return Err(Broken::Inflight("it is too short for the ring, or not aligned"));
        }
        match cells.load_u16(VERSION_AT, Ordering::Relaxed) {
            0 => Ok((cells, false)),
            VERSION if cells.load_u16(SIZE_AT, Ordering::Relaxed) == size => Ok((cells, true)),
            VERSION => Err(Broken::Inflight("it is of a ring of another size")),
            _ => Err(Broken::Inflight("it has an unknown version")),
        }
    }
}

/// No chain is out, and what the front end says when the ring starts again counts once more.
fn close(cells: &Cells) {
    cells.store_u16(VERSION_AT, 0, Ordering::Release);
}
