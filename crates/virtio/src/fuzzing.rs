//! Fuzz target: a guest that writes anything anywhere, also while the device reads, and the
//! properties that must hold nevertheless.
//!
//! The input is a ring's shape followed by steps, most of which are plausible, so that a fuzzer
//! reaches chains and requests without guessing a ring first.

use reactor::guest::{GuestBytes, GuestMemory, Region};

use super::{
    block::{BlkDeviceConfig, BlkOperation, BlkRange, BlkRequest, BlkStatus, RangeLimits, parse},
    ring::{
        ChainTicket, InflightQueueArea, MAX_DESCRIPTORS, RingLayout, RingParts, Virtqueue,
        access_hook::{RingAccess, with_hook},
        driver::{DriverBuffer, RingDriver},
    },
};

/// Region of the rings: descriptors, driver area, device area.
const RINGS: u64 = 0x1000;
const RINGS_BYTES: usize = 0x1000;
const DRIVER: u64 = RINGS + 0x800;
const DEVICE: u64 = RINGS + 0xa00;
/// Two adjacent regions.
const BUFFERS: u64 = 0x10_000;
const BUFFERS_BYTES: usize = 0x2000;
const DISK_BYTES: u64 = 1 << 20;

const DEVICE_RULES: BlkDeviceConfig = BlkDeviceConfig {
    bytes: DISK_BYTES,
    block_bytes: 1024,
    read_only: false,
    max_segments: 14,
    discard: Some(RangeLimits { max_sectors: 64, max_ranges: 4 }),
    write_zeroes: Some(RangeLimits { max_sectors: 64, max_ranges: 4 }),
};

/// The bytes of the input, followed by zeroes.
struct RingFuzzInput<'a>(&'a [u8]);

impl RingFuzzInput<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let (first, rest) = self.0.split_at(self.0.len().min(N));
        bytes[..first.len()].copy_from_slice(first);
        self.0 = rest;
        bytes
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.bytes())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    /// A guest-physical address, mostly in a region.
    fn address(&mut self) -> u64 {
        let at = self.u16();
        match at >> 14 {
            0 => RINGS + u64::from(at & 0xfff),
            1 | 2 => BUFFERS + u64::from(at & 0x3fff),
            _ => u64::from_le_bytes(self.bytes()),
        }
    }
}

struct RingFuzzGuest {
    memory: GuestMemory,
    layout: RingLayout,
    // Not guest memory, but the front end may be malicious as well.
    area: GuestBytes,
    ring: Option<Virtqueue>,
    held: Vec<(ChainTicket, Option<BlkRequest>)>,
    /// Number of requests with an operation to execute.
    requests: usize,
}

impl RingFuzzGuest {
    fn new(input: &mut RingFuzzInput<'_>) -> Self {
        let region = |at, bytes| Region::on_heap(at, at, bytes);
        let second_region = BUFFERS + BUFFERS_BYTES as u64;
        let regions = vec![
            region(RINGS, RINGS_BYTES),
            region(BUFFERS, BUFFERS_BYTES),
            region(second_region, BUFFERS_BYTES),
        ];
        let memory = GuestMemory::new(regions).expect("they do not overlap");
        let shape = input.u8();
        let [packed, event_idx, indirect] = [1, 2, 4].map(|bit| shape & bit != 0);
        // The size of a split ring is a power of two.
        let size = if packed { 1 + u16::from(shape >> 3) } else { 1 << (shape >> 3).min(5) };
        let parts = RingParts::of(size, packed, event_idx);
        let part = |at, (bytes, _)| memory.range(at, bytes).expect("inside");
        let layout = RingLayout {
            size,
            descriptors: part(RINGS, parts.descriptors),
            driver: part(DRIVER, parts.driver),
            device: part(DEVICE, parts.device),
            packed,
            event_idx,
            indirect,
        };
        let bytes = InflightQueueArea::bytes(size, packed);
        let area = GuestMemory::new(vec![region(0, bytes)]).expect("one").range(0, bytes).expect("all of it");
        Self { memory, layout, area, ring: None, held: Vec::new(), requests: 0 }
    }

