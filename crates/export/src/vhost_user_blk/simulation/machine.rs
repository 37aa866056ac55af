//! A well-behaved guest: its memory, a driver with many requests in flight, and the expected result
//! of each.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    ops::Range,
    os::fd::OwnedFd,
    rc::Rc,
    sync::Arc,
};

use event_listener::Event;
use policy::time::Duration;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{
    BLOCK, DISK_BYTES, SERIAL, SimulatedDiskLife, VhostUserSimulationCounts, chance, count, sleep_randomly,
};
use crate::{
    model::{Model, Outcome},
    passed::GroupSamples,
    vhost_user_blk::{
        device::VhostUserDevice, features::virtio, vring::RingAreas, vring_event::simulated::SimulatedEvent,
    },
};
use ::virtio::ring::{
    ChainMemory, InflightQueueArea, RingLayout, RingParts,
    driver::{DriverBuffer, RingDriver, UsedChain},
};
use reactor::{
    guest::{DirtyLog, GuestBytes, GuestMemory, MappingQuota, Region},
    select::{FirstReady, first},
    sim, timeout,
};

/// Guest-physical addresses: the rings, then slots for requests.
const RINGS: u64 = 0x1_0000;
const DRIVER: u64 = RINGS + 0x4000;
const DEVICE: u64 = RINGS + 0x6000;
const SLOTS: u64 = RINGS + 0x8000;
const MAX_SLOTS: usize = 12;
/// Layout of a slot: an indirect table, device-readable data, device-writable data.
const SLOT_BYTES: u64 = 0x7000;
const READABLE: u64 = 0x1000;
const WRITABLE: u64 = 0x4000;
const END: u64 = SLOTS + MAX_SLOTS as u64 * SLOT_BYTES;
const PAGE: u64 = 4096;
/// Content of bytes that must not change, and of a status that was not written yet.
const GUARD: u8 = 0xa5;
const MAX_SECTORS: usize = 16;
const MAX_PIECES: usize = 4;

/// `VIRTIO_BLK_T_…` and `VIRTIO_BLK_S_…`, from virtio 1.3 § 5.2.6.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

#[derive(Clone, Copy, Debug)]
pub(super) struct SimulatedRingShape {
    pub(super) size: u16,
    packed: bool,
    event_idx: bool,
    indirect: bool,
}

#[derive(Debug)]
enum GuestOperation {
    Read {
        offset: usize,
        began: u64,
    },
    /// Writes, zeroes and discards, by their numbers in the model. `hint`: it may have no effect.
    Change {
        numbers: Vec<usize>,
        hint: bool,
    },
    Flush {
        began: u64,
    },
    Id,
    /// Expected status of an invalid request.
    Answer(u8),
}

#[derive(Debug)]
struct SentGuestRequest {
    slot: usize,
    operation: GuestOperation,
    /// Device-writable buffers; the last byte is the status.
    writable_buffers: Vec<(u64, usize)>,
    /// The write cache when the request began, and the number of switches until then.
    cache: (bool, u64),
    /// Log in which all written pages must be marked.
    log: Option<DirtyLog>,
}

pub(super) struct SimulatedGuest {
    pub(super) shape: SimulatedRingShape,
    pub(super) device: Arc<VhostUserDevice>,
    file: OwnedFd,
    /// Address at which its memory is split into two regions.
    seam: u64,
    memory: GuestMemory,
    driver: RefCell<RingDriver>,
    inflight: Option<GuestBytes>,
    kick: RefCell<Option<SimulatedEvent>>,
    call: RefCell<SimulatedEvent>,
    /// Notified when the call event was replaced.
    call_replaced: Event,
    sent: RefCell<HashMap<u16, SentGuestRequest>>,
    slots: RefCell<Vec<usize>>,
    log: RefCell<Option<DirtyLog>>,
    model: Rc<RefCell<Model>>,
    samples: Rc<RefCell<GroupSamples>>,
    may_fail: bool,
    cache: Rc<Cell<(bool, u64)>>,
    counts: Rc<Cell<VhostUserSimulationCounts>>,
}

