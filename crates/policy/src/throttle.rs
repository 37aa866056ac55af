//! Throttling: decides which request is admitted now, and when the next one can be.
//!
//! ```text
//!   disk A  reads  ▕▏▕▏▕▏ ─┐  A's own    ┐ scheduled by weight   group's     ┐ scheduled    host's
//!   disk A  writes ▕▏▕▏ ───┴─ limits ────┤ and reservation ────► limits ─────┤ ───────────► limits ──► admit
//!   disk B  reads  ▕▏ ─────── limits ────┘                                   │
//!   disk C  reads  (idle) ·                                     a group's ───┘
//! ```
//!
//! **The bucket** (`bucket.rs`). Each of a node's six limits ([`LimitKind`]) is a leaky bucket.
//! Admitted work fills it, and it leaks at the limit's rate. While its level exceeds its size,
//! requests that it applies to wait. The size is the burst capacity: a tenth of a second at the
//! rate by default, otherwise `-max` × `-max-length`. A burst longer than one second has a second,
//! small bucket that leaks at `-max`. A request is admitted whatever its size; later requests wait
//! for the excess.
//!
//! **The slice** (`slicing.rs`). A request that costs more than 90 ms of its scarcest limit is
//! charged in slices of that size and admitted with the last one. Siblings are served between the
//! slices.
//!
//! **The size** (`at_size.rs`). A limit of a disk may be given for each GiB of its size. It
//! becomes a rate before it reaches the tree ([`Limits::at_size`]).
//!
//! **The tree** (`tree.rs`). Disks have limits and belong to groups with limits, which may belong
//! to other groups. All levels apply at once. The cost of a decision does not depend on the number
//! of idle disks.
//!
//! **The cap** (`cap.rs`). A controller may set a second, independent set of limits of a node,
//! which holds beside the first one.
//!
//! **The schedule** (`scheduler.rs`). The cost of a request is the time that it takes at the
//! scarcest limit that it shares with its siblings. They share that time by weight, so neither
//! small requests nor short queues are at a disadvantage. A reservation is served first, up to its
//! rate; reservations that do not fit are rejected (`reservations.rs`).
//!
//! **The longest wait.** The first request in a disk's queue waits, in each group, until each
//! sibling has been served twice and has got its share of the service of this one. One service is a
//! request or a slice, of cost C. With weights w and without reservations, the wait is at most Σ (2
//! Cⱼ + wⱼ/wᵢ · Cᵢ) over its siblings, plus one service by which its own bucket is overrun, plus 40
//! ms of credit (`tests/throttle/every_order.rs` checks all orders of events). Reservations
//! multiply it by a hundred at most.
//!
//! **The two directions** have separate queues, as in QEMU: a read overtakes waiting writes, unless
//! both wait for a total limit. Then they are scheduled like siblings, and alternate within a disk.
//!
//! **Read-ahead** (`bucket/spare.rs`, `tree/spare.rs`) uses spare capacity. Each bucket has a
//! second level on top of the guests', which leaks only while theirs is empty. Read-ahead is
//! admitted if both together do not exceed the size at any level and no request waits there. Guests
//! are charged for cached data as for any other, and the spare level is refunded that amount
//! ([`SpareRefund`]).
//!
//! Names, defaults and validity of limits are those of QEMU (docs/throttle.txt; `throttle_is_valid`
//! in util/throttle.c).
//!
//! The tree never rejects or drops a request, and has no access to its data.

mod at_size;
mod bucket;
mod burst;
mod cap;
mod cause;
mod cost;
mod enforcement;
mod heap;
mod kernel_buckets;
mod limits;
mod node;
mod refund;
mod reservation_monitor;
mod reservations;
mod scheduler;
mod share;
mod size_rate;
mod slicing;
mod stats;
mod tree;
mod used_up_rate;

pub use bucket::{BucketContents, BucketSnapshot};
pub use burst::{BurstBalance, FullBurst};
pub use cause::CauseKind;
pub use cost::RequestCost;
pub use enforcement::{Enforcement, LimitScale};
pub use kernel_buckets::KernelBuckets;
pub use limits::{
    InvalidLimit, LimitKind, LimitPart, LimitRule, LimitSetting, Limits, MAX_BURST_LENGTH_S, MAX_VALUE,
    RateLimit,
};
pub use node::{CarriedCharges, NodeId, QueuedRequestId};
pub use refund::SpareRefund;
pub use reservation_monitor::ReservationTimes;
pub use reservations::{
    MAX_LEVELS, ReservableCapacity, ReservationBound, ReservationExceeded, ReservationUnit, ThrottleError,
};
pub use share::NodeShare;
pub use stats::{
    AdmissionCounters, BucketLevel, CumulativeStats, LimitLevel, RECENT_NS, ThrottleStats, ThrottleSummary,
    WaitSummary, throttled_with_groups_ns,
};
pub use tree::{
    AdmissionResult, LevelCause, MemberDemands, PollDecision, QuotaLease, ReturnedRequest, ThrottleTree,
};
