//! The driver's half of a virtqueue: makes chains available and takes them back.
//!
//! For tests, simulations and clients that measure a device. It believes what it is told of its own
//! memory, but not that the device gives back what it had.

mod packed;
mod split;

use reactor::guest::Place;

use self::{packed::Packed, split::Split};
use super::{cells, chain, chain::flag, layout::Layout, position};

/// A buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Its guest-physical address.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u32,
    /// Whether the device writes it; it reads it otherwise.
    pub writable: bool,
}

impl Buffer {
    fn flags(self) -> u16 {
        if self.writable { flag::WRITE } else { 0 }
    }
}

/// A chain that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What [`Driver::add`] said.
    pub id: u16,
    /// Bytes that the device has written, it says.
    pub written: u32,
}

/// The device gave back a chain that it did not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device gave back chain {0}, which it did not have")]
pub struct NotOut(pub u32);

/// The driver's half of a ring.
#[derive(Debug)]
pub struct Driver(Kind);

#[derive(Debug)]
enum Kind {
    Split(Split),
    Packed(Packed),
}

macro_rules! either {
    ($driver:expr, $half:ident => $what:expr) => {
        match $driver {
            Kind::Split($half) => $what,
            Kind::Packed($half) => $what,
        }
    };
}

impl Driver {
    /// Of a ring that nobody has used yet: zeroes. A split ring may be one whose chains are all
    /// back.
    pub fn new(layout: &Layout) -> Self {
        let (size, event_idx, cells) = (layout.size, layout.event_idx, layout.cells());
        Self(if layout.packed {
            Kind::Packed(Packed::new(size, event_idx, cells))
        } else {
            Kind::Split(Split::new(size, event_idx, cells))
        })
    }

    /// How many descriptors are free.
    pub fn free(&self) -> usize {
        either!(&self.0, half => half.free())
    }

    /// Makes a chain of one buffer or more available: what it comes back as. `None` if it has no
    /// buffers or the ring has no room for it.
    pub fn add(&mut self, buffers: &[Buffer]) -> Option<u16> {
        either!(&mut self.0, half => half.add(buffers, 0))
    }

    /// The same through an indirect table at `table`, so that it takes one descriptor of the ring.
    /// The table has to stay until the chain is back.
    ///
    /// # Panics
    /// If `table` is too short: sixteen bytes for each buffer.
    pub fn add_indirect(&mut self, table: &Place, buffers: &[Buffer]) -> Option<u16> {
        let packed = matches!(self.0, Kind::Packed(_));
        for (number, buffer) in buffers.iter().enumerate() {
            let last = number + 1 == buffers.len();
            let rest = if packed {
                // Descriptors as in the ring itself, without ids and NEXT (§ 2.8.7).
                u64::from(buffer.flags()) << 48
            } else {
                let next = if last { 0 } else { flag::NEXT };
                u64::from(buffer.flags() | next) << 32 | (number as u64 + 1) << 48
            };
            let rest = u64::from(buffer.bytes) | rest;
            let offset = number * chain::DESCRIPTOR_BYTES;
            table.write(offset, &buffer.address.to_le_bytes());
            table.write(offset + 8, &rest.to_le_bytes());
        }
        let bytes = (buffers.len() * chain::DESCRIPTOR_BYTES) as u32;
        let table = Buffer { address: table.guest_address(), bytes, writable: false };
        either!(&mut self.0, half => half.add(&[table], flag::INDIRECT))
    }

    /// Whether the device is to be kicked for what was added since this was last asked.
    #[must_use]
    pub fn wants_kick(&mut self) -> bool {
        either!(&mut self.0, half => half.wants_kick())
    }

    /// The next chain that came back, if there is one.
    ///
    /// # Errors
    /// The device gave back what it did not have; the ring cannot be used on.
    pub fn next_used(&mut self) -> Result<Option<Used>, NotOut> {
        either!(&mut self.0, half => half.next_used())
    }

    /// No calls, please: we look anyway.
    pub fn silence(&mut self) {
        either!(&mut self.0, half => half.silence());
    }

    /// Asks the device for a call when the next chain comes back. True: one is back already.
    #[must_use]
    pub fn listen(&mut self) -> bool {
        either!(&mut self.0, half => half.listen())
    }
}
