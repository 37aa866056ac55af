//! Simulated cluster: hosts that share a group's limits, leaders and a store on one virtual clock,
//! for tests and predictions.
//!
//! ```text
//!     host: clients ─► tree ─► demand ─► quota ──reports──► store ──► leader
//!        ▲                                 ▲                  │          │
//!        └──── drifting clocks, messages that are delayed or lost ◄──────┘
//! ```
//!
//! Hosts, leaders, trees and demands are the daemon's own code. Store, network and clients are
//! models. A [`SimulatedCluster`] repeats the same run for the same seed.
//!
//! Never reads a clock: its time is virtual.

mod audit;
mod cluster;
mod host;
mod random;
mod store;

pub use audit::AdmissionAudit;
pub use cluster::{SimulatedCluster, SimulationConfig, StoreValue};
pub use host::{ClientLoad, SimulatedClient, SimulatedHost};
pub use random::SeededRandom;
pub use store::{SimulatedStore, StoreTraffic};

/// Nanoseconds in a millisecond.
pub const NANOS_PER_MS: u64 = 1_000_000;
/// Nanoseconds in a second.
pub const NANOS_PER_S: u64 = 1000 * NANOS_PER_MS;
