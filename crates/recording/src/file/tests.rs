use std::io::Cursor;

use proptest::{collection::vec, option, prelude::*, sample::select};

use policy::{
    throttle::{LimitKind, Limits, RateLimit},
    watermark::Watermark,
};

use super::{block::RecordingBlock, read::BlockContent, *};
use crate::{
    error::TraceError,
    input::TraceInput,
    lines::LineReader,
    merge::MergedTraces,
    reader::{TraceOptions, TraceReader},
};

// Bytes before the first block: the head of a frame, the magic text, the version and the clock.
const MARK_BYTES: usize = 8 + MAGIC.len() + 2 + 8;
const DISKS: [&str; 3] = ["vm1", "vm2", "a disk, \"quoted\""];
const LIMITS: [&str; 2] = ["iops-total", "gold: bps-write"];

fn entry() -> impl Strategy<Value = RecordingEntry> {
    let times = (0..u64::MAX / 4, option::of((any::<u64>(), any::<u64>())));
    let place = prop_oneof![
        (0..1_u64 << 20, 1..64_u64).prop_map(|(page, pages)| (page * 4096, pages * 4096)),
        (0..u64::MAX / 2, 1..u64::MAX / 2),
    ];
    let indices = (0..DISKS.len() as u32, option::of(0..LIMITS.len() as u32));
    (times, place, select(&RequestOp::ALL[..]), any::<bool>(), indices).prop_map(
        |((arrival_ns, times), (offset, length), op, has_failed, (disk, limit))| {
            let (offset, length) = if op == RequestOp::Flush { (0, 0) } else { (offset, length) };
            let times = times.map(|(wait_ns, service_ns)| RecordedTimes { wait_ns, service_ns });
            RecordingEntry { arrival_ns, times, offset, length, op, has_failed, disk, limit }
        },
    )
}

fn write(entries: &[RecordingEntry], cuts: usize) -> Vec<u8> {
    let mut writer = RecordingWriter::new(Vec::new(), 1_000).unwrap();
    for (index, &entry) in entries.iter().enumerate() {
        let limit = || LIMITS[entry.limit.unwrap() as usize];
        writer.push(entry, || DISKS[entry.disk as usize], limit).unwrap();
        if (index + 1) % cuts == 0 {
            writer.end_block().unwrap();
        }
    }
    writer.finish().unwrap()
}

/// Offset, length and disk of each request by arrival, and the error.
fn read(bytes: &[u8]) -> (Vec<(u64, u64, String)>, Option<String>) {
    let mut reader =
        TraceReader::new("t", Box::new(Cursor::new(bytes.to_vec())), &TraceOptions::default()).unwrap();
    let mut records = Vec::new();
    loop {
        match reader.next() {
            Ok(Some(record)) => {
                let disk = reader.disks()[record.disk.index()].clone();
                records.push((record.offset, record.length, disk));
            }
            Ok(None) => return (records, None),
            Err(error) => return (records, Some(error.to_string())),
        }
    }
}

fn by_arrival(mut entries: Vec<RecordingEntry>) -> Vec<(u64, u64, String)> {
    entries.sort_by_key(|entry| entry.arrival_ns);
    let fields_of =
        |entry: &RecordingEntry| (entry.offset, entry.length, DISKS[entry.disk as usize].to_owned());
    entries.iter().map(fields_of).collect()
}

