//! The driver's half of a virtqueue: makes chains available and takes completed ones.
//!
//! For tests, simulations and clients that measure a device. It trusts its own memory, but checks
//! that the device returns only chains in flight.

mod packed;
mod split;

use reactor::guest::GuestBytes;

use self::{packed::PackedDriver, split::SplitDriver};
use super::{cells, chain, chain::flag, layout::RingLayout, position};

/// A buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverBuffer {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// True if the device writes it, false if it reads it.
    pub writable: bool,
}

impl DriverBuffer {
    fn flags(self) -> u16 {
        if self.writable { flag::WRITE } else { 0 }
    }
}

/// A completed chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedChain {
    /// Id that [`RingDriver::add`] returned.
    pub id: u16,
    /// Number of bytes written, as the device reports it.
    pub written: u32,
}

/// Error: the device returned a chain that was not in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device returned chain {0}, which was not in flight")]
pub struct NotInFlight(pub u32);

/// The driver's half of a ring.
#[derive(Debug)]
pub struct RingDriver(DriverRing);

#[derive(Debug)]
enum DriverRing {
    Split(SplitDriver),
    Packed(PackedDriver),
}

macro_rules! either {
    ($driver:expr, $half:ident => $what:expr) => {
        match $driver {
            DriverRing::Split($half) => $what,
            DriverRing::Packed($half) => $what,
        }
    };
}

impl RingDriver {
    /// Creates the driver of an unused (zeroed) ring. A split ring may also be one without chains
    /// in flight.
    pub fn new(layout: &RingLayout) -> Self {
        let (size, event_idx, cells) = (layout.size, layout.event_idx, layout.cells());
        Self(if layout.packed {
            DriverRing::Packed(PackedDriver::new(size, event_idx, cells))
        } else {
            DriverRing::Split(SplitDriver::new(size, event_idx, cells))
        })
    }

    /// Number of free descriptors.
    pub fn free_descriptors(&self) -> usize {
        either!(&self.0, half => half.free())
    }

    /// Makes a chain of at least one buffer available and returns its id. `None` if there are no
    /// buffers or too few free descriptors.
    pub fn add(&mut self, buffers: &[DriverBuffer]) -> Option<u16> {
        either!(&mut self.0, half => half.add(buffers, 0))
    }

    /// As [`RingDriver::add`], through an indirect table at `table`, so that the chain uses one
    /// descriptor of the ring. The table must stay unchanged until the chain is completed.
    ///
    /// # Panics
    /// Panics if `table` is too short: sixteen bytes for each buffer.
    pub fn add_indirect(&mut self, table: &GuestBytes, buffers: &[DriverBuffer]) -> Option<u16> {
        let packed = matches!(self.0, DriverRing::Packed(_));
        for (number, buffer) in buffers.iter().enumerate() {
            let last = number + 1 == buffers.len();
            let word = if packed {
                // Descriptors as in the ring itself, without ids and NEXT (§ 2.8.7).
                u64::from(buffer.flags()) << 48
            } else {
                let next = if last { 0 } else { flag::NEXT };
                u64::from(buffer.flags() | next) << 32 | (number as u64 + 1) << 48
            };
            let word = u64::from(buffer.bytes) | word;
            let offset = number * chain::DESCRIPTOR_BYTES;
            table.write(offset, &buffer.address.to_le_bytes());
            table.write(offset + 8, &word.to_le_bytes());
        }
        let bytes = (buffers.len() * chain::DESCRIPTOR_BYTES) as u32;
        // The ring itself has one descriptor, which points to the table.
        let table = DriverBuffer { address: table.guest_address(), bytes, writable: false };
        either!(&mut self.0, half => half.add(&[table], flag::INDIRECT))
    }

    /// True if the device must be kicked for the chains added since the last call.
    #[must_use]
    pub fn wants_kick(&mut self) -> bool {
        either!(&mut self.0, half => half.wants_kick())
    }

    /// Takes the next completed chain; `None` if there is none.
    ///
    /// # Errors
    /// The device returned a chain that was not in flight; the ring is unusable.
    pub fn next_used(&mut self) -> Result<Option<UsedChain>, NotInFlight> {
        either!(&mut self.0, half => half.next_used())
    }

    /// Suppresses calls while the ring is polled.
    pub fn suppress_calls(&mut self) {
        either!(&mut self.0, half => half.suppress_calls());
    }

    /// Requests a call when the next chain is completed. True if one is completed already.
    #[must_use]
    pub fn enable_calls(&mut self) -> bool {
        either!(&mut self.0, half => half.enable_calls())
    }
}
