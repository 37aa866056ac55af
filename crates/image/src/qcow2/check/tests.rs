//! Checks of sound images and of images with known damage.

mod partial;

use super::*;
use reactor::sim;

use crate::qcow2::{
    Qcow2Image,
    amend::Amendment,
    big_endian::u64_at,
    bitmap,
    create::{CreateOptions, Preallocation, create},
    entry::COPIED,
    header::{BackingReference, BitmapsExtension, FileRegion},
    refcount_entries, snapshot,
};

/// 64 guest clusters of 4 KiB, all mapped, without unused space at the end, which would hide
/// damage.
async fn image(options: CreateOptions) -> (Storage, Qcow2Header) {
    let storage = Storage::memory(512);
    let size_bytes = options.size_bytes.max(256 << 10);
    let options = CreateOptions { size_bytes, cluster_bytes: 4096, ..options };
    let header = create(&storage, None, &options).await.expect("valid");
    (storage, header)
}

fn preallocated() -> CreateOptions {
    CreateOptions { preallocation: Preallocation::Metadata, ..CreateOptions::default() }
}

async fn number_at(storage: &Storage, offset: u64) -> u64 {
    let read = metadata_io::read(storage, offset, 8).await.expect("memory");
    u64_at(&read, 0)
}

async fn put(storage: &Storage, offset: u64, value: u64) {
    metadata_io::write(storage, offset, &value.to_be_bytes()).await.expect("memory");
}

async fn l2_of(storage: &Storage, header: &Qcow2Header) -> u64 {
    number_at(storage, header.l1_offset).await & !COPIED
}

/// Damages a preallocated image. Returns the findings, and checks that a repair leaves it
/// consistent.
fn damaged(damage: impl AsyncFnOnce(&Storage, &Qcow2Header) + 'static) -> CheckReport {
    sim::run(1, async move {
        let (storage, header) = image(preallocated()).await;
        damage(&storage, &header).await;
        let found = check(&storage, Repair::Nothing).await.expect("a header");
        let repaired = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((repaired.corruptions, repaired.leaks, repaired.check_errors), (0, 0, 0), "{repaired:#?}");
        let rechecked = check(&storage, Repair::Nothing).await.expect("a header");
        assert_eq!((rechecked.corruptions, rechecked.leaks), (0, 0), "{rechecked:#?}");
        found
    })
}

#[test]
fn new_image_is_consistent() {
    for options in [
        CreateOptions::default(),
        preallocated(),
        CreateOptions { refcount_bits: 1, ..preallocated() },
        CreateOptions { refcount_bits: 64, version: 3, ..preallocated() },
        CreateOptions { luks: Some([&b"LUKS\xba\xbe"[..], &[0; 9994]].concat()), ..preallocated() },
        CreateOptions { data_file: Some("data".into()), ..CreateOptions::default() },
    ] {
        sim::run(1, async move {
            let is_preallocated = options.preallocation != Preallocation::Off;
            let (storage, _) = image(options).await;
            let report = check(&storage, Repair::All).await.expect("a header");
            let expect = CheckReport {
                total_clusters: 64,
                allocated_clusters: if is_preallocated { 64 } else { 0 },
                image_end_offset: storage.size_bytes(),
                ..CheckReport::default()
            };
            assert_eq!(report, expect);
        });
    }
}

#[test]
fn a_leak_is_freed() {
    let report = damaged(async |storage, header| {
        let l2 = l2_of(storage, header).await;
        put(storage, l2 + 8, 0).await;
    });
    assert_eq!((report.leaks, report.corruptions), (1, 0), "{report:?}");
    assert_eq!((report.allocated_clusters, report.fragmented_clusters), (63, 1));
}

/// Damages a preallocated image and repairs it, which must not change its content; then discards
/// the ambiguous content. Returns both reports.
fn ambiguous(damage: impl AsyncFnOnce(&Storage, &Qcow2Header) + 'static) -> (CheckReport, CheckReport) {
    sim::run(1, async move {
        let (storage, header) = image(preallocated()).await;
        damage(&storage, &header).await;
        let refused = check(&storage, Repair::All).await.expect("a header");
        let forced = check(&storage, Repair::Forced).await.expect("a header");
        assert_eq!((forced.corruptions, forced.leaks, forced.check_errors), (0, 0, 0), "{forced:#?}");
        (refused, forced)
    })
}

