//! Throttling: which request may pass now, and when the next one may.
//!
//! ```text
//!   disk A  reads  ▕▏▕▏▕▏ ─┐  A's own    ┐ turns, by weight     group's     ┐ turns      host's
//!   disk A  writes ▕▏▕▏ ───┴─ limits ────┤ and by promise ────► limits ─────┤ ─────────► limits ──► pass
//!   disk B  reads  ▕▏ ─────── limits ────┘                                  │
//!   disk C  reads  (idle) ·                                    a group's ───┘
//! ```
//!
//! **The bucket** (`bucket.rs`). Each of a node's six limits ([`LimitKind`]) is a leaky bucket. What is admitted fills it, it
//! leaks at the limit's rate, and while it is more than full everything it applies to waits. How full it may get is
//! the burst: a tenth of a second's worth by default, `-max` × `-max-length` where a burst is configured. A burst
//! longer than one second has a rate of its own to keep, so it gets a second, small bucket that leaks at `-max`. A
//! request is charged when it is admitted, and passes if the bucket is not more than full, whatever its size: what it takes
//! beyond that is paid for by those after it. So the wait never depends on who asks.
//!
//! **The slice** (`price.rs`). A request worth more than 90 ms of its scarcest limit is charged in parts of that size, and
//! passes with the last. Between them others have their turns.
//!
//! **The tree** (`tree.rs`). Disks have limits, and belong to groups that have limits, which may belong to groups. All
//! levels hold at once. Only nodes with work waiting are ever looked at, so thousands of idle disks cost a decision nothing.
//!
//! **The turn** (`schedule.rs`). What a request costs in its siblings' eyes is the time it takes of the scarcest limit above
//! them. Siblings share that time by weight, so neither small requests nor short queues are at a disadvantage; and
//! a reservation comes first, as far as it goes. Reservations that cannot be kept are refused (`booking.rs`).
//!
//! **How long at most.** The first request in a disk's queue waits, in each group, until each sibling has had two turns and its
//! share of what this one had; a turn is a request or a slice, C. With weights w and nothing promised, that is at most
//! Σ (2 Cⱼ + wⱼ/wᵢ · Cᵢ) over its siblings, its bucket's own overrun of one turn, and the 40 ms that somebody idle may catch up.
//! A test goes through all orders of events in small cases and holds every wait against it (`tests/throttle/every_order.rs`).
//! Promises lengthen it to a hundredfold at the most, where all of a limit is promised.
//!
//! **The two directions** are apart, as in QEMU: a read passes waiting writes, unless they wait for a total limit,
//! which is both directions' business. Then they have turns like siblings, and alternate within a disk.
//!
//! **Read-ahead** (`bucket/spare.rs`, `tree/spare.rs`) lives on what guests leave. Each bucket has a second level on top of the guests', which
//! drains only once theirs is empty; a read-ahead may be made while both together are not more than full at every level, and nobody
//! waits there. Guests' waits look at their own level alone, so no decision for them depends on what was read ahead. What they then have
//! from memory they pay for like everything, and the spare level is given it back ([`GivenBack`]).
//!
//! **Time** comes in as an argument and deadlines go out as values ([`Decision::Wait`]). The arithmetic is in whole
//! billionths of a unit, so a deadline is exact to the nanosecond, nothing drifts over a year of uptime, and a
//! property test can demand equality.
//!
//! Names, defaults and validity of limits are those of QEMU (docs/throttle.txt; `throttle_is_valid` in util/throttle.c),
//! whose users should find nothing new there but the error messages.
//!
//! Never rejects a request, never drops one, never knows what a request carries.

mod booking;
mod bucket;
mod cost;
mod enforcement;
mod heap;
mod ledger;
mod limits;
mod node;
mod price;
mod schedule;
mod share;
mod spare;
mod stats;
mod tree;

pub use booking::{Bound, MAX_LEVELS, Overbooked, Refused, Unit};
pub use cost::Cost;
pub use enforcement::{Enforcement, Scale};
pub use ledger::Ledger;
pub use limits::{Invalid, Limit, LimitKind, Limits, MAX_BURST_LENGTH_S, MAX_VALUE, Part, Rule, Setting};
pub use node::{NodeId, Ticket};
pub use share::Share;
pub use spare::GivenBack;
pub use stats::{Counters, Stats, WaitSummary};
pub use tree::{Admission, Decision, Returned, Tree};
