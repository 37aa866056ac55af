//! Bursts: how much passes how fast before the rate holds, to the request.

use crate::timeline::{Timeline, Workload, ms, s};

/// Burst and rate are asked at once, so the bucket of 2000 × 60 leaks at 100 while it fills at 2000: it is full
/// after 120,000 / 1900 seconds, 63.1.
#[test]
fn burst_of_2000_for_60_s_then_100() {
    let mut disk = Timeline::new("iops-total=100,iops-total-max=2000,iops-total-max-length=60");
    disk.queue_reads(200_000);
    assert_eq!(
        disk.admitted_between(s(0), ms(1)),
        200 + 1 + 1,
        "a tenth of a second's worth, one over, one leaked"
    );
    assert_eq!(disk.admitted_between(s(1), s(60)), 59 * 2000);
    assert_eq!(disk.admitted_between(s(62), s(63)), 2000);
    assert_eq!(disk.admitted_between(s(64), s(65)), 100);
    assert_eq!(disk.admitted_between(s(70), s(80)), 1000);
}

#[test]
fn a_burst_may_last_again_after_the_bucket_has_leaked() {
    let mut disk = Timeline::new("iops-total=100,iops-total-max=1000,iops-total-max-length=3");
    disk.queue_reads(4000);
    assert_eq!(disk.admitted_between(s(1), s(2)), 1000);
    assert_eq!(disk.admitted_between(s(5), s(6)), 100);
    // 3000 in the bucket leak in 30 s, once the 4000 have passed.
    disk.run_until(s(60));
    disk.queue_reads(4000);
    assert_eq!(disk.admitted_between(s(61), s(62)), 1000);
    assert_eq!(disk.admitted_between(s(65), s(66)), 100);
}

#[test]
fn a_burst_of_one_second_passes_at_once() {
    let mut disk = Timeline::new("iops-total=100,iops-total-max=500");
    disk.queue_reads(2000);
    assert_eq!(disk.admitted_between(s(0), ms(1)), 501);
    assert_eq!(disk.admitted_between(s(1), s(2)), 100);
}

#[test]
fn without_a_burst_rate_a_tenth_of_a_second_passes_at_once() {
    let mut disk = Timeline::new("iops-total=1000");
    disk.queue_reads(5000);
    assert_eq!(disk.admitted_between(s(0), ms(1)), 101);
    assert_eq!(disk.admitted_between(ms(100), ms(1100)), 1000);
}

#[test]
fn a_limit_below_one_a_tenth_of_a_second_still_lets_requests_pass() {
    let mut disk = Timeline::new("iops-total=1");
    disk.queue_reads(100);
    assert_eq!(disk.admitted_between(s(0), s(1)), 2, "one at once; the next when 0.9 of it has leaked");
    assert_eq!(disk.admitted_between(s(1), s(11)), 10);
}

#[test]
fn an_oversized_request_passes_once_it_is_paid_for_and_nobody_waits_behind_it() {
    let mut disk = Timeline::new("bps-total=1000000");
    let huge = disk.add(Workload::READS.of(4 << 20).queued(1));
    let small = disk.add(Workload::READS.queued(1));
    assert_eq!(disk.admitted_of(small, s(0), ms(101)), 1, "behind one slice");
    // Of (4 MiB + 4 KiB) / 1,000,000 = 4.198 s, the last two tenths are a full bucket and the slice that makes it run over.
    assert_eq!(disk.admitted_of(huge, s(0), ms(4000)), 0);
    assert_eq!(disk.admitted_of(huge, ms(4000), ms(4099)), 1);
}

#[test]
fn bytes_burst_like_operations() {
    let mut disk = Timeline::new("bps-read=1048576,bps-read-max=10485760,bps-read-max-length=5");
    disk.add(Workload::READS.of(65536).depth(8));
    assert_eq!(disk.bytes_between(s(1), s(5)), 40 << 20);
    assert_eq!(disk.bytes_between(s(10), s(20)), 10 << 20);
}

#[test]
fn iops_size_makes_a_large_request_count_as_several() {
    let mut disk = Timeline::new("iops-total=1000,iops-size=4096");
    disk.add(Workload::READS.of(8192).depth(4));
    assert_eq!(disk.admitted_between(s(1), s(11)), 5000);
    let mut disk = Timeline::new("iops-total=1000,iops-size=4096");
    disk.add(Workload::READS.of(6144).depth(4));
    assert_eq!(disk.admitted_between(s(1), s(10)), 6000);
}
