//! The bucket against QEMU's own tests, and against the definition in floating point.

use super::*;
use crate::time::Duration;
use alloc::vec::Vec;
use proptest::prelude::*;

const MILLISECOND: u64 = 1_000_000;

fn bucket(rate: u64, burst_rate: u64, burst_length_s: u64) -> LeakyBucket {
    LeakyBucket::new(RateLimit { rate, burst_rate, burst_length_s, ..RateLimit::NONE })
}

fn billionths(units: f64) -> u128 {
    (units * LEVEL_SCALE as f64) as u128
}

/// The tolerance of QEMU's own tests.
#[track_caller]
fn assert_near(actual: f64, expected: f64) {
    let error = (actual - expected).abs();
    assert!(error <= 1e-6 * expected.abs().max(1.0), "{actual} is not {expected}");
}

#[track_caller]
fn assert_levels(bucket: &LeakyBucket, level: f64, burst_level: f64) {
    assert_near(bucket.level as f64 / LEVEL_SCALE as f64, level);
    assert_near(bucket.burst_level as f64 / LEVEL_SCALE as f64, burst_level);
}

fn wait_s(bucket: &LeakyBucket) -> f64 {
    bucket.wait_ns() as f64 / 1e9
}

#[test]
fn leaks_at_the_rate_and_stops_when_empty() {
    let mut b = bucket(150, 0, 1);
    b.add(billionths(1.5));
    for level in [0.5, 0.0, 0.0] {
        b.leak(1_000_000_000 / 150);
        assert_levels(&b, level, 0.0);
    }
}

#[test]
fn burst_level_leaks_at_the_burst_rate() {
    let mut b = bucket(150, 250, 2);
    b.add(billionths(6.0));
    for (level, burst_level) in [(4.5, 3.5), (3.0, 1.0), (1.5, 0.0), (0.0, 0.0)] {
        b.leak(10 * MILLISECOND);
        assert_levels(&b, level, burst_level);
    }
}

#[test]
fn waits_only_above_the_bucket_size() {
    let rows = [
        ((0, 0, 1), 1e15, 0.0),
        ((150, 15, 1), 9.0, 0.0),
        ((150, 15, 1), 15.0, 0.0),
        ((150, 15, 1), 15.5, 0.5 / 150.0),
        // Without a burst rate the bucket holds a tenth of a second.
        ((10, 0, 1), 1.0, 0.0),
        ((10, 0, 1), 2.0, 0.1),
        // The slower one decides: the burst exceeds by 381 at 200/s, the bucket by 1 at 100/s.
        ((100, 200, 2), 401.0, 381.0 / 200.0),
    ];
    for ((rate, burst_rate, length), level, wait) in rows {
        let mut b = bucket(rate, burst_rate, length);
        b.add(billionths(level));
        assert_near(wait_s(&b), wait);
        assert_eq!(b.wait_ns() == 0, wait == 0.0, "{rate}, {burst_rate}, {length}: {level}");
    }
}

#[test]
fn a_burst_lasts_until_the_whole_bucket_is_full() {
    let mut b = bucket(10, 200, 2);
    for step in 0..22 {
        assert_eq!(b.wait_ns(), 0, "step {step}");
        b.add(billionths(20.0));
        b.leak(100 * MILLISECOND);
        assert_levels(&b, f64::from(step + 1) * 19.0, 0.0);
        if step == 21 {
            assert_near(wait_s(&b), 1.8);
        }
    }
}

/// Charges all six limits at once, a combination that the rules reject, to observe each charge.
fn charge(buckets: &mut NodeBuckets, direction: Direction, cost: &RequestCost) {
    buckets.charge_part(direction, cost, &(0..WHOLE_REQUEST));
}

fn wait(buckets: &NodeBuckets, direction: Direction) -> Duration {
    Duration::from_nanos(buckets.longest_wait(direction).map_or(0, |(wait_ns, _)| wait_ns))
}

fn all_six(iops_size: u64) -> NodeBuckets {
    let mut limits = Limits::default();
    limits.iops_size = iops_size;
    for kind in LimitKind::ALL {
        limits.limit_mut(kind).rate = 150;
    }
    NodeBuckets::new(&limits, Instant::ZERO)
}

fn levels_after_a_read_and_a_write(iops_size: u64, length: u64) -> Vec<f64> {
    let mut buckets = all_six(iops_size);
    for direction in Direction::ALL {
        charge(&mut buckets, direction, &RequestCost::one(length));
    }
    buckets.buckets.iter().map(|bucket| bucket.level as f64 / LEVEL_SCALE as f64).collect()
}

#[test]
fn each_direction_is_charged_to_its_own_limits_and_the_totals() {
    assert_eq!(levels_after_a_read_and_a_write(0, 512), [1024.0, 512.0, 512.0, 2.0, 1.0, 1.0]);
}

