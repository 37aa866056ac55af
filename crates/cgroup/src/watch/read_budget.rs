//! Bounds the CPU time of the watch, independently of the number of control groups.

use nix::time::{ClockId, clock_gettime};
use policy::time::{Duration, Instant};

const SHARE_OF_A_CORE: f64 = 0.015;
/// Reads allowed in each round, regardless of their cost.
const ALWAYS_ALLOWED: usize = 4;

/// Budget of control groups that may be read now (a token bucket).
#[derive(Debug)]
pub(super) struct ReadBudget {
    last: Instant,
    /// CPU time of the thread at the last round.
    cpu: Duration,
    /// CPU seconds for reading one control group, including overhead; smoothed.
    pub(super) read_s: f64,
    /// Reads in the bucket.
    tokens: f64,
    #[cfg(test)]
    pub(super) read_count: usize,
}

impl ReadBudget {
    /// Initial estimate: the cost on a slow machine.
    const INITIAL_READ_S: f64 = 50e-6;
    /// Capacity of the bucket, in CPU seconds of reading.
    const MAX_SAVED_S: f64 = 0.2;

    pub(super) fn new(now: Instant, cpu: Duration) -> Self {
        Self {
            last: now,
            cpu,
            read_s: Self::INITIAL_READ_S,
            tokens: 0.0,
            #[cfg(test)]
            read_count: 0,
        }
    }

    pub(super) fn allowed(&mut self, now: Instant) -> usize {
        let elapsed_s = now.nanos_since(self.last) as f64 / 1e9;
        self.last = now;
        let affordable = SHARE_OF_A_CORE / self.read_s;
        self.tokens = (self.tokens + elapsed_s * affordable).min(Self::MAX_SAVED_S * affordable);
        (self.tokens as usize).max(ALWAYS_ALLOWED)
    }

    /// Charges `reads` reads, given the thread's CPU time after them.
    pub(super) fn charge(&mut self, cpu: Duration, reads: usize) {
        #[cfg(test)]
        {
            self.read_count += reads;
        }
        if reads > 0 {
            let used = cpu.saturating_sub(self.cpu).as_secs_f64();
            // Exponential smoothing; the lower bound keeps the quotient in `allowed` finite.
            self.cpu = cpu;
            self.read_s += (used / reads as f64 - self.read_s) * 0.05;
            self.read_s = self.read_s.max(1e-7);
        }
        self.tokens = (self.tokens - reads as f64).max(0.0);
    }
}

pub(super) fn cpu_now() -> Duration {
    clock(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

pub(super) fn clock(id: ClockId) -> Duration {
    // Never fails: both clocks always exist (clock_gettime(2)).
    clock_gettime(id).map(Duration::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Instant {
        Instant::from_nanos(milliseconds * 1_000_000)
    }

    #[test]
    fn reading_stays_within_its_cpu_share() {
        let mut pace = ReadBudget::new(at(0), Duration::ZERO);
        let (mut reads, mut cpu) = (0, Duration::ZERO);
        for round in 1..=1000 {
            let allowed = pace.allowed(at(round * 10)).min(1000);
            cpu += Duration::from_micros(20) * allowed as u32;
            pace.charge(cpu, allowed);
            reads += allowed;
        }
        let share = reads as f64 * 20e-6 / 10.0;
        assert!((share / SHARE_OF_A_CORE - 1.0).abs() < 0.1, "{share}");
        // At 10 ms for each read, a minimum of reads is still allowed.
        for round in 1001..=1100 {
            let allowed = pace.allowed(at(round * 10));
            assert!(allowed >= ALWAYS_ALLOWED);
            cpu += Duration::from_millis(10) * allowed as u32;
            pace.charge(cpu, allowed);
        }
    }
}
