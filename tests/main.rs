//! The whole program with independent clients: one file per subject, one harness.
//!
//! Each test starts its own `weir serve` and observes it from outside with nbdinfo, nbdcopy,
//! libnbd, qemu-img, qemu-io, fio, or bytes written to its socket. Behaviour that can be decided in
//! virtual time is tested beside the code; these tests cover the kernel, file systems and
//! independent implementations of the protocols.
//!
//! Never asserts speed. Assertions about time are bounds that a slow host cannot break: at most as
//! much work as a limit admits in the elapsed time, and no completion earlier than possible. Speed
//! and accuracy are rows of `make bench`.
//!
//! Never reaches beyond loopback and temporary directories, and kills only processes that it
//! started. Tests may run in parallel. Run with `make test-e2e`; some tests need root, for loop
//! devices and mount namespaces, and say so.
#![allow(clippy::print_stdout, reason = "tests that measure print their figures")]

mod harness;

mod access;
mod advise;
mod attach;
mod backup;
mod backup_chain;
mod bench;
mod bench_vhost_user;
mod bitmaps;
mod cache_modes;
mod cgroup_explain;
mod cgroup_limit;
mod cgroup_run;
mod cgroup_show;
mod chains;
mod check_config;
mod cluster;
mod config_schema;
mod control;
mod control_socket;
mod descriptors;
mod devices;
mod disk_and_group;
mod docker_plugin;
mod documents;
mod events;
mod exports;
mod failures;
mod fio;
mod from_qemu;
mod fsx;
mod fuse;
mod fuse_own;
mod fuse_size;
mod hostile;
mod http;
mod hung_control;
mod hung_files;
mod image_measure;
mod image_names;
mod image_options;
mod image_qemu_img_pitfalls;
mod image_soak;
mod imitated_devices;
mod job_histories;
mod latency_target;
mod libnbd;
mod limits;
mod limits_by_size;
mod limits_by_time;
mod locking;
mod logging;
mod metrics;
mod migration;
mod mirror;
mod named_pipes;
mod nbd_storage;
mod nbdcopy;
mod nbdinfo;
mod openapi;
mod packaging;
mod page;
mod prefetch;
mod probe;
mod probing;
mod proxmox;
mod qcow2_bitmaps;
mod qcow2_check;
mod qcow2_conformance;
mod qcow2_convert;
mod qcow2_crash;
mod qcow2_create;
mod qcow2_damage;
mod qcow2_partial;
mod qcow2_snapshot;
mod qemu_img;
mod qemu_io;
mod qemu_nbd;
mod qemu_storage_daemon;
mod qmp;
mod qmp_hostile;
mod qmp_qemu;
mod quota;
mod recipes;
mod record;
mod recorded_limits;
mod reload;
mod report;
mod sandbox;
mod shutdown;
mod simulate;
mod snapshot;
mod startup;
mod stream;
mod systemd;
mod throttle_and_top;
mod tls;
mod tour;
mod trace;
mod tune;
mod upgrade;
mod verify;
mod vhost_user;
mod wire;
mod zeroes;