proptest! {
    #[test]
    fn block_round_trips(mut entries in vec(entry(), 0..50), lost in any::<u64>()) {
        entries.sort_by_key(|entry| entry.arrival_ns);
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let block = RecordingBlock { lost, disks: names(&DISKS), limits: names(&LIMITS), entries };
        let mut bytes = Vec::new();
        block.encode(&mut bytes);
        prop_assert_eq!(RecordingBlock::decode(&bytes), Some(block));
        prop_assert_eq!(RecordingBlock::decode(&bytes[..bytes.len() - 1]), None);
        bytes.push(0);
        prop_assert_eq!(RecordingBlock::decode(&bytes), None);
    }

    #[test]
    fn recording_reads_as_a_trace(mut entries in vec(entry(), 1..50), cuts in 1..20_usize) {
        // Requests of one instant keep their order, which this model does not reproduce.
        entries.sort_by_key(|entry| entry.arrival_ns);
        entries.dedup_by_key(|entry| entry.arrival_ns);
        prop_assert_eq!(read(&write(&entries, cuts)), (by_arrival(entries), None));
    }

    #[test]
    fn truncated_recording_is_read_up_to_the_last_complete_block(
        entries in vec(entry(), 1..30),
        at in any::<prop::sample::Index>(),
    ) {
        let bytes = write(&entries, 1);
        let mark = MARK_BYTES;
        let length = mark + at.index(bytes.len() - mark);
        let (records, error) = read(&bytes[..length]);
        prop_assert!(records.len() <= entries.len());
        let complete: Vec<_> = entries[..records.len()].to_vec();
        prop_assert_eq!(records, by_arrival(complete));
        if let Some(error) = error {
            prop_assert!(error.starts_with("t: the recording ends within a block"), "{}", error);
        } else {
            prop_assert!(bytes[length..].starts_with(&SKIPPABLE));
        }
    }

    #[test]
    fn damaged_blocks_are_rejected(
        entries in vec(entry(), 1..30),
        at in any::<prop::sample::Index>(),
        bit in 0..8_u32,
    ) {
        let mut bytes = write(&entries, 4);
        let mark = MARK_BYTES;
        let at = mark + at.index(bytes.len() - mark);
        bytes[at] ^= 1 << bit;
        let (records, error) = read(&bytes);
        // A frame has an unused bit (RFC 8878, section 3.1.1.1.1.3).
        prop_assert!(error.is_some() || records.len() == entries.len());
        let complete: Vec<_> = entries[..records.len()].to_vec();
        prop_assert_eq!(records, by_arrival(complete));
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        if let Some(block) = RecordingBlock::decode(&bytes) {
            prop_assert!(block.entries.is_sorted_by_key(|entry| entry.arrival_ns));
        }
    }

    #[test]
    fn limit_changes_round_trip(changes in vec(change(), 0..50)) {
        let mut bytes = Vec::new();
        limits::encode(&changes, &mut bytes);
        prop_assert_eq!(limits::decode(&bytes), Some(changes));
        prop_assert_eq!(limits::decode(&bytes[..bytes.len() - 1]), None);
        bytes.push(0);
        prop_assert_eq!(limits::decode(&bytes), None);
    }

    #[test]
    fn damaged_limit_changes_are_valid_or_rejected(
        changes in vec(change(), 1..5),
        at in any::<prop::sample::Index>(),
        bit in 0..8_u32,
    ) {
        let mut bytes = Vec::new();
        limits::encode(&changes, &mut bytes);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        for change in limits::decode(&bytes).unwrap_or_default() {
            prop_assert!(change.limits.validate().is_ok() && !change.name.is_empty());
        }
    }

    #[test]
    fn limit_changes_are_recorded_between_requests(
        entries in vec(entry(), 1..20),
        changes in vec(change(), 1..20),
        cuts in 1..10_usize,
    ) {
        let mut writer = RecordingWriter::new(Vec::new(), 1_000).unwrap();
        let rounds = entries.len().max(changes.len());
        for round in 0..rounds {
            if let Some(change) = changes.get(round) {
                writer.change_limits(change.clone()).unwrap();
            }
            if let Some(&entry) = entries.get(round) {
                let limit = || LIMITS[entry.limit.unwrap() as usize];
                writer.push(entry, || DISKS[entry.disk as usize], limit).unwrap();
            }
            if (round + 1) % cuts == 0 {
                writer.end_block().unwrap();
                prop_assert!(writer.is_block_empty());
            }
        }
        let (read, count) = read_all(&writer.finish().unwrap());
        prop_assert_eq!((read, count), (changes, entries.len()));
    }
}

fn limits() -> impl Strategy<Value = Limits> {
    let kinds = select(vec![
        vec![LimitKind::BpsTotal, LimitKind::IopsTotal],
        vec![LimitKind::BpsRead, LimitKind::BpsWrite, LimitKind::IopsRead, LimitKind::IopsWrite],
        vec![LimitKind::IopsRead],
        vec![],
    ]);
    (kinds, 1..1_000_000_u64, 0..3_u64, 1..100_u64, 0..3_u64).prop_map(
        |(kinds, rate, factor, length, operation)| {
            let mut limits = Limits::default();
            for kind in kinds {
                let (burst_length_s, burst_for_s) = match factor {
                    0 => (1, 0),
                    1 => (length, 0),
                    _ => (1, length),
                };
                let burst_rate = rate * factor;
                *limits.limit_mut(kind) = RateLimit { rate, burst_rate, burst_length_s, burst_for_s };
                limits.iops_size = if kind.counts_bytes() { 0 } else { operation * 4096 };
            }
            limits.validate().expect("the strategy makes valid limits");
            limits
        },
    )
}

