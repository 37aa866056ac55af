//! The throttle layer: requests wait here until the limits of their disk, and of every group above
//! it, let them pass.
//!
//! ```text
//!   request ──► no limit on the way up? ─────────────────► pass          seat.rs: one atomic load
//!                  │ there is
//!                  ▼
//!             lock the tree ─► may pass now ─────────────► pass          arbiter.rs, policy's Tree
//!                  │ must wait
//!                  ▼
//!             task sleeps ◄── woken by: the tree's timer │ new settings │ another admission  waiter.rs
//! ```
//!
//! Disks of one tree may run on several threads. They share the state of the decisions behind a
//! lock that is held for a decision, never across an `.await` and never while a task is woken. A
//! tree has at most one timer that matters (`timer`), armed by the thread that first sees somebody
//! wait. A request waits to be told that it is admitted, never for a time to pass. So a change of
//! limits, shares, watermarks or its group applies to it at once.
//!
//! Read-ahead is not a request: it asks the same tree whether there are spare tokens
//! ([`Member::spare`]). It never waits for them and never makes anybody wait.
//!
//! | | |
//! | --- | --- |
//! | [`Group`], [`Member`] | what the rest of the program knows: groups and disks, their settings, changed while they run |
//! | `seat` | where a disk's requests ask; how it moves |
//! | `arbiter` | a tree, its lock and what its decisions set in motion |
//! | `waiter` | the handshake between a waiting request and its admission |
//! | `timer` | the only part that sleeps |
//!
//! `waiter`, `arbiter` and `seat` know no reactor; `tests/model` tries every interleaving of them.

mod arbiter;
mod group;
mod member;
mod seat;
mod settings;
mod sync;
mod timer;
mod waiter;

pub use group::Group;
pub use member::Member;
pub use settings::{DiskSettings, GroupSettings};
