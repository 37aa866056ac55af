//! Limits that the kernel enforces: which rates to set, and when to look again.
//!
//! ```text
//!                   what has passed, what waits                     rates, by member
//!   control groups ────────────────────────────► [Pool] ─────────────────────────────► io.max
//!                                          buckets │ division                            │
//!   control groups ◄─────────────────────────────────────────────────── the kernel keeps them
//! ```
//!
//! A disk of weir's own is throttled request by request ([`throttle`](crate::throttle)). For a
//! control group the kernel keeps four fixed rates, for bytes and operations read and written. What
//! it does not have is made here, with the same buckets and the same watermark:
//!
//! - **bursts** (`pool.rs`): while the bucket of a limit has room, its burst rate is set, and its
//!   own rate afterwards. The earliest time at which the bucket can be full is known, and nobody
//!   needs to look before;
//! - **shared limits** (`division.rs`): each member of a group is given a part, and so is each
//!   direction of a total. The parts never add up to more than the limit;
//! - **watermarks**: an [`Enforcement`](crate::throttle::Enforcement) that the controller of the
//!   device decided applies to all limits.
//!
//! No failure may leave a burst behind: whoever stops steering sets [`Pool::settled`].

mod demand;
mod division;
mod pool;

pub use pool::{Member, Passed, Pool, is_steered};

/// What the kernel is told for one control group on one device: the four keys of cgroup v2's
/// `io.max`, in units per second, `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rates {
    /// Bytes per second, reads and writes.
    pub bps: [Option<u64>; 2],
    /// Operations per second, reads and writes.
    pub iops: [Option<u64>; 2],
}

impl Rates {
    /// No limit at all.
    pub const NONE: Self = Self { bps: [None; 2], iops: [None; 2] };
}
