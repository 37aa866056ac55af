//! Quotas in virtual time: lengths of months, transitions of zones, steps of the clock.

use alloc::vec;

use proptest::prelude::*;

use super::*;
use crate::{
    schedule::{ConfiguredLimits, ScheduledLimits},
    throttle::{LimitKind, LimitSetting, Limits, NodeShare, RateLimit},
    time_zone::test_zones::{AUTUMN_S, BERLIN, MONDAY_S, SPRING_S, UTC, Zone},
};

fn quota(total: u64, period: QuotaPeriod) -> VolumeQuota {
    VolumeQuota { total: Some(VolumeAmount { bytes: total, period }), writes: None, rate_bps: 5 }
}

#[test]
fn months_have_their_lengths() {
    let length_days = |year: i64, month: i64| {
        let first_s = first_day_of(year * 12 + month - 1) * DAY_S;
        (QuotaPeriod::Month.end_s(first_s + 12_345, &UTC) - first_s) / DAY_S
    };
    let lengths = |year| (1..=12).map(|month| length_days(year, month)).collect::<Vec<_>>();
    assert_eq!(lengths(2026), [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]);
    assert_eq!([2028, 2100, 2000].map(|year| length_days(year, 2)), [29, 28, 29]);
    assert_eq!(QuotaPeriod::Month.index(MONDAY_S, &UTC), 2026 * 12 + 10);
    assert_eq!(QuotaPeriod::Month.index(0, &UTC), 1970 * 12);
}

#[test]
fn periods_begin_at_their_boundaries() {
    let end = |period: QuotaPeriod, at_s| period.end_s(at_s, &UTC) - MONDAY_S;
    let at_s = MONDAY_S + 10 * HOUR_S + 59;
    assert_eq!(end(QuotaPeriod::Hour, at_s), 11 * HOUR_S);
    assert_eq!(end(QuotaPeriod::Day, at_s), DAY_S);
    assert_eq!(end(QuotaPeriod::Week, at_s), 7 * DAY_S);
    assert_eq!(end(QuotaPeriod::Month, at_s), DAY_S, "2026-11-30 is the last day of its month");
    assert_eq!(end(QuotaPeriod::Week, MONDAY_S - 1), 0, "a week begins on Monday");
    assert_eq!(end(QuotaPeriod::Day, MONDAY_S), DAY_S, "a boundary belongs to the later period");
}

#[test]
fn days_of_transitions_are_shorter_and_longer() {
    // Midnights in Berlin on 2026-03-29 and on 2026-10-25.
    let (spring_s, autumn_s) = (SPRING_S - 2 * HOUR_S, AUTUMN_S - 3 * HOUR_S);
    assert_eq!(QuotaPeriod::Day.end_s(spring_s, &BERLIN), spring_s + 23 * HOUR_S);
    assert_eq!(QuotaPeriod::Day.end_s(autumn_s, &BERLIN), autumn_s + 25 * HOUR_S);
    assert_eq!(QuotaPeriod::Hour.end_s(SPRING_S - 1, &BERLIN), SPRING_S);
    // March has an hour less, and the end of October is an hour later.
    let march_s = QuotaPeriod::Month.end_s(spring_s, &BERLIN);
    assert_eq!(march_s, spring_s + 3 * DAY_S - HOUR_S);
    assert_eq!(QuotaPeriod::Month.end_s(autumn_s, &BERLIN), autumn_s + 7 * DAY_S + HOUR_S);
}

#[test]
fn hour_that_occurs_twice_is_one_period() {
    // The clock goes from 03:00 back to 02:00.
    let begin_s = AUTUMN_S - HOUR_S;
    assert_eq!(QuotaPeriod::Hour.end_s(begin_s, &BERLIN), begin_s + 2 * HOUR_S);
    let quota = quota(10, QuotaPeriod::Hour);
    let mut counts = QuotaCounts::default();
    counts.advance(&quota, begin_s, &BERLIN);
    counts.add(10, 0);
    assert!(!counts.advance(&quota, AUTUMN_S, &BERLIN) && counts.is_used_up(&quota));
    assert!(counts.advance(&quota, AUTUMN_S + HOUR_S, &BERLIN) && !counts.is_used_up(&quota));
}

