//! A QMP conversation with a daemon of two disks in memory: every request gets one well-formed
//! answer, and the limits in force stay valid.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| control::fuzzing::qmp_session(data));
