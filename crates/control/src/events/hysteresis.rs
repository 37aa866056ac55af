//! Hysteresis for conditions: a change counts only after it has lasted for a while, so that a disk
//! at its limit causes one event and not a thousand.
//!
//! ```text
//!   over     ███████████ █ ██████                 a sample each second
//!   between            █  █                       neither: the state does not change
//!   under  ██                    ████████████
//!               ▲ begins, after `on`        ▲ ends, after `off` without a break
//! ```
//!
//! Pure: time and all measurements are arguments.

use policy::{
    counter,
    throttle::{ReservationTimes, ThrottleSummary},
    time::{Duration, Instant},
    watermark::MeasuredCapacity,
};

/// Percentage of time in which requests waited for a limit: a limit counts as hit from the first
/// value on, and as released below the second.
const HIT_PERCENT: u64 = 50;
const RELEASED_PERCENT: u64 = 10;
/// Queue length of a busy device, and the percentage of its measured capacity below which it counts
/// as slow. The alert `WeirDeviceSlow` uses the same values.
const BUSY_QUEUE: f64 = 4.0;
const SLOW_PERCENT: u64 = 50;

/// How long a condition must last before it counts as begun (`on`) or ended (`off`).
pub(crate) const LIMIT_DELAYS: ConditionDelays =
    ConditionDelays { on: Duration::from_secs(2), off: Duration::from_secs(10) };
pub(crate) const RESERVATION_DELAYS: ConditionDelays =
    ConditionDelays { on: Duration::from_secs(1), off: Duration::from_secs(10) };
pub(crate) const WATERMARK_DELAYS: ConditionDelays =
    ConditionDelays { on: Duration::from_secs(1), off: Duration::from_secs(5) };
/// Begins at once, because the controller has waited. A target that is tried again and missed
/// again, which takes less than 30 s, is one condition.
pub(crate) const LATENCY_DELAYS: ConditionDelays =
    ConditionDelays { on: Duration::ZERO, off: Duration::from_secs(30) };
pub(crate) const DEVICE_DELAYS: ConditionDelays =
    ConditionDelays { on: Duration::from_secs(60), off: Duration::from_secs(60) };

#[derive(Clone, Copy, Debug)]
pub(crate) struct ConditionDelays {
    on: Duration,
    off: Duration,
}

/// One sample, compared with the thresholds of its condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConditionSample {
    Over,
    Between,
    Under,
}

/// Change of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConditionChange {
    Began,
    /// The condition held for this long.
    Ended(Duration),
}

/// Condition with hysteresis.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Condition {
    /// Start of the condition; `None` while it does not hold.
    held_since: Option<Instant>,
    /// Time of the first of the samples that contradict the state.
    contradicted_since: Option<Instant>,
}

impl Condition {
    /// True if the condition does not hold and no sample contradicts that.
    pub(crate) fn is_idle(&self) -> bool {
        self.held_since.is_none() && self.contradicted_since.is_none()
    }

    pub(crate) fn observe(
        &mut self,
        sample: ConditionSample,
        delays: ConditionDelays,
        now: Instant,
    ) -> Option<ConditionChange> {
        // `Between` contradicts neither state; it only restarts the delay.
        let opposite = if self.held_since.is_some() { ConditionSample::Under } else { ConditionSample::Over };
        if sample != opposite {
            self.contradicted_since = None;
            return None;
        }
        let since = *self.contradicted_since.get_or_insert(now);
        let enough = if self.held_since.is_some() { delays.off } else { delays.on };
        if now - since < enough {
            return None;
        }
        self.contradicted_since = None;
        match self.held_since.take() {
            // Ends at the first contradicting sample: the time of `off` is not part of the
            // condition.
            Some(began) => Some(ConditionChange::Ended(since - began)),
            None => {
                self.held_since = Some(since);
                Some(ConditionChange::Began)
            }
        }
    }
}

/// Percentage of the time between two samples in which requests waited for a limit; 0 if the
/// counter decreased.
pub(crate) fn limited_percent(before: &ThrottleSummary, now: &ThrottleSummary, elapsed: Duration) -> u64 {
    // 128 bits: nanoseconds of a long interval times 100 exceed 64 bits.
    let limited = u128::from(counter::growth(before.throttled_ns, now.throttled_ns).unwrap_or(0));
    u64::try_from(limited * 100 / elapsed.as_nanos().max(1)).unwrap_or(u64::MAX).min(100)
}

pub(crate) fn limit_sample(percent: u64) -> ConditionSample {
    match percent {
        HIT_PERCENT.. => ConditionSample::Over,
        RELEASED_PERCENT.. => ConditionSample::Between,
        _ => ConditionSample::Under,
    }
}

/// `None` (undecided) if requests wait and no interval of the reservation ended since `before`.
pub(crate) fn reservation_sample(before: &ThrottleSummary, now: &ThrottleSummary) -> Option<ConditionSample> {
    let (ReservationTimes { met_ns, missed_ns }, after) =
        (before.reservation_times.unwrap_or_default(), now.reservation_times?);
    if after.missed_ns > missed_ns {
        Some(ConditionSample::Over)
    } else if after.met_ns > met_ns || now.waiting == [0; 2] {
        Some(ConditionSample::Under)
    } else {
        None
    }
}

