//! An image of any bytes: opening it ends, with its snapshots, bitmaps and LUKS header, and so does
//! looking at all of its disk.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| image::qcow2::fuzzing::open(data));
