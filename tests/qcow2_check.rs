//! `weir image check` beside `qemu-img check`: equal verdicts and numbers on images made by QEMU,
//! intact and damaged; both accept a repaired image.

use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::harness::{Scratch, create_encrypted, qemu_img, qemu_io, text, weir_image as weir};

/// An image of 8 MiB with these options and some data: compressed clusters, zeroes, holes.
fn image(scratch: &Scratch, name: &str, options: &str) -> PathBuf {
    let path = scratch.path(name);
    let data = scratch.path("data.raw");
    let options = options.replace("DATA", text(&data));
    let mut create = qemu_img(["create", "-q", "-f", "qcow2"]);
    if !options.is_empty() {
        create = create.args(["-o", &options]);
    }
    create.args([text(&path), "8M"]).succeeds();
    let mut commands = vec!["write -P 1 0 1M", "write -P 2 3M 700k", "write -z 5M 64k", "discard 64k 64k"];
    // QEMU compresses whole clusters, and only into unallocated ones.
    if !["data_file", "preallocation", "2M"].iter().any(|option| options.contains(option)) {
        commands.push("write -c -P 3 6M 128k");
    }
    qemu_io(["-f", "qcow2"], commands, &path);
    path
}

#[track_caller]
fn assert_equal_checks(path: &Path, label: &str) -> (i32, Value) {
    let theirs = qemu_img(["check", "--output=json", "-f", "qcow2", text(path)]).run();
    let ours = weir(&["check", "--output=json", text(path)]).run();
    let (their_code, our_code, stderr) = (theirs.code(), ours.code(), ours.stderr());
    let parse = |printed: String| serde_json::from_str::<Value>(&printed).unwrap_or(Value::Null);
    let (theirs, ours) = (parse(theirs.stdout()), parse(ours.stdout()));
    assert_eq!((our_code, &ours), (their_code, &theirs), "{label}: standard error of weir:\n{stderr}");
    (our_code, ours)
}

const FEATURES: [&str; 12] = [
    "",
    "compat=0.10",
    "cluster_size=512,refcount_bits=1",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=4k,refcount_bits=8,lazy_refcounts=on",
    "cluster_size=2M,refcount_bits=32",
    "extended_l2=on,cluster_size=16k",
    "extended_l2=on,cluster_size=2M",
    "compression_type=zstd",
    "preallocation=metadata",
    "data_file=DATA",
    "data_file=DATA,data_file_raw=on",
];

#[test]
fn images_of_qemu_are_checked_equally() {
    let scratch = Scratch::new();
    for options in FEATURES {
        // A refcount of one bit cannot count the compressed clusters that share a cluster.
        if options.contains("refcount_bits=1") {
            continue;
        }
        let path = image(&scratch, "image.qcow2", options);
        assert_eq!(assert_equal_checks(&path, options).0, 0, "{options}");
        if !options.contains("data_file") {
            qemu_img(["snapshot", "-c", "one", text(&path)]).succeeds();
            qemu_io(["-f", "qcow2"], ["write -P 7 256k 1M"], &path);
            qemu_img(["snapshot", "-c", "two", text(&path)]).succeeds();
            assert_equal_checks(&path, &format!("{options} with snapshots"));
        }
        if !options.contains("compat=0.10") {
            qemu_img(["bitmap", "--add", "-g", "4k", text(&path), "changes"]).succeeds();
            assert_equal_checks(&path, &format!("{options} with a bitmap"));
        }
    }
}

#[test]
fn encrypted_image_is_checked_without_its_key() {
    let scratch = Scratch::new();
    let path = scratch.path("image.qcow2");
    create_encrypted(&path);
    assert_eq!(weir(&["check", "--output=json", text(&path)]).json()["total-clusters"], 128);
}

fn number(file: &fs::File, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, offset).unwrap();
    u64::from_be_bytes(bytes)
}

/// Offsets of the metadata of an image.
struct MetadataOffsets {
    file: fs::File,
    l1: u64,
    l2: u64,
    refcount_table: u64,
    block: u64,
}

fn places(path: &Path) -> MetadataOffsets {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let (l1, refcount_table) = (number(&file, 40), number(&file, 48));
    let (l2, block) = (number(&file, l1) & !(1 << 63), number(&file, refcount_table));
    MetadataOffsets { file, l1, l2, refcount_table, block }
}

impl MetadataOffsets {
    fn put(&self, offset: u64, value: u64) {
        self.file.write_all_at(&value.to_be_bytes(), offset).unwrap();
    }
}

