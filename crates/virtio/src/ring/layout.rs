//! Location and negotiated features of a ring.

use reactor::guest::GuestBytes;

use super::{RingError, cells::Cells, chain::DESCRIPTOR_BYTES};

/// Maximum number of descriptors of a ring (virtio 1.3 § 2.7, § 2.8.10.1).
pub const MAX_SIZE: u16 = 1 << 15;

/// A ring in guest memory.
#[derive(Clone, Debug)]
pub struct RingLayout {
    /// Number of descriptors: at most [`MAX_SIZE`], for a split ring a power of two.
    pub size: u16,
    /// Descriptor table of a split ring, or descriptor ring of a packed one.
    pub descriptors: GuestBytes,
    /// Driver area: the available ring, or the driver's event suppression.
    pub driver: GuestBytes,
    /// Device area: the used ring, or the device's event suppression.
    pub device: GuestBytes,
    /// True if `VIRTIO_F_RING_PACKED` was negotiated.
    pub packed: bool,
    /// True if `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// True if `VIRTIO_F_INDIRECT_DESC` was negotiated.
    pub indirect: bool,
}

/// Required size and alignment, in bytes, of the three parts of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingParts {
    /// Size and alignment of [`RingLayout::descriptors`].
    pub descriptors: (usize, usize),
    /// Size and alignment of [`RingLayout::driver`].
    pub driver: (usize, usize),
    /// Size and alignment of [`RingLayout::device`].
    pub device: (usize, usize),
}

impl RingParts {
    /// Requirements of a ring of `size` descriptors (virtio 1.3 § 2.7, § 2.8.10).
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

impl RingLayout {
    /// Validates the layout.
    ///
    /// # Errors
    /// An invalid size, and parts that are too short or not aligned.
    pub(super) fn check(&self) -> Result<(), RingError> {
        let size = self.size;
        if size == 0 || size > MAX_SIZE || (!self.packed && !size.is_power_of_two()) {
            return Err(RingError::Size(size));
        }
        let parts = RingParts::of(size, self.packed, self.event_idx);
        let check_part = |part_name, memory: &GuestBytes, (bytes, alignment)| {
            if memory.bytes() < bytes || !memory.is_aligned(alignment) {
                return Err(RingError::Part {
                    what: part_name,
                    bytes: memory.bytes(),
                    needed: bytes,
                    alignment,
                });
            }
            Ok(())
        };
        check_part("descriptors", &self.descriptors, parts.descriptors)?;
        check_part("driver's part", &self.driver, parts.driver)?;
        check_part("device's part", &self.device, parts.device)
    }

    /// Words of the three parts: descriptors, driver area, device area.
    pub(super) fn cells(&self) -> [Cells; 3] {
        [&self.descriptors, &self.driver, &self.device].map(|memory| Cells::new(memory.clone()))
    }
}