fn range(offset: u64, length: u64) -> GuestRange {
    GuestRange { snapshot: None, offset, length }
}

#[test]
fn invalid_entries_stay_unless_discarded() {
    for wrong in [0x5_0200, 1 << 40 | COPIED, 3 << 62 | 0x100_0000_0000] {
        let (refused, forced) = ambiguous(async move |storage, header| {
            let l2 = l2_of(storage, header).await;
            put(storage, l2 + 8, wrong).await;
            check(storage, Repair::All).await.expect("a header");
            assert_eq!(number_at(storage, l2 + 8).await, wrong);
        });
        // The cluster that the entry refers to is neither freed nor reported as leaked.
        assert_eq!(
            (refused.corruptions > 0, refused.leaks, refused.leaks_fixed, refused.possible_leaks),
            (true, 0, 0, 1),
            "{refused:?}"
        );
        assert_eq!((refused.ambiguous, refused.lost), (vec![range(4096, 4096)], Vec::new()));
        assert_eq!((forced.leaks_fixed, forced.lost), (1, vec![range(4096, 4096)]));
    }
    let (refused, forced) = ambiguous(async |storage, header| put(storage, header.l1_offset, 1 << 50).await);
    assert_eq!(
        (refused.corruptions, refused.leaks, refused.possible_leaks),
        (1, 0, 65),
        "the table and all that it reached: {refused:?}"
    );
    assert_eq!(forced.lost, [range(0, 256 << 10)], "up to the end of the disk");
}

#[test]
fn zeroes_outlive_the_repair_of_their_offset() {
    sim::run(1, async {
        let (storage, header) = image(preallocated()).await;
        let l2 = l2_of(&storage, &header).await;
        let first = number_at(&storage, l2).await;
        put(&storage, l2, first | 0x201).await;
        let repaired = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((repaired.corruptions, repaired.corruptions_fixed, repaired.leaks_fixed), (0, 1, 1));
        assert_eq!(number_at(&storage, l2).await, 1, "the zero flag");
        assert_eq!(repaired.lost, []);
    });
}

#[test]
fn subclusters_that_read_as_zeroes_outlive_the_repair_of_their_offset() {
    sim::run(1, async {
        let options = CreateOptions { extended_l2: true, cluster_bytes: 16_384, ..preallocated() };
        let storage = Storage::memory(512);
        let options = CreateOptions { size_bytes: 256 << 10, ..options };
        let header = create(&storage, None, &options).await.expect("valid");
        let l2 = l2_of(&storage, &header).await;
        let first = number_at(&storage, l2).await;
        put(&storage, l2, first | 0x200).await;
        put(&storage, l2 + 8, 0xff00_ff00 << 32).await;
        let repaired = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((repaired.corruptions, repaired.corruptions_fixed), (0, 1), "{repaired:?}");
        assert_eq!(
            (number_at(&storage, l2).await, number_at(&storage, l2 + 8).await),
            (0, 0xff00_ff00 << 32)
        );
    });
}

#[test]
fn an_l1_entry_without_a_table_has_no_flags() {
    sim::run(1, async {
        for wrong in [COPIED, 1 << 56, COPIED | 1] {
            let (storage, header) = image(CreateOptions::default()).await;
            put(&storage, header.l1_offset, wrong).await;
            let found = check(&storage, Repair::Nothing).await.expect("a header");
            assert_eq!((found.corruptions, found.leaks), (1, 0), "{found:?}");
            let repaired = check(&storage, Repair::All).await.expect("a header");
            assert_eq!((repaired.corruptions, repaired.corruptions_fixed), (0, 1), "{repaired:?}");
            assert_eq!(number_at(&storage, header.l1_offset).await, 0);
        }
    });
}

