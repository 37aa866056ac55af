//! Decisions as pure functions and state machines: admission, merging, read-ahead, quota division.
//!
//! The modules:
//! - [`throttle`]: limits, groups, weights and reservations; which request is admitted, and when
//!   the next one can be.
//! - [`cluster`]: one group's limits divided over many hosts.
//! - [`watermark`]: lifts limits while the device's utilization is low.
//! - [`latency_target`]: throttles other disks of a device so that one keeps its response time.
//! - [`schedule`]: limits by the clock, and the limits in force.
//! - [`volume_quota`]: bytes that may pass in a calendar period, and the limit after that.
//! - [`steering`]: the same limits as rates for the host's control groups.
//! - [`merge`]: joins adjacent requests of a batch.
//! - [`prefetch`]: detects sequential readers, decides what to read ahead and what to cache.
//! - [`device_model`]: completion times of a simulated device.
//! - [`polling`]: decides if a thread that waits for completions polls or sleeps.
//! - [`access`]: access rules for clients.
//! - [`histogram`]: latencies in logarithmic steps.
//! - [`counter`]: growth and rates of counters, including counters that fall.
//! - [`request`], [`time`] and [`time_zone`]: types that all of them share.
//!
//! Time is an argument ([`time::Instant`]) and decisions are return values, so the daemon, the
//! simulator and the tests run the same code.
//!
//! Never does I/O, starts a thread or reads a clock: `Instant::now()` does not compile here.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod access;
pub mod cluster;
pub mod counter;
pub mod device_model;
pub mod histogram;
pub mod latency_target;
pub mod merge;
pub mod polling;
pub mod prefetch;
pub mod request;
pub mod schedule;
pub mod steering;
pub mod throttle;
pub mod time;
pub mod time_zone;
pub mod volume_quota;
pub mod watermark;
