//! The data path under simulation: a virtual clock, an order of execution drawn from a seed, disks
//! that lose what was not flushed. What is checked are the invariants that the design promises,
//! over many seeds; nothing here waits in real time, apart from `stress`, which is about threads.
//!
//! - `disks`: reads, writes, flushes, errors, cancellations and crashes against a model of what
//!   each byte may be; half of the data is in memory of guests (`guest`).
//! - `nested`: requests in trees of groups against naive buckets: nothing passes too early, nothing
//!   waits too long, whatever changes meanwhile; with large requests, refused changes, promises,
//!   and limits enforced loosely or not at all.
//! - `shares`: everybody always wants more, and gets what the weights and promises of a tree come
//!   to on paper.
//! - `spare`: what is read ahead takes what guests leave, and they cannot tell.
//! - `qcow2`: the same for an image between clients and disk; after every crash it must be valid
//!   (`references`).
//! - `failures`: devices that are full and get room again, where a disk holds requests meanwhile.
//! - `prefetch`: reading ahead, where storage takes its time.
//! - `replay`: a trace passes the layer when the tree of buckets alone says, as `weir simulate` has
//!   it.
//! - `watermark`: limits that a device with room lifts, beside the figures of those who had the
//!   idea.
//! - `stress`: the parts of the throttle layer that threads share, on two real workers.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod bucket;
mod client;
mod disks;
mod failures;
mod guest;
mod model;
mod nested;
mod passed;
mod prefetch;
mod qcow2;
mod references;
mod replay;
mod seeds;
mod shares;
mod spare;
mod stress;
mod watermark;
