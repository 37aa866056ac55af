//! How much of a divided limit a member can use, judged by how much of its part it used.
//!
//! A member that used nearly all of its part is held back by it and counts as wanting everything.
//! Others want a little more than they used. A stuck member (a large request behind a small rate)
//! is told from an idle one by the kernel's own account of waiting.

/// Seconds that the rate is smoothed over: a large request at a small rate passes all at once.
const SMOOTHING_S: f64 = 0.4;
/// A member that took this part of what it was given is held back by that.
const HELD_BACK: f64 = 0.85;
/// Seconds for which it then counts as held back: writeback comes in lumps, with two seconds of
/// nothing between them. An idle member is forgotten sooner (`pool.rs`).
const REMEMBERED_S: f64 = 3.0;
/// How much more than what it took a member may want that is not held back.
const HEADROOM: f64 = 1.3;

/// Of one direction of one member, for bytes or operations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    rate: f64,
    held_back_s: f64,
}

impl Demand {
    /// Takes in that so many units passed, while so many a second were allowed (`None`: any
    /// number), and whether something waited and nothing passed.
    pub(super) fn observe(&mut self, units: u64, elapsed_s: f64, granted: Option<f64>, stuck: bool) {
        if elapsed_s <= 0.0 {
            return;
        }
        let fresh = elapsed_s / (SMOOTHING_S + elapsed_s);
        let now = units as f64 / elapsed_s;
        self.rate += (now - self.rate) * fresh;
        self.held_back_s -= elapsed_s;
        let held_back = granted.is_some_and(|granted| self.rate.max(now) >= granted * HELD_BACK);
        if held_back || (stuck && granted.is_some()) {
            self.held_back_s = REMEMBERED_S;
        }
    }

    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    pub(super) fn wants(&self) -> f64 {
        if self.held_back_s > 0.0 { f64::INFINITY } else { self.rate * HEADROOM }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same for two seconds.
    fn after(units_per_tick: u64, granted: f64, stuck: bool) -> f64 {
        let mut demand = Demand::default();
        for _ in 0..20 {
            demand.observe(units_per_tick, 0.1, Some(granted), stuck);
        }
        demand.wants()
    }

    #[test]
    fn who_takes_all_wants_more_and_who_does_not_wants_what_it_takes() {
        assert_eq!(after(100, 1000.0, false), f64::INFINITY);
        assert!((after(50, 1000.0, false) - 500.0 * HEADROOM).abs() < 10.0);
    }

    #[test]
    fn who_is_stuck_wants_more() {
        assert_eq!(after(0, 1000.0, true), f64::INFINITY);
        assert!(after(0, 1000.0, false) < f64::EPSILON);
    }

    #[test]
    fn a_large_request_now_and_then_is_a_rate() {
        let mut demand = Demand::default();
        // 1 MiB every second, at 1 MiB/s.
        for tick in 0..40 {
            let passed = if tick % 10 == 9 { 1 << 20 } else { 0 };
            demand.observe(passed, 0.1, Some(1_048_576.0), passed == 0);
        }
        assert_eq!(demand.wants(), f64::INFINITY);
    }

    #[test]
    fn it_is_remembered_for_three_seconds() {
        let mut demand = Demand::default();
        demand.observe(100, 0.1, Some(1000.0), false);
        demand.observe(0, 2.5, Some(1000.0), false);
        assert_eq!(demand.wants(), f64::INFINITY);
        demand.observe(0, 0.6, Some(1000.0), false);
        assert!(demand.wants() < 1000.0);
    }
}
