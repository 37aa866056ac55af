//! A group's limits over hosts, in virtual time: hosts with real trees and clients, leaders, and a
//! store, each with a clock of its own.
//!
//! - `faults`: partitions, pauses, drift, restarts, dead leaders, late and lost messages, a store
//!   that stops or goes back to what it held before: never more than the limit and one burst, and
//!   nobody starves.
//! - `hostile`: any numbers in what others have written.
//! - `rules`: a word between one host and its leader at a time.
//! - `shares`: without faults everybody has his share three ticks after a change.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod faults;
mod hostile;
mod rules;
#[path = "../../../block/tests/simulation/seeds.rs"]
mod seeds;
mod shares;

use policy::cluster::Timing;
use policy::cluster::simulated::{MS, Setting};
use policy::time::Duration;

pub(crate) const TIMING: Timing = Timing { tick: Duration::from_millis(200), lease: Duration::from_secs(2) };

/// Everybody asks again and again; one message in `late` is late.
pub(crate) fn setting(leaders: usize, late: Option<u64>) -> Setting {
    Setting {
        timing: TIMING,
        delay_ns: (MS / 5, 3 * MS),
        late,
        drift_ppm: 200,
        leaders,
        rereads: true,
        operations: 128,
        bytes: |_| 0,
    }
}
