//! weir's decisions, and nothing else: when a request may pass, what is merged, what is read ahead.
//!
//! The way through it:
//! - [`throttle`]: limits, groups, shares and promises; who may pass now, and when the next one
//!   may.
//! - [`cluster`]: one group's limits divided over many hosts.
//! - [`watermark`]: whether limits bind at all, by how much of the device is in use.
//! - [`steering`]: the same limits as rates for the host's control groups.
//! - [`merge`]: which waiting requests become one.
//! - [`prefetch`]: who reads in sequence, what to read ahead of him, and what to keep.
//! - [`device`]: when an imitated device is done with a request.
//! - [`polling`]: whether a thread that waits for completions had better stay awake.
//! - [`access`]: which clients are let in.
//! - [`counter`]: growth and rates of counters, also of those that fall.
//! - [`request`] and [`time`]: the words that all of them share.
//!
//! Time comes in as an argument ([`time::Instant`]), decisions go out as values: the daemon, the
//! simulator and the tests run the same code.
//!
//! Never does I/O, starts a thread or reads a clock: `Instant::now()` does not compile here.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod access;
pub mod cluster;
pub mod counter;
pub mod device;
pub mod merge;
pub mod polling;
pub mod prefetch;
pub mod request;
pub mod steering;
pub mod throttle;
pub mod time;
pub mod watermark;
