//! Numbers that a seed decides.

/// xorshift64*: any sequence will do that is the same for the same seed.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// Begins a sequence.
    pub const fn new(seed: u64) -> Self {
        Self((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d) | 1 << 63)
    }

    /// Below `end`, which is not 0.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }

    /// From one to the other, both included.
    pub const fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True once in so many times, on average.
    pub const fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// The time until the next of events that come by themselves, `mean` apart on average: a
    /// geometric distribution in steps of 1/16, which is near enough to the exponential one.
    pub const fn gap(&mut self, mean: u64) -> u64 {
        let mut steps = 0;
        while !self.one_in(16) && steps < 1000 {
            steps += 1;
        }
        // In the middle, on average.
        mean / 16 * steps + self.below(mean / 8 + 1)
    }
}
