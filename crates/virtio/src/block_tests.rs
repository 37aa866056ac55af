//! Requests against the specification, one case for each rule, through a ring as a driver makes
//! them.

use reactor::guest::{GuestMemory, Region};

use super::*;
use crate::ring::{
    RingLayout, RingParts, Virtqueue,
    driver::{DriverBuffer, RingDriver},
};

const RING: u64 = 0x1000;
const DATA: u64 = 0x10_000;
const SECTORS: u64 = 2048;

fn device() -> BlkDeviceConfig {
    let limits = |max_ranges| Some(RangeLimits { max_sectors: 100, max_ranges });
    BlkDeviceConfig {
        // A partial sector at the end.
        bytes: SECTORS * SECTOR_BYTES + 100,
        block_bytes: SECTOR_BYTES,
        read_only: false,
        max_segments: 4,
        discard: limits(3),
        write_zeroes: limits(2),
    }
}

/// A guest with one ring.
struct BlkTestGuest {
    memory: GuestMemory,
    driver: RingDriver,
    ring: Virtqueue,
}

impl BlkTestGuest {
    fn new() -> Self {
        let memory = [(RING, 0x4000), (DATA, 0x8000)].map(|(at, bytes)| Region::on_heap(at, at, bytes));
        let memory = GuestMemory::new(memory.into()).expect("they do not overlap");
        let parts = RingParts::of(32, false, true);
        let part = |at, (bytes, _)| memory.range(at, bytes).expect("inside");
        let layout = RingLayout {
            size: 32,
            descriptors: part(RING, parts.descriptors),
            driver: part(RING + 0x1000, parts.driver),
            device: part(RING + 0x2000, parts.device),
            packed: false,
            event_idx: true,
            indirect: true,
        };
        let ring = Virtqueue::new(layout.clone(), memory.clone(), 0).expect("a good ring");
        Self { driver: RingDriver::new(&layout), memory, ring }
    }

    /// Parses a request with these readable bytes and writable lengths, divided into descriptors of
    /// these lengths.
    fn submit(
        &mut self,
        readable: &[u8],
        cuts: &[u32],
        writable: &[u32],
        device: &BlkDeviceConfig,
    ) -> Option<BlkRequest> {
        self.memory.range(DATA, readable.len()).expect("inside").write(0, readable);
        let mut address = DATA;
        let mut buffers = Vec::new();
        for (lengths, writable) in [(cuts, false), (writable, true)] {
            for &bytes in lengths {
                buffers.push(DriverBuffer { address, bytes, writable });
                address += u64::from(bytes);
            }
        }
        self.driver.add(&buffers).expect("there is room");
        let chain = self.ring.take().expect("a good ring").expect("a chain");
        let (ticket, request) = parse(chain, device);
        self.ring.complete(ticket, 0);
        request
    }

    fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut into = vec![0; bytes];
        self.memory.range(address, bytes).expect("inside").read(0, &mut into);
        into
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0xff; 4], &sector.to_le_bytes()].concat()
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// A request in three descriptors, as Linux makes it: header, data, status.
fn request(kind: u32, sector: u64, data: &[u8], writable: u32, device: &BlkDeviceConfig) -> BlkRequest {
    let readable = [header(kind, sector), data.to_vec()].concat();
    let cuts: &[u32] = if data.is_empty() { &[16] } else { &[16, data.len() as u32] };
    let writable: &[u32] = if writable == 0 { &[1] } else { &[writable, 1] };
    BlkTestGuest::new().submit(&readable, cuts, writable, device).expect("there is room for an answer")
}

#[track_caller]
fn answers(status: BlkStatus, kind: u32, sector: u64, data: &[u8], writable: u32) {
    refuses(status, kind, sector, data, writable, &device());
}

#[track_caller]
fn refuses(status: BlkStatus, kind: u32, sector: u64, data: &[u8], writable: u32, device: &BlkDeviceConfig) {
    let request = request(kind, sector, data, writable, device);
    assert!(matches!(request.kind, BlkOperation::Completed(got) if got == status), "{:?}", request.kind);
}

