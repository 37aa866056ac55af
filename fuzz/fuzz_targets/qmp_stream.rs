//! Input of a QMP client, split into pieces of the length in the first byte: any split yields the
//! same values, and parsed values parse again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| control::fuzzing::qmp_stream(data));
