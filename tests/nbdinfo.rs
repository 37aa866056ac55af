//! nbdinfo: properties of an export, allocation, and the list of exports.

use crate::harness::{MIB, Scratch, Serve, TestClient, WEIR, Weir, assert_contains, export_size};

fn nbdinfo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> TestClient {
    TestClient::new("nbdinfo").args(arguments)
}

fn two_disks() -> Weir {
    let scratch = Scratch::new();
    let disks = [scratch.sparse("a.raw", 4 * MIB), scratch.sparse("b.raw", 8 * MIB)];
    Serve::owning(scratch)
        .args(disks)
        .args(["--description", "the first", "--description", "the second"])
        .start()
}

#[test]
fn size_equals_the_images() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).arg(scratch.sparse("odd.raw", 1_234_567)).start();
    assert_eq!(nbdinfo(["--size", &weir.uri("odd")]).succeeds().trim(), "1234567");
}

#[test]
fn exports_are_listed_and_chosen_by_name() {
    let weir = two_disks();
    let list = nbdinfo(["--list", "--json", &weir.uri("")]).json();
    let exports = list["exports"].as_array().expect("an array");
    let descriptions: Vec<_> = exports
        .iter()
        .map(|export| {
            let text = |key: &str| export[key].as_str().unwrap_or_default().to_owned();
            (text("export-name"), text("description"), export["export-size"].as_u64())
        })
        .collect();
    assert_eq!(
        descriptions,
        [
            ("a".to_owned(), "the first".to_owned(), Some(4 * MIB)),
            ("b".to_owned(), "the second".to_owned(), Some(8 * MIB))
        ]
    );
    // The default export is the first one.
    assert_eq!(export_size(&weir.uri("")), 4 * MIB);
    assert_eq!(export_size(&weir.uri("b")), 8 * MIB);
    let stderr = nbdinfo(["--size", &weir.uri("c")]).fails();
    assert_contains(&stderr, &["server has no export named 'c'"]);
}

#[test]
fn names_may_hold_any_character() {
    let weir = Serve::with_own_scratch().args(["memory:1M", "--name", "Zürich №1/a b"]).start();
    let uri = weir.uri("Z%C3%BCrich%20%E2%84%961%2Fa%20b");
    assert_eq!(export_size(&uri), MIB);
}

#[test]
fn writable_export_offers_all_commands() {
    let weir = Serve::sparse(MIB).start();
    let info = nbdinfo(["--json", &weir.uri("disk")]).json();
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(info["structured"], true);
    assert_eq!(info["TLS"], false);
    let export = &info["exports"][0];
    assert_eq!(export["is_read_only"], false);
    for can in ["cache", "df", "fast_zero", "flush", "fua", "multi_conn", "trim", "zero"] {
        assert_eq!(export[format!("can_{can}")], true, "can_{can}");
    }
    assert_eq!(export["contexts"], serde_json::json!(["base:allocation", "qemu:allocation-depth"]));
    assert_eq!(export["block_size_minimum"], 1, "requests need no alignment");
    assert_eq!(export["block_size_maximum"], 32 * MIB);
    for can in ["cache", "df", "fast-zero", "flush", "fua", "multi-conn", "trim", "zero", "write"] {
        nbdinfo(["--can", can, &weir.uri("disk")]).succeeds();
    }
}

#[test]
fn read_only_export_offers_no_command_that_writes() {
    let weir = Serve::sparse(MIB).arg("--read-only").start();
    let uri = weir.uri("disk");
    nbdinfo(["--is", "read-only", &uri]).succeeds();
    for can in ["write", "trim", "zero", "fast-zero"] {
        assert_eq!(nbdinfo(["--can", can, &uri]).run().code(), 2, "--can {can}: false is status 2");
    }
    nbdinfo(["--can", "read", &uri]).succeeds();
    nbdinfo(["--can", "df", &uri]).succeeds();
}

#[test]
fn map_shows_data_and_holes() {
    let weir = Serve::sparse(4 * MIB).start();
    weir.nbdsh("disk", "h.pwrite(b'x' * 65536, 1 << 20)\nh.flush()");
    let map = nbdinfo(["--map", "--json", &weir.uri("disk")]).json();
    let extents: Vec<_> = map
        .as_array()
        .expect("an array")
        .iter()
        .map(|extent| (extent["offset"].as_u64(), extent["length"].as_u64(), extent["type"].as_u64()))
        .collect();
    let end = MIB + 65_536;
    assert_eq!(
        extents,
        [
            (Some(0), Some(MIB), Some(3)),
            (Some(MIB), Some(65_536), Some(0)),
            (Some(end), Some(4 * MIB - end), Some(3))
        ],
        "3 is a hole that reads as zeroes, 0 is data"
    );
}

#[test]
fn totals_of_the_map_equal_the_images() {
    let weir = Serve::with_own_scratch().arg("memory:4M").start();
    weir.nbdsh("memory", "h.pwrite(b'x' * (1 << 20), 0)");
    let totals = nbdinfo(["--map", "--totals", &weir.uri("memory")]).succeeds();
    assert_contains(&totals, &["1048576  25.0%   0 data", "3145728  75.0%   3 hole,zero"]);
}

#[test]
fn socket_activation_by_a_client() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 3 * MIB);
    let image = image.to_str().expect("UTF-8");
    let size = nbdinfo(["--size", "--", "[", WEIR, "serve", "--read-only", image, "]"]).succeeds();
    assert_eq!(size.trim(), (3 * MIB).to_string());
}
