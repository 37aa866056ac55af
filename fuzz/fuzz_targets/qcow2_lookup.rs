//! An image of any bytes, followed by requests: a read returns written data, and a consistent image
//! stays consistent.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| image::qcow2::fuzzing::lookup(data));
