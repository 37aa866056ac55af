//! A guest with a ring: its memory, its driver, and its chains in flight.

use std::collections::{HashMap, HashSet};

use fastrand::Rng;
use reactor::guest::{GuestBytes, GuestMemory, Region};

use super::super::{
    ChainTicket, DescriptorChain, InflightQueueArea, RingLayout, RingParts, Virtqueue,
    driver::{DriverBuffer, RingDriver},
};

pub(super) const RINGS: u64 = 0x10_000;
const INFLIGHT: u64 = 0x80_000;
/// Border of two regions: buffers and tables are on both sides.
pub(super) const BUFFERS: u64 = 0x100_000;
pub(super) const SEAM: u64 = BUFFERS + 0x5000;
const SLOT_BYTES: u64 = 0x300;
/// Size of the indirect table in a slot.
const TABLE_BYTES: u64 = 0x100;

/// Size and features of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingShape {
    pub(super) size: u16,
    pub(super) packed: bool,
    pub(super) event_idx: bool,
    pub(super) indirect: bool,
}

impl RingShape {
    pub(super) fn any(rng: &mut Rng) -> Self {
        let packed = rng.bool();
        let size = if packed { rng.u16(1..=17) } else { 1 << rng.u16(0..=4) };
        Self { size, packed, event_idx: rng.bool(), indirect: rng.bool() }
    }

    /// Base of an unused ring.
    pub(super) fn start(self) -> u32 {
        if self.packed { 0x8000_8000 } else { 0 }
    }
}

pub(super) fn memory() -> GuestMemory {
    let region = |at, bytes| Region::on_heap(at, at + (1 << 40), bytes);
    let regions = vec![
        region(RINGS, 0x8000),
        region(INFLIGHT, 0x2000),
        region(BUFFERS, (SEAM - BUFFERS) as usize),
        region(SEAM, 0x8000),
    ];
    GuestMemory::new(regions).expect("they do not overlap")
}

pub(super) fn layout(memory: &GuestMemory, shape: RingShape) -> RingLayout {
    let RingShape { size, packed, event_idx, indirect } = shape;
    let parts = RingParts::of(size, packed, event_idx);
    let part = |at: u64, (bytes, _)| memory.range(RINGS + at, bytes).expect("inside");
    RingLayout {
        size,
        descriptors: part(0, parts.descriptors),
        driver: part(0x4000, parts.driver),
        device: part(0x6000, parts.device),
        packed,
        event_idx,
        indirect,
    }
}

pub(super) fn ring_with_inflight(layout: &RingLayout, memory: &GuestMemory, base: u32) -> Virtqueue {
    let bytes = InflightQueueArea::bytes(layout.size, layout.packed);
    let inflight = InflightQueueArea::new(memory.range(INFLIGHT, bytes).expect("inside"));
    Virtqueue::with_inflight(layout.clone(), memory.clone(), base, inflight).expect("a good ring")
}

/// A chain that the driver waits for.
struct SentChain {
    slot: usize,
    number: u64,
    writable: usize,
}

/// A chain that the device has taken.
pub(super) struct TakenChain {
    number: u64,
    ticket: ChainTicket,
}

/// Driver and device, and their notifications to each other.
pub(super) struct RingWorld {
    pub(super) rng: Rng,
    pub(super) memory: GuestMemory,
    pub(super) layout: RingLayout,
    pub(super) driver: RingDriver,
    slots: Vec<usize>,
    sent: HashMap<u16, SentChain>,
    numbers: u64,
    pub(super) kicked: bool,
    pub(super) called: bool,
    /// Chains that were completed and must not be taken again.
    done: HashSet<u64>,
    pub(super) returned: u64,
}

impl RingWorld {
    pub(super) fn new(seed: u64) -> (Self, RingShape) {
        let mut rng = Rng::with_seed(seed);
        let shape = RingShape::any(&mut rng);
        let memory = memory();
        let layout = layout(&memory, shape);
        let driver = RingDriver::new(&layout);
        let world = Self {
            rng,
            memory,
            layout,
            driver,
            slots: (0..usize::from(shape.size)).collect(),
            sent: HashMap::new(),
            numbers: 0,
            kicked: false,
            called: false,
            done: HashSet::new(),
            returned: 0,
        };
        (world, shape)
    }

    pub(super) fn ring(&self, base: u32) -> Virtqueue {
        Virtqueue::new(self.layout.clone(), self.memory.clone(), base).expect("a good ring")
    }

    pub(super) fn ring_with_inflight(&self, base: u32) -> Virtqueue {
        ring_with_inflight(&self.layout, &self.memory, base)
    }

