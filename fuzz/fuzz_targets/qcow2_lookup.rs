//! An image of any bytes, and requests at their end: what is written is read, and what was
//! consistent stays so.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| image::qcow2::fuzzing::lookup(data));
