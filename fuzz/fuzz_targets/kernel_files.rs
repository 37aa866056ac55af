//! A text, parsed as every kernel file about cgroups, processes and mounts that weir reads:
//! accepted values are bounded and consistent.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| cgroup::fuzzing::kernel_files(data));