fn change() -> impl Strategy<Value = LimitChange> {
    let owner = select(vec![LimitOwner::Disk, LimitOwner::Group]);
    let group = option::of(select(vec!["gold", "host"]));
    (0..u64::MAX / 4, owner, select(&DISKS[..]), group, limits(), 0..=100_u8).prop_map(
        |(at_ns, owner, name, group, limits, percent)| LimitChange {
            at_ns,
            owner,
            name: name.to_owned(),
            group: group.map(str::to_owned),
            limits,
            watermark: Watermark::new(percent).expect("a percentage"),
        },
    )
}

/// Changes of limits and number of requests of a recording.
fn read_all(bytes: &[u8]) -> (Vec<LimitChange>, usize) {
    let input = TraceInput::new("t".to_owned(), Box::new(Cursor::new(bytes.to_vec()))).unwrap();
    let (mut lines, mut blocks) = (LineReader::new(input), RecordingReader::default());
    let (mut changes, mut count) = (Vec::new(), 0);
    while blocks.next(&mut lines, &mut |change| changes.push(change)).unwrap().is_some() {
        count += 1;
    }
    (changes, count)
}

/// A recording of version 1: three requests of two disks, of which the first waited for a limit.
const VERSION_1: &str = "\
    572a4d181900000077656972207265636f7264696e6720310a0010a5d4e8000000572a4d18040000\
    004e00000028b52ffd2441090200000203766d3103766d32010a696f70732d746f74616c030c0600\
    f09309e80705a08d06000007a08d0600a08d060302001f0301100003011200030001010301000041\
    a3608a";

#[test]
fn older_version_is_read_and_newer_one_rejected() {
    let bytes: Vec<u8> = (0..VERSION_1.len() / 2)
        .map(|at| u8::from_str_radix(&VERSION_1[2 * at..2 * at + 2], 16).unwrap())
        .collect();
    assert_eq!(read_all(&bytes), (Vec::new(), 3));
    let (records, error) = read(&bytes);
    let record = |offset, length, disk: &str| (offset, length, disk.to_owned());
    assert_eq!(records, [record(4096, 4096, "vm1"), record(0, 65_536, "vm2"), record(0, 0, "vm2")]);
    assert_eq!(error, None);
    let mut newer = RecordingWriter::new(Vec::new(), 0).unwrap().finish().unwrap();
    newer[8 + MAGIC.len()] = b'3';
    let error = read(&newer).1.unwrap();
    assert_eq!(error, "t: the recording has version 3, but this weir reads only up to 2 (use a newer weir)");
}

#[test]
fn blocks_of_long_names_respect_the_reader_limit() {
    let mut writer = RecordingWriter::new(Vec::new(), 0).unwrap();
    let change = |number: u64| LimitChange {
        at_ns: number,
        owner: LimitOwner::Group,
        name: format!("{number}{}", "n".repeat(4000)),
        group: Some("g".repeat(4096)),
        limits: Limits::default(),
        watermark: Watermark::ALWAYS,
    };
    let changes: Vec<_> = (0..3000).map(change).collect();
    changes.iter().for_each(|change| writer.change_limits(change.clone()).unwrap());
    assert_eq!(read_all(&writer.finish().unwrap()), (changes, 0));
}

#[test]
fn block_of_unknown_kind_is_rejected() {
    for kind in [2, 127] {
        assert!(BlockContent::decode(&[kind, 0, 0, 0, 0, 0], 2).is_none());
    }
    assert!(BlockContent::decode(&[], 2).is_none());
}

