//! A text, read as every file of the kernel that weir reads about cgroups, processes and mounts:
//! what is accepted is in bounds and consistent.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| cgroup::fuzzing::kernel_files(data));
