//! Schedules in virtual time: transitions of zones, steps of the clock, random instants.

use alloc::vec;

use proptest::prelude::*;

use super::*;
use crate::{
    throttle::LimitKind,
    time_zone::test_zones::{AUTUMN_S, BERLIN, MONDAY_S, SPRING_S, UTC},
};

const HOUR_S: i64 = 3600;
const DAY_S: i64 = 24 * HOUR_S;

fn schedule(times: &[&str]) -> LimitSchedule {
    let entry = |when: &&str| ScheduleEntry { when: when.parse().expect("a range"), limits: Vec::new() };
    LimitSchedule { time_zone: None, entries: times.iter().map(entry).collect() }
}

fn state(entry: Option<usize>, until_s: i64) -> ScheduleState {
    ScheduleState { entry, until_s: Some(until_s) }
}

fn group_limits(limits: Limits) -> ConfiguredLimits {
    let (quota, share) = Default::default();
    ConfiguredLimits { limits, quota, share, size_bytes: None }
}

#[test]
fn nights_hold_until_morning() {
    assert_eq!(minute_of_week(MONDAY_S), 0);
    let nights = schedule(&["Mon..Fri 22:00-06:00"]);
    let at = |day: i64, hour: i64| nights.state(MONDAY_S + day * DAY_S + hour * HOUR_S + 59, &UTC);
    assert_eq!(at(0, 12), state(None, MONDAY_S + 22 * HOUR_S));
    assert_eq!(at(0, 22), state(Some(0), MONDAY_S + 30 * HOUR_S));
    assert_eq!(at(1, 5), state(Some(0), MONDAY_S + 30 * HOUR_S));
    assert_eq!(at(5, 6), state(None, MONDAY_S + 7 * DAY_S + 22 * HOUR_S));
}

#[test]
fn first_match_wins() {
    let both = schedule(&["Sun", "22:00-06:00"]);
    let saturday_s = MONDAY_S + 5 * DAY_S;
    assert_eq!(both.state(saturday_s + 23 * HOUR_S, &UTC), state(Some(1), saturday_s + DAY_S));
    assert_eq!(both.state(saturday_s + DAY_S, &UTC), state(Some(0), saturday_s + 2 * DAY_S));
    assert_eq!(both.state(saturday_s + 2 * DAY_S, &UTC), state(Some(1), saturday_s + 2 * DAY_S + 6 * HOUR_S));
}

#[test]
fn skipped_hour_belongs_to_no_entry() {
    // The clock goes from 02:00 to 03:00.
    let early = schedule(&["02:00-03:00", "03:00-04:00"]);
    assert_eq!(early.state(SPRING_S - 1, &BERLIN), state(None, SPRING_S));
    assert_eq!(early.state(SPRING_S, &BERLIN), state(Some(1), SPRING_S + HOUR_S));
    // A night is an hour shorter.
    let night = schedule(&["22:00-06:00"]);
    let begin_s = SPRING_S - 4 * HOUR_S;
    assert_eq!(night.state(begin_s, &BERLIN), state(Some(0), begin_s + 7 * HOUR_S));
}

#[test]
fn repeated_hour_belongs_to_its_entry_twice() {
    // The clock goes from 03:00 back to 02:00.
    let early = schedule(&["02:00-03:00"]);
    assert_eq!(early.state(AUTUMN_S - HOUR_S, &BERLIN), state(Some(0), AUTUMN_S + HOUR_S));
    assert_eq!(early.state(AUTUMN_S - HOUR_S - 1, &BERLIN), state(None, AUTUMN_S - HOUR_S));
    let half = schedule(&["02:30-03:00"]);
    let half_hour_s = HOUR_S / 2;
    assert_eq!(half.state(AUTUMN_S - half_hour_s, &BERLIN), state(Some(0), AUTUMN_S));
    assert_eq!(half.state(AUTUMN_S, &BERLIN), state(None, AUTUMN_S + half_hour_s));
}

#[test]
fn entry_without_an_end_holds_forever() {
    let always = schedule(&["Mon..Sun"]);
    assert_eq!(always.state(MONDAY_S, &BERLIN), ScheduleState { entry: Some(0), until_s: None });
    assert_eq!(schedule(&[]).state(MONDAY_S, &UTC), ScheduleState::default());
}

#[test]
fn covered_entries_are_found() {
    assert_eq!(schedule(&["Mon..Fri", "Tue 10:00-12:00"]).unreachable_entry(), Some(1));
    assert_eq!(schedule(&["22:00-02:00", "Mon 21:00-23:00"]).unreachable_entry(), None);
    assert_eq!(schedule(&["22:00-24:00", "00:00-02:00", "Sun 23:00-01:00"]).unreachable_entry(), Some(2));
}

#[test]
fn entries_replace_the_settings_that_they_give() {
    let setting = |name| LimitSetting::from_name(name).expect("a setting");
    let (iops, bps) = (setting("iops-total"), setting("bps-total"));
    let entry = |limits| ScheduleEntry { when: CalendarRange::default(), limits };
    let entries = vec![entry(vec![(bps, 500)]), entry(vec![(iops, 0)])];
    let schedule = Arc::new(LimitSchedule { time_zone: None, entries });
    let configured = Limits::default().with_settings(&[(iops, 100), (bps, 50)]).expect("valid");
    let in_force = |entry| {
        let state = ScheduleState { entry, until_s: None };
        let scheduled = ScheduledLimits { schedule: Arc::clone(&schedule), state, is_quota_used_up: false };
        let limits = scheduled.in_force(&group_limits(configured)).expect("valid");
        [LimitKind::IopsTotal, LimitKind::BpsTotal].map(|kind| limits.limit(kind).rate)
    };
    assert_eq!([None, Some(0), Some(1)].map(in_force), [[100, 50], [100, 500], [0, 50]]);
    let reads = Limits::default().with_settings(&[(setting("bps-read"), 1)]).expect("valid");
    let (index, invalid) = schedule.contradiction(&reads, true).expect("total and read");
    assert_eq!((index, invalid.setting), (0, bps));
    let scheduled = ScheduledLimits { schedule, ..ScheduledLimits::default() };
    let refused = scheduled.in_force(&group_limits(reads));
    assert_eq!(refused, Err(ThrottleError::Schedule(0, invalid)));
}

proptest! {
    /// The state computed at an instant holds at every later one before its end, also if the clock
    /// steps there, and not at its end.
    #[test]
    fn state_holds_until_its_end(
        from in 0..1440_u32, to in 0..1440_u32, day in 0..7_usize,
        near in prop::sample::select(vec![SPRING_S, AUTUMN_S, MONDAY_S]),
        before_s in 0..9 * DAY_S, part in 0.0..1.0_f64,
    ) {
        prop_assume!(from != to);
        let days = ["Mon", "Tue..Thu", "Fri,Sun", "Sat..Mon", "Sun", "Mon..Fri", "Mon..Sun"];
        let text = alloc::format!("{} {}:{}-{}:{}", days[day], from / 60, from % 60, to / 60, to % 60);
        let schedule = schedule(&[&text]);
        let now_s = near + DAY_S - before_s;
        let state = schedule.state(now_s, &BERLIN);
        let until_s = state.until_s.expect("a gap");
        prop_assert!(until_s > now_s);
        let between_s = now_s + ((until_s - 1 - now_s) as f64 * part) as i64;
        prop_assert_eq!(schedule.state(between_s, &BERLIN), state);
        prop_assert_ne!(schedule.state(until_s, &BERLIN).entry, state.entry);
    }
}
