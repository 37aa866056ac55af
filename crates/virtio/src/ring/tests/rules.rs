//! The specification's rules, one by one: chains, errors that make a ring meaningless,
//! notifications, and the bytes of the in-flight area.

use reactor::guest::{GuestMemory, Region};

use super::world::{BUFFERS, RINGS, RingShape, SEAM, layout, memory};
use crate::ring::{
    ChainFault, DescriptorChain, InflightQueueArea, MAX_DESCRIPTORS, RingError, RingLayout, RingParts,
    Virtqueue,
    chain::flag::{INDIRECT, NEXT, WRITE},
    driver::{DriverBuffer, RingDriver},
    position::RingPosition,
};

const SPLIT: RingShape = RingShape { size: 8, packed: false, event_idx: false, indirect: true };
const PACKED: RingShape = RingShape { packed: true, ..SPLIT };

/// A ring whose memory the test writes directly.
struct Raw {
    memory: GuestMemory,
    layout: RingLayout,
    ring: Virtqueue,
    available: u16,
}

/// Address, bytes, flags, next.
type Descriptor = (u64, u32, u16, u16);

impl Raw {
    fn new(shape: RingShape) -> Self {
        Self::of(memory(), shape)
    }

    fn of(memory: GuestMemory, shape: RingShape) -> Self {
        let layout = layout(&memory, shape);
        let ring = Virtqueue::new(layout.clone(), memory.clone(), shape.start()).expect("a good ring");
        Self { memory, layout, ring, available: 0 }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        for (at, byte) in (address..).zip(bytes) {
            self.memory.range(at, 1).expect("inside").write(0, &[*byte]);
        }
    }

