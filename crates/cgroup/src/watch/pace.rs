//! Limits the watch's share of a processor, however many control groups there are.

use nix::time::{ClockId, clock_gettime};
use policy::time::{Duration, Instant};

const SHARE_OF_A_CORE: f64 = 0.015;
/// In a round, whatever they cost.
const ALWAYS_ALLOWED: usize = 4;

/// How many control groups may be looked at now.
#[derive(Debug)]
pub(super) struct Pace {
    last: Instant,
    /// The thread's processor time at the last round.
    cpu: Duration,
    /// Seconds of a processor for one look, with its part of all else; smoothed.
    pub(super) look_s: f64,
    /// Looks that may be made.
    saved: f64,
    #[cfg(test)]
    pub(super) made: usize,
}

impl Pace {
    /// Before anything is known: what a slow machine takes.
    const FIRST_LOOK_S: f64 = 50e-6;
    /// As many looks as so many seconds allow may be made at once.
    const MOST_SAVED_S: f64 = 0.2;

    pub(super) fn new(now: Instant, cpu: Duration) -> Self {
        Self {
            last: now,
            cpu,
            look_s: Self::FIRST_LOOK_S,
            saved: 0.0,
            #[cfg(test)]
            made: 0,
        }
    }

    pub(super) fn allowed(&mut self, now: Instant) -> usize {
        let elapsed_s = now.nanos_since(self.last) as f64 / 1e9;
        self.last = now;
        let affordable = SHARE_OF_A_CORE / self.look_s;
        self.saved = (self.saved + elapsed_s * affordable).min(Self::MOST_SAVED_S * affordable);
        (self.saved as usize).max(ALWAYS_ALLOWED)
    }

    /// So many looks were made, by this processor time of the thread.
    pub(super) fn spent(&mut self, cpu: Duration, looks: usize) {
        #[cfg(test)]
        {
            self.made += looks;
        }
        if looks > 0 {
            let used = cpu.saturating_sub(self.cpu).as_secs_f64();
            self.cpu = cpu;
            self.look_s += (used / looks as f64 - self.look_s) * 0.05;
            self.look_s = self.look_s.max(1e-7);
        }
        self.saved = (self.saved - looks as f64).max(0.0);
    }
}

pub(super) fn cpu_now() -> Duration {
    clock(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

pub(super) fn clock(id: ClockId) -> Duration {
    // Both clocks are always there (clock_gettime(2)).
    clock_gettime(id).map(Duration::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Instant {
        Instant::from_nanos(milliseconds * 1_000_000)
    }

    #[test]
    fn looking_costs_no_more_than_its_share() {
        let mut pace = Pace::new(at(0), Duration::ZERO);
        let (mut looks, mut cpu) = (0, Duration::ZERO);
        for round in 1..=1000 {
            let allowed = pace.allowed(at(round * 10)).min(1000);
            cpu += Duration::from_micros(20) * allowed as u32;
            pace.spent(cpu, allowed);
            looks += allowed;
        }
        let share = looks as f64 * 20e-6 / 10.0;
        assert!((share / SHARE_OF_A_CORE - 1.0).abs() < 0.1, "{share}");
        // Where each takes 10 ms, some are looked at all the same.
        for round in 1001..=1100 {
            let allowed = pace.allowed(at(round * 10));
            assert!(allowed >= ALWAYS_ALLOWED);
            cpu += Duration::from_millis(10) * allowed as u32;
            pace.spent(cpu, allowed);
        }
    }
}