    /// Function that overwrites bytes anywhere: in guest memory, or sometimes in the in-flight
    /// area.
    fn scribble(&self, input: &mut RingFuzzInput<'_>) -> impl Fn() + use<> {
        let bytes: [u8; 8] = input.bytes();
        let count = 1 + usize::from(input.u8() % 8);
        let address = input.address();
        let target = if input.u8() == 0 {
            let at = address as usize % (self.area.bytes() - count);
            Some(self.area.part(at, count))
        } else {
            self.memory.range(address, count)
        };
        move || {
            if let Some(target) = &target {
                target.write(0, &bytes[..count]);
            }
        }
    }

    /// A more or less valid request of a driver.
    fn request(&self, driver: &mut RingDriver, input: &mut RingFuzzInput<'_>) {
        let [kind, sector, odd, count] = [input.u8() % 16, input.u8(), input.u8(), input.u8()];
        let to = |offset: u64| BUFFERS + offset + 0x10 * u64::from(count);
        let (header, data) = (to(0), to(0x1800));
        let write_u64 = |address, value: u64| {
            self.memory.range(address, 8).expect("inside").write(0, &value.to_le_bytes());
        };
        write_u64(header, u64::from(kind));
        write_u64(header + 8, u64::from(sector) * 9);
        // The range of DISCARD and WRITE_ZEROES.
        write_u64(data, u64::from(sector) * 9);
        write_u64(data + 8, u64::from(odd % 80) | u64::from(odd / 100) << 32);
        let reads = matches!(kind, 0 | 8);
        let unit = if matches!(kind, 0 | 1) { 512 } else { 16 };
        let mut buffers = vec![DriverBuffer { address: header, bytes: 16, writable: false }];
        for number in 0..count % 4 {
            // Usually a valid buffer.
            let (address, bytes) = match odd % 16 {
                0 => (input.address(), u32::from(input.u8())),
                1 => (input.address(), unit),
                _ => (data + 0x10 * u64::from(number), unit),
            };
            buffers.push(DriverBuffer { address, bytes, writable: reads != (odd % 16 == 2) });
        }
        buffers.push(DriverBuffer { address: to(0x1700), bytes: 1, writable: odd % 32 != 3 });
        // A table across a border of regions is not supported by the driver.
        let table = self.memory.range(to(0x1900), 16 * buffers.len());
        let _full = match table.filter(|_| self.layout.indirect != (odd % 32 == 4)) {
            Some(table) => driver.add_indirect(&table, &buffers),
            None => driver.add(&buffers),
        };
    }

    /// Starts the ring, after any end of the previous one; false if it is invalid.
    fn start(&mut self, base: u32, tracked: bool) -> bool {
        self.held.clear();
        let (layout, memory) = (self.layout.clone(), self.memory.clone());
        let ring = if tracked {
            Virtqueue::with_inflight(layout, memory, base, InflightQueueArea::new(self.area.clone()))
        } else {
            Virtqueue::new(layout, memory, base)
        };
        self.ring = ring.ok();
        self.ring.is_some()
    }

    /// Takes at most `max_chains` chains and checks their requests.
    fn take(&mut self, max_chains: u8) {
        for _ in 0..max_chains {
            let Some(ring) = &mut self.ring else { return };
            match ring.take() {
                Ok(None) => return,
                Ok(Some(chain)) => {
                    assert!(chain.descriptors <= MAX_DESCRIPTORS);
                    let (ticket, request) = parse(chain, &DEVICE_RULES);
                    if let Some(request) = &request {
                        check(request);
                        self.requests += usize::from(!matches!(
                            request.kind,
                            BlkOperation::Completed(_) | BlkOperation::PartOfBlock
                        ));
                    }
                    self.held.push((ticket, request));
                    assert!(self.held.len() <= usize::from(ring.in_flight()));
                    assert!(ring.in_flight() <= self.layout.size, "more chains are out than the ring has");
                }
                Err(broken) => {
                    assert!(broken.to_string().len() < 200);
                    // Chains in flight can still be completed.
                    for (ticket, _) in self.held.drain(..) {
                        ring.complete(ticket, 0);
                    }
                    self.ring = None;
                }
            }
        }
    }

