//! The data path under simulation: a virtual clock, an order of execution drawn from a seed, disks
//! that lose writes that were not flushed. The tests check the invariants of the design over many
//! seeds; no test waits in real time, except `stress`, which is about threads.
//!
//! - `disks`: reads, writes, flushes, errors, cancellations and crashes against a model of the
//!   possible content of each byte; half of the data is in guest memory (`guest`).
//! - `nested`: requests in trees of groups against naive buckets: no request is admitted too early
//!   or waits too long, during any changes; with large requests, rejected changes, reservations,
//!   and limits that are scaled or lifted.
//! - `shares`: under saturation, disks receive the shares that follow from the weights and
//!   reservations of a tree.
//! - `spare`: read-ahead uses spare capacity only, and does not affect requests.
//! - `qcow2`: as `disks`, with an image between clients and disk; after every crash it must be
//!   valid (`references`).
//! - `failures`: full devices that get space again, while a stopped disk keeps requests waiting.
//! - `prefetch`: read-ahead with slow storage.
//! - `replay`: the layer admits the requests of a trace at the instants of the tree alone, which
//!   `weir simulate` uses.
//! - `watermark`: limits that are lifted at low utilization, compared with the results of the
//!   authors of the idea.
//! - `switches`: as `disks`, with a disk that is switched to new overlays meanwhile.
//! - `stress`: the shared parts of the throttle layer, on two real workers.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod bucket;
mod client;
mod disks;
mod failures;
mod group_samples;
mod guest;
mod latency_target;
mod model;
mod nested;
mod prefetch;
mod qcow2;
mod references;
mod replay;
mod seeds;
mod shares;
mod spare;
mod stress;
mod switches;
mod watermark;