#[test]
fn transition_at_midnight_grants_no_second_day() {
    // The clock goes from 00:00 back to 23:00, as in Havana.
    const HAVANA: Zone = Zone(&[(i64::MIN, -4 * HOUR_S), (MONDAY_S + 4 * HOUR_S, -5 * HOUR_S)]);
    let quota = quota(10, QuotaPeriod::Day);
    let midnight_s = MONDAY_S + 4 * HOUR_S;
    let mut counts = QuotaCounts::default();
    counts.advance(&quota, midnight_s - 1, &HAVANA);
    counts.add(10, 0);
    assert_eq!(QuotaPeriod::Day.end_s(midnight_s - 1, &HAVANA), midnight_s + HOUR_S);
    counts.advance(&quota, midnight_s, &HAVANA);
    assert!(counts.is_used_up(&quota));
    assert_eq!(counts.used_up_until_s(&quota, midnight_s, &HAVANA), Some(midnight_s + HOUR_S));
}

#[test]
fn step_back_grants_no_amount_twice() {
    let quota = quota(10, QuotaPeriod::Day);
    let mut counts = QuotaCounts::default();
    let mut used_up_after = |day: i64, bytes| {
        counts.advance(&quota, MONDAY_S + day * DAY_S, &UTC);
        let is_used_up_before = counts.is_used_up(&quota);
        counts.add(bytes, 0);
        is_used_up_before
    };
    assert!(!used_up_after(0, 10));
    // A step forward starts the next period.
    assert!(!used_up_after(1, 10));
    // Back, and forward again.
    assert!(used_up_after(0, 0));
    assert!(used_up_after(1, 0));
    // Back into a period that was never counted.
    assert!(used_up_after(-3, 0));
    // Far into the future and back: the next real day is a new one.
    assert!(!used_up_after(365, 10));
    assert!(used_up_after(1, 0));
    assert!(!used_up_after(2, 10));
    assert!(used_up_after(365, 0));
}

#[test]
fn counts_are_those_of_their_directions() {
    let quota = VolumeQuota {
        total: Some(VolumeAmount { bytes: 100, period: QuotaPeriod::Month }),
        writes: Some(VolumeAmount { bytes: 20, period: QuotaPeriod::Hour }),
        rate_bps: 1,
    };
    let mut counts = QuotaCounts::default();
    counts.add(7, 7);
    assert_eq!(counts, QuotaCounts::default(), "nothing is counted before the first period");
    counts.advance(&quota, MONDAY_S, &UTC);
    counts.add(50, 20);
    let of_writes_s = counts.used_up_until_s(&quota, MONDAY_S, &UTC);
    assert_eq!(of_writes_s, Some(MONDAY_S + HOUR_S));
    counts.advance(&quota, MONDAY_S + HOUR_S, &UTC);
    assert!(!counts.is_used_up(&quota), "70 of 100");
    counts.add(30, 0);
    assert_eq!(counts.used_up_until_s(&quota, MONDAY_S + HOUR_S, &UTC), Some(MONDAY_S + DAY_S));
}

#[test]
fn changed_amount_keeps_the_count() {
    let mut counts = QuotaCounts::default();
    counts.advance(&quota(10, QuotaPeriod::Day), MONDAY_S, &UTC);
    counts.add(10, 0);
    let larger = quota(11, QuotaPeriod::Day);
    counts.advance(&larger, MONDAY_S, &UTC);
    assert!(!counts.is_used_up(&larger));
    counts.add(1, 0);
    assert!(counts.is_used_up(&larger));
    let weekly = quota(11, QuotaPeriod::Week);
    counts.advance(&weekly, MONDAY_S, &UTC);
    assert!(!counts.is_used_up(&weekly), "another kind of period");
    counts.advance(&VolumeQuota::default(), MONDAY_S, &UTC);
    assert_eq!(counts, QuotaCounts::default());
}

#[test]
fn stored_counts_continue() {
    let mut count = VolumeCount::new(QuotaPeriod::Day, 5);
    count.add(9);
    let again = VolumeCount::restore(count.period(), count.counts()).expect("a period");
    assert_eq!(again, count);
    assert_eq!(VolumeCount::restore(QuotaPeriod::Day, &[]), None);
    let many = vec![PeriodCount { index: 1, bytes: u64::MAX }; 9];
    let mut bounded = VolumeCount::restore(QuotaPeriod::Day, &many).expect("a period");
    assert_eq!(bounded.counts().len(), MAX_COUNTS);
    bounded.add(1);
    assert_eq!(bounded.bytes(), u64::MAX);
}

