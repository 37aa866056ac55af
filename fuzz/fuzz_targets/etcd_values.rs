//! What stands in etcd, or a line of a watch: no report makes a leader give more than there is, no
//! grant a host take more than all may have.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| cluster::etcd_values(data));
