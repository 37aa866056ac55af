//! Hosts that share a group's limits, leaders and a store, on one virtual clock: the twin of a
//! cluster, for tests and predictions.
//!
//! ```text
//!     Machine: clients ─► Tree ─► Demand ─► Host ──reports──► Store ──► Leader
//!        ▲                                   ▲                  │          │
//!        └──────── World: clocks that drift, messages that take time, and are lost ◄──┘
//! ```
//!
//! Hosts, leaders, trees and demands are those of the daemon. What is imitated is the store, the
//! network, and the clients. A [`World`] does the same again for the same seed.
//!
//! Never reads a clock: what it calls time is its own.

mod audit;
mod machine;
mod random;
mod store;
mod world;

pub use audit::Audit;
pub use machine::{Client, Load, Machine};
pub use random::Random;
pub use store::{Store, Traffic};
pub use world::{Setting, Word, World};

/// Nanoseconds.
pub const MS: u64 = 1_000_000;
/// Nanoseconds.
pub const S: u64 = 1000 * MS;
