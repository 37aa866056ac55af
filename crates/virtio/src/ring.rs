//! A virtqueue: the device's half of a ring in a guest's memory, split or packed.
//!
//! ```text
//!   layout     where the ring lies
//!   cells      its words, each loaded or stored once
//!   split      tables of descriptors, an available and a used ring     (split/indices: the order)
//!   packed     one ring that both sides write to                       (packed/turns: the order;
//!                                                                       position: where in it)
//!   chain      the buffers behind a head, and what can be wrong with them
//!   regions    where in the guest's memory they are
//!   inflight   which chains are out, kept where a crash does not reach
//!   driver     the other half: for tests, and for clients that measure
//! ```
//!
//! A turn of a queue:
//!
//! ```text
//!   silence()                            no kicks while we look anyway
//!   take() … take() → None               each chain has a ticket
//!   complete(ticket, written) …          in any order
//!   wants_call() → call once
//!   listen() → true: another turn        false: sleep until the kick
//! ```
//!
//! A chain that is malformed is a chain with a fault: it is completed as others are. Only what
//! makes the ring itself meaningless is [`Broken`], and ends the queue.
//!
//! Never waits, makes no system call, and does not know what is in the buffers.

mod cells;
mod chain;
pub mod driver;
mod inflight;
mod layout;
#[cfg(any(test, fuzzing, feature = "meddler"))]
pub mod meddler;
mod packed;
mod position;
mod regions;
mod split;
#[cfg(test)]
mod tests;

use reactor::guest::{Memory, Place};

pub use self::{
    chain::{Chain, ChainFault, MAX_DESCRIPTORS, Ticket},
    inflight::Inflight,
    layout::{Layout, MAX_SIZE, Parts},
    regions::Places,
};
use self::{packed::Packed, regions::Regions, split::Split};

/// Why a queue cannot go on, or cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// No ring has this size.
    #[error("a ring of {0} descriptors (to {MAX_SIZE}, and a power of two in a split ring)")]
    Size(u16),
    /// A part of it is too short or not aligned.
    #[error("the ring's {what} has {bytes} bytes ({needed} are needed, aligned to {alignment})")]
    Part {
        /// Which part.
        what: &'static str,
        /// Bytes that it has.
        bytes: usize,
        /// Bytes that it should have.
        needed: usize,
        /// What its address should be a multiple of.
        alignment: usize,
    },
    /// The front end begins outside the ring.
    #[error("the ring's base {base:#x} is outside its {size} descriptors")]
    Base {
        /// As it was sent.
        base: u32,
        /// Descriptors of the ring.
        size: u16,
    },
    /// More was made available than the ring holds.
    #[error("the driver's index went from {from} to {to} in a ring of {size} descriptors")]
    Jump {
        /// What was taken so far.
        from: u16,
        /// The driver's index.
        to: u16,
        /// Descriptors of the ring.
        size: u16,
    },
    /// A head that the table does not have.
    #[error("the driver made descriptor {head} available in a table of {size}")]
    Head {
        /// The head.
        head: u16,
        /// Descriptors of the table.
        size: u16,
    },
    /// A head that is out already.
    #[error("the driver made descriptor {0} available again before it was used")]
    Twice(u16),
    /// Its file shrank.
    #[error("memory that was lent for the ring has gone")]
    Lost,
    /// A chain that has no end in its packed ring, and so no id.
    #[error("a chain of descriptors goes once round the ring")]
    Endless,
    /// The in-flight area is not what we, or another device, left there.
    #[error("the in-flight area cannot be taken up: {0}")]
    Inflight(&'static str),
}

/// The device's half of a virtqueue.
#[derive(Debug)]
pub struct Ring {
    regions: Regions,
    layout: Layout,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Split(Split),
    Packed(Packed),
}

/// The same of either kind.
macro_rules! either {
    ($ring:expr, $half:ident => $what:expr) => {
        match $ring {
            Kind::Split($half) => $what,
            Kind::Packed($half) => $what,
        }
    };
}

impl Ring {
    /// Takes up a ring. `base` is `VHOST_USER_SET_VRING_BASE` as it was sent: the available index
    /// of a split ring; of a packed ring index and wrap counter where descriptors are available, in
    /// the low half, and where used ones go, in the high half.
    ///
    /// What a device before us had taken and not given back is lost in a split ring; in a packed
    /// ring it is taken again, as far as it was not written over.
    ///
    /// # Errors
    /// A layout or base that cannot be.
    pub fn new(layout: Layout, memory: Memory, base: u32) -> Result<Self, Broken> {
        layout.check()?;
        let kind = if layout.packed {
            Kind::Packed(Packed::new(&layout, base)?)
        } else {
            Kind::Split(Split::new(&layout, base))
        };
        Ok(Self { regions: Regions::new(memory), layout, kind })
    }

