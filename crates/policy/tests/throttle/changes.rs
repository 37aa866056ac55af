//! Changes of limits while requests wait: valid ones apply at once, invalid ones change nothing.

use crate::timeline::{Timeline, Workload, limits, ms, s};
use policy::request::Direction;
use policy::throttle::{
    AdmissionResult, Limits, NodeShare, PollDecision, RequestCost, ThrottleError, ThrottleTree,
};

#[test]
fn lifting_a_limit_admits_waiting_requests() {
    let mut disk = Timeline::new("bps-total=1000000");
    disk.add(Workload::READS.with_length(8 << 20).queued(1));
    disk.run_until(s(1));
    assert_eq!(disk.admitted_between(s(0), s(1)), 0, "8 MiB take 8.3 s to pay for");
    disk.change_limits("");
    assert_eq!(disk.admitted_between(s(1), ms(1001)), 1);
}

#[test]
fn a_limit_raised_and_lowered_holds_from_then_on() {
    let mut disk = Timeline::new("iops-total=100");
    disk.add(Workload::READS.depth(32));
    assert_eq!(disk.admitted_between(s(1), s(11)), 1000);
    disk.change_limits("iops-total=5000");
    assert_eq!(disk.admitted_between(s(12), s(22)), 50_000);
    disk.change_limits("iops-total=10");
    assert_eq!(disk.admitted_between(s(23), s(33)), 100);
}

#[test]
fn a_limit_set_on_an_unlimited_disk_binds_at_once() {
    let mut disk = Timeline::new("");
    disk.queue_reads(10);
    disk.run_until(s(1));
    disk.change_limits("iops-total=10");
    disk.queue_reads(100);
    assert_eq!(disk.admitted_between(s(1), ms(1001)), 2);
    assert_eq!(disk.admitted_between(s(2), s(4)), 20);
}

#[test]
fn waiting_requests_use_iops_size_at_admission() {
    let mut group = ThrottleTree::new(s(0));
    let disk = group.add(None, limits("iops-total=10"), NodeShare::default()).unwrap();
    let submit =
        |group: &mut ThrottleTree<_>, cost, token| group.submit(disk, Direction::Read, cost, token, s(0));
    for token in ["first", "second"] {
        assert_eq!(submit(&mut group, RequestCost::one(512), token), AdmissionResult::Admitted(token));
    }
    assert!(matches!(submit(&mut group, RequestCost::one(32768), "large"), AdmissionResult::Queued(_)));
    assert!(matches!(submit(&mut group, RequestCost::one(512), "next"), AdmissionResult::Queued(_)));
    // One operation under the old limits, eight under the new ones. The bucket is overrun by one.
    group.configure(disk, limits("iops-total=10,iops-size=4096"), NodeShare::default(), s(0)).unwrap();
    let mut now = s(0);
    for tenth in 1..=8 {
        assert_eq!(group.poll(now), PollDecision::Wait { until: ms(tenth * 100) });
        now = ms(tenth * 100);
    }
    assert_eq!(group.poll(now), PollDecision::Admit("large"));
    assert_eq!(group.poll(now), PollDecision::Wait { until: ms(900) }, "8 operations, and the 1 too much");
}

#[test]
fn invalid_limits_are_refused_and_the_old_stay_in_force() {
    let invalid = limits("iops-total=10,iops-read=5");
    let refused = ThrottleTree::<()>::new(s(0)).add(None, invalid, NodeShare::default());
    assert!(matches!(refused, Err(ThrottleError::Limits(_))));

    let mut disk = Timeline::new("iops-total=10");
    disk.queue_reads(1000);
    disk.run_until(ms(50));
    let error = disk.tree.configure(disk.group, invalid, NodeShare::default(), ms(50)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "iops-total (10) cannot be set together with iops-read (5); use either the total or read and write"
    );
    assert_eq!(disk.tree.limits(disk.group), limits("iops-total=10"));
    assert_eq!(disk.admitted_between(s(0), s(1)), 2 + 9, "the bucket kept its level");
}

#[test]
fn admitted_work_counts_under_new_limits() {
    let mut disk = Timeline::new("iops-total=10");
    disk.queue_reads(1000);
    disk.run_until(ms(50));
    for same_rate in ["iops-total=10", "iops-total=10,bps-total=1000000000"] {
        disk.change_limits(same_rate);
        assert_eq!(disk.admitted_between(ms(50), ms(100)), 0);
    }
    assert_eq!(disk.admitted_between(ms(100), ms(101)), 1);
}

#[test]
fn a_change_with_an_older_instant_does_not_turn_time_back() {
    let mut group = ThrottleTree::new(s(0));
    let disk = group.add(None, Limits::default(), NodeShare::default()).unwrap();
    assert_eq!(group.poll(s(1)), PollDecision::Idle);
    group.configure(disk, limits("iops-total=10"), NodeShare::default(), ms(999)).unwrap();
    assert_eq!(
        group.submit(disk, Direction::Read, RequestCost::merged(&[0; 2]), 1, ms(999)),
        AdmissionResult::Admitted(1)
    );
    assert!(matches!(
        group.submit(disk, Direction::Read, RequestCost::one(0), 2, ms(999)),
        AdmissionResult::Queued(_)
    ));
    assert_eq!(group.poll(ms(999)), PollDecision::Wait { until: ms(1100) });
}