impl SimulatedGuest {
    pub(super) fn draw(life: &SimulatedDiskLife) -> Rc<Self> {
        let shape = sim::random(|random| {
            let packed = random.bool();
            let size = if packed { random.u16(2..=40) } else { 1 << random.u16(1..=5) };
            SimulatedRingShape { size, packed, event_idx: random.bool(), indirect: random.bool() }
        });
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, END - RINGS).expect("its length");
        // Behind the rings, so that these stay in one region; buffers may cross the seam.
        let seam = sim::random(|random| random.u64(SLOTS..END)) & !15;
        let memory = map(&file, seam);
        let driver = RingDriver::new(&layout(shape, places(&memory, shape)));
        let inflight = chance(60).then(|| {
            let bytes = InflightQueueArea::bytes(shape.size, shape.packed);
            let area = GuestMemory::new(vec![Region::on_heap(0, 0, bytes)]).expect("one region");
            area.range(0, bytes).expect("all of it")
        });
        Rc::new(Self {
            shape,
            device: Arc::clone(&life.device),
            file,
            seam,
            memory,
            driver: RefCell::new(driver),
            inflight,
            kick: RefCell::default(),
            call: RefCell::default(),
            call_replaced: Event::new(),
            sent: RefCell::default(),
            slots: RefCell::new((0..MAX_SLOTS.min(usize::from(shape.size))).collect()),
            log: RefCell::default(),
            model: Rc::clone(&life.model),
            samples: Rc::clone(&life.samples),
            may_fail: life.may_fail,
            cache: Rc::clone(&life.cache),
            counts: Rc::clone(&life.counts),
        })
    }

    /// Initial index of an unused ring.
    pub(super) fn start(&self) -> u32 {
        if self.shape.packed { 0x8000_8000 } else { 0 }
    }

    pub(super) fn features(&self) -> u64 {
        let flags_if = |condition: bool, bit| if condition { bit } else { 0 };
        flags_if(self.shape.packed, virtio::RING_PACKED)
            | flags_if(self.shape.event_idx, virtio::EVENT_IDX)
            | flags_if(self.shape.indirect, virtio::INDIRECT_DESC)
    }

    pub(super) fn has_inflight(&self) -> bool {
        self.inflight.is_some()
    }

    pub(super) fn inflight(&self) -> Option<GuestBytes> {
        self.inflight.clone()
    }

    pub(super) fn has_pending_requests(&self) -> bool {
        !self.sent.borrow().is_empty()
    }

    /// Maps its memory again, with the current log; returns the locations of its ring.
    pub(super) fn map(&self) -> (GuestMemory, RingAreas) {
        self.map_with(self.log.borrow().clone())
    }

    pub(super) fn map_with(&self, log: Option<DirtyLog>) -> (GuestMemory, RingAreas) {
        let memory = map(&self.file, self.seam).with_log(log);
        let areas = places(&memory, self.shape);
        (memory, areas)
    }

    pub(super) fn new_kick(&self) -> Option<SimulatedEvent> {
        // Some front ends pass no kick.
        let kick = (!chance(10)).then(SimulatedEvent::default);
        self.kick.borrow_mut().clone_from(&kick);
        kick
    }

    pub(super) fn new_call(&self) -> SimulatedEvent {
        let call = SimulatedEvent::default();
        self.call.replace(call.clone());
        self.call_replaced.notify(usize::MAX);
        call
    }

    /// Waits for a random time, or for the moment between a signal and its handling.
    pub(super) async fn wait_random_moment(&self) {
        let event = match sim::random(|random| random.u8(..3)) {
            0 => self.kick.borrow().clone(),
            1 => Some(self.call.borrow().clone()),
            _ => None,
        };
        let Some(event) = event else { return sleep_randomly(Duration::from_millis(20)).await };
        let _ = timeout(Duration::from_millis(20), event.next_signal()).await;
    }

    /// A change of the log begins: requests that complete meanwhile may be marked in either.
    pub(super) fn log_changes(&self) {
        *self.log.borrow_mut() = None;
        self.sent.borrow_mut().values_mut().for_each(|sent| sent.log = None);
    }

    /// The log is in force, also for requests without a status yet.
    pub(super) fn set_log(&self, log: Option<DirtyLog>) {
        for sent in self.sent.borrow_mut().values_mut().filter(|sent| self.status(sent) == GUARD) {
            sent.log.clone_from(&log);
        }
        *self.log.borrow_mut() = log;
    }

    /// True if a queue that starts reads its index from the in-flight area.
    pub(super) fn is_inflight_in_use(&self) -> bool {
        let mut version = [0; 2];
        if let Some(area) = &self.inflight {
            area.read(8, &mut version);
        }
        version != [0; 2]
    }

    /// Sends requests and collects all completions.
    pub(super) async fn run(self: Rc<Self>) {
        let mut remaining = sim::random(|random| random.usize(1..60));
        while remaining > 0 || self.has_pending_requests() {
            if remaining > 0 {
                for _ in 0..sim::random(|random| random.usize(1..=remaining.min(8))) {
                    remaining -= usize::from(self.send());
                }
                if self.driver.borrow_mut().wants_kick()
                    && let Some(kick) = &*self.kick.borrow()
                {
                    kick.signal();
                }
            }
            if chance(30) {
                self.driver.borrow_mut().suppress_calls();
            }
            if remaining > 0 && chance(50) {
                sleep_randomly(Duration::from_millis(10)).await;
            } else if self.has_pending_requests() && !self.driver.borrow_mut().enable_calls() {
                self.wait_for_call().await;
            }
            self.collect();
        }
    }

    async fn wait_for_call(&self) {
        loop {
            let call_replaced = self.call_replaced.listen();
            let call = self.call.borrow().clone();
            if let FirstReady::One(result) = first(call.wait(), call_replaced).await {
                result.expect("it is an event");
                return count(&self.counts, |all| all.called += 1);
            }
        }
    }

    fn send(&self) -> bool {
        let Some(slot) = self.slots.borrow_mut().pop() else { return false };
        let indirect = self.shape.indirect && chance(50);
        let free = self.driver.borrow().free_descriptors();
        let max_descriptors = if indirect { 2 * MAX_PIECES } else { free };
        // A request has at least one readable and one writable descriptor.
        if free == 0 || max_descriptors < 2 {
            self.slots.borrow_mut().push(slot);
            return false;
        }
        self.samples.borrow_mut().sample();
        let at = SLOTS + slot as u64 * SLOT_BYTES;
        fill(&self.memory, at, SLOT_BYTES as usize, GUARD);
        let (operation, request, writable) = self.draw_request();
        let pieces = (max_descriptors / 2).min(MAX_PIECES);
        let reads = divide(at + READABLE, request.len(), pieces);
        let writable_buffers = divide(at + WRITABLE, writable + 1, pieces);
        scatter(&self.memory, &reads, &request);
        let buffer = |writable| {
            move |&(address, bytes): &(u64, usize)| DriverBuffer { address, bytes: bytes as u32, writable }
        };
        let buffers: Vec<_> =
            reads.iter().map(buffer(false)).chain(writable_buffers.iter().map(buffer(true))).collect();
        let mut driver = self.driver.borrow_mut();
        let table = self.memory.range(at, 16 * buffers.len()).filter(|_| indirect);
        let added = match table {
            Some(table) => driver.add_indirect(&table, &buffers),
            None => driver.add(&buffers),
        };
        drop(driver);
        let Some(id) = added else {
            // The request was not added, so its model entry ends undetermined.
            self.end_undetermined(operation);
            self.slots.borrow_mut().push(slot);
            return false;
        };
        let sent = SentGuestRequest {
            slot,
            operation,
            writable_buffers,
            cache: self.cache.get(),
            log: self.log.borrow().clone(),
        };
        assert!(self.sent.borrow_mut().insert(id, sent).is_none(), "the driver has used an id twice");
        true
    }

    fn end_undetermined(&self, operation: GuestOperation) {
        if let GuestOperation::Change { numbers, .. } = operation {
            numbers.into_iter().for_each(|number| self.model.borrow_mut().end_change(number, Outcome::Open));
        }
    }

    /// Switches the write cache as the guest would.
    pub(super) fn switch_write_cache(&self) {
        let (_, switches) = self.cache.get();
        let on = chance(50);
        self.cache.set((on, switches + 1));
        self.device.set_write_cache(on, on);
    }

    /// A random request: its expectation, its device-readable bytes, and the number of bytes to be
    /// filled besides the status.
    fn draw_request(&self) -> (GuestOperation, Vec<u8>, usize) {
        let mut model = self.model.borrow_mut();
        let range = draw_range();
        let (offset, length) = (range.start, range.len());
        let header = |kind, offset| header(kind, (offset / BLOCK) as u64);
        match sim::random(|random| random.u32(..100)) {
            0..35 => (GuestOperation::Read { offset, began: model.begin() }, header(IN, offset), length),
            35..65 => {
                let (number, data) = model.begin_write(range);
                let request = [header(OUT, offset), data].concat();
                (GuestOperation::Change { numbers: vec![number], hint: false }, request, 0)
            }
            65..75 => (GuestOperation::Flush { began: model.begin() }, header(FLUSH, 0), 0),
            75..82 => {
                let number = model.begin_zeroes(range.clone());
                let flags = sim::random(|random| random.u32(..2));
                let request = [header(WRITE_ZEROES, 0), segment(&range, flags)].concat();
                (GuestOperation::Change { numbers: vec![number], hint: false }, request, 0)
            }
            82..90 => {
                let ranges: Vec<_> =
                    (0..sim::random(|random| random.usize(1..4))).map(|_| draw_range()).collect();
                let numbers = ranges.iter().map(|range| model.begin_zeroes(range.clone())).collect();
                let mut request = header(DISCARD, 0);
                ranges.iter().for_each(|range| request.extend(segment(range, 0)));
                (GuestOperation::Change { numbers, hint: true }, request, 0)
            }
            90..95 => (GuestOperation::Id, header(GET_ID, 0), sim::random(|random| random.usize(20..30))),
            95 => (GuestOperation::Answer(OK), header(IN, offset), 0),
            96 => (GuestOperation::Answer(IO_ERROR), header(IN, DISK_BYTES - BLOCK), 2 * BLOCK),
            97 => {
                let request = [header(OUT, DISK_BYTES - BLOCK), vec![7; 2 * BLOCK]].concat();
                (GuestOperation::Answer(IO_ERROR), request, 0)
            }
            98 => (GuestOperation::Answer(IO_ERROR), header(IN, offset), 100),
            _ => (GuestOperation::Answer(UNSUPPORTED), header(77, offset), length),
        }
    }

    fn collect(&self) {
        loop {
            let used = self.driver.borrow_mut().next_used();
            let Some(used) = used.expect("each request comes back once") else { return };
            let sent = self.sent.borrow_mut().remove(&used.id).expect("the driver knows it");
            self.check(&used, &sent);
            self.slots.borrow_mut().push(sent.slot);
            count(&self.counts, |all| all.answered += 1);
            self.samples.borrow_mut().sample();
        }
    }

    fn status(&self, sent: &SentGuestRequest) -> u8 {
        let &(address, bytes) = sent.writable_buffers.last().expect("there is a status");
        gather(&self.memory, &[(address + bytes as u64 - 1, 1)])[0]
    }

    fn check(&self, used: &UsedChain, sent: &SentGuestRequest) {
        let mut found = gather(&self.memory, &sent.writable_buffers);
        let status = found.pop().expect("there is a status");
        assert!([OK, IO_ERROR, UNSUPPORTED].contains(&status), "{sent:?} was answered with {status}");
        let mut model = self.model.borrow_mut();
        let failed = status != OK;
        let mut filled = 0;
        match &sent.operation {
            GuestOperation::Answer(expected) => assert_eq!(status, *expected, "{sent:?}"),
            GuestOperation::Id => {
                assert_eq!(status, OK);
                let mut expected = SERIAL.as_bytes()[..20].to_vec();
                expected.resize(found.len(), 0);
                assert_eq!(found, expected);
                filled = found.len();
            }
            _ if failed => {
                assert!(self.may_fail && status == IO_ERROR, "{sent:?} failed with {status}");
                count(&self.counts, |all| all.failed += 1);
            }
            GuestOperation::Read { offset, began } => {
                model.check_read(*began, *offset, &found);
                filled = found.len();
            }
            GuestOperation::Flush { began } => {
                model.end_flush(*began);
                count(&self.counts, |all| all.flushed += 1);
            }
            GuestOperation::Change { .. } => {}
        }
        if let GuestOperation::Change { numbers, hint } = &sent.operation {
            let outcome = match sent.cache {
                _ if failed || *hint => Outcome::Open,
                // Write-through guarantees durability only if the mode did not change meanwhile.
                (false, switches) if switches == self.cache.get().1 => Outcome::Durable,
                _ => Outcome::Applied,
            };
            numbers.iter().for_each(|&number| model.end_change(number, outcome));
        }
        // The used length counts written bytes from the beginning: with unfilled data it is zero,
        // although the status behind it was written.
        let written = if filled > 0 || found.is_empty() { filled + 1 } else { 0 };
        assert_eq!(used.written, written as u32, "{sent:?}");
        self.check_surroundings(sent);
        if let Some(log) = &sent.log {
            self.check_log(log, sent, filled);
        }
    }

    /// Checks that bytes beside the request's buffers have not changed.
    fn check_surroundings(&self, sent: &SentGuestRequest) {
        let at = SLOTS + sent.slot as u64 * SLOT_BYTES + WRITABLE;
        let mut all = gather(&self.memory, &[(at, (SLOT_BYTES - WRITABLE) as usize)]);
        for &(address, bytes) in &sent.writable_buffers {
            all[(address - at) as usize..][..bytes].fill(GUARD);
        }
        assert!(all.iter().all(|&byte| byte == GUARD), "bytes beside a request's have changed");
    }

    /// Checks that filled pages, the status and the used ring are marked.
    fn check_log(&self, log: &DirtyLog, sent: &SentGuestRequest, filled: usize) {
        count(&self.counts, |all| all.logged += 1);
        let used = if self.shape.packed { RINGS } else { DEVICE };
        assert!(log.is_marked(used), "the ring is not marked");
        let (&(last, bytes), _) = sent.writable_buffers.split_last().expect("there is a status");
        let status = last + bytes as u64 - 1;
        let pieces = sent.writable_buffers.iter().filter(|_| filled > 0).copied().chain([(status, 1)]);
        for (address, bytes) in pieces {
            for page in address / PAGE..=(address + bytes as u64 - 1) / PAGE {
                assert!(log.is_marked(page * PAGE), "{sent:?}: page {page:#x} is not marked");
            }
        }
    }
}

