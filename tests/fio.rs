//! fio's nbd engine with verification: every block carries its own checksum and offset.

use crate::harness::{MIB, Scratch, Serve, TestClient};

#[test]
fn random_writes_are_verified() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch)
        .args([scratch.sparse("disk.raw", 32 * MIB).to_str().unwrap(), "memory:32M", "--cache", "none"])
        .start();
    for export in ["disk", "memory"] {
        for size in ["4k", "512-60k"] {
            TestClient::new("fio")
                .args(["--name=verified", "--ioengine=nbd", "--rw=randwrite", "--size=32M", "--io_size=24M"])
                .args(["--iodepth=32", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1"])
                .args(["--randseed=42", "--blockalign=512", "--fsync=100", "--serialize_overlap=1"])
                .arg(format!("--bsrange={}", if size == "4k" { "4k-4k" } else { size }))
                .arg(format!("--uri={}", weir.uri(export)))
                .arg(format!("--aux-path={}", scratch.path("").display()))
                .succeeds();
        }
    }
}

#[test]
fn several_connections_share_one_disk() {
    let scratch = Scratch::new();
    let weir =
        Serve::new(&scratch).arg(scratch.sparse("disk.raw", 64 * MIB)).args(["--cache", "none"]).start();
    TestClient::new("fio")
        .args(["--name=shared", "--ioengine=nbd", "--rw=randwrite", "--size=16M", "--offset_increment=16M"])
        .args(["--numjobs=4", "--bs=4k", "--io_size=8M", "--iodepth=16", "--verify=crc32c", "--do_verify=1"])
        .args(["--verify_fatal=1", "--group_reporting"])
        .arg(format!("--uri={}", weir.uri("disk")))
        .arg(format!("--aux-path={}", scratch.path("").display()))
        .succeeds();
}