#[test]
fn reads_and_writes_are_inside_the_disk_and_in_sectors() {
    let two = [0; 1024];
    for (sector, is_inside) in [
        (0, true),
        (SECTORS - 2, true),
        (SECTORS - 1, false),
        (SECTORS, false),
        (u64::MAX / SECTOR_BYTES, false),
        (u64::MAX, false),
    ] {
        if !is_inside {
            answers(BlkStatus::IoError, kind::IN, sector, &[], 1024);
            answers(BlkStatus::IoError, kind::OUT, sector, &two, 0);
            continue;
        }
        let read = request(kind::IN, sector, &[], 1024, &device());
        assert!(matches!(read.kind, BlkOperation::Read { offset, .. } if offset == sector * SECTOR_BYTES));
        assert_eq!(read.bytes(), 1024);
        let write = request(kind::OUT, sector, &two, 0, &device());
        assert!(matches!(write.kind, BlkOperation::Write { offset, .. } if offset == sector * SECTOR_BYTES));
        assert_eq!(write.bytes(), 1024);
    }
    for bytes in [1, 511, 513, 1023] {
        answers(BlkStatus::IoError, kind::IN, 0, &[], bytes);
        answers(BlkStatus::IoError, kind::OUT, 0, &two[..bytes as usize], 0);
    }
    // An empty request is valid if its offset is inside the disk.
    answers(BlkStatus::Ok, kind::IN, SECTORS, &[], 0);
    answers(BlkStatus::Ok, kind::OUT, SECTORS, &[], 0);
    answers(BlkStatus::IoError, kind::OUT, SECTORS + 1, &[], 0);
}

#[test]
fn requests_are_of_whole_blocks() {
    // With a partial block of four sectors at the end.
    let device = BlkDeviceConfig { bytes: 8 * SECTORS * SECTOR_BYTES + 2048, block_bytes: 4096, ..device() };
    let data = [0; 4096];
    for (sector, bytes, refused) in [
        (0, 4096, None),
        (8, 4096, None),
        (8 * SECTORS - 8, 4096, None),
        (8 * SECTORS, 4096, Some(BlkOperation::Completed(BlkStatus::IoError))),
        (1, 4096, Some(BlkOperation::PartOfBlock)),
        (4, 4096, Some(BlkOperation::PartOfBlock)),
        (0, 512, Some(BlkOperation::PartOfBlock)),
        (0, 3584, Some(BlkOperation::PartOfBlock)),
        (8 * SECTORS, 2048, Some(BlkOperation::PartOfBlock)),
        (8, 0, Some(BlkOperation::Completed(BlkStatus::Ok))),
    ] {
        let sectors = bytes / SECTOR_BYTES as u32;
        for (kind, data, writable) in [
            (kind::IN, &[][..], bytes),
            (kind::OUT, &data[..bytes as usize], 0),
            (kind::DISCARD, &range(sector, sectors, 0), 0),
            (kind::WRITE_ZEROES, &range(sector, sectors, 0), 0),
        ] {
            let request = request(kind, sector, data, writable, &device);
            if let Some(refused) = &refused {
                assert_eq!(format!("{:?}", request.kind), format!("{refused:?}"), "{kind} {sector}");
            } else {
                assert_eq!(request.bytes(), 4096, "{kind} {sector}");
            }
        }
    }
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let device = BlkDeviceConfig { read_only: true, ..device() };
    let ranges = range(0, 8, 0);
    refuses(BlkStatus::IoError, kind::OUT, 0, &[0; 512], 0, &device);
    refuses(BlkStatus::IoError, kind::DISCARD, 0, &ranges, 0, &device);
    refuses(BlkStatus::IoError, kind::WRITE_ZEROES, 0, &ranges, 0, &device);
    assert!(matches!(request(kind::IN, 0, &[], 512, &device).kind, BlkOperation::Read { .. }));
    assert!(matches!(request(kind::FLUSH, 0, &[], 0, &device).kind, BlkOperation::Flush));
}

