//! A virtqueue: the device's half of a ring in guest memory, split or packed.
//!
//! ```text
//!   layout     location of the ring's parts
//!   cells      words of the ring, each loaded or stored once
//!   split      descriptor table, available ring and used ring   (split/indices: memory ordering)
//!   packed     one ring that both sides write to                (packed/ownership: memory
//!                                                               ordering; position: indices in it)
//!   chain      the buffers of a head, and the faults that they can have
//!   regions    their location in guest memory
//!   inflight   log of the chains in flight, in memory that survives a crash
//!   driver     the driver's half: for tests, and for clients that measure
//! ```
//!
//! One turn of a queue:
//!
//! ```text
//!   suppress_kicks()                     no kicks are needed while the queue is polled
//!   take() … take() → None               each chain has a ticket
//!   complete(ticket, written) …          in any order
//!   wants_call() → call once
//!   enable_kicks() → true: another turn  false: sleep until the kick
//! ```
//!
//! A malformed chain is a chain with a fault: it is completed like others. Only an error that makes
//! the ring itself meaningless is [`RingError`], and stops the queue.
//!
//! Never waits, makes no system call, and does not interpret the buffers.

#[cfg(any(test, fuzzing, feature = "meddler"))]
pub mod access_hook;
mod cells;
mod chain;
pub mod driver;
mod inflight;
mod layout;
mod packed;
mod position;
mod regions;
mod split;
#[cfg(test)]
mod tests;

use reactor::guest::{GuestBytes, GuestMemory};

pub use self::{
    chain::{ChainFault, ChainTicket, DescriptorChain, MAX_DESCRIPTORS},
    inflight::InflightQueueArea,
    layout::{MAX_SIZE, RingLayout, RingParts},
    regions::ChainMemory,
};
use self::{packed::PackedRing, regions::Regions, split::SplitRing};

/// Reason why a queue stops, or cannot start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Invalid ring size.
    #[error("the ring has {0} descriptors (at most {MAX_SIZE}, and a power of two in a split ring)")]
    Size(u16),
    /// A part of the ring is too short or not aligned.
    #[error("the ring's {what} has {bytes} bytes ({needed} are needed, aligned to {alignment})")]
    Part {
        /// Name of the part.
        what: &'static str,
        /// Size of the part.
        bytes: usize,
        /// Required size.
        needed: usize,
        /// Required alignment.
        alignment: usize,
    },
    /// The base from the front end is outside the ring.
    #[error("the ring's base {base:#x} is outside its {size} descriptors")]
    Base {
        /// Base as sent.
        base: u32,
        /// Number of descriptors of the ring.
        size: u16,
    },
    /// The driver made more available than the ring holds.
    #[error("the driver's index went from {from} to {to} in a ring of {size} descriptors")]
    IndexJump {
        /// Index of the next entry to take.
        from: u16,
        /// The driver's index.
        to: u16,
        /// Number of descriptors of the ring.
        size: u16,
    },
    /// A head beyond the descriptor table.
    #[error("the driver made descriptor {head} available in a table of {size}")]
    Head {
        /// The head.
        head: u16,
        /// Number of descriptors of the table.
        size: u16,
    },
    /// A head that is in flight already.
    #[error("the driver made descriptor {0} available again before it was used")]
    AlreadyInFlight(u16),
    /// The file behind the ring's memory was truncated.
    #[error("the file of the ring's memory was truncated")]
    MemoryTruncated,
    /// A chain that fills a packed ring without an end, and so without an id.
    #[error("a chain of descriptors wraps around the whole ring")]
    Endless,
    /// The content of the in-flight area is invalid.
    #[error("the in-flight area cannot be used: {0}")]
    Inflight(&'static str),
}

/// The device's half of a virtqueue.
#[derive(Debug)]
pub struct Virtqueue {
    regions: Regions,
    layout: RingLayout,
    kind: DeviceRing,
}

#[derive(Debug)]
enum DeviceRing {
    Split(SplitRing),
    Packed(PackedRing),
}

/// Evaluates the same expression for either format.
macro_rules! either {
    ($ring:expr, $half:ident => $what:expr) => {
        match $ring {
            DeviceRing::Split($half) => $what,
            DeviceRing::Packed($half) => $what,
        }
    };
}

impl Virtqueue {
    /// Starts a ring. `base` is `VHOST_USER_SET_VRING_BASE` as sent: the available index of a split
    /// ring; for a packed ring, index and wrap counter of the next available descriptor in the low
    /// half, and of the next used one in the high half.
    ///
    /// Chains that an earlier device had taken and not completed are lost in a split ring. In a
    /// packed ring they are taken again, unless they were overwritten.
    ///
    /// # Errors
    /// An invalid layout or base.
    pub fn new(layout: RingLayout, memory: GuestMemory, base: u32) -> Result<Self, RingError> {
        layout.check()?;
        let kind = if layout.packed {
            DeviceRing::Packed(PackedRing::new(&layout, base)?)
        } else {
            DeviceRing::Split(SplitRing::new(&layout, base))
        };
        Ok(Self { regions: Regions::new(memory), layout, kind })
    }

