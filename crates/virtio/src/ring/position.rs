//! Positions in a packed ring, and event suppression.

use super::cells::{Cells, Ordering};

/// `VIRTQ_DESC_F_AVAIL` and `VIRTQ_DESC_F_USED` (virtio 1.3 § 2.8.1).
pub(super) const AVAIL: u16 = 1 << 7;
pub(super) const USED: u16 = 1 << 15;

/// Position of the driver or of the device in a packed ring: index of a descriptor, and the wrap
/// counter of that side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingPosition {
    pub(super) index: u16,
    pub(super) wrap: bool,
}

impl RingPosition {
    /// Initial position of both sides.
    pub(super) const START: Self = Self { index: 0, wrap: true };

    /// From the format of a ring's base and of event suppression (§ 2.8.10): 15 bits and one.
    pub(super) fn from_bits(bits: u16) -> Self {
        Self { index: bits & 0x7fff, wrap: bits >> 15 == 1 }
    }

    pub(super) fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// Position `descriptors` further, at most the ring's size.
    pub(super) fn after(self, descriptors: u16, size: u16) -> Self {
        // Both are at most 2¹⁵, so the sum fits.
        let index = u32::from(self.index) + u32::from(descriptors);
        match index.checked_sub(u32::from(size)) {
            Some(index) => Self { index: index as u16, wrap: !self.wrap },
            None => Self { index: index as u16, ..self },
        }
    }

    /// Position `descriptors` back, at most the ring's size.
    pub(super) fn before(self, descriptors: u16, size: u16) -> Self {
        match self.index.checked_sub(descriptors) {
            Some(index) => Self { index, ..self },
            None => Self { index: self.index + (size - descriptors), wrap: !self.wrap },
        }
    }

    /// Flags of an available descriptor here.
    pub(super) fn available(self) -> u16 {
        if self.wrap { AVAIL } else { USED }
    }

    /// Flags of a used descriptor here.
    pub(super) fn used(self) -> u16 {
        if self.wrap { AVAIL | USED } else { 0 }
    }

    /// True for the flags of an available descriptor here.
    pub(super) fn is_available(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == self.available()
    }

    /// True for the flags of a used descriptor here.
    pub(super) fn is_used(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == self.used()
    }
}

/// Event suppression area (§ 2.8.10): one side writes in it which notifications it wants from the
/// other. A position, then flags.
#[derive(Debug)]
pub(super) struct EventSuppression {
    cells: Cells,
    event_idx: bool,
}

const ENABLE: u16 = 0;
const DISABLE: u16 = 1;
/// Notify at the position.
const DESC: u16 = 2;

impl EventSuppression {
    pub(super) fn new(cells: Cells, event_idx: bool) -> Self {
        Self { cells, event_idx }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.cells.is_lost()
    }

    /// Suppresses all notifications.
    pub(super) fn disable(&self) {
        self.cells.store_u32(0, u32::from(DISABLE) << 16, Ordering::Relaxed);
    }

    /// Requests a notification for the descriptor at `next`, or for all. A fence must follow.
    pub(super) fn request(&self, next: RingPosition) {
        let suppression = if self.event_idx { (next.bits(), DESC) } else { (0, ENABLE) };
        let word = u32::from(suppression.0) | u32::from(suppression.1) << 16;
        self.cells.store_u32(0, word, Ordering::Relaxed);
    }

    /// True if the peer wants a notification for the `passed` descriptors before `now`, in a ring
    /// of `size`. A fence must precede it.
    pub(super) fn wants(&self, passed: u32, now: RingPosition, size: u16) -> bool {
        // One load, so that position and flags are consistent.
        let word = self.cells.load_u32(0, Ordering::Relaxed);
        match (word >> 16) as u16 & 3 {
            DISABLE => false,
            DESC if self.event_idx => {
                let event = RingPosition::from_bits(word as u16);
                // The event may be in the previous round of the ring.
                let round = if event.wrap == now.wrap { 0 } else { i32::from(size) };
                let distance = i32::from(now.index) + round - i32::from(event.index) - 1;
                u32::try_from(distance).is_ok_and(|distance| distance < passed)
            }
            _ => true,
        }
    }
}
