//! Messages of a vhost-user front end: each request is answered once, and rings start and stop in
//! order.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| export::vhost_user_blk::fuzzing::vhost_user_session(data));