#[test]
fn unknown_kinds_are_unsupported() {
    // SCSI, GET_LIFETIME, SECURE_ERASE, ZONE_APPEND and ZONE_REPORT among them.
    for kind in [2, 3, 5, 6, 7, 9, 10, 12, 14, 15, 16, 24, 0x8000_0000, u32::MAX] {
        answers(BlkStatus::Unsupported, kind, 0, &[], 0);
    }
}

#[test]
fn each_range_is_validated() {
    let two = [range(0, 100, 0), range(SECTORS - 1, 1, 0)].concat();
    let expected = [(0, 100 * SECTOR_BYTES), ((SECTORS - 1) * SECTOR_BYTES, SECTOR_BYTES)];
    for kind in [kind::DISCARD, kind::WRITE_ZEROES] {
        let (BlkOperation::Discard(ranges) | BlkOperation::WriteZeroes(ranges)) =
            request(kind, 7, &two, 0, &device()).kind
        else {
            panic!("they are ranges")
        };
        let found: Vec<_> = ranges.iter().map(|range| (range.offset, range.bytes)).collect();
        assert_eq!(found, expected);
        assert!(ranges.iter().all(|range| !range.may_unmap));

        for bad in [range(0, 101, 0), range(SECTORS, 1, 0), range(SECTORS - 1, 2, 0), range(u64::MAX, 1, 0)] {
            answers(BlkStatus::IoError, kind, 0, &[range(0, 1, 0), bad].concat(), 0);
        }
        answers(BlkStatus::Unsupported, kind, 0, &range(0, 1, 2), 0);
        answers(BlkStatus::Unsupported, kind, 0, &range(0, 1, 1 << 31), 0);
        // A partial range, none, and too many.
        answers(BlkStatus::IoError, kind, 0, &two[..17], 0);
        answers(BlkStatus::IoError, kind, 0, &[], 0);
        answers(BlkStatus::IoError, kind, 0, &[&two[..], &two].concat(), 0);
        answers(BlkStatus::Ok, kind, 0, &range(5, 0, 0), 0);
    }
    // The only flag is valid for zeroing only (§ 5.2.6.2).
    answers(BlkStatus::Unsupported, kind::DISCARD, 0, &range(0, 1, UNMAP), 0);
    let BlkOperation::WriteZeroes(ranges) =
        request(kind::WRITE_ZEROES, 0, &range(0, 1, UNMAP), 0, &device()).kind
    else {
        panic!("they are zeroes")
    };
    assert!(ranges[0].may_unmap);

    let device = BlkDeviceConfig { discard: None, write_zeroes: None, ..device() };
    refuses(BlkStatus::Unsupported, kind::DISCARD, 0, &range(0, 1, 0), 0, &device);
    refuses(BlkStatus::Unsupported, kind::WRITE_ZEROES, 0, &range(0, 1, 0), 0, &device);
}

#[test]
fn descriptors_divide_a_request_as_they_like() {
    let data: Vec<u8> = (0..1024_u32).map(|byte| byte as u8).collect();
    let readable = [header(kind::OUT, 3), data.clone()].concat();
    for cuts in [&[1040][..], &[16, 1024], &[3, 13, 0, 1000, 24], &[1, 1039], &[17, 511, 512]] {
        let mut guest = BlkTestGuest::new();
        let request = guest.submit(&readable, cuts, &[1], &device()).expect("there is room");
        let BlkOperation::Write { offset, from } = request.kind else { panic!("{:?}", request.kind) };
        assert_eq!(offset, 3 * SECTOR_BYTES);
        let mut found = Vec::new();
        for segment in &from {
            let mut part = vec![0; segment.bytes()];
            segment.read(0, &mut part);
            found.extend(part);
        }
        assert_eq!(found, data, "{cuts:?}");
    }
    for cuts in [&[513][..], &[512, 1], &[100, 400, 13], &[0, 512, 0, 1]] {
        let mut guest = BlkTestGuest::new();
        let request = guest.submit(&header(kind::IN, 0), &[16], cuts, &device()).expect("there is room");
        assert_eq!(request.bytes(), 512, "{cuts:?}");
        // The status is the last byte, whatever the descriptors.
        assert_eq!(request.finish(BlkStatus::IoError), 0);
        assert_eq!(guest.read(DATA + 16, 514), [vec![0; 512], vec![1, 0]].concat());
    }
}

