//! A message of the kernel over FUSE: it is parsed exactly, or rejected.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| export::fuse::fuzzing::fuse_message(data));
