//! An image of any bytes: opening it with its snapshots, bitmaps and LUKS header terminates, and so
//! does a scan of its disk.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| image::qcow2::fuzzing::open(data));