fn limits(given: &[(&str, u64)]) -> Limits {
    let setting = |name| LimitSetting::from_name(name).expect("a setting");
    let given: Vec<_> = given.iter().map(|(name, value)| (setting(name), *value)).collect();
    Limits::default().with_settings(&given).expect("valid")
}

#[test]
fn used_up_quota_is_the_strictest_limit() {
    let limited = |given: &[(&str, u64)]| limits(given).with_used_up_rate(100, 0);
    let iops = ("iops-total", 7);
    for (given, expect) in [
        (&[][..], &[("bps-total", 100)][..]),
        (&[iops], &[iops, ("bps-total", 100)]),
        (&[("bps-total", 500), ("bps-total-max", 900)], &[("bps-total", 100)]),
        (&[("bps-total", 50), ("bps-total-max", 900)], &[("bps-total", 50), ("bps-total-max", 100)]),
        (&[("bps-read", 500)], &[("bps-total", 100)]),
        (&[("bps-read", 30)], &[("bps-read", 30), ("bps-write", 70)]),
        (&[("bps-write", 30), ("bps-read", 500)], &[("bps-read", 70), ("bps-write", 30)]),
        (&[("bps-read", 30), ("bps-write", 40)], &[("bps-read", 30), ("bps-write", 40)]),
        (&[("bps-read", 30), ("bps-write", 90)], &[("bps-read", 25), ("bps-write", 75)]),
        (&[("bps-total", 500), ("bps-total-max", 900), ("burst-for", 10)], &[("bps-total", 100)]),
    ] {
        assert_eq!(limited(given), limits(expect), "{given:?}");
    }
}

proptest! {
    /// Each second of a period has the same index and the same end.
    #[test]
    fn periods_are_contiguous(at_s in AUTUMN_S - 400 * DAY_S..AUTUMN_S + 400 * DAY_S) {
        for period in QuotaPeriod::ALL {
            for zone in [&UTC, &BERLIN] {
                let (index, end_s) = (period.index(at_s, zone), period.end_s(at_s, zone));
                prop_assert!(end_s > at_s);
                prop_assert_eq!(period.index(end_s - 1, zone), index);
                let next = period.index(end_s, zone);
                // The clock skips an hour in spring.
                let is_skipped = period == QuotaPeriod::Hour && next == index + 2;
                prop_assert!(next == index + 1 || is_skipped);
                prop_assert_eq!(period.end_s(end_s - 1, zone), end_s);
            }
        }
    }

    /// Limits in force stay valid, and never admit more than the rate of the quota.
    #[test]
    fn limits_of_a_used_up_quota_are_valid(
        total in 0..3_u64, read in 0..300_u64, write in 0..300_u64, burst in 1..3_u64, rate in 1..200_u64,
        is_total: bool, reserved in 0..300_u64,
    ) {
        let mut configured = Limits::default();
        let of = |rate| RateLimit { rate, burst_rate: rate * burst, ..RateLimit::default() };
        match is_total {
            true => *configured.limit_mut(LimitKind::BpsTotal) = of(total * 100),
            false => {
                *configured.limit_mut(LimitKind::BpsRead) = of(read);
                *configured.limit_mut(LimitKind::BpsWrite) = of(write);
            }
        }
        let scheduled = ScheduledLimits { is_quota_used_up: true, ..ScheduledLimits::default() };
        let quota = VolumeQuota { rate_bps: rate, ..quota(1, QuotaPeriod::Day) };
        let share = NodeShare::default().with_reservation(0, reserved);
        let configured = ConfiguredLimits { limits: configured, quota, share, size_bytes: Some(1) };
        let in_force = scheduled.in_force(&configured).expect("valid");
        prop_assert_eq!(in_force.validate_in_force(), Ok(()));
        let rate_of = |kind| in_force.limit(kind).rate.max(in_force.limit(kind).burst_rate);
        let [all, reads, writes] =
            [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite].map(rate_of);
        let most = rate.max(reserved);
        let is_bounded = all > 0 && all <= most || reads > 0 && writes > 0 && reads + writes <= most;
        prop_assert!(is_bounded, "{in_force:?}");
        let free = ScheduledLimits::default().in_force(&configured).expect("valid");
        prop_assert_eq!(free, configured.limits);
    }
}