    pub(super) fn waits_for(&self) -> usize {
        self.sent.len()
    }

    /// The driver makes a chain available, if there is space. The chain begins with its number.
    pub(super) fn send(&mut self) {
        let indirect = self.layout.indirect && self.rng.bool();
        // An indirect chain needs only one descriptor of the ring.
        let max_buffers = if indirect { 8 } else { self.driver.free_descriptors().min(8) };
        if max_buffers == 0 || self.driver.free_descriptors() == 0 {
            return;
        }
        let slot = self.slots.pop().expect("as many as descriptors");
        let at = BUFFERS + 8 + slot as u64 * SLOT_BYTES;
        let (readable, writable) = {
            let all = self.rng.usize(1..=max_buffers);
            let writable = self.rng.usize(0..all);
            (all - writable, writable)
        };
        let mut buffers = Vec::new();
        let mut address = at + TABLE_BYTES;
        let mut buffer = |bytes: u32, writable| {
            buffers.push(DriverBuffer { address, bytes, writable });
            address += u64::from(bytes);
        };
        let number = self.numbers;
        self.numbers += 1;
        buffer(8, false);
        for _ in 1..readable {
            buffer(self.rng.u32(0..32), false);
        }
        let mut writable_bytes = 0;
        for _ in 0..writable {
            let bytes = self.rng.u32(0..32);
            writable_bytes += bytes as usize;
            buffer(bytes, true);
        }
        self.put(at + TABLE_BYTES, &number.to_le_bytes());
        let added = match self.table(at).filter(|_| indirect) {
            Some(table) => self.driver.add_indirect(&table, &buffers),
            None if buffers.len() <= self.driver.free_descriptors() => self.driver.add(&buffers),
            None => None,
        };
        let Some(id) = added else {
            self.slots.push(slot);
            return;
        };
        let sent = SentChain { slot, number, writable: writable_bytes };
        assert!(self.sent.insert(id, sent).is_none(), "the driver has used an id twice");
    }

    /// `None` if the table would cross a border of regions.
    fn table(&self, at: u64) -> Option<GuestBytes> {
        self.memory.range(at, TABLE_BYTES as usize)
    }

    fn put(&self, address: u64, bytes: &[u8]) {
        let mut segments = super::super::ChainMemory::new();
        assert!(self.memory.ranges(address, bytes.len(), &mut segments));
        let mut remaining = bytes;
        for segment in &segments {
            let (front, tail) = remaining.split_at(segment.bytes());
            segment.write(0, front);
            remaining = tail;
        }
    }

    /// The driver kicks the device, if kicks are not suppressed.
    pub(super) fn kick(&mut self) {
        self.kicked |= self.driver.wants_kick();
    }

    /// The driver takes all completed chains.
    pub(super) fn collect(&mut self) {
        while let Some(used) = self.driver.next_used().expect("each chain is used once") {
            let sent = self.sent.remove(&used.id).expect("the driver knows it");
            assert_eq!(used.written, (sent.number * 7) as u32, "of chain {}", sent.number);
            self.slots.push(sent.slot);
            self.done.insert(sent.number);
            self.returned += 1;
        }
    }

    /// Compares a chain of the device with the one that the driver made available.
    pub(super) fn check_chain(&self, chain: DescriptorChain) -> TakenChain {
        assert_eq!(chain.fault, None);
        let mut number = [0; 8];
        let mut filled = 0;
        for segment in chain.readable() {
            let part = segment.bytes().min(8 - filled);
            segment.read(0, &mut number[filled..filled + part]);
            filled += part;
        }
        let number = u64::from_le_bytes(number);
        assert!(!self.done.contains(&number), "chain {number} is served again");
        let sent = self.sent.values().find(|sent| sent.number == number).expect("the driver waits for it");
        assert_eq!(sent.writable, chain.writable().iter().map(GuestBytes::bytes).sum::<usize>());
        TakenChain { number, ticket: chain.ticket }
    }

    /// The device completes a chain, with a length that depends on its number.
    pub(super) fn complete(&mut self, ring: &mut Virtqueue, taken: TakenChain) {
        ring.complete(taken.ticket, (taken.number * 7) as u32);
        assert!(self.done.insert(taken.number), "chain {} is served twice", taken.number);
    }

    /// Puts taken chains back, newest first, as long as the ring accepts them.
    pub(super) fn put_back(&mut self, ring: &mut Virtqueue, taken: &mut Vec<TakenChain>) {
        while let Some(TakenChain { number, ticket }) = taken.pop() {
            if let Err(ticket) = ring.put_back(ticket) {
                taken.push(TakenChain { number, ticket });
                return;
            }
        }
    }
}