    fn u16(&self, address: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.range(address, 2).expect("inside").read(0, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Writes descriptors at `address`: those of a split ring, or of an indirect table.
    fn table(&self, address: u64, descriptors: &[Descriptor]) {
        for (number, &(to, bytes, flags, next)) in descriptors.iter().enumerate() {
            let word = u64::from(bytes) | u64::from(flags) << 32 | u64::from(next) << 48;
            let descriptor = [to.to_le_bytes(), word.to_le_bytes()].concat();
            self.write(address + 16 * number as u64, &descriptor);
        }
    }

    /// Makes a head available in a split ring.
    fn offer(&mut self, head: u16) {
        let entry = u64::from(self.available % self.layout.size);
        self.write(RINGS + 0x4004 + 2 * entry, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.write(RINGS + 0x4002, &self.available.to_le_bytes());
    }

    /// Takes the chain of these descriptors in a split ring, the first at 0.
    fn chain(&mut self, descriptors: &[Descriptor]) -> DescriptorChain {
        self.table(RINGS, descriptors);
        self.offer(0);
        self.ring.take().expect("a good ring").expect("a chain")
    }

    /// Takes the chain of one indirect descriptor for this table, which is at `BUFFERS`.
    fn indirect(&mut self, table: &[Descriptor]) -> DescriptorChain {
        self.table(BUFFERS, table);
        self.chain(&[(BUFFERS, 16 * table.len() as u32, INDIRECT, 0)])
    }
}

const A: u64 = BUFFERS + 0x1000;
const OUTSIDE: u64 = 1 << 50;

fn ranges_of(segments: &[reactor::guest::GuestBytes]) -> Vec<(u64, usize)> {
    segments.iter().map(|segment| (segment.guest_address(), segment.bytes())).collect()
}

#[test]
fn a_chain_is_its_descriptors_in_order() {
    let mut raw = Raw::new(SPLIT);
    // In any order in the table; one of zero bytes, and one across a border of regions.
    raw.table(
        RINGS,
        &[
            (SEAM - 10, 30, WRITE | NEXT, 2),
            (0, 0, 0, 0),
            (A, 1, WRITE, 7),
            (A + 8, 16, NEXT, 5),
            (0, 0, 0, 0),
            (A + 100, 0, NEXT, 0),
        ],
    );
    raw.offer(3);
    let chain = raw.ring.take().expect("a good ring").expect("a chain");
    assert_eq!(chain.fault, None);
    assert_eq!(chain.descriptors, 4);
    assert_eq!(ranges_of(chain.readable()), [(A + 8, 16)]);
    assert_eq!(ranges_of(chain.writable()), [(SEAM - 10, 10), (SEAM, 20), (A, 1)]);
    raw.ring.complete(chain.ticket, 31);
    // The used ring: the index, then head and length.
    assert_eq!([2, 4, 6, 8, 10].map(|at| raw.u16(RINGS + 0x6000 + at)), [1, 3, 0, 31, 0]);
}

#[test]
fn an_indirect_table_may_lie_anywhere_and_behind_a_chain() {
    for at in [BUFFERS, BUFFERS + 3, SEAM - 16, SEAM - 24, SEAM - 5] {
        let mut raw = Raw::new(SPLIT);
        raw.table(at, &[(A, 5, NEXT, 2), (0, 0, NEXT, 9), (A + 50, 6, WRITE, 0)]);
        let chain = raw.chain(&[(A + 9, 3, NEXT, 1), (at, 48, INDIRECT | WRITE, 0)]);
        assert_eq!(chain.fault, None);
        assert_eq!(ranges_of(chain.readable()), [(A + 9, 3), (A, 5)]);
        assert_eq!(ranges_of(chain.writable()), [(A + 50, 6)]);
    }
}

#[test]
fn faulty_chain_reports_its_fault_and_completes() {
    let loops = [(A, 1, NEXT, 1), (A, 1, NEXT, 0)];
    for (descriptors, fault) in [
        (&[(OUTSIDE, 1, 0, 0)][..], ChainFault::Outside),
        (&[(SEAM + 0x7fff, 2, 0, 0)], ChainFault::Outside),
        (&[(u64::MAX, 2, WRITE, 0)], ChainFault::Outside),
        (&[(0, u32::MAX, WRITE, 0)], ChainFault::Outside),
        (&[(A, 1, NEXT, 0)], ChainFault::TooLong),
        (&loops, ChainFault::TooLong),
        (&[(A, 1, NEXT, 8)], ChainFault::Next(8)),
        (&[(A, 1, NEXT, u16::MAX)], ChainFault::Next(u16::MAX)),
        (&[(A, 1, WRITE | NEXT, 1), (A, 1, 0, 0)], ChainFault::Order),
        (&[(A, 0, WRITE | NEXT, 1), (A, 1, 0, 0)], ChainFault::Order),
        (&[(A, 16, INDIRECT | NEXT, 1), (A, 1, 0, 0)], ChainFault::IndirectNext),
        (&[(A, 0, INDIRECT, 0)], ChainFault::Table(0)),
        (&[(A, 17, INDIRECT, 0)], ChainFault::Table(17)),
        (&[(OUTSIDE, 16, INDIRECT, 0)], ChainFault::Outside),
        (&[(SEAM + 0x7ff8, 16, INDIRECT, 0)], ChainFault::Outside),
        (&[(u64::MAX - 7, 32, INDIRECT, 0)], ChainFault::Outside),
    ] {
        let mut raw = Raw::new(SPLIT);
        let chain = raw.chain(descriptors);
        assert_eq!(chain.fault, Some(fault), "{descriptors:x?}");
        raw.ring.complete(chain.ticket, 0);
        assert_eq!(raw.u16(RINGS + 0x6002), 1);
        assert!(raw.ring.take().expect("it continues").is_none());
    }
    for (table, fault) in [
        (&loops[..], ChainFault::TooLong),
        (&[(A, 1, NEXT, 2), (A, 1, 0, 0)], ChainFault::Next(2)),
        (&[(A, 16, INDIRECT, 0)], ChainFault::Nested),
        (&[(A, 1, WRITE | NEXT, 1), (A, 1, 0, 0)], ChainFault::Order),
        (&[(OUTSIDE, 1, 0, 0)], ChainFault::Outside),
    ] {
        assert_eq!(Raw::new(SPLIT).indirect(table).fault, Some(fault), "{table:x?}");
    }
    let mut raw = Raw::new(RingShape { indirect: false, ..SPLIT });
    assert_eq!(raw.chain(&[(A, 16, INDIRECT, 0)]).fault, Some(ChainFault::NotNegotiated));
}

#[test]
fn chains_are_bounded_in_descriptors_and_in_bytes() {
    let table = |count: u16, bytes| -> Vec<Descriptor> {
        (1..=count).map(|next| (A, bytes, if next < count { NEXT } else { 0 }, next)).collect()
    };
    let regions = |buffers| {
        let regions = [(RINGS, 0x8000), (BUFFERS, buffers)];
        GuestMemory::new(regions.map(|(at, bytes)| Region::on_heap(at, at, bytes)).into()).expect("apart")
    };
    for packed in [SPLIT, PACKED] {
        for (count, fault) in
            [(MAX_DESCRIPTORS as u16, None), (MAX_DESCRIPTORS as u16 + 1, Some(ChainFault::TooLong))]
        {
            let memory = regions(0x10_000);
            let layout = layout(&memory, packed);
            let mut driver = RingDriver::new(&layout);
            let raw = Raw::of(memory, packed);
            let buffers = vec![DriverBuffer { address: A, bytes: 1, writable: false }; usize::from(count)];
            let indirect_table = raw.memory.range(BUFFERS, 16 * buffers.len()).expect("inside");
            driver.add_indirect(&indirect_table, &buffers).expect("there is room");
            let mut ring = raw.ring;
            let chain = ring.take().expect("a good ring").expect("a chain");
            assert_eq!((chain.fault, chain.descriptors), (fault, MAX_DESCRIPTORS));
        }
    }
    // Buffers of 2³² bytes in total, all of them in the guest's 8 MiB of memory.
    let mut raw = Raw::of(regions((8 << 20) + 0x1000), SPLIT);
    raw.table(BUFFERS, &table(512, 8 << 20));
    let chain = raw.chain(&[(BUFFERS, 512 * 16, INDIRECT, 0)]);
    assert_eq!(chain.fault, Some(ChainFault::TooLarge));
}

/// Flags and ids of their entries are at other offsets than in split rings.
#[test]
fn indirect_tables_of_packed_rings_have_packed_descriptors() {
    let mut raw = Raw::new(PACKED);
    let write_descriptor = |at: u64, (address, bytes, id, flags): (u64, u32, u16, u16)| {
        raw.write(at, &address.to_le_bytes());
        raw.write(at + 8, &bytes.to_le_bytes());
        raw.write(at + 12, &id.to_le_bytes());
        raw.write(at + 14, &flags.to_le_bytes());
    };
    write_descriptor(BUFFERS, (A, 16, 7, NEXT));
    write_descriptor(BUFFERS + 16, (A + 64, 5, u16::MAX, WRITE));
    write_descriptor(RINGS, (BUFFERS, 32, 3, INDIRECT | 1 << 7));
    let chain = raw.ring.take().expect("a good ring").expect("a chain");
    assert_eq!((chain.fault, chain.descriptors), (None, 2));
    assert_eq!(ranges_of(chain.readable()), [(A, 16)]);
    assert_eq!(ranges_of(chain.writable()), [(A + 64, 5)]);
}

#[test]
fn meaningless_rings_are_rejected() {
    let broken = |raw: &mut Raw| raw.ring.take().expect_err("it means nothing");
    let mut raw = Raw::new(SPLIT);
    raw.write(RINGS + 0x4002, &9_u16.to_le_bytes());
    assert_eq!(broken(&mut raw), RingError::IndexJump { from: 0, to: 9, size: 8 });
    let mut raw = Raw::new(SPLIT);
    raw.write(RINGS + 0x4002, &u16::MAX.to_le_bytes());
    assert_eq!(broken(&mut raw), RingError::IndexJump { from: 0, to: u16::MAX, size: 8 });

    let mut raw = Raw::new(SPLIT);
    raw.offer(8);
    assert_eq!(broken(&mut raw), RingError::Head { head: 8, size: 8 });

    let mut raw = Raw::new(SPLIT);
    let first = raw.chain(&[(A, 1, 0, 0)]);
    raw.offer(0);
    assert_eq!(broken(&mut raw), RingError::AlreadyInFlight(0));
    // A valid chain can still be completed.
    raw.ring.complete(first.ticket, 0);
    assert_eq!(raw.u16(RINGS + 0x6002), 1);

    let mut raw = Raw::new(PACKED);
    for index in 0..8 {
        raw.write(RINGS + 16 * index + 14, &(1_u16 << 7).to_le_bytes());
    }
    for _ in 0..8 {
        assert!(raw.ring.take().expect("a good ring").is_some());
    }
    // Available once more, as if it had been completed.
    raw.write(RINGS + 14, &(1_u16 << 15).to_le_bytes());
    assert!(raw.ring.take().expect("a good ring").is_none());

    let mut raw = Raw::new(PACKED);
    for index in 0..8 {
        // Available, each with NEXT set.
        raw.write(RINGS + 16 * index + 14, &(1_u16 << 7 | NEXT).to_le_bytes());
    }
    assert_eq!(broken(&mut raw), RingError::Endless);
}

#[test]
fn invalid_layouts_are_rejected() {
    let memory = memory();
    let check =
        |layout: RingLayout, base| Virtqueue::new(layout, memory.clone(), base).expect_err("it cannot be");
    let split = layout(&memory, SPLIT);
    let packed = layout(&memory, PACKED);
    for size in [0, 3, 9, (1 << 15) + 1, u16::MAX] {
        assert_eq!(check(RingLayout { size, ..split.clone() }, 0), RingError::Size(size));
    }
    for size in [0, (1 << 15) + 1] {
        assert_eq!(check(RingLayout { size, ..packed.clone() }, 0), RingError::Size(size));
    }
    for base in [8, 8 << 16, 0x7fff] {
        assert_eq!(check(packed.clone(), base), RingError::Base { base, size: 8 });
    }
    let part_error =
        |part_name, bytes, needed, alignment| RingError::Part { what: part_name, bytes, needed, alignment };
    let at = |offset, bytes| memory.range(RINGS + offset, bytes).expect("inside");
    let short = |layout: RingLayout| check(layout, 0x8000_8000);
    assert_eq!(
        short(RingLayout { descriptors: at(0, 127), ..split.clone() }),
        part_error("descriptors", 127, 128, 16)
    );
    assert_eq!(
        short(RingLayout { descriptors: at(8, 128), ..packed.clone() }),
        part_error("descriptors", 128, 128, 16)
    );
    assert_eq!(
        short(RingLayout { driver: at(0, 19), ..split.clone() }),
        part_error("driver's part", 19, 20, 2)
    );
    assert_eq!(short(RingLayout { driver: at(2, 4), ..packed }), part_error("driver's part", 4, 4, 4));
    assert_eq!(
        short(RingLayout { device: at(2, 68), ..split.clone() }),
        part_error("device's part", 68, 68, 4)
    );
    let with_event = RingLayout { event_idx: true, ..split };
    assert_eq!(short(with_event), part_error("driver's part", 20, 22, 2));
    assert_eq!(RingParts::of(256, false, true).device, (4 + 8 * 256 + 2, 4));
}

#[test]
fn calls_are_made_when_the_event_is_passed() {
    // Published before, published now, the event: as in § 2.7.7.1, also if the index wraps.
    for (before, now, event, expected) in [
        (0_u16, 1_u16, 0, true),
        (0, 1, 1, false),
        (0, 3, 1, true),
        (0, 3, 3, false),
        (5, 8, 4, false),
        (5, 8, 7, true),
        (u16::MAX, 2, u16::MAX, true),
        (u16::MAX, 2, 1, true),
        (u16::MAX - 1, 1, 1, false),
        (u16::MAX - 1, 1, u16::MAX - 2, false),
    ] {
        let memory = memory();
        let layout = layout(&memory, RingShape { event_idx: true, ..SPLIT });
        memory.range(RINGS + 0x4002, 2).expect("inside").write(0, &u16::to_le_bytes(before));
        memory.range(RINGS + 0x6002, 2).expect("inside").write(0, &u16::to_le_bytes(before));
        let mut driver = RingDriver::new(&layout);
        let mut ring = Virtqueue::new(layout, memory.clone(), u32::from(before)).expect("a good ring");
        assert!(ring.wants_call(), "the call that the previous device owed");
        assert!(!ring.wants_call(), "nothing was completed");
        for _ in 0..now.wrapping_sub(before) {
            driver.add(&[DriverBuffer { address: A, bytes: 1, writable: false }]).expect("there is room");
            let chain = ring.take().expect("a good ring").expect("a chain");
            ring.complete(chain.ticket, 0);
        }
        memory.range(RINGS + 0x4004 + 16, 2).expect("inside").write(0, &u16::to_le_bytes(event));
        assert_eq!(ring.wants_call(), expected, "{before} to {now}, event {event}");
        assert!(!ring.wants_call(), "it is said once");
    }
}

#[test]
fn a_packed_rings_events_have_a_wrap_counter() {
    // Ring of 8: used position before, number of used descriptors, event, its wrap counter.
    for (before, count, event, wrap, expected) in [
        (0, 1, 0, true, true),
        (0, 1, 1, true, false),
        (0, 3, 2, true, true),
        (0, 3, 2, false, false),
        (6, 4, 7, true, true),
        (6, 4, 1, false, true),
        (6, 4, 2, false, false),
        (6, 4, 1, true, false),
        (6, 4, 5, true, false),
    ] {
        let memory = memory();
        let layout = layout(&memory, RingShape { event_idx: true, ..PACKED });
        let mut driver = RingDriver::new(&layout);
        let mut ring = Virtqueue::new(layout, memory.clone(), 0x8000_8000).expect("a good ring");
        let mut serve = |count| {
            for _ in 0..count {
                driver.add(&[DriverBuffer { address: A, bytes: 1, writable: true }]).expect("there is room");
                let chain = ring.take().expect("a good ring").expect("a chain");
                ring.complete(chain.ticket, 1);
                assert!(driver.next_used().expect("it was out").is_some());
            }
            ring.wants_call()
        };
        let _owed_call = serve(before);
        let word = u32::from(RingPosition { index: event, wrap }.bits()) | 2 << 16;
        memory.range(RINGS + 0x4000, 4).expect("inside").write(0, &word.to_le_bytes());
        assert_eq!(serve(count), expected, "{count} from {before}, event {event} {wrap}");
    }
}

#[test]
fn positions_wrap() {
    for size in [1, 2, 7, 1 << 15] {
        let mut at = RingPosition::START;
        for step in [0, 1, size / 2, size] {
            let after = at.after(step, size);
            assert_eq!(after.before(step, size), at);
            assert!(after.index < size);
            assert_eq!(RingPosition::from_bits(after.bits()), after);
            at = after;
        }
        assert_eq!(at.after(size, size), RingPosition { wrap: !at.wrap, ..at });
    }
}

#[test]
fn a_ring_continues_at_its_base() {
    for (shape, bases) in
        [(SPLIT, [0, 1, 2, 3]), (PACKED, [0x8000_8000, 0x8003_8003, 0x8006_8006, 0x0001_0001])]
    {
        let memory = memory();
        let layout = layout(&memory, shape);
        let mut driver = RingDriver::new(&layout);
        let mut base = shape.start();
        for expected in bases {
            let mut ring = Virtqueue::new(layout.clone(), memory.clone(), base).expect("a good ring");
            assert_eq!(ring.base(), expected);
            driver.add(&[DriverBuffer { address: A, bytes: 1, writable: false }; 3]).expect("there is room");
            let chain = ring.take().expect("a good ring").expect("a chain");
            ring.complete(chain.ticket, 0);
            assert!(driver.next_used().expect("it was out").is_some());
            base = ring.stop();
        }
    }
}

#[test]
fn unstarted_chains_are_put_back_newest_first() {
    for shape in [SPLIT, PACKED] {
        let memory = memory();
        let layout = layout(&memory, shape);
        let mut driver = RingDriver::new(&layout);
        let mut ring = Virtqueue::new(layout, memory, shape.start()).expect("a good ring");
        let buffer = DriverBuffer { address: A, bytes: 1, writable: false };
        let ids = [3, 2, 1].map(|count| driver.add(&[buffer; 3][..count]).expect("there is room"));
        let take = |ring: &mut Virtqueue| ring.take().expect("a good ring").expect("a chain").ticket;
        let [first, second, third] = [0, 1, 2].map(|_| take(&mut ring));
        let second = ring.put_back(second).expect_err("there is a newer one");
        // Completed out of order: the chain before it can no longer be put back.
        ring.complete(second, 0);
        ring.put_back(third).expect("it is the newest");
        let first = ring.put_back(first).expect_err("a newer one is done");
        ring.complete(first, 0);
        let third = take(&mut ring);
        assert_eq!(third.id, ids[2]);
        ring.put_back(third).expect("it is the newest");
        assert_eq!(ring.in_flight(), 0);
    }
}

#[test]
fn an_old_chain_cannot_be_put_back() {
    for shape in [SPLIT, PACKED] {
        let memory = memory();
        let layout = layout(&memory, shape);
        let mut driver = RingDriver::new(&layout);
        let mut ring = Virtqueue::new(layout, memory, shape.start()).expect("a good ring");
        let buffer = DriverBuffer { address: A, bytes: 1, writable: false };
        driver.add(&[buffer]).expect("there is room");
        let old = ring.take().expect("a good ring").expect("a chain").ticket;
        // As many as bring a packed ring back to the same position with the same wrap counter.
        for _ in 0..16 {
            driver.add(&[buffer]).expect("there is room");
            let newer = ring.take().expect("a good ring").expect("a chain").ticket;
            ring.complete(newer, 0);
            assert!(driver.next_used().expect("it was out").is_some());
        }
        let old = ring.put_back(old).expect_err("newer ones are done");
        ring.complete(old, 0);
        assert!(driver.next_used().expect("it was out").is_some());
    }
}

/// An in-flight area as another device would leave it.
fn area(bytes: usize) -> GuestMemory {
    GuestMemory::new(vec![Region::on_heap(0, 0, bytes)]).expect("one region")
}

#[test]
fn the_in_flight_area_has_the_specifications_fields() {
    let memory = memory();
    let layout = layout(&memory, SPLIT);
    let area = area(InflightQueueArea::bytes(8, false));
    let all = area.range(0, InflightQueueArea::bytes(8, false)).expect("all of it");
    let u16 = |at| all.load_u16(at, std::sync::atomic::Ordering::Relaxed);
    let u64 = |at| all.load_u64(at, std::sync::atomic::Ordering::Relaxed);
    let mut driver = RingDriver::new(&layout);
    let inflight = InflightQueueArea::new(all.clone());
    let mut ring = Virtqueue::with_inflight(layout, memory, 0, inflight).expect("a good ring");
    // Version, number of descriptors.
    assert_eq!((u16(8), u16(10)), (1, 8));
    let heads: Vec<u16> = (0..3)
        .map(|_| {
            driver.add(&[DriverBuffer { address: A, bytes: 1, writable: false }]).expect("there is room")
        })
        .collect();
    let chains: Vec<DescriptorChain> =
        (0..3).map(|_| ring.take().expect("a good ring").expect("a chain")).collect();
    let entry = |head: u16| 16 + 16 * usize::from(head);
    for (number, &head) in heads.iter().enumerate() {
        assert_eq!((u16(entry(head)), u64(entry(head) + 8)), (1, number as u64));
    }
    let [first, second, _third] = <[DescriptorChain; 3]>::try_from(chains).expect("three");
    ring.complete(second.ticket, 0);
    ring.complete(first.ticket, 0);
    // The last head of the batch, the used index, and the head that it was linked to.
    assert_eq!((u16(12), u16(14), u16(entry(heads[0]) + 6)), (heads[0], 2, heads[1]));
    assert_eq!(heads.iter().map(|&head| u16(entry(head))).collect::<Vec<_>>(), [0, 0, 1]);
    // A ring that stops with chains in flight leaves the area in use.
    ring.stop();
    assert_eq!(u16(8), 1);
}

#[test]
fn unfinished_batch_of_another_device_is_recovered() {
    let memory = memory();
    let layout = layout(&memory, SPLIT);
    let area = area(InflightQueueArea::bytes(8, false));
    let all = area.range(0, InflightQueueArea::bytes(8, false)).expect("all of it");
    let write_u16 = |at: usize, value: u16| all.write(at, &value.to_le_bytes());
    // Chains 3 and 0 are in flight, in this order; 5 and 6 were completed in one batch that was not
    // cleared.
    write_u16(8, 1);
    write_u16(10, 8);
    for (order, head) in [6, 3, 5, 0].into_iter().enumerate() {
        write_u16(16 + 16 * head, 1);
        write_u16(16 + 16 * head + 8, order as u16 + 40);
    }
    write_u16(12, 6);
    write_u16(16 + 16 * 6 + 6, 5);
    write_u16(14, 65_535);
    memory.range(RINGS + 0x6002, 2).expect("inside").write(0, &1_u16.to_le_bytes());
    let inflight = InflightQueueArea::new(all);
    let mut ring = Virtqueue::with_inflight(layout, memory, 77, inflight).expect("a good ring");
    assert_eq!((ring.in_flight(), ring.base()), (2, 3));
    assert!(ring.enable_kicks(), "two are to be taken");
    let heads = [0, 1].map(|_| ring.take().expect("a good ring").expect("a chain").ticket.id);
    assert_eq!(heads, [3, 0]);
}

#[test]
fn a_ring_that_stopped_leaves_a_new_area() {
    for shape in [SPLIT, PACKED] {
        let bytes = InflightQueueArea::bytes(8, shape.packed);
        let area = area(bytes);
        for count in [3, 2] {
            // A guest that reboots has new rings, and the front end passes the old area.
            let memory = memory();
            let layout = layout(&memory, shape);
            let mut driver = RingDriver::new(&layout);
            let inflight = InflightQueueArea::new(area.range(0, bytes).expect("all of it"));
            let mut ring =
                Virtqueue::with_inflight(layout, memory, shape.start(), inflight).expect("it is new again");
            for _ in 0..count {
                driver.add(&[DriverBuffer { address: A, bytes: 1, writable: false }]).expect("there is room");
                let chain = ring.take().expect("a good ring").expect("a chain");
                ring.complete(chain.ticket, 0);
                assert!(driver.next_used().expect("it was out").is_some());
            }
            ring.stop();
        }
    }
}

#[test]
fn foreign_inflight_areas_are_rejected() {
    for shape in [SPLIT, PACKED] {
        let bytes = InflightQueueArea::bytes(8, shape.packed);
        let memory = memory();
        let open = |change: &dyn Fn(&reactor::guest::GuestBytes)| {
            let area = area(bytes);
            let all = area.range(0, bytes).expect("all of it");
            let layout = layout(&memory, shape);
            let inflight = || InflightQueueArea::new(all.clone());
            let open_ring =
                || Virtqueue::with_inflight(layout.clone(), memory.clone(), shape.start(), inflight());
            open_ring().expect("a new area");
            change(&all);
            open_ring().map(|ring| ring.in_flight())
        };
        let open_with = |at: usize, bytes: &'static [u8]| {
            open(&move |all: &reactor::guest::GuestBytes| all.write(at, bytes))
        };
        let refused = |result: Result<u16, RingError>| {
            assert!(matches!(result, Err(RingError::Inflight(_))), "{shape:?} {result:?}");
        };
        assert_eq!(open_with(0, &[]), Ok(0));
        refused(open_with(8, &[2, 0]));
        refused(open_with(10, &[9, 0]));
        let short = area(64);
        let short = InflightQueueArea::new(short.range(0, 64).expect("all of it"));
        refused(
            Virtqueue::with_inflight(layout(&memory, shape), memory.clone(), shape.start(), short)
                .map(|ring| ring.in_flight()),
        );
        if shape.packed {
            // In flight without descriptors, but free; a free list that ends early; a list that
            // loops.
            assert_eq!(open_with(32, &[1]), Ok(0));
            refused(open_with(32 + 2, &[8, 0]));
            refused(open_with(32 + 32 + 2, &[0, 0]));
            refused(open_with(16, &[8, 0, 8, 0]));
        } else {
            assert_eq!(open_with(16, &[1]), Ok(1));
            // A used index from another ring; a batch that links outside.
            refused(open_with(14, &[200, 0]));
            refused(open_with(12, &[8, 0, 255, 255]));
        }
    }
}

#[test]
fn a_ring_continues_in_other_memory() {
    for shape in [SPLIT, PACKED] {
        let old = memory();
        let first = layout(&old, shape);
        let mut driver = RingDriver::new(&first);
        let mut ring = Virtqueue::new(first, old.clone(), shape.start()).expect("a good ring");
        let buffer = DriverBuffer { address: A, bytes: 1, writable: false };
        driver.add(&[buffer]).expect("there is room");
        let taken = ring.take().expect("a good ring").expect("a chain");
        // The same guest's memory without one region, which is not used here.
        let new = old.without(SEAM, SEAM + (1 << 40), 0x8000).expect("it is there");
        let RingLayout { descriptors, driver: suppression, device, .. } = layout(&new, shape);
        let short = descriptors.part(0, 16);
        assert!(ring.set_memory(new.clone(), short, suppression.clone(), device.clone()).is_err());
        ring.set_memory(new, descriptors, suppression, device).expect("good places");
        ring.complete(taken.ticket, 0);
        assert!(driver.next_used().expect("it was out").is_some());
        driver.add(&[DriverBuffer { address: SEAM, ..buffer }]).expect("there is room");
        let chain = ring.take().expect("a good ring").expect("a chain");
        assert_eq!(chain.fault, Some(ChainFault::Outside));
    }
}

#[test]
fn writes_to_a_ring_are_logged_as_dirty() {
    for shape in [SPLIT, PACKED] {
        let log = reactor::guest::DirtyLog::on_heap(0x100);
        let memory = memory().with_log(Some(log.clone()));
        let layout = layout(&memory, shape);
        let at = if shape.packed { RINGS } else { RINGS + 0x6000 };
        let mut driver = RingDriver::new(&layout);
        let mut ring = Virtqueue::new(layout, memory, shape.start()).expect("a good ring");
        driver.add(&[DriverBuffer { address: A, bytes: 1, writable: false }]).expect("there is room");
        let chain = ring.take().expect("a good ring").expect("a chain");
        ring.complete(chain.ticket, 0);
        assert!(log.is_marked(at));
    }
}