#[test]
fn request_is_encoded_in_few_bytes() {
    let mut random = fastrand::Rng::with_seed(1);
    let mut writer = RecordingWriter::new(Vec::new(), 0).unwrap();
    let count = 200_000;
    for number in 0..count {
        let entry = RecordingEntry {
            arrival_ns: number * 2000 + random.u64(0..2000),
            times: Some(RecordedTimes { wait_ns: 0, service_ns: 80_000 + random.u64(0..40_000) }),
            offset: random.u64(0..100 << 18) * 4096,
            length: 4096,
            op: if random.bool() { RequestOp::Read } else { RequestOp::Write },
            has_failed: false,
            disk: random.u32(0..8),
            limit: None,
        };
        writer.push(entry, || ["a", "b", "c", "d", "e", "f", "g", "h"][entry.disk as usize], || "").unwrap();
    }
    let bytes = writer.finish().unwrap().len() as u64;
    assert!(bytes < 12 * count, "{} bytes a request", bytes as f64 / count as f64);
}

#[test]
fn invalid_requests_are_reported_with_their_number() {
    let entry = |arrival_ns: u64, length: u64| RecordingEntry {
        arrival_ns,
        times: None,
        offset: 0,
        length,
        op: RequestOp::Read,
        has_failed: false,
        disk: 0,
        limit: None,
    };
    let (records, error) = read(&write(&[entry(1, 512), entry(2, 0)], 1));
    assert_eq!((records.len(), error.as_deref()), (1, Some("t:2: the length of a read is 0")));
}

/// A recording that was truncated by a full disk does not hide the ones after it.
#[test]
fn blocks_after_a_truncated_one_are_read() {
    let requests = |from_ns: u64| {
        let entry = |number: u64| RecordingEntry {
            arrival_ns: from_ns + number,
            times: None,
            offset: number * 4096,
            length: 4096,
            op: RequestOp::Read,
            has_failed: false,
            disk: 0,
            limit: None,
        };
        (0..10).map(entry).collect::<Vec<_>>()
    };
    let (first, second) = (write(&requests(0), 4), write(&requests(1000), 4));
    let torn = &first[..first.len() - 5];
    let alone = read(torn).0.len() as u64;
    assert!(alone > 0 && alone < 10);
    let open = |name: &str, bytes: &[u8]| {
        TraceReader::new(name, Box::new(Cursor::new(bytes.to_vec())), &TraceOptions::default()).unwrap()
    };
    let mut merged = MergedTraces::new(vec![open("torn", torn), open("whole", &second)], None).unwrap();
    let mut count = 0;
    let error = loop {
        match merged.next() {
            Ok(Some(_)) => count += 1,
            Ok(None) => panic!("missing records are not reported"),
            Err(error) => break error,
        }
    };
    assert_eq!(count, alone + 10);
    assert!(matches!(error, TraceError::Torn { file, requests } if file == "torn" && requests == alone));
    assert!(merged.next().unwrap().is_none());
}

/// Readers store names and counts, so names that no disk can have are rejected.
#[test]
fn memory_of_a_recording_is_bounded() {
    let at = |arrival_ns| RecordingEntry {
        arrival_ns,
        times: Some(RecordedTimes { wait_ns: 1, service_ns: 1 }),
        offset: 0,
        length: 4096,
        op: RequestOp::Read,
        has_failed: false,
        disk: 0,
        limit: Some(0),
    };
    let long = "n".repeat(5000);
    for (disk, limit, rule) in [
        (long.as_str(), "iops-total", "longer than 4096 bytes"),
        ("vm1", &long, "longer than 4096 bytes"),
        ("vm\n1", "iops-total", "is not UTF-8"),
        ("vm1", "", "name is missing"),
    ] {
        let mut writer = RecordingWriter::new(Vec::new(), 0).unwrap();
        writer.push(at(1), || disk, || limit).unwrap();
        let (records, error) = read(&writer.finish().unwrap());
        assert_eq!(records, []);
        let error = error.unwrap();
        assert!(error.contains(rule) && error.contains("the recording is damaged"), "{error}");
    }
    let mut writer = RecordingWriter::new(Vec::new(), 0).unwrap();
    for number in 0..2 {
        writer.add_lost(u64::MAX);
        writer.push(at(number), || "vm1", || "iops-total").unwrap();
        writer.end_block().unwrap();
    }
    assert_eq!(read(&writer.finish().unwrap()).0.len(), 2);
}
