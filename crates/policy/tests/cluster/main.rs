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

mod audit;
mod client;
mod faults;
mod hostile;
mod rules;
#[path = "../../../block/tests/simulation/seeds.rs"]
mod seeds;
mod shares;
mod store;
mod world;

/// xorshift64*: any sequence will do that the seed decides.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d);
        random.below(2);
        random
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }

    pub(crate) fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Nanoseconds.
pub(crate) const MS: u64 = 1_000_000;
pub(crate) const S: u64 = 1000 * MS;