#[test]
fn chain_without_header_or_status() {
    let mut guest = BlkTestGuest::new();
    assert!(guest.submit(&header(kind::FLUSH, 0), &[16], &[], &device()).is_none());
    assert!(guest.submit(&header(kind::FLUSH, 0), &[16], &[0], &device()).is_none());
    let short = guest.submit(&header(kind::FLUSH, 0), &[15], &[1], &device()).expect("there is room");
    assert!(matches!(short.kind, BlkOperation::Completed(BlkStatus::IoError)));
}

#[test]
fn more_segments_than_seg_max_fail() {
    let operation_of = |writable: &[u32]| {
        BlkTestGuest::new()
            .submit(&header(kind::IN, 0), &[16], writable, &device())
            .expect("there is room")
            .kind
    };
    assert!(matches!(operation_of(&[128, 128, 128, 128, 1]), BlkOperation::Read { .. }));
    assert!(matches!(operation_of(&[128, 128, 128, 64, 64, 1]), BlkOperation::Completed(BlkStatus::IoError)));
}

#[test]
fn a_chain_with_a_fault_is_answered() {
    let mut guest = BlkTestGuest::new();
    let buffer = |address, bytes, writable| DriverBuffer { address, bytes, writable };
    guest.memory.range(DATA, 16).expect("inside").write(0, &header(kind::IN, 0));
    let outside = [buffer(DATA, 16, false), buffer(1 << 40, 512, true), buffer(DATA + 16, 1, true)];
    guest.driver.add(&outside).expect("there is room");
    let chain = guest.ring.take().expect("a good ring").expect("a chain");
    assert!(chain.fault.is_some());
    let (ticket, request) = parse(chain, &device());
    let request = request.expect("there is room for an answer");
    assert!(matches!(request.kind, BlkOperation::Completed(BlkStatus::IoError)));
    let written = request.finish(BlkStatus::IoError);
    guest.ring.complete(ticket, written);
    assert_eq!(guest.read(DATA + 16, 1), [1]);
    assert!(guest.driver.next_used().expect("it was out").is_some());
}

#[test]
fn id_is_padded_and_truncated() {
    for (id, lengths, expected) in [
        (&b"vm1"[..], &[20][..], &b"vm1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"[..]),
        (b"12345678901234567890123", &[20], b"12345678901234567890"),
        (b"12345678901234567890123", &[2, 3, 15], b"12345678901234567890"),
        (b"abcdef", &[4], b"abcd"),
        (b"12345678901234567890123", &[24], b"12345678901234567890\0\0\0\0"),
    ] {
        let mut guest = BlkTestGuest::new();
        let lengths = [lengths, &[1]].concat();
        let request =
            guest.submit(&header(kind::GET_ID, 0), &[16], &lengths, &device()).expect("there is room");
        guest.memory.range(DATA + 16, 30).expect("inside").fill(0, 30, 0xaa);
        request.write_id(id);
        assert_eq!(request.finish(BlkStatus::Ok), expected.len() as u32 + 1);
        assert_eq!(guest.read(DATA + 16, expected.len() + 2), [expected, &[0, 0xaa]].concat());
    }
}

#[test]
fn used_length_counts_from_the_first_writable_byte() {
    for (kind, data, writable, status, written) in [
        (kind::IN, 0, 512, BlkStatus::Ok, 513),
        (kind::IN, 0, 512, BlkStatus::IoError, 0),
        (kind::OUT, 512, 0, BlkStatus::Ok, 1),
        (kind::OUT, 512, 0, BlkStatus::IoError, 1),
        // Writable bytes that the request does not use.
        (kind::OUT, 512, 10, BlkStatus::Ok, 0),
        (kind::FLUSH, 0, 0, BlkStatus::Ok, 1),
        (99, 0, 0, BlkStatus::Unsupported, 1),
    ] {
        let request = request(kind, 0, &vec![0; data], writable, &device());
        assert_eq!(request.finish(status), written, "{kind} {status:?}");
    }
}