/// The content of a guest's cluster must not be "corrected" as a table.
#[test]
fn guest_data_that_resembles_a_table_is_unchanged() {
    for repair in [Repair::All, Repair::Forced] {
        sim::run(1, async move {
            let (storage, header) = image(CreateOptions { size_bytes: 4 << 20, ..preallocated() }).await;
            let l2 = l2_of(&storage, &header).await;
            let data = number_at(&storage, l2).await & !COPIED;
            metadata_io::write(&storage, data, &[0x3f; 4096]).await.expect("memory");
            let second = number_at(&storage, header.l1_offset + 8).await;
            assert_ne!(second, 0);
            put(&storage, header.l1_offset + 8, data | COPIED).await;
            let report = check(&storage, repair).await.expect("a header");
            assert_eq!(metadata_io::read(&storage, data, 4096).await.expect("memory"), [0x3f; 4096]);
            if repair == Repair::All {
                assert!(report.corruptions > 0 && report.lost.is_empty(), "{report:?}");
            } else {
                assert_eq!((report.corruptions, report.lost), (0, vec![range(2 << 20, 2 << 20)]));
                assert_eq!(number_at(&storage, header.l1_offset + 8).await, 0);
            }
        });
    }
}

#[test]
fn guest_data_on_metadata_is_discarded_only_by_force() {
    let (refused, forced) = ambiguous(async |storage, header| {
        let l2 = l2_of(storage, header).await;
        put(storage, l2 + 8, header.l1_offset | COPIED).await;
    });
    assert!(refused.corruptions > 0, "{refused:?}");
    assert_eq!(forced.lost, [range(4096, 4096)]);
}

#[test]
fn ranges_name_the_snapshots_that_share_a_table() {
    sim::run(1, async {
        let (storage, header) = with_old_snapshots(preallocated(), 1).await;
        let l2 = l2_of(&storage, &header).await;
        put(&storage, l2 + 8, 0x200).await;
        put(&storage, l2 + 16, 0x200).await;
        let report = check(&storage, Repair::Forced).await.expect("a header");
        let in_snapshot = GuestRange { snapshot: Some(String::new()), ..range(4096, 8192) };
        assert_eq!(report.lost, [range(4096, 8192), in_snapshot]);
    });
}

/// Clusters of a data file have no refcounts; only this check keeps two entries from sharing one.
#[test]
fn data_file_clusters_lie_at_their_guest_offset() {
    sim::run(1, async {
        let options = CreateOptions { data_file: Some("data".into()), ..preallocated() };
        let (storage, header) = image(options).await;
        let l2 = l2_of(&storage, &header).await;
        let first = number_at(&storage, l2).await;
        put(&storage, l2 + 8, first).await;
        let found = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((found.corruptions, found.leaks), (1, 0), "{found:?}");
        assert_eq!(number_at(&storage, l2 + 8).await, first);
        let repaired = check(&storage, Repair::Forced).await.expect("a header");
        assert_eq!((repaired.corruptions, repaired.corruptions_fixed), (0, 1), "{repaired:?}");
        assert_eq!(number_at(&storage, l2 + 8).await, 1);
        assert_eq!(number_at(&storage, l2).await, first);
    });
}

#[test]
fn shared_cluster_is_reported_and_counted() {
    let report = damaged(async |storage, header| {
        let l2 = l2_of(storage, header).await;
        put(storage, l2, number_at(storage, l2 + 8).await).await;
    });
    // One cluster is free, one has too low a refcount; the flags agree with the stored numbers.
    assert_eq!((report.leaks, report.corruptions), (1, 1), "{report:?}");
}

#[test]
fn wrong_flags_are_corrected() {
    let report = damaged(async |storage, header| {
        let l2 = l2_of(storage, header).await;
        put(storage, l2, number_at(storage, l2).await & !COPIED).await;
        put(storage, header.l1_offset, l2).await;
    });
    assert_eq!((report.leaks, report.corruptions), (0, 2), "{report:?}");
}

