//! A group's limits over hosts in virtual time: hosts with real trees and simulated clients,
//! leaders, and a store, each with its own clock.
//!
//! - `faults`: partitions, pauses, clock drift, restarts, dead leaders, late and lost messages, a
//!   store that stops or loses writes: never more than the limit and one burst, and no starvation.
//! - `hostile`: arbitrary values in the store.
//! - `peers`: hosts that reach each other while the store is unreachable.
//! - `rules`: single messages between one host and its leader.
//! - `shares`: without faults, every host has its share three ticks after a change.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod faults;
mod hostile;
mod peers;
mod rules;
#[path = "../../../block/tests/simulation/seeds.rs"]
mod seeds;
mod shares;

use policy::cluster::Timing;
use policy::cluster::simulated::{NANOS_PER_MS, SimulationConfig};
use policy::time::Duration;

pub(crate) const TIMING: Timing = Timing { tick: Duration::from_millis(200), lease: Duration::from_secs(2) };

/// Every process reads everything at each tick; one message in `late` is late.
pub(crate) fn setting(leaders: usize, late: Option<u64>) -> SimulationConfig {
    SimulationConfig {
        timing: TIMING,
        delay_ns: (NANOS_PER_MS / 5, 3 * NANOS_PER_MS),
        late,
        drift_ppm: 200,
        leaders,
        has_peers: false,
        rereads: true,
        max_grants_per_transaction: 128,
        value_bytes: |_| 0,
    }
}
