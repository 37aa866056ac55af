//! Random histories of block jobs: weir and qemu-storage-daemon execute the same QMP commands, and
//! QEMU's tools compare the images: `job_histories/exercise.py`.
//!
//! `WEIR_HISTORIES` is their number, by default 20; `WEIR_SEED` is the first seed.

use crate::harness::{Scratch, TestClient, WEIR, env_number, need, text};

const EXERCISE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/job_histories/exercise.py");
/// Histories of one run of the program, because the harness limits the run time of a client.
const SLICE: u64 = 100;

#[test]
#[allow(clippy::print_stderr, reason = "a failure is repeated by its seed")]
fn images_equal_those_of_qemu() {
    need("qemu-storage-daemon");
    let first = env_number("WEIR_SEED", fastrand::u64(..1 << 32));
    eprintln!("WEIR_SEED={first}");
    let last = first + env_number("WEIR_HISTORIES", 20);
    for seed in (first..last).step_by(SLICE as usize) {
        let scratch = Scratch::new();
        TestClient::new("/usr/bin/python3")
            .args([EXERCISE, WEIR, "--directory", text(&scratch.path("histories"))])
            .args(["--seed", &seed.to_string(), "--histories", &SLICE.min(last - seed).to_string()])
            .succeeds();
    }
}