/// Damage as after the loss of an internal snapshot that shared all clusters.
#[test]
fn repair_of_leaks_sets_flags_of_lowered_refcounts() {
    sim::run(1, async {
        let (storage, header) = image(preallocated()).await;
        let (l2, block) =
            (l2_of(&storage, &header).await, number_at(&storage, header.refcount_table_offset).await);
        let mut counts = metadata_io::read(&storage, block, 4096).await.expect("memory");
        let mut owned = vec![(header.l1_offset, l2)];
        for at in (l2..l2 + 512).step_by(8) {
            owned.push((at, number_at(&storage, at).await & !COPIED));
        }
        for (at, cluster) in owned {
            put(&storage, at, cluster).await;
            refcount_entries::put(&mut counts, 4, (cluster / 4096) as usize, 2);
        }
        metadata_io::write(&storage, block, &counts).await.expect("memory");
        let found = check(&storage, Repair::Nothing).await.expect("a header");
        assert_eq!((found.leaks, found.corruptions), (65, 0), "{found:?}");
        let repaired = check(&storage, Repair::Leaks).await.expect("a header");
        assert_eq!((repaired.leaks_fixed, repaired.leaks, repaired.corruptions), (65, 0, 0), "{repaired:?}");
        let rechecked = check(&storage, Repair::Nothing).await.expect("a header");
        assert_eq!((rechecked.leaks, rechecked.corruptions), (0, 0), "{rechecked:?}");
    });
}

#[test]
fn reserved_bits_are_cleared_and_the_clusters_stay() {
    sim::run(1, async {
        let (storage, header) = image(preallocated()).await;
        let l2 = l2_of(&storage, &header).await;
        let first = number_at(&storage, l2).await;
        put(&storage, l2, first | 0x3f00_0000_0000_01fe).await;
        put(&storage, l2 + 8, 1 << 56).await;
        let found = check(&storage, Repair::Leaks).await.expect("a header");
        assert_eq!((found.leaks_fixed, found.corruptions), (1, 2), "{found:?}");
        let repaired = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((repaired.corruptions_fixed, repaired.corruptions), (2, 0), "{repaired:?}");
        assert_eq!((number_at(&storage, l2).await, number_at(&storage, l2 + 8).await), (first, 0));
    });
}

/// Snapshots as old programs wrote them, without extra data.
async fn with_old_snapshots(options: CreateOptions, count: u32) -> (Storage, Qcow2Header) {
    let (storage, mut header) = image(options).await;
    let (l1, table) = (storage.size_bytes(), storage.size_bytes() + 4096);
    put(&storage, l1, l2_of(&storage, &header).await).await;
    let entry = |number: u32| snapshot::InternalSnapshot {
        l1_offset: l1,
        l1_entries: 1,
        id: number.to_string().into_bytes(),
        vm_state_bytes: 77,
        ..snapshot::InternalSnapshot::default()
    };
    let entries: Vec<_> = (1..=count).map(entry).collect();
    metadata_io::write(&storage, table, &snapshot::encode(&entries).expect("short")).await.expect("memory");
    (header.snapshots, header.snapshots_offset) = (count, table);
    write_header(&storage, &header).await.expect("fits");
    (storage, header)
}

#[test]
fn snapshots_without_size_get_the_disk_size() {
    sim::run(1, async {
        for (version, count) in [(3, 1), (3, 200), (2, 3)] {
            let (storage, header) =
                with_old_snapshots(CreateOptions { version, ..preallocated() }, count).await;
            let found = check(&storage, Repair::Nothing).await.expect("a header");
            let incomplete =
                found.findings.iter().filter(|finding| finding.contains("is incomplete")).count();
            assert_eq!(incomplete, if version == 3 { count as usize } else { 0 }, "{found:?}");
            let repaired = check(&storage, Repair::All).await.expect("a header");
            assert_eq!((repaired.corruptions, repaired.leaks), (0, 0), "{repaired:?}");
            // The space of the new table was free and is not a finding.
            let free = |report: &CheckReport| {
                report.findings.iter().filter(|finding| finding.contains("refcount=0")).count()
            };
            assert_eq!(free(&repaired), free(&found), "{repaired:?}");
            let after = read_header(&storage).await.expect("a header");
            let (snapshots, _) = snapshot::read(&storage, &after).await.expect("a table");
            assert_eq!(snapshots.len(), count as usize);
            for snapshot in snapshots {
                let bytes = (version == 3).then_some(header.size_bytes);
                assert_eq!((snapshot.disk_bytes, snapshot.vm_state_bytes), (bytes, 77));
            }
            assert_eq!(check(&storage, Repair::All).await.expect("a header").corruptions_fixed, 0);
        }
    });
}

