//! Large requests are charged in slices of 90 ms, so that no request waits behind a whole one.

use crate::timeline::{Timeline, Workload, assert_within_percent, limits, ms, s};
use policy::request::Direction;
use policy::throttle::{AdmissionResult, Limits, NodeShare, PollDecision, RequestCost, ThrottleTree};
use policy::time::{Duration, Instant};

const SLICE: Duration = Duration::from_millis(90);

/// QEMU: 4.1 s behind 4 MiB at 1 MB/s.
#[test]
fn a_small_request_waits_one_slice_behind_huge_ones() {
    for huge in [4 << 20, 32 << 20] {
        for late in [Duration::ZERO, Duration::from_millis(1)] {
            let mut disks = Timeline::new("bps-total=1000000").with_late_timers(late);
            disks.add(Workload::WRITES.with_length(huge).depth(4));
            // Below its fair rate: 4 KiB every 10 ms would be 410 kB/s of its 500.
            let small = disks.add(Workload::READS.paced(Duration::from_millis(100)));
            disks.run_until(s(120));
            let waited = disks.longest_wait_of(small);
            assert!(waited <= SLICE + late * 2, "{waited:?} behind {huge} bytes");
        }
    }
}

#[test]
fn huge_and_small_requests_get_half_each() {
    let mut disks = Timeline::new("bps-total=10000000");
    let huge = disks.add(Workload::READS.with_length(4 << 20).depth(2));
    let small = disks.add(Workload::READS.with_length(4096).depth(32));
    let [huge, small] = [huge, small].map(|client| disks.bytes_of(client, s(1), s(101)) as f64);
    assert_within_percent(2.0, huge / (huge + small), 0.5);
}

#[test]
fn two_huge_requests_alternate_by_slice() {
    let mut disks = Timeline::new("bps-total=1000000");
    let [first, second] = [(); 2].map(|()| disks.add(Workload::READS.with_length(900_000).queued(1)));
    // Both are charged fully at 1.8 s, less the bucket of 0.1 s and the last slice, one slice
    // apart.
    assert_eq!(disks.admitted_between(s(0), ms(1520)), 0);
    assert_eq!(disks.admitted_of(first, ms(1520), ms(1521)), 1);
    assert_eq!(disks.admitted_of(second, ms(1610), ms(1611)), 1);
}

#[test]
fn huge_request_is_charged_exactly() {
    let mut disks = Timeline::new("bps-total=1000003");
    disks.add(Workload::READS.with_length(3_333_333).queued(7));
    disks.run_until(s(60));
    let small = disks.add(Workload::READS.with_length(1).queued(100_003));
    // The bucket is empty: it holds a tenth of a second, and one more byte overruns it.
    assert_eq!(disks.admitted_of(small, s(60), Instant::from_nanos(60_000_000_001)), 100_001);

    // Seven times their cost, less the bucket and the slice that overruns it.
    let mut disk = Timeline::new("bps-total=1000000");
    disk.add(Workload::READS.with_length(3_333_333).queued(7));
    let last = 7 * 3_333_333_000 - 100_000_000;
    assert_eq!(disk.admitted_between(s(0), Instant::from_nanos(last - 100_000_000)), 6);
    assert_eq!(disk.admitted_between(s(0), Instant::from_nanos(last)), 7);
}

#[test]
fn a_burst_is_spent_at_once_and_in_few_steps() {
    let mut tree = ThrottleTree::new(s(0));
    let text = "bps-total=1000,bps-total-max=1000000000";
    let disk = tree.add(None, limits(text), NodeShare::default()).unwrap();
    let passed = tree.submit(disk, Direction::Read, RequestCost::one(32 << 20), (), s(0));
    assert_eq!(passed, AdmissionResult::Admitted(()), "a burst of 1 GB needs no slices of 100 bytes");

    // Beside another disk it is served in slices: a few dozen, not 300,000.
    let other = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
    assert!(tree.try_admit(other, Direction::Read, &RequestCost::one(1), s(0)));
    assert!(tree.try_admit(disk, Direction::Read, &RequestCost::one(960_000_000), s(0)));
    assert!(matches!(
        tree.submit(disk, Direction::Read, RequestCost::one(32 << 20), (), s(0)),
        AdmissionResult::Queued(_)
    ));
    let PollDecision::Wait { until } = tree.poll(s(0)) else { panic!("nothing left of the burst") };
    assert!(until > s(0));
}

#[test]
fn changed_limits_apply_to_the_rest_of_a_request() {
    let mut disk = Timeline::new("bps-total=1000000");
    let huge = disk.add(Workload::READS.with_length(10_000_000).queued(1));
    disk.run_until(s(5));
    disk.change_limits("bps-total=10000000");
    // Half is charged. The rest takes 0.5 s, less the 0.1 of the empty bucket and half a slice.
    assert_eq!(disk.admitted_of(huge, s(5), ms(5_300)), 0);
    assert_eq!(disk.admitted_of(huge, ms(5_300), ms(5_400)), 1);
}

#[test]
fn operation_is_never_divided() {
    let mut disks = Timeline::new("iops-total=2");
    let [first, second] = [(); 2].map(|()| disks.add(Workload::READS.queued(2)));
    // One at once; another when 0.8 of it have leaked; then one every half second.
    let passed = |disks: &mut Timeline, client, at| disks.admitted_of(client, s(0), ms(at));
    assert_eq!([passed(&mut disks, first, 401), passed(&mut disks, second, 401)], [1, 1]);
    assert_eq!(passed(&mut disks, first, 901) + passed(&mut disks, second, 901), 3);
}

#[test]
fn large_request_under_iops_size_is_charged_in_slices() {
    let mut disks = Timeline::new("iops-total=100,iops-size=4096");
    let huge = disks.add(Workload::READS.with_length(4 << 20).depth(2));
    let small = disks.add(Workload::READS.paced(Duration::from_millis(50)));
    disks.run_until(s(60));
    let waited = disks.longest_wait_of(small);
    assert!(waited <= SLICE, "{waited:?}");
    assert!(disks.admitted_of(huge, s(0), s(60)) >= 4);
}

#[test]
fn no_window_admits_more_than_was_charged() {
    let mut disks = Timeline::new("bps-total=1000000");
    for _ in 0..3 {
        disks.add(Workload::READS.with_length(2 << 20).depth(2));
    }
    // From the start: every request is charged before it is admitted, except the last slice.
    for seconds in 1..=60 {
        let max_bytes = 1_000_000 * seconds + 200_000;
        assert!(disks.bytes_between(s(0), s(seconds)) <= max_bytes, "in {seconds} s");
    }
    assert!(disks.bytes_between(s(0), s(60)) >= 60_000_000 - 3 * (2 << 20));
}
