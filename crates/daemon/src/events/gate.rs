//! How often something may happen: so many at once, and so many a second; the others are counted.
//!
//! Time is an argument.

use policy::time::Instant;

const SECOND_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
pub(super) struct Gate {
    burst: u64,
    /// Between two, in the long run.
    each_ns: u64,
    /// What has been used of the burst, as time until it is there again.
    used_ns: u64,
    at: Instant,
    left_out: u64,
}

impl Gate {
    pub(super) const fn new(burst: u64, per_second: u64) -> Self {
        Self { burst, each_ns: SECOND_NS / per_second, used_ns: 0, at: Instant::ZERO, left_out: 0 }
    }

    /// Whether one more may be: how many were left out since the last. Else it is left out.
    pub(super) fn pass(&mut self, now: Instant) -> Option<u64> {
        self.used_ns = self.used_ns.saturating_sub(now.nanos_since(self.at));
        self.at = self.at.max(now);
        if self.used_ns > (self.burst - 1) * self.each_ns {
            self.left_out += 1;
            return None;
        }
        self.used_ns += self.each_ns;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_so_many_a_second() {
        let mut gate = Gate::new(3, 10);
        let mut at = |ms: u64| gate.pass(Instant::from_nanos(ms * 1_000_000));
        assert_eq!(
            [at(1000), at(1000), at(1000), at(1000), at(1050)],
            [Some(0), Some(0), Some(0), None, None]
        );
        assert_eq!([at(1100), at(1150), at(1200)], [Some(2), None, Some(1)]);
        assert_eq!([at(9000), at(9000), at(9000), at(9000)], [Some(0), Some(0), Some(0), None]);
    }
}
