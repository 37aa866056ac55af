//! Names, ranges, rules and their messages, with the numbers of QEMU's own tests.

use super::*;
use crate::throttle::burst::FullBurst;
use alloc::string::ToString;
use alloc::vec::Vec;

fn limits(settings: &[(&str, u64)]) -> Limits {
    let mut limits = Limits::default();
    for (name, value) in settings {
        limits.set(LimitSetting::from_name(name).unwrap(), *value).unwrap();
    }
    limits
}

fn validation_error(settings: &[(&str, u64)]) -> alloc::string::String {
    limits(settings).validate().unwrap_err().to_string()
}

fn valid(settings: &[(&str, u64)]) -> bool {
    limits(settings).validate().is_ok()
}

/// A burst as in QEMU's own tests, beyond the range that a setting accepts.
fn burst(rate: u64, burst_rate: u64, burst_length_s: u64) -> Result<(), LimitRule> {
    let mut limits = Limits::default();
    *limits.limit_mut(IopsRead) = RateLimit { rate, burst_rate, burst_length_s, ..RateLimit::NONE };
    limits.validate().map_err(|invalid| invalid.rule)
}

#[test]
fn every_setting_is_found_by_its_name_and_keeps_its_own_value() {
    let mut limits = Limits::default();
    for (value, setting) in (1..).zip(LimitSetting::ALL) {
        assert_eq!(LimitSetting::from_name(setting.name()), Some(setting));
        limits.set(setting, value).unwrap();
    }
    for (value, setting) in (1..).zip(LimitSetting::ALL) {
        assert_eq!(limits.get(setting), value, "{setting}");
    }
    assert_eq!(LimitSetting::from_name("iops"), None);
    assert_eq!(LimitSetting::from_name("iops-total-max-length").unwrap(), Of(IopsTotal, BurstLength));
}

#[test]
fn sizes_are_bytes_and_lengths_are_not() {
    let sizes = LimitSetting::ALL.iter().filter(|setting| setting.is_size()).count();
    assert_eq!(sizes, 7, "rate and burst rate of three limits, and iops-size");
    assert!(!Of(BpsRead, BurstLength).is_size());
}

#[test]
fn defaults_limit_nothing() {
    let limits = Limits::default();
    assert!(limits.is_unlimited());
    assert_eq!(limits.validate(), Ok(()));
    for setting in LimitSetting::ALL {
        let expected = u64::from(matches!(setting, Of(_, BurstLength)));
        assert_eq!(limits.get(setting), expected, "{setting}");
    }
}

#[test]
fn one_rate_is_enough_to_limit() {
    for kind in LimitKind::ALL {
        let mut limits = Limits::default();
        limits.set(Of(kind, Rate), 1).unwrap();
        assert!(!limits.is_unlimited());
        assert_eq!(limits.validate(), Ok(()));
    }
}

#[test]
fn total_excludes_read_and_write_of_the_same_kind() {
    for kind in ["bps", "iops"] {
        for max in ["", "-max"] {
            let name = |scope| alloc::format!("{kind}-{scope}{max}");
            let (total, read, write) = (name("total"), name("read"), name("write"));
            for excluded in [&[&read][..], &[&write], &[&read, &write]] {
                let mut settings = alloc::vec![(total.as_str(), 9)];
                settings.extend(excluded.iter().map(|other| (other.as_str(), 5)));
                assert_eq!(
                    validation_error(&settings),
                    alloc::format!(
                        "{total} (9) cannot be set together with {} (5); \
                         use either the total or read and write",
                        excluded[0]
                    )
                );
            }
        }
    }
    assert!(valid(&[("bps-total", 9), ("iops-read", 5), ("iops-write", 5)]), "different kinds go together");
}

#[test]
fn iops_size_needs_an_iops_limit() {
    assert_eq!(
        validation_error(&[("iops-size", 4096)]),
        "iops-size (4096) has no limit to apply to; it needs iops-total, iops-read or iops-write"
    );
    assert!(!valid(&[("iops-size", 4096), ("bps-total", 10)]));
    for iops in ["iops-total", "iops-read", "iops-write"] {
        assert!(valid(&[("iops-size", 4096), (iops, 10)]));
    }
}

#[test]
fn values_go_up_to_ten_to_the_fifteenth() {
    assert_eq!(burst(MAX_VALUE, 0, 1), Ok(()));
    assert_eq!(burst(MAX_VALUE + 1, 0, 1), Err(LimitRule::AtMost(MAX_VALUE)));
    assert_eq!(burst(1, MAX_VALUE, 1), Ok(()));
    assert_eq!(burst(1, MAX_VALUE + 1, 1), Err(LimitRule::AtMost(MAX_VALUE)));
    let mut limits = limits(&[("iops-total", 1)]);
    limits.iops_size = MAX_VALUE + 1;
    assert_eq!(limits.validate().unwrap_err().rule, LimitRule::AtMost(MAX_VALUE));
}

#[test]
fn too_large_value_is_rejected_and_changes_nothing() {
    for setting in LimitSetting::ALL {
        let mut limits = Limits::default();
        assert_eq!(limits.set(setting, setting.maximum()), Ok(()));
        let before = limits;
        let error = limits.set(setting, setting.maximum() + 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            alloc::format!(
                "{setting} ({}) is too large; it may be {} at most",
                setting.maximum() + 1,
                setting.maximum()
            )
        );
        assert_eq!(limits, before);
    }
}

