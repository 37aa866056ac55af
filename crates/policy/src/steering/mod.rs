//! Limits that somebody else keeps: which rates to tell the kernel, and when to look again.
//!
//! ```text
//!                   what has passed, what waits                        rates, by member
//!   control groups ───────────────────────────► [Pool] ──────────────────────────────► io.max
//!                                          buckets │ division                              │
//!   control groups ◄────────────────────────────────────────────────────── the kernel keeps them
//! ```
//!
//! A disk of weir's own is throttled request by request ([`throttle`](crate::throttle)). A control group's requests never come by here: the
//! kernel lets them pass at four fixed rates, bytes and operations read and written. What it does not know is steered from here, by the same
//! buckets and the same watermark:
//!
//! - **bursts** (`pool.rs`): while the bucket of a limit has room, its burst rate is what the kernel is told, and its rate afterwards. The
//!   kernel keeps the burst rate, so when the bucket will be full at the earliest is known beforehand, and nobody needs to look before;
//! - **limits of several** (`division.rs`): each member of a group is told a part, and so is each direction of a total. The parts add up to
//!   the limit and never to more; they follow what is asked for, and the weights where that is too much;
//! - **watermarks**: an [`Enforcement`](crate::throttle::Enforcement) that the controller of the device decided, applied to all of it.
//!
//! Nothing that fails on the way is to leave a burst or a lifted limit behind: [`Pool::settled`] is what each member is held to by the
//! configured limits alone, for whoever stops steering.

mod demand;
mod division;
mod pool;

pub use pool::{Member, Passed, Pool, is_steered};

/// What the kernel is told for one control group on one device: units per second, `None` for no limit. The four keys of cgroup v2's `io.max`.
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
