//! An image of any bytes: checking it ends, repairing it ends, and what a repair calls consistent
//! is.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| image::qcow2::fuzzing::check(data));