type ImageDamage = (&'static str, fn(&MetadataOffsets));

const DAMAGES: [ImageDamage; 8] = [
    ("a lost entry", |at| at.put(at.l2 + 8 * 4, 0)),
    ("two owners", |at| at.put(at.l2 + 8 * 4, number(&at.file, at.l2 + 8 * 5))),
    ("a flag", |at| at.put(at.l2, number(&at.file, at.l2) & !(1 << 63))),
    ("the table's flag", |at| at.put(at.l1, at.l2)),
    ("refcounts too low and too high", |at| at.put(at.block + 8, 0x0000_0002_0001_0000)),
    ("clusters counted too often", |at| at.put(at.block + 8 * 3, 0x0002_0001_0003_0001)),
    ("reserved bits", |at| {
        at.put(at.l2, number(&at.file, at.l2) | 0x2000_0000_0000_0002);
        at.put(at.l2 + 8 * 4, number(&at.file, at.l2 + 8 * 4) | 0x0100);
    }),
    ("reserved bits alone", |at| at.put(at.l2 + 8 * 4, 0x0100_0000_0000_0000)),
];

#[test]
fn damage_is_found_equally_and_repairs_satisfy_both() {
    let scratch = Scratch::new();
    for (label, damage) in DAMAGES {
        let path = image(&scratch, "image.qcow2", "");
        damage(&places(&path));
        let (code, _) = assert_equal_checks(&path, label);
        assert!(code == 2 || code == 3, "{label}: {code}");
        weir(&["check", "-q", "-r", "all", text(&path)]).succeeds();
        assert_eq!(assert_equal_checks(&path, label).0, 0, "{label}: repaired");
    }
}

#[test]
fn snapshots_with_missing_extra_data_are_checked_equally() {
    let scratch = Scratch::new();
    for (options, code) in [("", 2), ("compat=0.10", 0)] {
        let path = image(&scratch, "image.qcow2", options);
        qemu_img(["snapshot", "-c", "one", text(&path)]).succeeds();
        let at = places(&path);
        let table = number(&at.file, 64);
        // Without the extra data, ID and name follow the fixed part directly.
        let mut names = [0; 8];
        at.file.read_exact_at(&mut names[..4], table + 64).unwrap();
        assert_eq!(&names[..4], b"1one");
        at.put(table + 32, 0);
        at.put(table + 40, u64::from_be_bytes(names));
        assert_eq!(assert_equal_checks(&path, options).0, code, "{options}");
        weir(&["check", "-q", "-r", "all", text(&path)]).succeeds();
        assert_eq!(assert_equal_checks(&path, options).0, 0, "{options}: repaired");
        qemu_io(["-f", "qcow2"], ["write -P 9 0 2M"], text(&path));
        qemu_img(["snapshot", "-a", "one", text(&path)]).succeeds();
        qemu_io(["-f", "qcow2"], ["read -P 1 128k 512k"], text(&path));
    }
}

/// Damage to refcounts that weir and QEMU repair in different ways.
const LOST_REFCOUNTS: [ImageDamage; 6] = [
    ("no refcount table", |at| at.put(56, 0)),
    ("a refcount table between clusters", |at| at.put(48, 0x1_0200)),
    ("a refcount table beyond the end", |at| at.put(48, 1 << 40)),
    ("no refcount block", |at| at.put(at.refcount_table, 0)),
    ("a refcount block on guest data", |at| at.put(at.refcount_table, number(&at.file, at.l2) & !(1 << 63))),
    ("a refcount block beyond the end", |at| at.put(at.refcount_table, 1 << 40)),
];

#[test]
fn lost_refcounts_are_rebuilt() {
    let scratch = Scratch::new();
    for (label, damage) in LOST_REFCOUNTS {
        let path = image(&scratch, "image.qcow2", "");
        damage(&places(&path));
        assert_eq!(weir(&["check", "-q", text(&path)]).run().code(), 2, "{label}");
        weir(&["check", "-q", "--repair", text(&path)]).succeeds();
        assert_eq!(assert_equal_checks(&path, label).0, 0, "{label}: repaired");
    }
}

/// Damage that makes the location of guest data ambiguous: offset and length of the affected range.
const AMBIGUOUS: [(ImageDamage, u64, u64); 4] = [
    (("a cluster beyond the end", |at| at.put(at.l2, 1 << 40)), 0, 65_536),
    (("a cluster inside another", |at| at.put(at.l2 + 8, number(&at.file, at.l2) | 512)), 65_536, 65_536),
    (("an L2 table inside a cluster", |at| at.put(at.l1, at.l2 | 512)), 0, 8 << 20),
    (("an L2 table beyond the end", |at| at.put(at.l1, 1 << 40)), 0, 8 << 20),
];

#[test]
fn ambiguous_content_stays_unless_forced() {
    let scratch = Scratch::new();
    for ((label, damage), offset, length) in AMBIGUOUS {
        let path = image(&scratch, "image.qcow2", "");
        let at = places(&path);
        damage(&at);
        let entries = [number(&at.file, at.l1), number(&at.file, at.l2), number(&at.file, at.l2 + 8)];
        let refused = weir(&["check", "-r", "all", "--output=json", text(&path)]).run();
        assert_eq!(refused.code(), 2, "{label}: {}", refused.stderr());
        assert!(refused.stderr().contains("--force"), "{label}: {}", refused.stderr());
        let report: Value = serde_json::from_str(&refused.stdout()).unwrap();
        let ranges = serde_json::json!([{ "offset": offset, "length": length }]);
        assert_eq!(report["ambiguous-ranges"], ranges, "{label}");
        let after = [number(&at.file, at.l1), number(&at.file, at.l2), number(&at.file, at.l2 + 8)];
        assert_eq!(after, entries, "{label}: ambiguous data stays");
        let forced = weir(&["check", "-r", "all", "--force", text(&path)]).run();
        assert_eq!(forced.code(), 0, "{label}: {}", forced.stderr());
        let lost = format!("Lost: {length} bytes at {offset:#x} of the disk\n");
        assert!(forced.stderr().contains(&lost), "{label}: {}", forced.stderr());
        assert_eq!(assert_equal_checks(&path, label).0, 0, "{label}: discarded by force");
    }
    let refused = weir(&["check", "--force", text(&scratch.path("image.qcow2"))]).run();
    assert_eq!(refused.code(), 2, "--force without a repair");
}

/// Otherwise the guest would read old data of the backing file.
#[test]
fn zeroes_with_a_bad_offset_stay_zeroes() {
    let scratch = Scratch::new();
    let base = scratch.file("base.raw", vec![0xff; 1 << 20]);
    for (options, zeroes) in [("cluster_size=64k", "64k"), ("cluster_size=64k,extended_l2=on", "32k")] {
        let path = scratch.path("image.qcow2");
        let create = qemu_img(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&base), "-o", options]);
        create.arg(&path).succeeds();
        qemu_io(["-f", "qcow2"], ["write -P 1 0 64k", "write -z 0 64k"], &path);
        let at = places(&path);
        at.put(at.l2, number(&at.file, at.l2) | 0x200);
        if options.contains("extended") {
            // The subclusters of the second half refer to the backing file.
            at.put(at.l2 + 8, 0xffff << 32);
        }
        assert_eq!(weir(&["check", "-q", text(&path)]).run().code(), 2, "{options}");
        weir(&["check", "-q", "-r", "all", text(&path)]).succeeds();
        assert_eq!(weir(&["check", "-q", text(&path)]).run().code(), 0, "{options}");
        qemu_img(["check", "-q", text(&path)]).succeeds();
        let mut reads = vec![format!("read -P 0 0 {zeroes}"), "read -P 0xff 64k 64k".to_owned()];
        if options.contains("extended") {
            reads.push("read -P 0xff 32k 32k".to_owned());
        }
        qemu_io(["-f", "qcow2"], reads, &path);
    }
}

