//! A trace, in the format and with the window of the first byte: reading ends, in order and in
//! bounds, and what was read is read again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| recording::fuzzing::trace(data));