#[test]
fn missing_raw_data_file_is_an_error() {
    sim::run(1, async {
        let (storage, mut header) = image(preallocated()).await;
        header.autoclear |= autoclear::RAW_DATA_FILE;
        write_header(&storage, &header).await.expect("fits");
        for repair in [Repair::Nothing, Repair::Leaks] {
            let found = check(&storage, repair).await.expect("a header");
            assert_eq!((found.corruptions, found.corruptions_fixed), (1, 0), "{found:?}");
        }
        let repaired = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((repaired.corruptions, repaired.corruptions_fixed), (0, 1), "{repaired:?}");
        assert_eq!(read_header(&storage).await.expect("a header").autoclear, 0);
    });
}

#[test]
fn snapshots_are_completed_before_the_version_is_raised() {
    sim::run(1, async {
        let (storage, header) = with_old_snapshots(CreateOptions { version: 2, ..preallocated() }, 3).await;
        // Corrects the refcounts of the hand-made tables.
        check(&storage, Repair::All).await.expect("a header");
        let image = Qcow2Image::open_for_maintenance(storage).await.expect("valid");
        image.complete_snapshots().await.expect("memory");
        let upgrade = Amendment { upgrade: true, lazy_refcounts: None };
        image.amend(upgrade).await.expect("memory");
        image.flush().await.expect("memory");
        let storage = image.file.storage();
        let after = read_header(storage).await.expect("a header");
        let (snapshots, _) = snapshot::read(storage, &after).await.expect("a table");
        assert_eq!((after.version, snapshots.len()), (3, 3));
        for snapshot in snapshots {
            assert_eq!((snapshot.disk_bytes, snapshot.vm_state_bytes), (Some(header.size_bytes), 77));
        }
        let clean = check(storage, Repair::Nothing).await.expect("a header");
        assert_eq!((clean.corruptions, clean.leaks), (0, 0), "{clean:?}");
    });
}

#[test]
fn a_snapshot_table_that_cannot_be_counted_stays() {
    sim::run(1, async {
        let (storage, header) = with_old_snapshots(preallocated(), 1).await;
        // An unreadable L1 table prevents a rebuild of the refcounts, and their block is missing.
        put(&storage, header.snapshots_offset, 1 << 40).await;
        put(&storage, header.refcount_table_offset, 0x200).await;
        let before = storage.size_bytes();
        let report = check(&storage, Repair::All).await.expect("a header");
        assert!(report.findings.iter().any(|finding| finding.contains("is incomplete")), "{report:?}");
        let after = read_header(&storage).await.expect("a header");
        assert_eq!((after.snapshots_offset, storage.size_bytes()), (header.snapshots_offset, before));
    });
}

#[test]
fn lost_refcounts_are_rebuilt() {
    // No block at all, one inside a cluster, one beyond the end, one on a guest's cluster.
    for wrong in [0, 0x200, 1 << 40, 0x4000 + 3 * 4096] {
        let report = damaged(async move |storage, header| {
            put(storage, header.refcount_table_offset, wrong).await;
        });
        assert!(report.corruptions > 0, "{report:?}");
    }
}

#[test]
fn low_refcounts_are_raised_and_marks_cleared() {
    let report = damaged(async |storage, header| {
        let block = number_at(storage, header.refcount_table_offset).await;
        let mut numbers = metadata_io::read(storage, block, 4096).await.expect("memory");
        (5..9).for_each(|index| refcount_entries::put(&mut numbers, 4, index, 0));
        refcount_entries::put(&mut numbers, 4, 2, 7);
        metadata_io::write(storage, block, &numbers).await.expect("memory");
        let marked =
            Qcow2Header { incompatible: incompatible::DIRTY | incompatible::CORRUPT, ..header.clone() };
        write_header(storage, &marked).await.expect("fits");
    });
    assert_eq!(report.leaks, 1);
    assert!(report.corruptions >= 4, "{report:?}");
    sim::run(1, async {
        let (storage, header) = image(preallocated()).await;
        let marked = Qcow2Header { incompatible: incompatible::DIRTY, ..header.clone() };
        write_header(&storage, &marked).await.expect("fits");
        check(&storage, Repair::All).await.expect("a header");
        assert_eq!(read_header(&storage).await, Ok(header));
    });
}

