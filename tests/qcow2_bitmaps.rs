//! Dirty bitmaps updated by weir and QEMU in turn: each sees exactly the writes of both.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness::{self, MIB, Scratch, Serve, TestClient, assert_contains, qemu_img, text, weir_image};

const KIB: u64 = 1024;
const DISK_BYTES: u64 = 8 * MIB;
/// Names and granularities.
const BITMAPS: [(&str, u64); 2] = [("fine", 4 * KIB), ("coarse", 64 * KIB)];

#[track_caller]
fn qemu_io(format: &str, commands: &[&str], name: &str) {
    harness::qemu_io(["-f", format, "-d", "unmap"], commands, name);
}

/// An image with both bitmaps, and `off`, which is disabled and has the first 64 KiB marked.
fn image(scratch: &Scratch, options: &str) -> PathBuf {
    let path = scratch.path("disk.qcow2");
    let size = DISK_BYTES.to_string();
    qemu_img(["create", "-q", "-f", "qcow2", "-o", options, text(&path), &size]).succeeds();
    qemu_img(["bitmap", "--add", "-g", "64k", text(&path), "off"]).succeeds();
    qemu_io("qcow2", &["write -P 1 0 1k"], text(&path));
    qemu_img(["bitmap", "--disable", text(&path), "off"]).succeeds();
    for (name, granularity) in BITMAPS {
        qemu_img(["bitmap", "--add", "-g", &granularity.to_string(), text(&path), name]).succeeds();
    }
    path
}

/// The expected content of the bitmaps, one flag per KiB.
struct BitmapModel(Vec<bool>);

impl BitmapModel {
    fn new() -> Self {
        Self(vec![false; (DISK_BYTES / KIB) as usize])
    }

    fn mark(&mut self, ranges: &[(u64, u64)]) {
        for &(at, length) in ranges {
            self.0[at as usize..(at + length) as usize].fill(true);
        }
    }

    fn marked(&self, granularity: u64) -> Vec<bool> {
        self.0.chunks((granularity / KIB) as usize).map(|granule| granule.contains(&true)).collect()
    }
}

#[track_caller]
fn granules(map: &str, granularity: u64) -> Vec<bool> {
    let map: Value = serde_json::from_str(map).unwrap();
    let extents = map.as_array().unwrap().iter();
    let granules = extents.flat_map(|extent| {
        let length = extent["length"].as_u64().unwrap();
        assert!(length.is_multiple_of(granularity), "{extent}");
        std::iter::repeat_n(extent["type"] == 1, (length / granularity) as usize)
    });
    granules.collect()
}

#[track_caller]
pub(crate) fn map_of(name: &str, uri: &[&str]) -> String {
    let context = format!("--map=qemu:dirty-bitmap:{name}");
    TestClient::new("nbdinfo").args(["--json", &context, "--"]).args(uri).succeeds()
}

