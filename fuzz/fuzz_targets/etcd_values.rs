//! Values in etcd, or a line of a watch: no report makes a leader grant more than the limit, and no
//! grant makes a host use more than the limit.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| cluster::etcd_values(data));
