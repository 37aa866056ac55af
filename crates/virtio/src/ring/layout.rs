//! Where a ring lies and what was negotiated for it.

use reactor::guest::Place;

use super::{Broken, cells::Cells, chain::DESCRIPTOR_BYTES};

/// The most descriptors a ring has (virtio 1.3 § 2.7, § 2.8.10.1).
pub const MAX_SIZE: u16 = 1 << 15;

/// A ring in a guest's memory.
#[derive(Clone, Debug)]
pub struct Layout {
    /// How many descriptors it has: to [`MAX_SIZE`], and for a split ring a power of two.
    pub size: u16,
    /// The descriptor table, or the ring of descriptors.
    pub descriptors: Place,
    /// What the driver writes: the available ring, or its event suppression.
    pub driver: Place,
    /// What the device writes: the used ring, or its event suppression.
    pub device: Place,
    /// `VIRTIO_F_RING_PACKED`
    pub packed: bool,
    /// `VIRTIO_F_EVENT_IDX`
    pub event_idx: bool,
    /// `VIRTIO_F_INDIRECT_DESC`
    pub indirect: bool,
}

/// How many bytes the three parts of a ring take, and what their addresses are multiples of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Bytes and alignment of [`Layout::descriptors`].
    pub descriptors: (usize, usize),
    /// Of [`Layout::driver`].
    pub driver: (usize, usize),
    /// Of [`Layout::device`].
    pub device: (usize, usize),
}

impl Parts {
    /// Of a ring of `size` descriptors (virtio 1.3 § 2.7, § 2.8.10).
    pub const fn of(size: u16, packed: bool, event_idx: bool) -> Self {
        let size = size as usize;
        let descriptors = (size * DESCRIPTOR_BYTES, 16);
        if packed {
            return Self { descriptors, driver: (4, 4), device: (4, 4) };
        }
        let event = if event_idx { 2 } else { 0 };
        Self { descriptors, driver: (4 + 2 * size + event, 2), device: (4 + 8 * size + event, 4) }
    }
}

impl Layout {
    /// # Errors
    /// A size that no ring has, and parts that are too short or not aligned.
    pub(super) fn check(&self) -> Result<(), Broken> {
        let size = self.size;
        if size == 0 || size > MAX_SIZE || (!self.packed && !size.is_power_of_two()) {
            return Err(Broken::Size(size));
        }
        let parts = Parts::of(size, self.packed, self.event_idx);
        let part = |what, place: &Place, (bytes, alignment)| {
            if place.bytes() < bytes || !place.is_aligned(alignment) {
                return Err(Broken::Part { what, bytes: place.bytes(), needed: bytes, alignment });
            }
            Ok(())
        };
        part("descriptors", &self.descriptors, parts.descriptors)?;
        part("driver's part", &self.driver, parts.driver)?;
        part("device's part", &self.device, parts.device)
    }

    /// Descriptors, driver's part, device's part.
    pub(super) fn cells(&self) -> [Cells; 3] {
        [&self.descriptors, &self.driver, &self.device].map(|place| Cells::new(place.clone()))
    }
}
