//! The storage plugin for Proxmox VE: `tests/proxmox/storage.t` calls each of its methods, with a
//! real daemon and stand-ins for the classes of Proxmox VE.

use std::path::Path;

use crate::harness::{TestClient, WEIR, need};

#[test]
fn the_storage_plugin() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    need("qemu-io");
    // A failure prints the lines of the failed tests.
    TestClient::new("prove")
        .args(["-I", "tests/proxmox/lib", "-I", "packaging/proxmox", "tests/proxmox/storage.t"])
        .inside(&root)
        .env("WEIR", WEIR)
        .succeeds();
}
