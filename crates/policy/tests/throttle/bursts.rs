//! Bursts: how much is admitted, and how fast, before the rate applies; exact to the request.

use policy::throttle::{FullBurst, RateLimit};
use proptest::prelude::*;

use crate::timeline::{Timeline, Workload, ms, s};

/// Requests admitted in an interval, in milliseconds.
#[test]
fn burst_rows_are_exact() {
    type Passes = (u64, u64, usize);
    let reads = Workload::READS;
    let rows: [(&str, &str, Workload, &[Passes]); 9] = [
        // At first a tenth of a second at the burst rate, one request that overruns the bucket, and
        // one that has leaked. Burst and rate apply together: the bucket of 2000 × 60 leaks at 100
        // while it fills at 2000, so it is full after 120,000 / 1900 = 63.1 seconds.
        (
            "a burst of 2000 for 60 s, then 100",
            "iops-total=100,iops-total-max=2000,iops-total-max-length=60",
            reads.queued(200_000),
            &[
                (0, 1, 200 + 1 + 1),
                (1000, 60_000, 59 * 2000),
                (62_000, 63_000, 2000),
                (64_000, 65_000, 100),
                (70_000, 80_000, 1000),
            ],
        ),
        (
            "a burst of one second passes at once",
            "iops-total=100,iops-total-max=500",
            reads.queued(2000),
            &[(0, 1, 501), (1000, 2000, 100)],
        ),
        (
            "without a burst rate, a tenth of a second passes at once",
            "iops-total=1000",
            reads.queued(5000),
            &[(0, 1, 101), (100, 1100, 1000)],
        ),
        (
            "one a second: one at once; the next when 0.9 of it has leaked",
            "iops-total=1",
            reads.queued(100),
            &[(0, 1000, 2), (1000, 11_000, 10)],
        ),
        ("no limits", "", reads.queued(100_000), &[(0, 1, 100_000)]),
        (
            "8 KiB are two",
            "iops-total=1000,iops-size=4096",
            reads.with_length(8192).depth(4),
            &[(1000, 11_000, 5000)],
        ),
        (
            "6 KiB are one and a half",
            "iops-total=1000,iops-size=4096",
            reads.with_length(6144).depth(4),
            &[(1000, 10_000, 6000)],
        ),
        ("bytes are short", "iops-total=1000,bps-total=409600", reads.depth(8), &[(1000, 11_000, 1000)]),
        (
            "operations are short",
            "iops-total=1000,bps-total=409600",
            reads.with_length(1).depth(8),
            &[(1000, 11_000, 10_000)],
        ),
    ];
    for (name, limits, workload, passes) in rows {
        let mut disk = Timeline::new(limits);
        disk.add(workload);
        for &(from, to, requests) in passes {
            assert_eq!(disk.admitted_between(ms(from), ms(to)), requests, "{name}: from {from} to {to} ms");
        }
    }
}

#[test]
fn a_burst_may_last_again_after_the_bucket_has_leaked() {
    let mut disk = Timeline::new("iops-total=100,iops-total-max=1000,iops-total-max-length=3");
    disk.queue_reads(4000);
    assert_eq!(disk.admitted_between(s(1), s(2)), 1000);
    assert_eq!(disk.admitted_between(s(5), s(6)), 100);
    // 3000 in the bucket leak in 30 s, after the 4000 have been admitted.
    disk.run_until(s(60));
    disk.queue_reads(4000);
    assert_eq!(disk.admitted_between(s(61), s(62)), 1000);
    assert_eq!(disk.admitted_between(s(65), s(66)), 100);
}

#[test]
fn oversized_request_is_sliced_and_delays_no_other() {
    let mut disk = Timeline::new("bps-total=1000000");
    let huge = disk.add(Workload::READS.with_length(4 << 20).queued(1));
    let small = disk.add(Workload::READS.queued(1));
    assert_eq!(disk.admitted_of(small, s(0), ms(101)), 1, "behind one slice");
    // Of 4.198 s, the last two tenths are the capacity of the bucket and the slice that overruns
    // it.
    assert_eq!(disk.admitted_of(huge, s(0), ms(4000)), 0);
    assert_eq!(disk.admitted_of(huge, ms(4000), ms(4099)), 1);
}

