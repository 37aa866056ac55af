//! Monitors a reservation: compares the service it got with the guarantee, in windows of one second
//! of waiting.
//!
//! ```text
//!   waits        ────────────          ──────────────────────
//!   windows      [   1 s of waiting            ][    1 s    ]      gaps are not counted
//!   service      time at the reserved rate: 1.2 s ✓   0.7 s ✗      95 % of a window is enough
//! ```
//!
//! Service is measured, slice by slice, by the time that it takes at the reserved rate. This takes
//! `iops-size` and both units into account as the reservation does, and counts a large request
//! while it is charged. Only time in which requests wait is counted: a node that requests less than
//! its reservation does not miss it.
//!
//! The monitor only measures; `scheduler.rs` schedules.

use crate::time::Instant;

/// Waiting time of a window.
const WINDOW_NS: u64 = 1_000_000_000;
/// Age above which an incomplete window is discarded.
const STALE_NS: u64 = 4 * WINDOW_NS;
/// Percentage of the reservation that counts as met; the same as in `weir verify`.
const MET_PERCENT: u64 = 95;

/// Result of monitoring a reservation since it was set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservationTimes {
    /// Time during which requests waited and the reservation was met, in nanoseconds.
    pub met_ns: u64,
    /// Time during which requests waited and the reservation was missed, in nanoseconds.
    pub missed_ns: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ReservationMonitor {
    times: ReservationTimes,
    waits_since: Option<Instant>,
    /// Start of the current window.
    began: Instant,
    waited_ns: u64,
    served_ns: u64,
}

impl ReservationMonitor {
    pub(super) const fn new(waits: bool, now: Instant) -> Self {
        let waits_since = if waits { Some(now) } else { None };
        Self {
            times: ReservationTimes { met_ns: 0, missed_ns: 0 },
            waits_since,
            began: now,
            waited_ns: 0,
            served_ns: 0,
        }
    }

    /// Records that requests wait from now on, or no longer.
    pub(super) fn set_waiting(&mut self, waits: bool, now: Instant) {
        if waits == self.waits_since.is_some() {
            return;
        }
        self.advance(now);
        let is_stale = now.nanos_since(self.began) > STALE_NS;
        // A window is continued across short gaps, so that a bursty client fills it at all.
        if waits && (self.waited_ns == 0 || is_stale) {
            (self.began, self.waited_ns, self.served_ns) = (now, 0, 0);
        }
        self.waits_since = waits.then_some(now);
    }

    /// Records service, as the time that it takes at the reserved rate.
    pub(super) fn add_service(&mut self, service_ns: u64, now: Instant) {
        self.served_ns = self.served_ns.saturating_add(service_ns);
        self.advance(now);
    }

    /// Result as of `now`, including a wait that has not ended.
    pub(super) fn times(mut self, now: Instant) -> ReservationTimes {
        self.advance(now);
        self.times
    }

    /// Adds the result of another process.
    pub(super) const fn add_times(&mut self, times: ReservationTimes) {
        self.times.met_ns = self.times.met_ns.saturating_add(times.met_ns);
        self.times.missed_ns = self.times.missed_ns.saturating_add(times.missed_ns);
    }

    fn advance(&mut self, now: Instant) {
        let Some(since) = self.waits_since else { return };
        self.waited_ns += now.nanos_since(since);
        self.waits_since = Some(since.max(now));
        if self.waited_ns < WINDOW_NS {
            return;
        }
        let is_met = u128::from(self.served_ns) * 100 >= u128::from(self.waited_ns) * u128::from(MET_PERCENT);
        let sum = if is_met { &mut self.times.met_ns } else { &mut self.times.missed_ns };
        *sum = sum.saturating_add(self.waited_ns);
        (self.began, self.waited_ns, self.served_ns) = (now, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    fn times_ms(met_ms: u64, missed_ms: u64) -> ReservationTimes {
        ReservationTimes { met_ns: met_ms * 1_000_000, missed_ns: missed_ms * 1_000_000 }
    }

    #[test]
    fn service_of_95_percent_meets_the_reservation() {
        for (each_us, expect) in [(9_500, times_ms(1000, 0)), (9_400, times_ms(0, 1000))] {
            let mut monitor = ReservationMonitor::new(true, ms(0));
            for at in (10..=1000).step_by(10) {
                monitor.add_service(each_us * 1000, ms(at));
            }
            assert_eq!(monitor.times(ms(1000)), expect, "{each_us} us of each 10 ms");
        }
    }

    #[test]
    fn unused_reservation_is_not_missed() {
        let mut monitor = ReservationMonitor::new(false, ms(0));
        monitor.add_service(1, ms(5000));
        monitor.set_waiting(true, ms(6000));
        monitor.set_waiting(false, ms(6900));
        assert_eq!(monitor.times(ms(60_000)), ReservationTimes::default());
        // A window that began long ago is discarded.
        monitor.set_waiting(true, ms(60_000));
        monitor.set_waiting(false, ms(60_500));
        assert_eq!(monitor.times(ms(90_000)), ReservationTimes::default());
    }

    #[test]
    fn starvation_is_reported_before_any_service() {
        let monitor = ReservationMonitor::new(true, ms(0));
        assert_eq!(monitor.times(ms(999)), ReservationTimes::default());
        assert_eq!(monitor.times(ms(7000)), times_ms(0, 7000));
    }

    #[test]
    fn only_waiting_time_counts() {
        let mut monitor = ReservationMonitor::new(false, ms(0));
        // Waits for half of each 100 ms, and gets half of the reservation for all of it.
        for at in (0..2000).step_by(100) {
            monitor.set_waiting(true, ms(at));
            monitor.set_waiting(false, ms(at + 50));
            monitor.add_service(50_000_000, ms(at + 50));
        }
        assert_eq!(monitor.times(ms(2000)), times_ms(1000, 0));
    }
}