/// Asserts that QEMU reads the bitmaps of the model, and that `check` finds no errors.
#[track_caller]
fn assert_qemu_reads(path: &Path, model: &BitmapModel) {
    qemu_img(["check", "-q", text(path)]).succeeds();
    for (name, granularity) in BITMAPS {
        let map = map_of(name, &["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, text(path), "]"]);
        assert!(granules(&map, granularity) == model.marked(granularity), "{name}: {map}");
    }
    let map = map_of("off", &["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", "off", text(path), "]"]);
    let marked = granules(&map, 64 * KIB);
    assert!(marked[0] && !marked[1..].contains(&true), "{map}");
}

fn flags(path: &Path) -> Value {
    let info = qemu_img(["info", "-U", "--output=json", text(path)]).json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().unwrap().iter();
    bitmaps.map(|bitmap| (bitmap["name"].as_str().unwrap().to_owned(), bitmap["flags"].clone())).collect()
}

fn served(scratch: &Scratch, path: &Path) -> Serve {
    Serve::new(scratch).arg(path).args(["--format", "qcow2"])
}

#[test]
fn weir_and_qemu_update_the_same_bitmaps() {
    let scratch = Scratch::new();
    for options in ["cluster_size=64k", "cluster_size=512", "cluster_size=16k,extended_l2=on"] {
        let path = image(&scratch, options);
        let mut model = BitmapModel::new();
        qemu_io("qcow2", &["write -P 2 3M 65k"], text(&path));
        model.mark(&[(3072, 65)]);

        let weir = served(&scratch, &path).args(["--bitmap", "fine", "--bitmap", "coarse"]).start();
        let uri = weir.uri("disk");
        let commands = [
            "write -P 3 100k 3k",
            "write -P 3 1M 128k",
            "write -z 2M 5k",
            "discard 4100k 200k",
            "read 5M 1M",
        ];
        qemu_io("raw", &commands, &uri);
        model.mark(&[(100, 3), (1024, 128), (2048, 5), (4100, 200)]);
        for (name, granularity) in BITMAPS {
            let map = map_of(name, &[&uri]);
            assert!(granules(&map, granularity) == model.marked(granularity), "{name}: {map}");
        }
        assert_eq!(
            flags(&path),
            json!({"off": [], "fine": ["in-use", "auto"], "coarse": ["in-use", "auto"]})
        );
        weir.stop();
        assert_eq!(flags(&path), json!({"off": [], "fine": ["auto"], "coarse": ["auto"]}));
        assert_qemu_reads(&path, &model);

        qemu_io("qcow2", &["write -P 4 6M 1k"], text(&path));
        model.mark(&[(6144, 1)]);
        let bench_options =
            ["bench", "-q", "-f", "qcow2", "-w", "-c", "10", "-s", "4k", "-o", "7M", "-S", "32k"];
        harness::weir(&bench_options).arg(&path).succeeds();
        model.mark(&(0..10).map(|number| (7168 + number * 32, 4)).collect::<Vec<_>>());
        assert_qemu_reads(&path, &model);
    }
}

#[test]
fn bitmaps_get_the_size_of_the_disk() {
    let scratch = Scratch::new();
    for options in ["cluster_size=64k", "cluster_size=512"] {
        let path = image(&scratch, options);
        let mut model = BitmapModel::new();
        let resize = |size: &str| {
            weir_image(&["resize", "-q", "-f", "qcow2", "--shrink", text(&path), size]).succeeds();
        };
        qemu_io("qcow2", &["write 3M 65k", "write 7M 64k"], text(&path));
        resize("12M");
        model.mark(&[(3072, 65), (7168, 64)]);
        model.0.resize(12 * 1024, false);
        // weir marks the added space; QEMU would not.
        model.mark(&[(8 * 1024, 4 * 1024)]);
        assert_qemu_reads(&path, &model);
        qemu_io("qcow2", &["write 11M 64k"], text(&path));
        resize("5M");
        model.0.truncate(5 * 1024);
        assert_qemu_reads(&path, &model);
    }
}

#[test]
fn bitmap_in_use_is_not_trusted() {
    let scratch = Scratch::new();
    let path = image(&scratch, "cluster_size=64k");
    let weir = served(&scratch, &path).start();
    qemu_io("raw", &["read 1M 64k", "flush"], &weir.uri("disk"));
    weir.crash();
    // The image has not changed.
    assert_qemu_reads(&path, &BitmapModel::new());
    let weir = served(&scratch, &path).start();
    qemu_io("raw", &["write -P 5 1M 64k", "flush"], &weir.uri("disk"));
    weir.crash();
    assert_eq!(flags(&path), json!({"off": [], "fine": ["in-use", "auto"], "coarse": ["in-use", "auto"]}));
    // Only leaked clusters are permitted.
    let checked = qemu_img(["check", text(&path)]).run();
    assert!(matches!(checked.code(), 0 | 3), "{}", checked.stdout());
    qemu_io("qcow2", &["read -P 5 1M 64k"], text(&path));
    let stderr = served(&scratch, &path).args(["--bitmap", "fine"]).fails();
    assert_contains(&stderr, &["bitmap \"fine\" is marked in-use and may be inconsistent"]);
    let stderr = served(&scratch, &path).args(["--bitmap", "off"]).fails();
    assert_contains(&stderr, &["bitmap \"off\" does not record", "read-only"]);
    // A further start and stop does not make them consistent.
    served(&scratch, &path).start().stop();
    assert_eq!(flags(&path), json!({"off": [], "fine": ["in-use", "auto"], "coarse": ["in-use", "auto"]}));
    for (name, granularity) in BITMAPS {
        qemu_img(["bitmap", "--remove", text(&path), name]).succeeds();
        let granularity = granularity.to_string();
        weir_image(&["bitmap", "--add", "-g", &granularity, text(&path), name]).succeeds();
    }
    let weir = served(&scratch, &path).start();
    qemu_io("raw", &["write -P 5 2M 64k"], &weir.uri("disk"));
    weir.stop();
    let mut model = BitmapModel::new();
    model.mark(&[(2048, 64)]);
    let _ = TestClient::new("qemu-img").args(["check", "-q", "-r", "leaks", text(&path)]).run();
    assert_qemu_reads(&path, &model);
}