#[test]
fn repair_of_leaks_repairs_only_leaks() {
    sim::run(1, async {
        let (storage, header) = image(preallocated()).await;
        let l2 = l2_of(&storage, &header).await;
        put(&storage, l2, 0).await;
        put(&storage, l2 + 8, 1 << 56).await;
        let report = check(&storage, Repair::Leaks).await.expect("a header");
        assert_eq!((report.leaks_fixed, report.corruptions), (2, 1), "{report:?}");
        // One of the leaks may be the cluster that this entry refers to.
        put(&storage, l2 + 8, 1 << 40).await;
        put(&storage, l2 + 16, 0).await;
        let report = check(&storage, Repair::Leaks).await.expect("a header");
        assert_eq!((report.leaks_fixed, report.leaks, report.possible_leaks), (0, 0, 1), "{report:?}");
    });
}

#[test]
fn snapshots_and_bitmaps_are_counted_and_never_freed_unread() {
    sim::run(1, async {
        let (storage, mut header) = image(preallocated()).await;
        let end = storage.size_bytes();
        // A snapshot that shares everything, and a bitmap of one cluster: five clusters at the
        // end.
        let (l1, table) = (end, end + 4096);
        put(&storage, l1, l2_of(&storage, &header).await).await;
        let entry = snapshot::InternalSnapshot {
            l1_offset: l1,
            l1_entries: 1,
            id: b"1".to_vec(),
            disk_bytes: Some(header.size_bytes),
            ..snapshot::InternalSnapshot::default()
        };
        metadata_io::write(&storage, table, &snapshot::encode(&[entry]).expect("short"))
            .await
            .expect("memory");
        let (directory, bits_table, bits) = (end + 2 * 4096, end + 3 * 4096, end + 4 * 4096);
        put(&storage, bits_table, bits).await;
        metadata_io::write(&storage, bits, &[0; 4096]).await.expect("memory");
        let entry = bitmap::BitmapEntry {
            table_offset: bits_table,
            table_entries: 1,
            flags: 0,
            granularity_bits: 16,
            name: b"b".to_vec(),
            extra: Vec::new(),
        };
        let encoded = bitmap::encode(&[entry]);
        metadata_io::write(&storage, directory, &encoded).await.expect("memory");
        let place = FileRegion { offset: directory, length: encoded.len() as u64 };
        header.bitmaps = Some(BitmapsExtension { count: 1, directory: place });
        header.autoclear = autoclear::BITMAPS;
        (header.snapshots, header.snapshots_offset) = (1, table);
        write_header(&storage, &header).await.expect("fits");

        let report = check(&storage, Repair::All).await.expect("a header");
        // Five new clusters; 64 clusters and their table shared; and the flags of all of them.
        assert_eq!(
            (report.corruptions_fixed, report.corruptions, report.leaks),
            (70 + 65, 0, 0),
            "{report:?}"
        );
        put(&storage, table, 0x123).await;
        let report = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((report.corruptions, report.leaks, report.leaks_fixed), (1, 0, 0), "{report:?}");
        assert!(report.possible_leaks > 0, "{report:?}");
    });
}

