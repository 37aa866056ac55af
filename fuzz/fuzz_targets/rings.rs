//! A guest that writes anything anywhere, also while the device reads it: rings and requests end,
//! stay inside the disk, and no more chains are out than the ring has.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    virtio::fuzzing::rings(data);
});
