//! The throttle layer: requests wait here until the limits of their disk, and of every group above
//! it, admit them.
//!
//! ```text
//!   request ──► no limit applies? ────────────────────► admitted      slot.rs: one atomic load
//!                  │ a limit applies
//!                  ▼
//!             lock the tree ─► limits allow it now ───► admitted      tree.rs, ThrottleTree
//!                  │ must wait
//!                  ▼
//!             task sleeps ◄── woken by: the tree's timer │ new settings │ another admission waiter.rs
//! ```
//!
//! Disks of one tree may run on several threads. They share the tree behind a lock that is held for
//! one decision, never across an `.await` and never while a task is woken. A tree has at most one
//! effective timer (`timer`), armed by the thread that first sees a request wait. A request waits
//! for its admission, never for an instant. So a change of limits, shares, watermarks or its group
//! applies to it at once.
//!
//! Read-ahead is not a request: the same tree admits it from spare capacity
//! ([`ThrottleMember::try_read_ahead`]). It never waits, and never makes a request wait.
//!
//! | | |
//! | --- | --- |
//! | [`ThrottleGroup`], [`ThrottleMember`] | public interface: groups and disks, and settings, which can change at run time |
//! | [`BackgroundMember`] | work that uses spare capacity, or a share of the group |
//! | `slot` | a disk's slot: admission of its requests, moves |
//! | `tree` | a tree, its lock and the effects of its decisions |
//! | `waiter` | the handshake between a waiting request and its admission |
//! | `timer` | the only part that sleeps |
//!
//! `waiter`, `tree` and `slot` are independent of the reactor; `tests/model` checks every
//! interleaving of them.

mod background;
mod group;
mod member;
mod settings;
mod slot;
mod sync;
mod timer;
mod tree;
mod waiter;

pub use background::{BackgroundCause, BackgroundMember, BackgroundSettings, CauseOwner};
pub use group::ThrottleGroup;
pub use member::ThrottleMember;
pub use settings::{DiskSettings, GroupSettings};