#[test]
fn flags_of_an_empty_l1_entry_are_cleared() {
    let scratch = Scratch::new();
    let path = scratch.path("image.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&path), "1G"]).succeeds();
    let at = places(&path);
    at.put(at.l1 + 8, 1 << 63);
    assert_ne!(qemu_img(["check", text(&path)]).run().code(), 0);
    assert_eq!(weir(&["check", "-q", text(&path)]).run().code(), 2);
    weir(&["check", "-q", "-r", "all", text(&path)]).succeeds();
    assert_eq!(assert_equal_checks(&path, "cleared").0, 0);
}

#[test]
fn repair_clears_the_dirty_mark() {
    let scratch = Scratch::new();
    let path = image(&scratch, "image.qcow2", "lazy_refcounts=on");
    let at = places(&path);
    at.put(72, 1);
    at.put(at.block + 8, 0);
    weir(&["check", "-q", "--repair=all", text(&path)]).succeeds();
    assert_eq!(number(&at.file, 72), 0, "the dirty bit");
    assert_eq!(assert_equal_checks(&path, "was dirty").0, 0);
}

#[test]
fn leaks_alone_are_freed_and_raw_images_have_nothing_to_check() {
    let scratch = Scratch::new();
    let path = image(&scratch, "image.qcow2", "");
    let at = places(&path);
    at.put(at.l2 + 8 * 4, 0);
    assert_eq!(weir(&["check", "-r", "leaks", "--output=json", text(&path)]).json()["leaks-fixed"], 1);
    let raw = scratch.sparse("disk.raw", 1 << 20);
    assert_eq!(weir(&["check", text(&raw)]).run().code(), 63);
}

/// The daemon refuses an image with the corrupt bit, so a check without errors reports the bit too.
#[test]
fn corrupt_mark_is_reported_and_cleared_by_repair() {
    let scratch = Scratch::new();
    let path = image(&scratch, "marked.qcow2", "");
    // Byte 79 is the lowest byte of the incompatible features; bit 1 is the corrupt bit.
    let file = fs::OpenOptions::new().write(true).open(&path).expect("an image");
    file.write_all_at(&[2], 79).expect("a header");
    let found = weir(&["check", text(&path)]).run();
    assert_eq!(found.code(), 0, "{}", found.stderr());
    assert!(found.stderr().contains("it is marked corrupt"), "{}", found.stderr());
    weir(&["check", "-r", "all", text(&path)]).succeeds();
    let rechecked = weir(&["check", text(&path)]).run();
    assert_eq!((rechecked.code(), rechecked.stderr()), (0, String::new()));
}
