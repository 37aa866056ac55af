//! The driver's half of a packed ring (virtio 1.3 § 2.8.17 to § 2.8.22).

use super::{
    DriverBuffer, NotInFlight, UsedChain,
    cells::{Cells, Ordering, fence},
    chain::{DESCRIPTOR_BYTES, flag},
    position::{EventSuppression, RingPosition},
};

#[derive(Debug)]
pub(super) struct PackedDriver {
    size: u16,
    ring: Cells,
    driver: EventSuppression,
    device: EventSuppression,
    next: RingPosition,
    used: RingPosition,
    /// Number of free descriptors.
    free: u16,
    /// Free buffer ids.
    ids: Vec<u16>,
    /// Number of descriptors of the chain with each id; zero if it is free.
    lengths: Box<[u16]>,
    /// Number of descriptors published since the last `wants_kick`.
    unkicked: u32,
}

impl PackedDriver {
    pub(super) fn new(size: u16, event_idx: bool, [ring, driver, device]: [Cells; 3]) -> Self {
        Self {
            size,
            ring,
            driver: EventSuppression::new(driver, event_idx),
            device: EventSuppression::new(device, event_idx),
            next: RingPosition::START,
            used: RingPosition::START,
            free: size,
            ids: (0..size).rev().collect(),
            lengths: vec![0; usize::from(size)].into(),
            unkicked: 0,
        }
    }

    pub(super) fn free(&self) -> usize {
        usize::from(self.free)
    }

    pub(super) fn add(&mut self, buffers: &[DriverBuffer], flags: u16) -> Option<u16> {
        let length = u16::try_from(buffers.len()).ok().filter(|&length| length > 0)?;
        self.free = self.free.checked_sub(length)?;
        let id = self.ids.pop().expect("as many ids as descriptors");
        self.lengths[usize::from(id)] = length;
        let head = self.next;
        // In reverse: making the first descriptor available publishes the whole chain.
        for (number, buffer) in (0..length).zip(buffers).rev() {
            let at = head.after(number, self.size);
            let link = if number + 1 < length { flag::NEXT } else { 0 };
            let flags = flags | link | buffer.flags() | at.available();
            let offset = usize::from(at.index) * DESCRIPTOR_BYTES;
            let word = u64::from(buffer.bytes) | u64::from(id) << 32 | u64::from(flags) << 48;
            self.ring.store_u64(offset, buffer.address, Ordering::Relaxed);
            // The word contains the flags, which transfer the ownership.
            self.ring.store_u64(offset + 8, word, Ordering::Release);
        }
        self.next = head.after(length, self.size);
        self.unkicked += u32::from(length);
        Some(id)
    }

    pub(super) fn wants_kick(&mut self) -> bool {
        let unkicked = std::mem::take(&mut self.unkicked);
        if unkicked == 0 {
            return false;
        }
        fence(Ordering::SeqCst);
        self.device.wants(unkicked, self.next, self.size)
    }

    pub(super) fn next_used(&mut self) -> Result<Option<UsedChain>, NotInFlight> {
        let offset = usize::from(self.used.index) * DESCRIPTOR_BYTES;
        let word = self.ring.load_u64(offset + 8, Ordering::Acquire);
        if self.free == self.size || !self.used.is_used((word >> 48) as u16) {
            return Ok(None);
        }
        let id = (word >> 32) as u16;
        let length = self.lengths.get_mut(usize::from(id)).map_or(0, std::mem::take);
        if length == 0 {
            return Err(NotInFlight(u32::from(id)));
        }
        self.ids.push(id);
        self.free += length;
        self.used = self.used.after(length, self.size);
        Ok(Some(UsedChain { id, written: word as u32 }))
    }

    pub(super) fn suppress_calls(&mut self) {
        self.driver.disable();
    }

    pub(super) fn enable_calls(&mut self) -> bool {
        self.driver.request(self.used);
        fence(Ordering::SeqCst);
        let offset = usize::from(self.used.index) * DESCRIPTOR_BYTES;
        let word = self.ring.load_u64(offset + 8, Ordering::Relaxed);
        self.free < self.size && self.used.is_used((word >> 48) as u16)
    }
}
