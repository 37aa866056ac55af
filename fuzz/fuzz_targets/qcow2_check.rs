//! An image of any bytes: check and repair terminate, and an image that a repair reports as
//! consistent is consistent.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| image::qcow2::fuzzing::check(data));
