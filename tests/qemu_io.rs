//! qemu-io: writes whose pattern a later read verifies, zeroes, discards, a second opening.

use crate::harness::{MIB, Scratch, Serve, TestClient, qemu_io};

#[test]
fn patterns_are_read_back_after_reopening() {
    let scratch = Scratch::new();
    for cache in ["writeback", "writethrough", "none", "directsync", "unsafe"] {
        let weir =
            Serve::new(&scratch).arg(scratch.sparse("disk.raw", 8 * MIB)).args(["--cache", cache]).start();
        let uri = weir.uri("disk");
        qemu_io(
            ["-f", "raw"],
            [
                "write -P 0x11 0 1M",
                "write -P 0x22 1537 5000",
                "write -f -P 0x33 2M 64k",
                "aio_write -P 0x44 3M 1M",
                "aio_flush",
                "flush",
            ],
            &uri,
        );
        qemu_io(
            ["-f", "raw"],
            [
                "read -P 0x11 0 1537",
                "read -P 0x22 1537 5000",
                "read -P 0x11 6537 1000000",
                "read -P 0x33 2M 64k",
                "read -P 0x44 3M 1M",
                "read -P 0 4M 4M",
            ],
            &uri,
        );
    }
}

#[test]
fn zeroes_and_discards_read_as_specified() {
    let scratch = Scratch::new();
    for image in ["disk.raw", "memory:8M"] {
        let export = if image == "disk.raw" { "disk" } else { "memory" };
        let image =
            if export == "disk" { scratch.sparse(image, 8 * MIB).into_os_string() } else { image.into() };
        let weir = Serve::new(&scratch).arg(image).start();
        qemu_io(
            ["-f", "raw"],
            [
                "write -P 0x77 0 4M",
                "write -z 64k 1000",
                "write -z -u 1M 1M",
                "discard 2M 1M",
                "read -P 0x77 0 64k",
                "read -P 0 64k 1000",
                "read -P 0x77 66536 10000",
                "read -P 0 1M 1M",
                "read -P 0x77 3M 1M",
            ],
            weir.uri(export),
        );
    }
}

#[test]
fn verification_of_wrong_data_fails() {
    let weir = Serve::with_own_scratch().arg("memory:1M").start();
    let outcome =
        TestClient::new("qemu-io").args(["-f", "raw", "-c", "read -P 1 0 4k", &weir.uri("memory")]).run();
    assert_eq!(outcome.code(), 1, "a memory disk begins as zeroes, so these tests can fail");
}
