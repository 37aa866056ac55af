//! Throttling: which request may pass now, and when the next one may.
//!
//! ```text
//!   disk A  reads  ▕▏▕▏▕▏ ─┐  A's own    ┐ turns, by weight     group's     ┐ turns      host's
//!   disk A  writes ▕▏▕▏ ───┴─ limits ────┤ and by promise ────► limits ─────┤ ─────────► limits ──► pass
//!   disk B  reads  ▕▏ ─────── limits ────┘                                  │
//!   disk C  reads  (idle) ·                                    a group's ───┘
//! ```
//!
//! **The bucket** (`bucket.rs`). Each of a node's six limits ([`LimitKind`]) is a leaky bucket.
//! Admitted work fills it, and it leaks at the limit's rate. While it is more than full, what it
//! applies to waits. Its size is the burst: a tenth of a second's worth by default, else `-max` ×
//! `-max-length`. A burst longer than one second has a second, small bucket that leaks at `-max`. A
//! request passes whatever its size; the requests after it pay for what was too much.
//!
//! **The slice** (`price.rs`). A request worth more than 90 ms of its scarcest limit is charged in
//! parts of that size, and passes with the last part. Others have their turns between the parts.
//!
//! **The tree** (`tree.rs`). Disks have limits, and belong to groups that have limits, which may
//! belong to groups. All levels hold at once. Thousands of idle disks cost a decision nothing.
//!
//! **The turn** (`schedule.rs`). The cost of a request is the time that it takes of the scarcest
//! limit above its siblings. They share that time by weight, so neither small requests nor short
//! queues are at a disadvantage. A reservation comes first, up to its rate; those that cannot be
//! kept are refused (`booking.rs`).
//!
//! **The longest wait.** The first request in a disk's queue waits, in each group, until each
//! sibling has had two turns and its share of what this one had. A turn is a request or a slice, C.
//! With weights w and nothing promised, that is at most Σ (2 Cⱼ + wⱼ/wᵢ · Cᵢ) over its siblings,
//! plus one turn that its own bucket is overrun by, plus 40 ms of credit
//! (`tests/throttle/every_order.rs` tries all orders of events). Promises lengthen it at most a
//! hundredfold.
//!
//! **The two directions** are apart, as in QEMU: a read passes waiting writes, unless both wait for
//! a total limit. Then they have turns like siblings, and alternate within a disk.
//!
//! **Read-ahead** (`bucket/spare.rs`, `tree/spare.rs`) uses what guests leave. Each bucket has a
//! second level on top of the guests', which drains only when theirs is empty. A read-ahead is
//! admitted while both together are not more than full at every level, and nobody waits there.
//! Guests pay for data from memory as for any other, and the spare level gets that amount back
//! ([`GivenBack`]).
//!
//! Names, defaults and validity of limits are those of QEMU (docs/throttle.txt; `throttle_is_valid`
//! in util/throttle.c).
//!
//! Never rejects a request, never drops one, never knows its data.

mod booking;
mod bucket;
mod cost;
mod enforcement;
mod heap;
mod ledger;
mod limits;
mod node;
mod price;
mod promise;
mod schedule;
mod share;
mod spare;
mod stats;
mod tree;

pub use booking::{Bound, MAX_LEVELS, Overbooked, Refused, Reservable, Unit};
pub use bucket::{Contents, Filled};
pub use cost::Cost;
pub use enforcement::{Enforcement, Scale};
pub use ledger::Ledger;
pub use limits::{Invalid, Limit, LimitKind, Limits, MAX_BURST_LENGTH_S, MAX_VALUE, Part, Rule, Setting};
pub use node::{Charged, NodeId, Ticket};
pub use promise::Kept;
pub use share::Share;
pub use spare::GivenBack;
pub use stats::{Brief, Counted, Counters, Level, RECENT_NS, Stats, WaitSummary, limited_with_groups};
pub use tree::{Admission, Decision, Held, Lent, Returned, Tree, Wanted};