/// Throughput of a device between two samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceThroughput {
    /// Requests and bytes per second, by direction.
    pub(crate) iops: [u64; 2],
    pub(crate) bps: [u64; 2],
    /// Average number of requests in flight.
    pub(crate) queue: f64,
}

/// Percentage of the measured capacity in use, the larger of IOPS and bytes; `None` if the capacity
/// was not measured.
pub(crate) fn capacity_percent(capacity: &MeasuredCapacity, throughput: &DeviceThroughput) -> Option<u64> {
    let part = |used: [u64; 2], measured: [u64; 2]| {
        let parts = [0, 1].map(|direction| (used[direction] * 100).checked_div(measured[direction]));
        // Reads and writes share the device, so their parts add up.
        (parts != [None; 2]).then(|| parts.into_iter().flatten().sum::<u64>())
    };
    let operations = part(throughput.iops, [capacity.read_iops, capacity.write_iops]);
    operations.max(part(throughput.bps, [capacity.read_bps, capacity.write_bps]))
}

/// Slow: the queue is long and the throughput is far below the capacity.
pub(crate) fn device_sample(percent: u64, queue: f64) -> ConditionSample {
    if queue > BUSY_QUEUE && percent < SLOW_PERCENT { ConditionSample::Over } else { ConditionSample::Under }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_second(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    /// Feeds one sample per second; returns the second of each change.
    fn changes_of(
        samples: &[(ConditionSample, u64)],
        delays: ConditionDelays,
    ) -> Vec<(u64, ConditionChange)> {
        let (mut condition, mut at, mut changes) = (Condition::default(), 0, Vec::new());
        for &(sample, seconds) in samples {
            for _ in 0..seconds {
                changes.extend(condition.observe(sample, delays, at_second(at)).map(|change| (at, change)));
                at += 1;
            }
        }
        changes
    }

    #[test]
    fn an_hour_at_the_limit_is_two_events() {
        use ConditionSample::{Between, Over, Under};
        // Includes pauses of some seconds, and seconds with little throttling.
        let mut samples = vec![(Under, 10)];
        for _ in 0..360 {
            samples.extend([(Over, 5), (Under, 3), (Between, 2)]);
        }
        samples.push((Under, 60));
        assert_eq!(
            changes_of(&samples, LIMIT_DELAYS),
            [(12, ConditionChange::Began), (3610 + 10, ConditionChange::Ended(Duration::from_secs(3600)))]
        );
    }

    #[test]
    fn short_condition_causes_no_event() {
        use ConditionSample::{Between, Over, Under};
        assert_eq!(
            changes_of(&[(Over, 2), (Between, 1), (Over, 2), (Under, 1), (Over, 2)], LIMIT_DELAYS),
            []
        );
    }

    #[test]
    fn limited_time_decides_limit_samples() {
        let brief = |limited_ns| ThrottleSummary { throttled_ns: limited_ns, ..ThrottleSummary::default() };
        let percent =
            |ms: u64| limited_percent(&brief(7), &brief(7 + ms * 1_000_000), Duration::from_secs(2));
        assert_eq!(
            [percent(0), percent(500), percent(1000), percent(2000), percent(9000)],
            [0, 25, 50, 100, 100]
        );
        assert_eq!(
            [limit_sample(50), limit_sample(49), limit_sample(10), limit_sample(9)],
            [
                ConditionSample::Over,
                ConditionSample::Between,
                ConditionSample::Between,
                ConditionSample::Under
            ]
        );
        // The disk was replaced, and its counter restarted.
        assert_eq!(limited_percent(&brief(9), &brief(1), Duration::from_secs(1)), 0);
    }

    #[test]
    fn reservation_is_undecided_without_new_intervals() {
        let brief = |met_ns, missed_ns, waiting| ThrottleSummary {
            reservation_times: Some(ReservationTimes { met_ns, missed_ns }),
            waiting: [waiting, 0],
            ..ThrottleSummary::default()
        };
        let before = brief(5, 5, 1);
        assert_eq!(reservation_sample(&before, &brief(5, 6, 1)), Some(ConditionSample::Over));
        assert_eq!(reservation_sample(&before, &brief(6, 5, 1)), Some(ConditionSample::Under));
        assert_eq!(reservation_sample(&before, &brief(5, 5, 1)), None);
        assert_eq!(reservation_sample(&before, &brief(5, 5, 0)), Some(ConditionSample::Under));
        assert_eq!(reservation_sample(&before, &ThrottleSummary::default()), None);
    }

    #[test]
    fn slow_device_has_long_queue_and_low_throughput() {
        let capacity =
            MeasuredCapacity { read_iops: 1000, write_iops: 500, read_bps: 0, write_bps: 1_000_000 };
        let done = |iops, bps| capacity_percent(&capacity, &DeviceThroughput { iops, bps, queue: 9.0 });
        assert_eq!(done([200, 100], [0, 0]), Some(40));
        assert_eq!(done([0, 1], [9_000_000, 600_000]), Some(60), "reads of bytes were not measured");
        assert_eq!(
            capacity_percent(
                &MeasuredCapacity::default(),
                &DeviceThroughput { iops: [1; 2], bps: [1; 2], queue: 9.0 }
            ),
            None
        );
        assert_eq!(
            [device_sample(40, 9.0), device_sample(40, 3.0), device_sample(60, 9.0)],
            [ConditionSample::Over, ConditionSample::Under, ConditionSample::Under]
        );
    }
}
