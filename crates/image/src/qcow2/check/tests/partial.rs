//! Images that are readable in part: the report covers that part only.

use super::*;
use storage::{
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use crate::qcow2::{Qcow2Components, Qcow2Image, header::MAX_SNAPSHOTS, snapshot::NewSnapshot};

/// An undamaged image with snapshots of these names, each with its own L1 table and sharing all
/// data.
async fn with_snapshots(names: &[&str]) -> (Storage, Qcow2Header) {
    let (storage, _) = image(preallocated()).await;
    let content = storage.read_all().await.expect("memory");
    let image = Qcow2Image::open_for_maintenance(Storage::with_content(&content).await).await.expect("valid");
    for name in names {
        image.create_snapshot(NewSnapshot { name, date_s: 1, date_ns: 0 }).await.expect("there is room");
    }
    image.close().await.expect("memory");
    let storage = Storage::with_content(&image.storage().read_all().await.expect("memory")).await;
    let header = read_header(&storage).await.expect("a header");
    assert_eq!(error_counts(&storage, Repair::Nothing).await, (0, 0, 0));
    (storage, header)
}

/// Returns corruptions, leaks, possible leaks.
async fn error_counts(storage: &Storage, repair: Repair) -> (u64, u64, u64) {
    let report = check(storage, repair).await.expect("a header");
    assert_eq!((report.check_errors, report.leaks_fixed), (0, 0), "{report:#?}");
    assert!(report.possible_leaks == 0 || report.missed_references.is_some(), "{report:#?}");
    (report.corruptions, report.leaks, report.possible_leaks)
}

/// Offset of entry `number` of the snapshot table, in the file.
async fn entry_at(storage: &Storage, header: &Qcow2Header, number: usize) -> u64 {
    let (snapshots, _) = snapshot::read(storage, header).await.expect("sound");
    header.snapshots_offset + snapshot::encode(&snapshots[..number]).expect("short").len() as u64
}

#[test]
fn damaged_snapshot_causes_no_leak_reports() {
    sim::run(1, async {
        let wrong_l1: [(u64, u64); 3] = [(0, 0x5_0200), (0, 1 << 57), (8, u64::MAX << 32)];
        for (at, value) in wrong_l1 {
            let (storage, header) = with_snapshots(&["one", "two", "three"]).await;
            let entry = entry_at(&storage, &header, 1).await;
            put(&storage, entry + at, number_at(&storage, entry + at).await | value).await;
            let before = storage.read_all().await.expect("memory");
            for repair in [Repair::Nothing, Repair::Leaks, Repair::All, Repair::Forced] {
                // The L1 table of that snapshot, and everything that it shares.
                assert_eq!(error_counts(&storage, repair).await, (1, 0, 66), "{repair:?} {at} {value:#x}");
                assert_eq!(storage.read_all().await.expect("memory"), before, "{repair:?}");
            }
            let intact = Qcow2Image::open_snapshot(parts(&before).await, "three").await;
            assert!(intact.is_ok(), "{intact:?}");
            let damaged = Qcow2Image::open_snapshot(parts(&before).await, "two").await;
            assert!(damaged.is_err_and(|error| error.to_string().contains("two")));
            let image =
                Qcow2Image::open_for_maintenance(Storage::with_content(&before).await).await.expect("valid");
            assert!(image.create_snapshot(NewSnapshot { name: "no", date_s: 1, date_ns: 0 }).await.is_err());
            assert!(image.delete_snapshot("one").await.is_err());
        }
    });
}

async fn parts(content: &[u8]) -> Qcow2Components {
    Qcow2Components::of(Storage::with_content(content).await)
}

#[test]
fn a_table_that_ends_early_makes_no_leaks() {
    sim::run(1, async {
        let (storage, header) = with_snapshots(&["one", "two", "three"]).await;
        let entry = entry_at(&storage, &header, 1).await;
        // Length of its extra data: the start of the third entry is then unknown.
        put(&storage, entry + 32, 0xffff_ffff).await;
        let before = storage.read_all().await.expect("memory");
        for repair in [Repair::Leaks, Repair::All, Repair::Forced] {
            // Two L1 tables, and the clusters that they share.
            assert_eq!(error_counts(&storage, repair).await, (1, 0, 67), "{repair:?}");
            assert_eq!(storage.read_all().await.expect("memory"), before, "{repair:?}");
        }
        assert!(Qcow2Image::open_snapshot(parts(&before).await, "one").await.is_ok());
        let cut = Qcow2Image::open_snapshot(parts(&before).await, "three").await.expect_err("not read");
        assert!(cut.to_string().contains("extra data"), "{cut}");
    });
}

#[test]
fn too_many_snapshots_are_reported_and_the_disk_can_be_read() {
    sim::run(1, async {
        let (storage, mut header) = image(CreateOptions { version: 2, ..preallocated() }).await;
        let table = storage.size_bytes();
        // Entries of zeroes are valid in version 2.
        metadata_io::grow(&storage, table + 40 * u64::from(MAX_SNAPSHOTS + 2)).await.expect("memory");
        (header.snapshots, header.snapshots_offset) = (MAX_SNAPSHOTS + 2, table);
        write_header(&storage, &header).await.expect("fits");
        let report = check(&storage, Repair::Forced).await.expect("a header");
        assert!(report.findings.iter().any(|finding| finding.contains("65538 snapshots")), "{report:?}");
        assert_eq!((report.leaks, report.leaks_fixed), (0, 0), "{report:?}");
        let content = storage.read_all().await.expect("memory");
        let image = Qcow2Image::open(Qcow2Components { read_only: true, ..parts(&content).await })
            .await
            .expect("readable");
        assert!(image.read(0, 4096).await.is_ok());
        let refused = Qcow2Image::open(parts(&content).await).await.expect_err("for writing");
        assert!(refused.to_string().contains("65538 snapshots"), "{refused}");
    });
}

fn bitmap_entry(name: &str, table_offset: u64) -> bitmap::BitmapEntry {
    bitmap::BitmapEntry {
        table_offset,
        table_entries: 1,
        flags: 0,
        granularity_bits: 16,
        name: name.into(),
        extra: Vec::new(),
    }
}

#[test]
fn only_damaged_bitmaps_are_dropped() {
    type Change = fn(&mut bitmap::BitmapEntry);
    let changes: [(&str, Change); 4] = [
        ("flags", |entry| entry.flags = 1 << 31),
        ("instead of 1", |entry| entry.table_entries = 2),
        ("not in the file", |entry| entry.table_offset = 1 << 40),
        ("and other data", |entry| entry.table_offset = 0x7000),
    ];
    sim::run(1, async move {
        for (expected, change) in changes {
            for damaged in [0, 1] {
                let (storage, mut header) = image(preallocated()).await;
                let end = storage.size_bytes();
                let mut entries = [bitmap_entry("a", end + 4096), bitmap_entry("bb", end + 8192)];
                change(&mut entries[damaged]);
                let encoded = bitmap::encode(&entries);
                metadata_io::write(&storage, end, &encoded).await.expect("memory");
                metadata_io::grow(&storage, end + 3 * 4096).await.expect("memory");
                let place = FileRegion { offset: end, length: encoded.len() as u64 };
                header.bitmaps = Some(BitmapsExtension { count: 2, directory: place });
                header.autoclear = autoclear::BITMAPS;
                write_header(&storage, &header).await.expect("fits");
                let found = check(&storage, Repair::Nothing).await.expect("a header");
                assert!(found.missed_references.is_some_and(|why| why.contains(expected)), "{expected}");
                let repaired = check(&storage, Repair::All).await.expect("a header");
                assert_eq!((repaired.corruptions, repaired.leaks), (0, 0), "{expected}: {repaired:#?}");
                let header = read_header(&storage).await.expect("a header");
                let remaining = bitmap::read(&storage, &header, header.bitmaps.expect("one")).await;
                assert_eq!(remaining, Ok(vec![entries[1 - damaged].clone()]), "{expected}");
                assert_ne!(header.autoclear & autoclear::BITMAPS, 0, "{expected}");
            }
        }
    });
}

#[test]
fn flags_of_clusters_with_an_unknown_refcount_stay() {
    sim::run(1, async {
        let (storage, header) = image(preallocated()).await;
        let l2 = l2_of(&storage, &header).await;
        // The ambiguous entry keeps the refcounts from being rebuilt.
        put(&storage, l2, 0x5_0200).await;
        put(&storage, header.refcount_table_offset, 1 << 40).await;
        let before = metadata_io::read(&storage, l2, 4096).await.expect("memory");
        let report = check(&storage, Repair::All).await.expect("a header");
        assert!(!report.findings.iter().any(|finding| finding.contains("COPIED")), "{report:#?}");
        assert_eq!(metadata_io::read(&storage, l2, 4096).await.expect("memory"), before);
    });
}

#[test]
fn copied_flag_requires_a_refcount_of_one() {
    let content = sim::run(1, async {
        let (storage, header) = image(preallocated()).await;
        let block = number_at(&storage, header.refcount_table_offset).await;
        let l2 = l2_of(&storage, &header).await;
        put(&storage, header.l1_offset, l2).await;
        // Every refcount is 2, so no flag may be set.
        let mut counts = metadata_io::read(&storage, block, 4096).await.expect("memory");
        for at in (l2..l2 + 512).step_by(8) {
            let cluster = number_at(&storage, at).await & !COPIED;
            put(&storage, at, cluster).await;
            refcount_entries::put(&mut counts, 4, (cluster / 4096) as usize, 2);
        }
        refcount_entries::put(&mut counts, 4, (l2 / 4096) as usize, 2);
        metadata_io::write(&storage, block, &counts).await.expect("memory");
        storage.read_all().await.expect("memory")
    });
    let mut unread = 0;
    for seed in 0..200 {
        let behaviour = Behaviour { error_probability: 0.05, ..Behaviour::default() };
        let disk = SimulatedStorage::new(content.clone(), behaviour);
        unread += sim::run(seed, async move {
            let flaky = Storage::Simulated(Align::new(disk));
            let report = check(&flaky, Repair::All).await;
            let mut after = flaky.read_all().await;
            while after.is_err() {
                after = flaky.read_all().await;
            }
            let after = Storage::with_content(&after.expect("read at last")).await;
            let found = check(&after, Repair::Nothing).await.expect("a header");
            let marked = found.findings.iter().find(|finding| finding.contains("is marked COPIED, but"));
            assert_eq!(marked, None, "seed {seed}: {report:#?}");
            u64::from(report.is_ok_and(|report| report.check_errors > 0))
        });
    }
    assert!(unread > 0);
}
