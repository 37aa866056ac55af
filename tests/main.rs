//! The whole program against other people's clients: one file a subject, one harness.
//!
//! Everything here is seen from outside: a `weir serve` of its own for each test, driven by
//! nbdinfo, nbdcopy, libnbd, qemu-img, qemu-io, fio, or by bytes written to its socket. What can be
//! decided in virtual time is tested beside the code; here is what only a kernel, a file system and
//! a foreign implementation of the protocol can tell.
//!
//! Nothing here is judged by how fast it is. What may be judged of time is what a slow machine
//! cannot break: no more passed than a limit allows in the time that went by, and nothing came
//! sooner than it may. Speed and accuracy are rows of `make bench`.
//!
//! Never reaches beyond loopback and temporary directories, and ends processes it started alone.
//! Each test may run beside any other. Run with `make test-e2e`; some tests need root, for loop
//! devices and mounts of their own, and say so.

mod harness;

mod access;
mod disk_and_group;
mod advise;
mod attach;
mod bench;
mod bench_vhost_user;
mod cache_modes;
mod cgroup_explain;
mod cgroup_limit;
mod cgroup_run;
mod cgroup_show;
mod chains;
mod cluster;
mod config_schema;
mod control;
mod control_socket;
mod descriptors;
mod devices;
mod docker_plugin;
mod documents;
mod events;
mod failures;
mod fio;
mod from_qemu;
mod fsx;
mod fuse;
mod fuse_own;
mod fuse_size;
mod hostile;
mod http;
mod image_qemu_img_pitfalls;
mod image_measure;
mod image_names;
mod image_options;
mod image_soak;
mod imitated_devices;
mod libnbd;
mod limits;
mod throttle_and_top;
mod locking;
mod logging;
mod vhost_user;
mod probe;
mod metrics;
mod migration;
mod named_pipes;
mod nbd_storage;
mod nbdcopy;
mod nbdinfo;
mod exports;
mod openapi;
mod packaging;
mod page;
mod prefetch;
mod probing;
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
mod recipes;
mod record;
mod recorded_limits;
mod reload;
mod report;
mod sandbox;
mod hung_control;
mod hung_files;
mod simulate;
mod startup;
mod shutdown;
mod systemd;
mod upgrade;
mod tls;
mod tour;
mod trace;
mod tune;
mod verify;
mod wire;
mod zeroes;
