//! A guest that writes anything anywhere, concurrently with the device: rings and requests
//! terminate, stay inside the disk, and no more chains are in use than the ring has.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    virtio::fuzzing::rings(data);
});