#[test]
fn burst_length_is_at_least_one_and_needs_a_burst_rate() {
    assert_eq!(burst(10, 20, 0), Err(LimitRule::AtLeastOneSecond));
    assert_eq!(burst(10, 0, 0), Err(LimitRule::AtLeastOneSecond));
    assert_eq!(
        validation_error(&[("bps-write", 1), ("bps-write-max", 1), ("bps-write-max-length", 0)]),
        "bps-write-max-length (0) is too short; a burst length must be at least 1 second"
    );
    assert_eq!(burst(10, 0, 1), Ok(()));
    assert_eq!(burst(10, 0, 2), Err(LimitRule::Needs(Of(IopsRead, BurstRate))));
    assert_eq!(
        validation_error(&[("iops-total", 100), ("iops-total-max-length", 60)]),
        "iops-total-max-length (60) is set without iops-total-max; set iops-total-max too"
    );
}

#[test]
fn burst_is_at_most_ten_to_the_fifteenth_units() {
    assert_eq!(burst(1, 2, MAX_VALUE / 2), Ok(()));
    assert_eq!(burst(1, 3, MAX_VALUE / 2), Err(LimitRule::BurstTooLarge(Of(IopsRead, BurstRate), 3)));
    assert_eq!(
        validation_error(&[
            ("bps-total", 1),
            ("bps-total-max", 1_000_000_000_000),
            ("bps-total-max-length", 1001)
        ]),
        "bps-total-max-length (1001) is too long for bps-total-max (1000000000000); \
         their product may be 1000000000000000 at most"
    );
}

#[test]
fn burst_rate_needs_a_rate_and_is_not_below_it() {
    assert_eq!(burst(0, 100, 1), Err(LimitRule::Needs(Of(IopsRead, Rate))));
    assert_eq!(burst(0, 0, 1), Ok(()));
    assert_eq!(burst(100, 0, 1), Ok(()));
    assert_eq!(burst(100, 30, 1), Err(LimitRule::AtLeastRate(Of(IopsRead, Rate), 100)));
    assert_eq!(burst(100, 100, 1), Ok(()));
    assert_eq!(
        validation_error(&[("iops-total", 1000), ("iops-total-max", 500)]),
        "iops-total-max (500) is below iops-total (1000); a burst rate must be at least the rate"
    );
    assert_eq!(
        validation_error(&[("iops-total-max", 500)]),
        "iops-total-max (500) is set without iops-total; set iops-total too"
    );
}

#[test]
fn burst_for_needs_a_burst_rate_and_excludes_lengths() {
    let burst = [("iops-total", 500), ("iops-total-max", 2000)];
    let with = |more: &[(&'static str, u64)]| [&burst[..], more].concat();
    assert!(valid(&with(&[("burst-for", 30)])));
    assert!(valid(&with(&[("burst-for", 30), ("iops-total-max-length", 1)])), "the default");
    assert!(valid(&with(&[("burst-for", 30), ("bps-total", 100)])), "a limit without a burst");
    assert!(valid(&[("iops-total", 500), ("iops-total-max", 500), ("burst-for", 30)]));
    assert_eq!(
        validation_error(&[("iops-total", 500), ("burst-for", 30)]),
        "burst-for (30) has no burst to apply to; it needs a burst rate, such as iops-total-max"
    );
    assert_eq!(
        validation_error(&with(&[("burst-for", 30), ("iops-total-max-length", 10)])),
        "iops-total-max-length (10) cannot be set together with burst-for (30); \
         use one of them, burst-for 0 removes it"
    );
    assert_eq!(
        validation_error(&[("bps-total", 1), ("bps-total-max", 1_000_000_000_001), ("burst-for", 1001)]),
        "burst-for (1001) is too long for bps-total-max (1000000000001); \
         their product may be 1000000000000000 at most"
    );
}

#[test]
fn a_change_of_burst_for_resets_lengths() {
    let named = |settings: &[(&str, u64)]| -> Vec<_> {
        settings.iter().map(|&(name, value)| (LimitSetting::from_name(name).unwrap(), value)).collect()
    };
    let change = |limits: Limits, settings: &[(&str, u64)]| limits.with_settings(&named(settings));
    let lengths = [("iops-total", 500), ("iops-total-max", 2000), ("iops-total-max-length", 10)];
    let before = change(Limits::default(), &lengths).unwrap();
    let after = change(before, &[("burst-for", 30)]).unwrap();
    let limit = RateLimit { rate: 500, burst_rate: 2000, burst_length_s: 1, burst_for_s: 30 };
    assert_eq!((after.limit(IopsTotal), after.get(BurstFor)), (limit, 30));
    assert!(change(after, &[("iops-total-max-length", 10)]).is_err(), "other limits would change too");
    let back = change(after, &[("burst-for", 0), ("iops-total-max-length", 10)]).unwrap();
    assert_eq!(back, before);
    // The duration stays after a change of rates, and goes with the last burst rate.
    let faster = change(after, &[("iops-total-max", 4000)]).unwrap();
    assert_eq!(faster.limit(IopsTotal).full_burst(), Some(FullBurst::Lasts { ms: 30_000 }));
    for setting in ["iops-total-max", "iops-total"] {
        assert_eq!(change(after, &[(setting, 0)]).unwrap().get(BurstFor), 0, "{setting}");
    }
    assert!(change(before, &[("burst-for", 30), ("iops-total-max-length", 10)]).is_err());
}
