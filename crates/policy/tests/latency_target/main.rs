//! Latency targets in virtual time.
//!
//! - `control`: a client at depth 1 keeps its percentile beside busy clients on a simulated device,
//!   whose speed and load change; the others keep their throughput.
//! - `rules`: the controller's states, order and bounds, with measurements made by hand.
//! - `comparison`: other control laws under the same loads.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod comparison;
mod control;
mod device;
mod laws;
mod rules;
mod scenario;
#[path = "../../../block/tests/simulation/seeds.rs"]
mod seeds;