fn map(file: &OwnedFd, seam: u64) -> GuestMemory {
    let ends = [RINGS, seam, END];
    let quota = MappingQuota::new(2, 2 * END);
    let regions = ends.windows(2).filter(|pair| pair[0] < pair[1]).map(|pair| {
        let file = file.try_clone().expect("a descriptor");
        Region::map(file, pair[0], pair[0], pair[1] - pair[0], pair[0] - RINGS, &quota)
            .expect("a good region")
    });
    GuestMemory::new(regions.collect()).expect("they do not overlap")
}

fn places(memory: &GuestMemory, shape: SimulatedRingShape) -> RingAreas {
    let parts = RingParts::of(shape.size, shape.packed, shape.event_idx);
    let part = |at, (bytes, _)| memory.range(at, bytes).expect("in the first region");
    RingAreas {
        descriptors: part(RINGS, parts.descriptors),
        driver: part(DRIVER, parts.driver),
        device: part(DEVICE, parts.device),
    }
}

pub(super) fn layout(shape: SimulatedRingShape, areas: RingAreas) -> RingLayout {
    let RingAreas { descriptors, driver, device } = areas;
    let SimulatedRingShape { size, packed, event_idx, indirect } = shape;
    RingLayout { size, descriptors, driver, device, packed, event_idx, indirect }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend([0; 4]);
    header.extend(sector.to_le_bytes());
    header
}

