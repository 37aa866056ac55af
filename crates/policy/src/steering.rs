//! Limits enforced by the kernel: computes the rates of `io.max`, and when to measure again.
//!
//! ```text
//!                   I/O counters, throttling                        rates, for each member
//!   control groups ────────────────────────────►  pool  ─────────────────────────────► io.max
//!                                          buckets │ division                            │
//!   control groups ◄─────────────────────────────────────────────── enforced by the kernel
//! ```
//!
//! A disk of weir is throttled request by request ([`throttle`](crate::throttle)). For a control
//! group the kernel enforces four fixed rates: bytes and operations, read and written. Features
//! that the kernel lacks are implemented here, with the same buckets and the same watermark:
//!
//! - **bursts** (`pool.rs`): while the bucket of a limit is not full, its burst rate is set,
//!   afterwards its rate. The earliest time at which the bucket can be full is known, so no
//!   measurement is needed before it;
//! - **shared limits** (`division.rs`): each member of a group gets a part, and so does each
//!   direction of a total limit. The parts never exceed the limit;
//! - **watermarks**: an [`Enforcement`](crate::throttle::Enforcement) decided by the controller of
//!   the device applies to all limits.
//!
//! A failure must not leave a burst rate in force: set [`SteeringPool::rates_without_steering`]
//! before steering stops.

mod demand;
mod division;
mod pool;

pub use pool::{IoCounters, SteeredMember, SteeringPool, is_steered};

/// Rates of one control group on one device: the four keys of cgroup v2's `io.max`, in units per
/// second; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct IoMaxRates {
    /// Bytes per second: reads, writes.
    pub bps: [Option<u64>; 2],
    /// Operations per second: reads, writes.
    pub iops: [Option<u64>; 2],
}

impl IoMaxRates {
    /// No limits.
    pub const NONE: Self = Self { bps: [None; 2], iops: [None; 2] };
}