    /// Takes up a ring with its in-flight area, which is new or left by a device that ended in any
    /// way. The chains that the driver still waits for come out of [`take`](Self::take) first, the
    /// oldest first. `base` counts where the area is new.
    ///
    /// # Errors
    /// As [`Ring::new`]; and an area that does not belong to this ring.
    pub fn with_inflight(
        layout: Layout,
        memory: Memory,
        base: u32,
        inflight: Inflight,
    ) -> Result<Self, Broken> {
        let mut ring = Self::new(layout, memory, base)?;
        either!(&mut ring.kind, half => half.resume(inflight)?);
        Ok(ring)
    }

    /// The guest's memory has changed, or what is written to it is to be logged from now on; the
    /// ring goes on in these places. Chains that are out keep theirs.
    ///
    /// # Errors
    /// Parts that are too short or not aligned. The ring stays as it was.
    pub fn set_memory(
        &mut self,
        memory: Memory,
        descriptors: Place,
        driver: Place,
        device: Place,
    ) -> Result<(), Broken> {
        let layout = Layout { descriptors, driver, device, ..self.layout.clone() };
        layout.check()?;
        either!(&mut self.kind, half => half.set_cells(&layout));
        (self.regions, self.layout) = (Regions::new(memory), layout);
        Ok(())
    }

    /// The next chain that the driver made available, if there is one.
    ///
    /// # Errors
    /// The ring has become meaningless: the queue stops. Chains that are out can be completed.
    pub fn take(&mut self) -> Result<Option<Chain>, Broken> {
        either!(&mut self.kind, half => half.take(&self.regions))
    }

    /// Gives a chain back to the driver. `written`: so many bytes from the beginning of what was
    /// writable have been written.
    ///
    /// # Panics
    /// If the ticket is not of this ring.
    pub fn complete(&mut self, ticket: Ticket, written: u32) {
        either!(&mut self.kind, half => half.complete(&ticket, written));
    }

    /// A chain that was not begun is to be taken again, by us or by whoever goes on with the ring.
    /// To be called for the newest first.
    ///
    /// # Errors
    /// The ticket, if a newer chain is out or was completed, or if the chain was taken before a
    /// crash. It has to be carried out.
    pub fn put_back(&mut self, ticket: Ticket) -> Result<(), Ticket> {
        let taken = either!(&mut self.kind, half => half.put_back(&ticket));
        if taken { Ok(()) } else { Err(ticket) }
    }

    /// Whether the driver is to be called for what was completed. To be asked once a turn, after
    /// the completions of that turn, and once when the ring was taken up: the first answer is
    /// always yes, for a call that a device before us may have owed.
    #[must_use]
    pub fn wants_call(&mut self) -> bool {
        either!(&mut self.kind, half => half.wants_call())
    }

    /// No kicks, please: we look anyway. A kick may come all the same.
    pub fn silence(&mut self) {
        either!(&mut self.kind, half => half.silence());
    }

    /// Asks the driver for a kick when it makes the next chain available. True: there is one
    /// already, for which no kick may come.
    #[must_use]
    pub fn listen(&mut self) -> bool {
        either!(&mut self.kind, half => half.listen())
    }

    /// How many chains are out, those included that were found in the in-flight area.
    pub fn taken(&self) -> u16 {
        either!(&self.kind, half => half.taken())
    }

    /// Whether the memory that the ring is in has gone: its file shrank. What is read there are
    /// zeroes, and the queue should stop.
    pub fn is_lost(&self) -> bool {
        either!(&self.kind, half => half.is_lost())
    }

    /// Where the ring goes on, as [`Ring::new`] takes it. It tells all only when nothing is out.
    pub fn base(&self) -> u32 {
        either!(&self.kind, half => half.base())
    }

    /// Ends, for `VHOST_USER_GET_VRING_BASE`: the answer. When nothing is out the in-flight area is
    /// new again, so that it does not contradict a base which the front end sends later.
    pub fn stop(self) -> u32 {
        let base = self.base();
        either!(self.kind, half => half.close());
        base
    }
}
