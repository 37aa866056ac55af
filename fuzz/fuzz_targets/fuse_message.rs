//! What the kernel may say over FUSE: a message is parsed as what it says, or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| export::fuse::fuzzing::fuse_message(data));
