//! Throttling: which request may pass now, and when the next one may.
//!
//! ```text
//!   member A  reads  ▕▏▕▏▕▏ ─┐   turn: one request each, round and round
//!   member B  reads  ▕▏ ─────┤──────────────►┐
//!   member C  reads   (idle) ·               │   four buckets apply to a direction
//!                                            ├──► bps-total ─ bps-read  ─ iops-total ─ iops-read  ──► pass
//!   member A  writes ▕▏▕▏ ───┐               ├──► bps-total ─ bps-write ─ iops-total ─ iops-write ──► pass
//!   member B  writes  (idle) ┴──────────────►┘
//! ```
//!
//! **The bucket.** Each of the six limits ([`LimitKind`]) is a leaky bucket. What is admitted fills it, it leaks at
//! the limit's rate, and while it is more than full everything it applies to waits. How full it may get is the
//! burst: a tenth of a second's worth by default, `-max` × `-max-length` where a burst is configured. A burst
//! longer than one second has a rate of its own to keep, so it gets a second, small bucket that leaks at `-max`.
//! A request is charged when it is admitted, whatever its size: an oversized one passes and is paid for by those
//! after it. So the wait never depends on who asks, and one decision serves a whole direction.
//!
//! **The group.** Disks that share limits share the buckets, and nothing else: each [member](MemberId) has its own
//! queue of reads and its own queue of writes. Members with work waiting take turns, one request a turn. A disk
//! without a group is a group of one. Only members with work waiting are ever looked at, so thousands of idle
//! disks cost a decision nothing.
//!
//! **The two directions** are apart, as in QEMU: a read passes waiting writes, unless they wait for a total limit,
//! which is both directions' business. Then reads and writes alternate.
//!
//! **Time** comes in as an argument and deadlines go out as values ([`Decision::Wait`]). The arithmetic is in whole
//! billionths of a unit, so a deadline is exact to the nanosecond, nothing drifts over a year of uptime, and a
//! property test can demand equality.
//!
//! Names, defaults and validity are those of QEMU (docs/throttle.txt; `throttle_is_valid` in util/throttle.c), whose
//! users should find nothing new here but the error messages.
//!
//! Never rejects a request, never drops one, never knows what a request carries.

mod booking;
mod bucket;
mod cost;
mod enforcement;
mod group;
mod heap;
mod limits;
mod member;
mod node;
mod price;
mod schedule;
mod share;
mod stats;
mod tree;

pub use booking::{Bound, Overbooked, Refused, Unit};
pub use cost::Cost;
pub use enforcement::{Enforcement, Scale};
pub use group::Group;
pub use limits::{Invalid, Limit, LimitKind, Limits, MAX_BURST_LENGTH_S, MAX_VALUE, Part, Rule, Setting};
pub use member::MemberId;
pub use node::{NodeId, Ticket};
pub use share::Share;
pub use stats::{Counters, Stats, WaitSummary};
pub use tree::{Admission, Decision, MAX_LEVELS, Returned, Tree};
