//! Demand of a member for a divided limit, estimated from the use of its part.
//!
//! A member that uses nearly all of its part is throttled and counts as demanding everything. Other
//! members demand slightly more than they use. A stuck member (a large request at a low rate) is
//! distinguished from an idle one by the kernel's statistics on waiting.

/// Time constant of the smoothed rate in seconds: at a low rate a large request completes at once.
const SMOOTHING_S: f64 = 0.4;
/// Used share of a part above which the member counts as throttled.
const THROTTLED_SHARE: f64 = 0.85;
/// Time in seconds for which a member counts as throttled: writeback is bursty, with pauses of two
/// seconds. An idle member is forgotten sooner (`pool.rs`).
const THROTTLED_FOR_S: f64 = 3.0;
/// Demand of a member that is not throttled, relative to its rate.
const HEADROOM: f64 = 1.3;

/// Demand of one member in one direction, for bytes or operations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemberDemand {
    rate: f64,
    throttled_for_s: f64,
}

impl MemberDemand {
    /// Adds a measurement: `units` in `elapsed_s`, with `granted` units per second allowed (`None`:
    /// unlimited). `stuck` is true if requests waited and none completed.
    pub(super) fn observe(&mut self, units: u64, elapsed_s: f64, granted: Option<f64>, stuck: bool) {
        if elapsed_s <= 0.0 {
            return;
        }
        // First-order low-pass filter, stable for any interval between measurements.
        let smoothing = elapsed_s / (SMOOTHING_S + elapsed_s);
        let current_rate = units as f64 / elapsed_s;
        self.rate += (current_rate - self.rate) * smoothing;
        self.throttled_for_s -= elapsed_s;
        let is_throttled =
            granted.is_some_and(|granted| self.rate.max(current_rate) >= granted * THROTTLED_SHARE);
        // A member without a limit cannot be throttled by it, however long it waits.
        if is_throttled || (stuck && granted.is_some()) {
            self.throttled_for_s = THROTTLED_FOR_S;
        }
    }

    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    pub(super) fn demand(&self) -> f64 {
        if self.throttled_for_s > 0.0 { f64::INFINITY } else { self.rate * HEADROOM }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Demand after two seconds of the same load.
    fn demand_after_2s(units_per_tick: u64, granted: f64, stuck: bool) -> f64 {
        let mut demand = MemberDemand::default();
        for _ in 0..20 {
            demand.observe(units_per_tick, 0.1, Some(granted), stuck);
        }
        demand.demand()
    }

    #[test]
    fn full_use_demands_all_and_partial_use_a_margin() {
        assert_eq!(demand_after_2s(100, 1000.0, false), f64::INFINITY);
        assert!((demand_after_2s(50, 1000.0, false) - 500.0 * HEADROOM).abs() < 10.0);
    }

    #[test]
    fn stuck_member_demands_all() {
        assert_eq!(demand_after_2s(0, 1000.0, true), f64::INFINITY);
        assert!(demand_after_2s(0, 1000.0, false) < f64::EPSILON);
    }

    #[test]
    fn periodic_large_requests_demand_everything() {
        let mut demand = MemberDemand::default();
        // 1 MiB every second at a rate of 1 MiB/s.
        for tick in 0..40 {
            let passed = if tick % 10 == 9 { 1 << 20 } else { 0 };
            demand.observe(passed, 0.1, Some(1_048_576.0), passed == 0);
        }
        assert_eq!(demand.demand(), f64::INFINITY);
    }

    #[test]
    fn throttling_is_remembered_for_three_seconds() {
        let mut demand = MemberDemand::default();
        demand.observe(100, 0.1, Some(1000.0), false);
        demand.observe(0, 2.5, Some(1000.0), false);
        assert_eq!(demand.demand(), f64::INFINITY);
        demand.observe(0, 0.6, Some(1000.0), false);
        assert!(demand.demand() < 1000.0);
    }
}
