//! The spare level against its definition: two levels that leak one by one, the guests' first.

use super::super::super::limits::{Limits, RateLimit};
use super::super::super::slicing::WHOLE_REQUEST;
use super::*;
use crate::time::Duration;
use proptest::prelude::*;

const FIRST: Instant = Instant::ZERO;

fn buckets(limit: RateLimit, kind: LimitKind, iops_size: u64) -> NodeBuckets {
    let mut limits = Limits::default();
    *limits.limit_mut(kind) = limit;
    limits.iops_size = iops_size;
    NodeBuckets::new(&limits, FIRST)
}

/// Number of read-aheads of this length that fit at an instant.
fn fill(buckets: &mut NodeBuckets, length: u64, now: Instant) -> usize {
    let charge_if_spare = |buckets: &mut NodeBuckets| {
        let has_spare = buckets.has_spare(now);
        if has_spare {
            buckets.charge_spare(&RequestCost::one(length), now);
        }
        has_spare
    };
    core::iter::repeat_with(|| charge_if_spare(buckets)).take_while(|charged| *charged).count()
}

fn ms(ms: u64) -> Instant {
    FIRST + Duration::from_millis(ms)
}

#[test]
fn an_operation_above_iops_size_counts_in_proportion() {
    let limit = RateLimit { rate: 100, ..RateLimit::NONE };
    // Ten fill the bucket, and one more overruns it.
    assert_eq!(fill(&mut buckets(limit, LimitKind::IopsRead, 4096), 4096, FIRST), 11);
    assert_eq!(fill(&mut buckets(limit, LimitKind::IopsRead, 4096), 8192, FIRST), 6);
    assert_eq!(fill(&mut buckets(limit, LimitKind::IopsRead, 0), 8192, FIRST), 11);
    assert!(buckets(limit, LimitKind::IopsWrite, 0).has_spare(FIRST));
    assert!(!buckets(limit, LimitKind::IopsWrite, 0).spare.in_use);
}

#[test]
fn both_levels_of_a_burst_must_fit() {
    // A burst of 1000 at 500/s over a rate of 100/s; the second bucket holds 50.
    let limit = RateLimit { rate: 100, burst_rate: 500, burst_length_s: 2, ..RateLimit::NONE };
    let mut buckets = buckets(limit, LimitKind::IopsTotal, 0);
    assert_eq!(fill(&mut buckets, 1, FIRST), 51);
    assert_eq!(fill(&mut buckets, 1, ms(100)), 50);
    for tenth in 2..=100 {
        fill(&mut buckets, 1, ms(tenth * 100));
    }
    // Ten seconds at 100/s, plus the bucket.
    assert_eq!(buckets.spare.levels[LimitKind::IopsTotal.index()].main / LEVEL_SCALE - 10 * 100, 1001);
    assert_eq!(fill(&mut buckets, 1, ms(10_100)), 10);
}

#[test]
fn charge_long_after_the_last_request_is_full() {
    let limit = RateLimit { rate: 100, ..RateLimit::NONE };
    let mut buckets = buckets(limit, LimitKind::BpsRead, 0);
    for second in [1000, 2000] {
        assert_eq!(fill(&mut buckets, 10, ms(second)), 2);
        assert_eq!(fill(&mut buckets, 10, ms(second + 99)), 0);
        assert_eq!(fill(&mut buckets, 10, ms(second + 100)), 1);
    }
    buckets.leak_to(ms(2150));
    assert_eq!(buckets.spare.levels[LimitKind::BpsRead.index()].main / LEVEL_SCALE, 15);
    buckets.leak_to(ms(2300));
    assert!(!buckets.spare.in_use);
}

/// In billionths, as of the last event of either level.
#[derive(Default)]
struct TwoLevelModel {
    now: Instant,
    level: u128,
    spare: u128,
}

impl TwoLevelModel {
    fn leak_to(&mut self, now: Instant, rate: u64) {
        let leaked = leak_in(rate, now.nanos_since(self.now));
        let of_guests = leaked.min(self.level);
        self.level -= of_guests;
        self.spare = self.spare.saturating_sub(leaked - of_guests);
        self.now = now;
    }
}

#[derive(Clone, Copy, Debug)]
enum SpareEvent {
    Guest(u64),
    ReadAhead(u64),
    Refund(u64),
}

fn any_event() -> impl Strategy<Value = (u64, SpareEvent)> {
    let event = prop_oneof![
        1 => (0..300_000u64).prop_map(SpareEvent::Guest),
        3 => (0..300_000u64).prop_map(SpareEvent::ReadAhead),
        1 => (0..300_000u64).prop_map(SpareEvent::Refund),
    ];
    (0..150_000_000u64, event)
}

proptest! {
    #[test]
    fn agrees_with_the_definition(
        rate in 1..3_000_000u64,
        burst in prop_oneof![Just((0, 1)), (1..4u64, 1..4u64)],
        events in prop::collection::vec(any_event(), 1..60),
    ) {
        let limit = RateLimit { rate, burst_rate: rate * burst.0, burst_length_s: burst.1, ..RateLimit::NONE };
        let mut buckets = buckets(limit, LimitKind::BpsTotal, 0);
        let twin = buckets.clone();
        let (mut main, mut burst_model, mut guests) = (TwoLevelModel::default(), TwoLevelModel::default(), twin);
        let LeakyBucket { size, burst_rate, burst_size, .. } = buckets.buckets[LimitKind::BpsTotal.index()];
        let mut now = FIRST;
        for (elapsed_ns, event) in events {
            now += Duration::from_nanos(elapsed_ns);
            main.leak_to(now, rate);
            burst_model.leak_to(now, burst_rate);
            match event {
                SpareEvent::Guest(length) => {
                    for buckets in [&mut buckets, &mut guests] {
                        buckets.leak_to(now);
                        buckets.charge_part(Direction::Read, &RequestCost::one(length), &(0..WHOLE_REQUEST));
                    }
                    main.level += u128::from(length) * LEVEL_SCALE;
                    burst_model.level += u128::from(length) * LEVEL_SCALE;
                }
                SpareEvent::ReadAhead(length) => {
                    let fits = main.level + main.spare <= size
                        && (burst_rate == 0 || burst_model.level + burst_model.spare <= burst_size);
                    prop_assert_eq!(buckets.has_spare(now), fits);
                    if fits {
                        buckets.charge_spare(&RequestCost::one(length), now);
                        main.spare += u128::from(length) * LEVEL_SCALE;
                        burst_model.spare += u128::from(length) * LEVEL_SCALE;
                    }
                }
                SpareEvent::Refund(length) => {
                    let mut refund = SpareRefund::NONE;
                    refund.add(length, length);
                    buckets.refund_spare(refund);
                    main.spare = main.spare.saturating_sub(u128::from(length) * LEVEL_SCALE);
                    burst_model.spare = burst_model.spare.saturating_sub(u128::from(length) * LEVEL_SCALE);
                }
            }
            prop_assert_eq!(buckets.longest_wait(Direction::Read), guests.longest_wait(Direction::Read));
            prop_assert_eq!(buckets.admittable_units(LimitKind::BpsTotal), guests.admittable_units(LimitKind::BpsTotal));
        }
    }
}