    fn complete(&mut self, choice: u8) {
        let Some(ring) = &mut self.ring else { return };
        if self.held.is_empty() {
            return;
        }
        let (ticket, request) = self.held.swap_remove(usize::from(choice) % self.held.len());
        let status = if choice & 128 == 0 { BlkStatus::Ok } else { BlkStatus::IoError };
        if let Some(request) = &request {
            request.write_id(b"fuzz");
        }
        ring.complete(ticket, request.map_or(0, |request| request.finish(status)));
    }

    fn put_back(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        if let Some((ticket, request)) = self.held.pop()
            && let Err(ticket) = ring.put_back(ticket)
        {
            self.held.push((ticket, request));
        }
    }
}

/// Asserts that a request is inside the disk and of whole blocks.
fn check(request: &BlkRequest) {
    let check_inside = |offset: u64, bytes: u64| {
        let block = DEVICE_RULES.block_bytes;
        assert!(bytes > 0 && bytes.is_multiple_of(block) && offset.is_multiple_of(block));
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= DISK_BYTES));
    };
    match &request.kind {
        BlkOperation::Read { offset, .. } | BlkOperation::Write { offset, .. } => {
            check_inside(*offset, request.bytes());
        }
        BlkOperation::Discard(ranges) | BlkOperation::WriteZeroes(ranges) => {
            assert!((1..=4).contains(&ranges.len()));
            ranges.iter().for_each(|&BlkRange { offset, bytes, .. }| check_inside(offset, bytes));
        }
        BlkOperation::Flush
        | BlkOperation::Id(_)
        | BlkOperation::Completed(_)
        | BlkOperation::PartOfBlock => {}
    }
}

/// Runs an input: a shape, then steps. Returns the number of requests with an operation.
pub fn rings(data: &[u8]) -> usize {
    let mut input = RingFuzzInput(data);
    let mut guest = RingFuzzGuest::new(&mut input);
    let mut driver = RingDriver::new(&guest.layout);
    let tracked = input.u8() & 1 == 0;
    let start = if guest.layout.packed { 0x8000_8000 } else { 0 };
    guest.start(start, tracked);
    while !input.0.is_empty() {
        match input.u8() % 16 {
            0 => guest.scribble(&mut input)(),
            1..=5 => guest.request(&mut driver, &mut input),
            6 => {
                // Overwrites memory while the device reads it.
                let scribble = guest.scribble(&mut input);
                let mut after = input.u8() % 32;
                let hook = move |access| {
                    if access == RingAccess::Load {
                        if after == 0 {
                            scribble();
                        }
                        after = after.wrapping_sub(1);
                    }
                };
                with_hook(hook, || guest.take(4));
            }
            7..=9 => guest.take(input.u8()),
            10 | 11 => guest.complete(input.u8()),
            12 => guest.put_back(),
            13 => {
                let Some(ring) = &mut guest.ring else { continue };
                ring.suppress_kicks();
                let _call = ring.wants_call();
                let _again = ring.enable_kicks();
            }
            14 => {
                // A driver that received an invalid id starts anew.
                if driver.next_used().is_err() {
                    driver = RingDriver::new(&guest.layout);
                }
            }
            _ => {
                // Stops the ring, or kills the device, and starts it again.
                let order = input.u8();
                let base = match guest.ring.take() {
                    Some(ring) if order & 1 == 0 => ring.stop(),
                    _ => u32::from_le_bytes(input.bytes()),
                };
                if !guest.start(base, tracked) && order & 2 == 0 {
                    guest.area.fill(0, guest.area.bytes(), 0);
                    guest.start(start, tracked);
                }
            }
        }
    }
    guest.requests
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::rings;

    #[test]
    fn random_guests_cause_no_panic_and_no_hang() {
        let mut rng = Rng::with_seed(0);
        let mut requests = 0;
        for _ in 0..20_000 {
            let mut data = vec![0; rng.usize(0..600)];
            rng.fill(&mut data);
            requests += rings(&data);
        }
        assert!(requests > 10_000, "{requests} requests, so most inputs make none");
    }
}