#[test]
fn any_damaged_byte_is_survived() {
    sim::run(1, async {
        let (storage, header) = image(preallocated()).await;
        let content = storage.read_all().await.expect("memory");
        // Header, refcount table, a block, the L1 table, an L2 table.
        let ranges =
            [0..112, 4096..4112, 8192..8300, header.l1_offset as usize..header.l1_offset as usize + 8];
        for at in ranges.into_iter().flatten() {
            for value in [0x00, 0x01, 0x80, 0xff] {
                let storage = Storage::with_content(&content).await;
                metadata_io::write(&storage, at as u64, &[value]).await.expect("memory");
                let Ok(report) = check(&storage, Repair::All).await else { continue };
                if report.is_consistent() {
                    let rechecked = check(&storage, Repair::Nothing).await.expect("still one");
                    assert!(
                        rechecked.is_consistent() && rechecked.leaks == 0,
                        "byte {at} = {value}: {rechecked:?}"
                    );
                }
            }
        }
    });
}

#[test]
fn lost_refcount_table_is_rebuilt() {
    for (at, wrong) in [(48, 0), (48, 0x1200), (48, 1 << 60), (48, 1 << 40), (56, 0), (56, u64::MAX << 32)] {
        let report = damaged(async move |storage, _| {
            put(storage, at, wrong).await;
            // Autoclear bits are cleared first, although the header is still invalid.
            put(storage, 88, 1 << 60).await;
        });
        assert!(report.corruptions > 64, "each cluster counts as free: {report:?}");
    }
}

#[test]
fn reserved_fields_of_the_header_are_cleared() {
    sim::run(1, async {
        let (storage, header) = image(CreateOptions::default()).await;
        put(&storage, 104, 1).await;
        let found = check(&storage, Repair::Nothing).await.expect("a header");
        assert_eq!((found.corruptions, found.ambiguous.len()), (1, 0), "{found:?}");
        let repaired = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((repaired.corruptions, repaired.corruptions_fixed), (0, 1), "{repaired:?}");
        assert_eq!((number_at(&storage, 104).await, read_header(&storage).await), (0, Ok(header)));
    });
}

#[test]
fn impossible_file_names_are_reported() {
    let altered = |change: fn(&mut Qcow2Header)| {
        sim::run(1, async move {
            let (storage, mut header) = image(CreateOptions::default()).await;
            change(&mut header);
            write_header(&storage, &header).await.expect("fits");
            check(&storage, Repair::All).await.expect("a header")
        })
    };
    assert_eq!(altered(|_| ()).corruptions, 0);
    for (part, change) in [
        ("unknown format", (|header| header.backing = Some(backing_of("r!w"))) as fn(&mut Qcow2Header)),
        ("not a file name", |header| {
            header.incompatible |= incompatible::DATA_FILE;
            header.data_file = Some("\0data".into());
        }),
        ("without a name", |header| header.incompatible |= incompatible::DATA_FILE),
        ("no external data file", |header| header.data_file = Some("data".into())),
    ] {
        let report = altered(change);
        assert!(report.corruptions > 0, "{report:?}");
        assert!(report.findings.iter().any(|finding| finding.contains(part)), "{part}: {report:?}");
    }
    assert_eq!(altered(|header| header.backing = Some(backing_of("vmdk"))).corruptions, 0);
}

/// A length that ends before the key slots would free their clusters as leaks.
#[test]
fn short_luks_header_frees_no_clusters() {
    sim::run(1, async {
        let mut area = [&b"LUKS\xba\xbe"[..], &[0; 10_234]].concat();
        // Number of key bytes, and first sector and stripes of the last slot: the end is 10,240.
        area[108..112].copy_from_slice(&64_u32.to_be_bytes());
        area[208 + 7 * 48 + 40..][..4].copy_from_slice(&16_u32.to_be_bytes());
        area[208 + 7 * 48 + 44..][..4].copy_from_slice(&32_u32.to_be_bytes());
        let (storage, _) = image(CreateOptions { luks: Some(area), ..CreateOptions::default() }).await;
        let report = check(&storage, Repair::Nothing).await.expect("a header");
        assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{report:?}");
        // The length in the encryption extension.
        assert_eq!(number_at(&storage, 128).await, 10_240);
        put(&storage, 128, 4096).await;
        for repair in [Repair::Leaks, Repair::All, Repair::Forced] {
            let report = check(&storage, repair).await.expect("a header");
            assert!(report.corruptions > 0 && report.leaks_fixed == 0, "{report:?}");
            assert!(report.findings.iter().any(|finding| finding.contains("key slot 7 ends")), "{report:?}");
        }
        put(&storage, 128, 10_240).await;
        let report = check(&storage, Repair::Nothing).await.expect("a header");
        assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{report:?}");
    });
}

