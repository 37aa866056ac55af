//! Pseudo-random numbers from a seed.

/// xorshift64*. Any generator would do that repeats its sequence for the same seed.
#[derive(Clone, Copy, Debug)]
pub struct SeededRandom(u64);

impl SeededRandom {
    /// Starts the sequence of a seed.
    pub const fn new(seed: u64) -> Self {
        // The highest bit is set because a state of zero would yield only zeros.
        Self((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d) | 1 << 63)
    }

    /// Number below `end`, which must not be 0.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }

    /// Number in `from..=to`.
    pub const fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True with probability 1 / `n`.
    pub const fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Time until the next of events at random instants with mean distance `mean`: a geometric
    /// distribution in steps of 1/16, which approximates the exponential one.
    pub const fn arrival_gap(&mut self, mean: u64) -> u64 {
        let mut steps = 0;
        while !self.one_in(16) && steps < 1000 {
            steps += 1;
        }
        // The random part of up to two steps has a mean of one step, which completes the mean.
        mean / 16 * steps + self.below(mean / 8 + 1)
    }
}
