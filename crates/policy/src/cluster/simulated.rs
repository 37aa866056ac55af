//! Simulated cluster: hosts that share a group's limits, leaders and a store on one virtual clock,
//! for tests and predictions.
//!
//! ```text
//!     Machine: clients ─► Tree ─► Demand ─► Host ──reports──► Store ──► Leader
//!        ▲                                   ▲                  │          │
//!        └──── World: drifting clocks, messages that are delayed or lost ◄─────┘
//! ```
//!
//! Hosts, leaders, trees and demands are the daemon's own code. Store, network and clients are
//! models. A [`World`] repeats the same run for the same seed.
//!
//! Never reads a clock: its time is virtual.

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

/// Nanoseconds in a millisecond.
pub const MS: u64 = 1_000_000;
/// Nanoseconds in a second.
pub const S: u64 = 1000 * MS;
