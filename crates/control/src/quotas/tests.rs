use super::*;

fn counts(period: QuotaPeriod, index: i64, bytes: u64) -> QuotaCounts {
    let mut count = VolumeCount::new(period, index);
    count.add(bytes);
    QuotaCounts { total: Some(count), writes: None }
}

#[test]
fn counts_end_soon_after_their_periods() {
    let now_s = i64::try_from(schedule::now().as_secs()).expect("a time");
    let zone = schedule::zone_rules(&LimitSchedule::default()).expect("the zone of the host");
    for (period, kept, over) in [
        (QuotaPeriod::Hour, 26, 27),
        (QuotaPeriod::Day, 2, 3),
        (QuotaPeriod::Week, 2, 3),
        (QuotaPeriod::Month, 2, 3),
    ] {
        let index = period.index(now_s, &zone);
        assert!(!is_over(&counts(period, index - kept, 1), now_s), "{period:?}");
        assert!(is_over(&counts(period, index - over, 1), now_s), "{period:?}");
    }
    // A file may have any index.
    assert!(!is_over(&counts(QuotaPeriod::Month, i64::MAX, 1), now_s));
}

#[test]
fn oldest_counts_of_removed_objects_are_dropped() {
    let all = [
        ("present", counts(QuotaPeriod::Day, 1, 1)),
        ("day-10", counts(QuotaPeriod::Day, 10, 1)),
        ("hour-of-day-11", counts(QuotaPeriod::Hour, 11 * 24, 1)),
        ("far", counts(QuotaPeriod::Month, i64::MAX, 1)),
        ("empty", QuotaCounts::default()),
    ];
    let all = HashMap::from(all.map(|(name, counts)| (name.to_owned(), counts)));
    let present = HashSet::from(["present".to_owned()]);
    let left = |max| {
        let mut counts = all.clone();
        drop_oldest(&mut counts, &present, max);
        let mut names: Vec<_> = counts.into_keys().collect();
        names.sort_unstable();
        names
    };
    assert_eq!(left(4).len(), 5);
    assert_eq!(left(3), ["day-10", "far", "hour-of-day-11", "present"]);
    assert_eq!(left(2), ["far", "hour-of-day-11", "present"]);
    assert_eq!(left(0), ["present"]);
}

#[test]
fn counts_without_a_quota_are_not_sent() {
    let counters = QuotaCounters::default();
    counters.counts.borrow_mut().insert("a".to_owned(), counts(QuotaPeriod::Day, 1, 7));
    assert_eq!(counters.stored("a", &VolumeQuota::default()), None);
    let total = Some(VolumeAmount { bytes: 10, period: QuotaPeriod::Day });
    let quota = VolumeQuota { total, rate_bps: 1, ..VolumeQuota::default() };
    assert!(counters.stored("a", &quota).is_some());
    assert_eq!(counters.stored("b", &quota), None);
}

#[test]
fn event_has_the_rate_in_force() {
    let quota = VolumeQuota {
        total: Some(VolumeAmount { bytes: 1 << 40, period: QuotaPeriod::Day }),
        rate_bps: 1 << 20,
        ..VolumeQuota::default()
    };
    let schedule = LimitSchedule::default();
    let message = |reserved_bps| {
        let member = QuotaMember { kind: "group", name: "g", quota, reserved_bps, schedule: &schedule };
        format!("{:?}", quota_event(&member, true, None))
    };
    assert!(message(0).contains("at most 1M bytes/s"), "{}", message(0));
    assert!(message(2 << 20).contains("at most 2M bytes/s"), "{}", message(2 << 20));
}
