//! qemu-img: convert there and back, compare, map, info, bench.

use std::{fs, path::Path};

use crate::harness::{MIB, Scratch, Serve, assert_contains, qemu_img, text};

/// An image of 16 MiB: data, a hole, data that ends in the middle of a sector of 4096 bytes.
fn original(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.filled("original.raw", 3 * MIB);
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(12 * MIB).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0x5a; 4096 + 512], 12 * MIB).unwrap();
    path
}

fn bytes(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

#[test]
fn image_survives_conversion_both_ways() {
    let scratch = Scratch::new();
    let original = original(&scratch);
    for cache in ["writeback", "none"] {
        let disk = scratch.sparse("disk.raw", bytes(&original));
        let weir = Serve::new(&scratch).arg(&disk).args(["--cache", cache]).start();
        let uri = weir.uri("disk");
        qemu_img(["convert", "-n", "-f", "raw", "-O", "raw", text(&original), &uri]).succeeds();
        qemu_img(["compare", "-f", "raw", "-F", "raw", text(&original), &uri]).succeeds();
        let copied_back = scratch.path("back.qcow2");
        qemu_img(["convert", "-f", "raw", "-O", "qcow2", &uri, text(&copied_back)]).succeeds();
        weir.stop();
        let same =
            qemu_img(["compare", "-f", "qcow2", "-F", "raw", text(&copied_back), text(&original)]).succeeds();
        assert_eq!(same.trim(), "Images are identical.", "{cache}");
        assert!(fs::read(&disk).unwrap() == fs::read(&original).unwrap(), "{cache}: the file differs");
    }
}

#[test]
fn compare_finds_the_offset_of_a_difference() {
    let scratch = Scratch::new();
    let disk = scratch.filled("disk.raw", MIB);
    let other = scratch.filled("other.raw", MIB);
    let file = fs::File::options().write(true).open(&other).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"?", 300_000).unwrap();
    let weir = Serve::new(&scratch).arg(disk).start();
    let outcome = qemu_img(["compare", "-f", "raw", "-F", "raw", text(&other), &weir.uri("disk")]).run();
    assert_eq!(outcome.code(), 1, "1 is qemu-img's status for images that differ");
}

#[test]
fn map_shows_where_data_is() {
    let scratch = Scratch::new();
    let original = original(&scratch);
    let weir = Serve::new(&scratch).arg(&original).start();
    let map = qemu_img(["map", "--output=json", "-f", "raw", &weir.uri("original")]).json();
    let extents: Vec<_> = map
        .as_array()
        .unwrap()
        .iter()
        .map(|extent| {
            (extent["start"].as_u64().unwrap(), extent["length"].as_u64().unwrap(), extent["data"] == true)
        })
        .collect();
    // QEMU 7.2 rounds the size of an NBD export down to sectors.
    assert_eq!(
        extents,
        [(0, 3 * MIB, true), (3 * MIB, 9 * MIB, false), (12 * MIB, 4096 + 512, true)],
        "{map:#}"
    );
}

#[test]
fn info_names_the_size() {
    let weir = Serve::with_own_scratch().arg("memory:3G").start();
    let info = qemu_img(["info", "-f", "raw", &weir.uri("memory")]).succeeds();
    assert_contains(&info, &["virtual size: 3 GiB (3221225472 bytes)"]);
}

#[test]
fn bench_completes_reading_and_writing() {
    let weir = Serve::sparse(16 * MIB).args(["--cache", "none"]).start();
    let uri = weir.uri("disk");
    for more in [
        &["-s", "4096"][..],
        &["-w", "-s", "4096"],
        &["-w", "-s", "700", "-S", "1100", "--flush-interval=64"],
    ] {
        let printed =
            qemu_img(["bench", "-f", "raw", "-c", "2000", "-d", "32"]).args(more).arg(&uri).succeeds();
        assert_contains(&printed, &["Run completed in "]);
    }
}
