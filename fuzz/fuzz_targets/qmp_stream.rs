//! What a QMP client sends, cut in pieces of the length in the first byte: the same values come out
//! of any cut, and what was understood is understood again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| control::fuzzing::qmp_stream(data));