#[test]
fn bytes_burst_like_operations() {
    let mut disk = Timeline::new("bps-read=1048576,bps-read-max=10485760,bps-read-max-length=5");
    disk.add(Workload::READS.with_length(65536).depth(8));
    assert_eq!(disk.bytes_between(s(1), s(5)), 40 << 20);
    assert_eq!(disk.bytes_between(s(10), s(20)), 10 << 20);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// A client that always has requests waiting gets the burst rate for the stated time, then the
    /// rate.
    #[test]
    fn a_full_burst_lasts_as_stated(rate in 10..200_u64, surplus in 1..500_u64, length_s in 2..30_u64) {
        let burst_rate = rate + surplus;
        let limit = RateLimit { rate, burst_rate, burst_length_s: length_s, ..RateLimit::NONE };
        let Some(FullBurst::Lasts { ms }) = limit.full_burst() else { panic!("{limit:?}") };
        // A burst rate just above the rate lasts for hours.
        prop_assume!(ms < 200_000);
        check_burst(limit, &format!("iops-total-max-length={length_s}"), ms);
    }

    #[test]
    fn burst_for_is_the_duration_of_a_full_burst(
        rate in 10..200_u64,
        times in 2..6_u64,
        burst_for_s in 1..60_u64,
    ) {
        let limit = RateLimit { rate, burst_rate: rate * times, burst_for_s, ..RateLimit::NONE };
        prop_assert_eq!(limit.full_burst(), Some(FullBurst::Lasts { ms: burst_for_s * 1000 }));
        check_burst(limit, &format!("burst-for={burst_for_s}"), burst_for_s * 1000);
    }
}

/// Loads a disk with this limit, which has this setting in text, and checks the duration.
fn check_burst(RateLimit { rate, burst_rate, .. }: RateLimit, setting: &str, burst_ms: u64) {
    let mut disk = Timeline::new(&format!("iops-total={rate},iops-total-max={burst_rate},{setting}"));
    disk.add(Workload::READS.depth(4));
    // The second bucket admits a tenth of a second at the burst rate in advance.
    let slack = burst_rate / 10 + 3;
    let in_burst = disk.admitted_between(ms(0), ms(burst_ms)) as u64;
    let expected = burst_ms * burst_rate / 1000;
    assert!(in_burst.abs_diff(expected) <= slack, "{in_burst}, not {expected}");
    let after = disk.admitted_between(ms(burst_ms + 1000), ms(burst_ms + 11_000)) as u64;
    assert!(after.abs_diff(10 * rate) <= 2, "{after}, not {}", 10 * rate);
}

#[test]
fn duration_of_a_full_burst() {
    let burst = |rate, burst_rate, burst_length_s| {
        RateLimit { rate, burst_rate, burst_length_s, ..RateLimit::NONE }.full_burst()
    };
    assert_eq!(burst(500, 2000, 30), Some(FullBurst::Lasts { ms: 40_000 }), "30 × 2000 ÷ 1500");
    assert_eq!(burst(1000, 1300, 2), Some(FullBurst::Lasts { ms: 8667 }), "rounded");
    assert_eq!(burst(500, 2000, 1), Some(FullBurst::AtOnce { units: 2000 }));
    assert_eq!(burst(500, 500, 30), Some(FullBurst::Endless));
    assert_eq!(burst(500, 0, 1), None);
    assert_eq!(burst(0, 0, 1), None);
}

#[test]
fn burst_for_determines_the_capacity() {
    let limit =
        |rate, burst_rate, burst_for_s| RateLimit { rate, burst_rate, burst_for_s, ..RateLimit::NONE };
    let thirty_seconds = limit(500, 2000, 30);
    assert_eq!(
        (thirty_seconds.capacity(), thirty_seconds.equivalent_length_s()),
        (45_000.0, 23),
        "22.5 s of 2000"
    );
    // One second is not admitted at once, unlike a length of one second.
    let short = limit(500, 2000, 1);
    assert_eq!((short.capacity(), short.has_burst_rate_bucket()), (1500.0, true));
    assert_eq!(short.full_burst(), Some(FullBurst::Lasts { ms: 1000 }));
    // A burst admits no less than the tenth of a second without one.
    assert_eq!(limit(1000, 1001, 5).capacity(), 100.0);
    let endless = limit(500, 500, 30);
    assert_eq!((endless.capacity(), endless.full_burst()), (50.0, Some(FullBurst::Endless)));
    assert_eq!(limit(500, 0, 30).capacity(), 50.0, "other limits may have the burst rate");
    assert_eq!(limit(0, 0, 30).capacity(), 0.0);
}