    /// Starts a ring with its in-flight area, which is new or left by a device that ended in any
    /// way. [`take`](Self::take) first returns the chains that the driver still waits for, oldest
    /// first. `base` is used only if the area is new.
    ///
    /// # Errors
    /// As [`Virtqueue::new`]; and an area that does not belong to this ring.
    pub fn with_inflight(
        layout: RingLayout,
        memory: GuestMemory,
        base: u32,
        inflight: InflightQueueArea,
    ) -> Result<Self, RingError> {
        let mut ring = Self::new(layout, memory, base)?;
        either!(&mut ring.kind, half => half.resume(inflight)?);
        Ok(ring)
    }

    /// Continues the ring after the guest's memory has moved, or its dirty log was turned on or
    /// off. Chains in flight keep their previous memory.
    ///
    /// # Errors
    /// Parts that are too short or not aligned. The ring is then unchanged.
    pub fn set_memory(
        &mut self,
        memory: GuestMemory,
        descriptors: GuestBytes,
        driver: GuestBytes,
        device: GuestBytes,
    ) -> Result<(), RingError> {
        let layout = RingLayout { descriptors, driver, device, ..self.layout.clone() };
        layout.check()?;
        // After the check, so that a failure changes nothing.
        either!(&mut self.kind, half => half.set_cells(&layout));
        (self.regions, self.layout) = (Regions::new(memory), layout);
        Ok(())
    }

    /// Takes the next chain that the driver made available; `None` if there is none.
    ///
    /// # Errors
    /// The ring is meaningless: stop the queue. Chains in flight can still be completed.
    #[inline]
    pub fn take(&mut self) -> Result<Option<DescriptorChain>, RingError> {
        either!(&mut self.kind, half => half.take(&self.regions))
    }

    /// Returns a chain to the driver. `written` is the number of bytes written, from the first
    /// writable one.
    ///
    /// # Panics
    /// Panics if the ticket belongs to another ring.
    #[inline]
    pub fn complete(&mut self, ticket: ChainTicket, written: u32) {
        either!(&mut self.kind, half => half.complete(&ticket, written));
    }

    /// Makes a chain that was not started available again, to this device or the next one. Call it
    /// in reverse order of taking.
    ///
    /// # Errors
    /// Returns the ticket if a newer chain is in flight or was completed, or if the chain was taken
    /// before a crash. It must be executed.
    pub fn put_back(&mut self, ticket: ChainTicket) -> Result<(), ChainTicket> {
        let is_put_back = either!(&mut self.kind, half => half.put_back(&ticket));
        if is_put_back { Ok(()) } else { Err(ticket) }
    }

    /// True if the driver must be called (interrupted) for the completed chains. Call it once a
    /// turn, after the completions of that turn, and once when the ring is started: the first
    /// result is always true, for a call that an earlier device may have owed.
    #[must_use]
    pub fn wants_call(&mut self) -> bool {
        either!(&mut self.kind, half => half.wants_call())
    }

    /// Suppresses kicks while the queue is polled. Kicks may still arrive.
    pub fn suppress_kicks(&mut self) {
        either!(&mut self.kind, half => half.suppress_kicks());
    }

    /// Requests a kick when the driver makes the next chain available. True if there is one
    /// already, for which no kick may arrive.
    #[must_use]
    pub fn enable_kicks(&mut self) -> bool {
        either!(&mut self.kind, half => half.enable_kicks())
    }

    /// Number of chains in flight, including those found in the in-flight area.
    pub fn in_flight(&self) -> u16 {
        either!(&self.kind, half => half.taken())
    }

    /// True if the file behind the ring's memory was truncated. Reads return zeroes, and the queue
    /// should stop.
    pub fn is_truncated(&self) -> bool {
        either!(&self.kind, half => half.is_lost())
    }

    /// Base at which the ring continues, for [`Virtqueue::new`]. Complete only if no chain is in
    /// flight.
    pub fn base(&self) -> u32 {
        either!(&self.kind, half => half.base())
    }

    /// Stops the ring for `VHOST_USER_GET_VRING_BASE` and returns its base. If no chain is in
    /// flight, the in-flight area is reset, so that it does not contradict a base that the front
    /// end sends later.
    pub fn stop(self) -> u32 {
        let base = self.base();
        either!(self.kind, half => half.close());
        base
    }
}