#[test]
fn iops_size_divides_large_requests() {
    let levels = levels_after_a_read_and_a_write(13 * 512, 64 * 512);
    for (level, expected) in levels[3..].iter().zip([128.0 / 13.0, 64.0 / 13.0, 64.0 / 13.0]) {
        assert_near(*level, expected);
    }
}

#[test]
fn the_slowest_of_the_four_buckets_decides() {
    let mut limits = Limits::default();
    limits.limit_mut(LimitKind::BpsTotal).rate = 4096;
    limits.limit_mut(LimitKind::IopsRead).rate = 10;
    let mut buckets = NodeBuckets::new(&limits, Instant::ZERO);
    charge(&mut buckets, Direction::Read, &RequestCost::merged(&[0; 6]));
    assert_eq!(wait(&buckets, Direction::Read), Duration::from_millis(500));
    assert_eq!(wait(&buckets, Direction::Write), Duration::ZERO, "operations read are no concern of writes");
    charge(&mut buckets, Direction::Write, &RequestCost::one(4096));
    assert_eq!(wait(&buckets, Direction::Write), Duration::from_millis(900));
    assert_eq!(wait(&buckets, Direction::Read), Duration::from_millis(900));
}

#[test]
fn an_earlier_instant_leaks_nothing_and_gives_nothing_back() {
    let mut buckets = all_six(0);
    charge(&mut buckets, Direction::Read, &RequestCost::one(1000));
    buckets.leak_to(Instant::from_nanos(1_000_000_000));
    let expected = wait(&buckets, Direction::Read);
    buckets.leak_to(Instant::from_nanos(1));
    assert_eq!((wait(&buckets, Direction::Read), buckets.now.as_nanos()), (expected, 1_000_000_000));
    buckets.leak_to(Instant::MAX);
    assert_eq!(wait(&buckets, Direction::Read), Duration::ZERO);
}

/// The definition of the bucket (QEMU's docs/throttle.txt), in units and seconds.
struct FloatBucket {
    rate: f64,
    burst_rate: f64,
    length: f64,
    level: f64,
    burst_level: f64,
}

impl FloatBucket {
    fn leak(&mut self, seconds: f64) {
        self.level = (self.level - self.rate * seconds).max(0.0);
        self.burst_level = (self.burst_level - self.burst_rate * seconds).max(0.0);
    }

    fn wait(&self) -> f64 {
        let size = if self.burst_rate > 0.0 { self.burst_rate * self.length } else { self.rate / 10.0 };
        let main = (self.level - size).max(0.0) / self.rate;
        let burst = if self.length > 1.0 {
            (self.burst_level - self.burst_rate / 10.0) / self.burst_rate
        } else {
            0.0
        };
        main.max(burst)
    }
}

fn any_limit() -> impl Strategy<Value = RateLimit> {
    (1..1_000_000u64, prop_oneof![Just(0), 1..20u64], 1..100u64).prop_map(|(rate, factor, length)| {
        let burst_length_s = if factor == 0 { 1 } else { length };
        RateLimit { rate, burst_rate: rate * factor, burst_length_s, ..RateLimit::NONE }
    })
}

proptest! {
    #[test]
    fn agrees_with_the_definition(
        limit in any_limit(),
        steps in prop::collection::vec((0.0..4.0f64, 0..3_000_000_000u64), 1..60),
    ) {
        let mut b = LeakyBucket::new(limit);
        let mut model = FloatBucket {
            rate: limit.rate as f64,
            burst_rate: limit.burst_rate as f64,
            length: limit.burst_length_s as f64,
            level: 0.0,
            burst_level: 0.0,
        };
        for (seconds_worth, elapsed_ns) in steps {
            let units = (seconds_worth * (limit.rate.max(limit.burst_rate)) as f64).round();
            b.add(billionths(units));
            model.level += units;
            model.burst_level += units;
            b.leak(elapsed_ns);
            model.leak(elapsed_ns as f64 / 1e9);
            prop_assert!((wait_s(&b) - model.wait().max(0.0)).abs() <= 1e-6 * model.wait().max(1.0));
        }
    }

    #[test]
    fn the_wait_is_exact(limit in any_limit(), units in 1..1_000_000_000u64) {
        let mut b = LeakyBucket::new(limit);
        b.add(u128::from(units) * LEVEL_SCALE);
        let wait = b.wait_ns();
        if wait > 0 {
            b.leak(wait - 1);
            prop_assert!(b.wait_ns() == 1, "a nanosecond early is early");
            b.leak(1);
        }
        prop_assert_eq!(b.wait_ns(), 0);
    }
}