/// Segment of a discard or write-zeroes request.
fn segment(range: &Range<usize>, flags: u32) -> Vec<u8> {
    let mut segment = ((range.start / BLOCK) as u64).to_le_bytes().to_vec();
    segment.extend(((range.len() / BLOCK) as u32).to_le_bytes());
    segment.extend(flags.to_le_bytes());
    segment
}

/// A range of whole sectors. Few distinct places, so that requests overlap and adjoin.
fn draw_range() -> Range<usize> {
    sim::random(|random| {
        let first = random.usize(..DISK_BYTES / BLOCK / 4) * random.usize(1..=4);
        let max_sectors = (DISK_BYTES / BLOCK - first).min(MAX_SECTORS);
        let count = if random.bool() { 1 } else { random.usize(1..=max_sectors) };
        first * BLOCK..(first + count) * BLOCK
    })
}

/// Divides `bytes` into up to `max_pieces` pieces from `at`, with gaps between them.
fn divide(mut at: u64, bytes: usize, max_pieces: usize) -> Vec<(u64, usize)> {
    let mut remaining = bytes;
    let mut pieces = Vec::new();
    while remaining > 0 {
        let (gap, piece) = sim::random(|random| (random.u64(..300), random.usize(1..=remaining)));
        let piece = if pieces.len() + 1 == max_pieces { remaining } else { piece };
        pieces.push((at + gap, piece));
        at += gap + piece as u64;
        remaining -= piece;
    }
    pieces
}

fn ranges_of(memory: &GuestMemory, pieces: &[(u64, usize)]) -> ChainMemory {
    let mut ranges = ChainMemory::new();
    for &(address, bytes) in pieces {
        assert!(memory.ranges(address, bytes, &mut ranges), "inside");
    }
    ranges
}

fn scatter(memory: &GuestMemory, pieces: &[(u64, usize)], bytes: &[u8]) {
    let mut rest = bytes;
    for segment in ranges_of(memory, pieces) {
        let (part, after) = rest.split_at(segment.bytes());
        segment.write(0, part);
        rest = after;
    }
}

fn gather(memory: &GuestMemory, pieces: &[(u64, usize)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for segment in ranges_of(memory, pieces) {
        let start = bytes.len();
        bytes.resize(start + segment.bytes(), 0);
        segment.read(0, &mut bytes[start..]);
    }
    bytes
}

fn fill(memory: &GuestMemory, address: u64, bytes: usize, byte: u8) {
    ranges_of(memory, &[(address, bytes)]).iter().for_each(|segment| segment.fill(0, segment.bytes(), byte));
}
