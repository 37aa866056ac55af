//! A trace, in the format and with the window of the first byte: reading terminates, in order and
//! in bounds, and the records survive a round trip.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| recording::fuzzing::trace(data));
