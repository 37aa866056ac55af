//! The driver's half of a split ring (virtio 1.3 § 2.7.13, § 2.7.14).

use super::{
    DriverBuffer, NotInFlight, UsedChain,
    cells::{Cells, Ordering, fence},
    chain::{DESCRIPTOR_BYTES, flag},
};

const FLAGS: usize = 0;
const IDX: usize = 2;
const RING: usize = 4;
/// Flag of the used ring: kicks are suppressed.
const NO_NOTIFY: u16 = 1;
/// Flag of the available ring: calls are suppressed.
const NO_INTERRUPT: u16 = 1;

#[derive(Debug)]
pub(super) struct SplitDriver {
    size: u16,
    event_idx: bool,
    table: Cells,
    available: Cells,
    used: Cells,
    /// Free descriptors.
    free: Vec<u16>,
    /// Next descriptor of the chain, for each descriptor in use.
    links: Box<[u16]>,
    /// Number of descriptors of the chain with each head; zero if it is not in flight.
    lengths: Box<[u16]>,
    published: u16,
    /// Number of entries published since the last `wants_kick`.
    unkicked: u32,
    used_index: u16,
}

impl SplitDriver {
    pub(super) fn new(size: u16, event_idx: bool, [table, available, used]: [Cells; 3]) -> Self {
        let published = available.load_u16(IDX, Ordering::Relaxed);
        let seen = used.load_u16(IDX, Ordering::Relaxed);
        Self {
            size,
            event_idx,
            table,
            available,
            used,
            free: (0..size).rev().collect(),
            links: vec![0; usize::from(size)].into(),
            lengths: vec![0; usize::from(size)].into(),
            published,
            unkicked: 0,
            used_index: seen,
        }
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn add(&mut self, buffers: &[DriverBuffer], flags: u16) -> Option<u16> {
        let first = self.free.len().checked_sub(buffers.len())?;
        let chain = self.free.split_off(first);
        let head = *chain.first()?;
        for (number, buffer) in buffers.iter().enumerate() {
            let offset = usize::from(chain[number]) * DESCRIPTOR_BYTES;
            let next = chain.get(number + 1).copied();
            let link = if next.is_some() { flag::NEXT } else { 0 };
            let flags = flags | link | buffer.flags();
            let next = next.unwrap_or(0);
            self.links[usize::from(chain[number])] = next;
            let word = u64::from(buffer.bytes) | u64::from(flags) << 32 | u64::from(next) << 48;
            self.table.store_u64(offset, buffer.address, Ordering::Relaxed);
            self.table.store_u64(offset + 8, word, Ordering::Relaxed);
        }
        self.lengths[usize::from(head)] = chain.len() as u16;
        let entry = RING + 2 * usize::from(self.published % self.size);
        self.available.store_u16(entry, head, Ordering::Relaxed);
        self.published = self.published.wrapping_add(1);
        // Release publishes the descriptors and the entry together with the index.
        self.available.store_u16(IDX, self.published, Ordering::Release);
        self.unkicked += 1;
        Some(head)
    }

    pub(super) fn wants_kick(&mut self) -> bool {
        let unkicked = std::mem::take(&mut self.unkicked);
        if unkicked == 0 {
            return false;
        }
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.used.load_u16(RING + 8 * usize::from(self.size), Ordering::Relaxed);
            u32::from(self.published.wrapping_sub(event).wrapping_sub(1)) < unkicked
        } else {
            self.used.load_u16(FLAGS, Ordering::Relaxed) & NO_NOTIFY == 0
        }
    }

    pub(super) fn next_used(&mut self) -> Result<Option<UsedChain>, NotInFlight> {
        if self.used.load_u16(IDX, Ordering::Acquire) == self.used_index {
            return Ok(None);
        }
        let entry = RING + 8 * usize::from(self.used_index % self.size);
        let id = self.used.load_u32(entry, Ordering::Relaxed);
        let written = self.used.load_u32(entry + 4, Ordering::Relaxed);
        let head = u16::try_from(id).ok().filter(|&head| head < self.size).ok_or(NotInFlight(id))?;
        let length = std::mem::take(&mut self.lengths[usize::from(head)]);
        if length == 0 {
            return Err(NotInFlight(id));
        }
        // Follows its own copy of the links: the device may not change the table, but is not
        // trusted.
        let mut descriptor = head;
        for _ in 0..length {
            self.free.push(descriptor);
            descriptor = self.links[usize::from(descriptor)];
        }
        self.used_index = self.used_index.wrapping_add(1);
        Ok(Some(UsedChain { id: head, written }))
    }

    pub(super) fn suppress_calls(&mut self) {
        if !self.event_idx {
            self.available.store_u16(FLAGS, NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    pub(super) fn enable_calls(&mut self) -> bool {
        if self.event_idx {
            self.available.store_u16(RING + 2 * usize::from(self.size), self.used_index, Ordering::Relaxed);
        } else {
            self.available.store_u16(FLAGS, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.used.load_u16(IDX, Ordering::Relaxed) != self.used_index
    }
}