/// Extensions after one of a wrong length may have been misread.
#[test]
fn an_extension_of_a_wrong_length_is_reported_and_stays() {
    sim::run(1, async {
        let options = CreateOptions {
            luks: Some([&b"LUKS\xba\xbe"[..], &[0; 9994]].concat()),
            ..CreateOptions::default()
        };
        let (storage, _) = image(options).await;
        // The extension also covers the next one, the feature names; the rest can still be parsed.
        let names_bytes = number_at(&storage, 136).await & 0xffff_ffff;
        let length = 16 + 8 + names_bytes.next_multiple_of(8);
        put(&storage, 112, 0x0537_be77_0000_0000 | length).await;
        // A reserved byte, which would be cleared otherwise.
        put(&storage, 104, 1).await;
        let before = metadata_io::read(&storage, 0, 4096).await.expect("memory");
        let expected = format!("{length} bytes instead of 16");
        let report = check(&storage, Repair::All).await.expect("a header");
        assert!(report.findings.iter().any(|finding| finding.contains(&expected)), "{report:?}");
        assert_eq!(metadata_io::read(&storage, 0, 4096).await.expect("memory"), before);
    });
}

fn backing_of(format: &str) -> BackingReference {
    BackingReference { name: "base".into(), format: Some(format.into()) }
}

#[test]
fn a_bitmap_with_a_table_of_another_size_is_dropped() {
    sim::run(1, async {
        let (storage, mut header) = image(preallocated()).await;
        let end = storage.size_bytes();
        let entry = bitmap::BitmapEntry {
            table_offset: end + 4096,
            table_entries: 2,
            flags: 0,
            granularity_bits: 16,
            name: b"b".to_vec(),
            extra: Vec::new(),
        };
        let encoded = bitmap::encode(&[entry]);
        metadata_io::write(&storage, end, &encoded).await.expect("memory");
        metadata_io::write(&storage, end + 4096, &[0; 4096]).await.expect("memory");
        let place = FileRegion { offset: end, length: encoded.len() as u64 };
        header.bitmaps = Some(BitmapsExtension { count: 1, directory: place });
        header.autoclear = autoclear::BITMAPS;
        write_header(&storage, &header).await.expect("fits");
        let found = check(&storage, Repair::Nothing).await.expect("a header");
        assert!(found.findings.iter().any(|finding| finding.contains("instead of 1")), "{found:?}");
        let repaired = check(&storage, Repair::All).await.expect("a header");
        assert_eq!((repaired.corruptions, repaired.leaks), (0, 0), "{repaired:?}");
        assert_eq!(read_header(&storage).await.expect("a header").bitmaps, None);
    });
}

#[test]
fn overlapping_tables_are_read_up_to_a_limit() {
    sim::run(1, async {
        let (storage, mut header) = image(preallocated()).await;
        let table = storage.size_bytes();
        let entry = |number: u32| snapshot::InternalSnapshot {
            l1_offset: table + 4096 * u64::from(number),
            l1_entries: 4 << 20,
            id: number.to_string().into_bytes(),
            disk_bytes: Some(header.size_bytes),
            instructions: Some(u64::MAX),
            ..snapshot::InternalSnapshot::default()
        };
        // The second and the third overlap an earlier one, by 64 MiB together.
        let entries: Vec<_> = (1..=5).map(entry).collect();
        metadata_io::write(&storage, table, &snapshot::encode(&entries).expect("short"))
            .await
            .expect("memory");
        metadata_io::grow(&storage, table + (256 << 20)).await.expect("memory");
        (header.snapshots, header.snapshots_offset) = (5, table);
        write_header(&storage, &header).await.expect("fits");
        let found = check(&storage, Repair::Nothing).await.expect("a header");
        let skipped = found.findings.iter().filter(|finding| finding.contains("is not read: too many"));
        assert_eq!(skipped.count(), 2, "{:#?}", &found.findings[..10]);
    });
}
