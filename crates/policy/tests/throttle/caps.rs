//! Caps: a second set of limits of a node, which holds beside the limits of the user.

use crate::timeline::{Timeline, Workload, assert_within_percent, limits, ms, reserved_share, s, weight};
use policy::request::Direction::{Read, Write};
use policy::throttle::{
    AdmissionResult, CauseKind, Enforcement, LevelCause, LimitKind, Limits, NodeId, NodeShare, PollDecision,
    RequestCost, SpareRefund, ThrottleTree,
};
use policy::time::Duration;
use proptest::prelude::*;

fn set_cap(disk: &mut Timeline, node: NodeId, text: &str) {
    disk.tree.set_cap(node, Some(limits(text)), disk.now).unwrap();
    disk.poll_now();
}

/// A tree with one disk without limits, and with a cap.
fn capped(text: &str) -> (ThrottleTree<u32>, NodeId) {
    let mut tree = ThrottleTree::new(s(0));
    let disk = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
    tree.set_cap(disk, Some(limits(text)), s(0)).unwrap();
    (tree, disk)
}

#[test]
fn a_cap_begins_full_and_its_removal_admits_waiting_requests() {
    let mut disk = Timeline::new("");
    disk.queue_reads(100);
    let group = disk.group;
    set_cap(&mut disk, group, "iops-total=10");
    assert_eq!(disk.admitted_between(s(0), s(1)), 10, "at 0 ms, 100 ms, … 900 ms");
    disk.tree.set_cap(group, None, s(1)).unwrap();
    disk.poll_now();
    assert_eq!(disk.admitted_between(s(1), ms(1001)), 90);
    assert!(disk.tree.is_unlimited(group));
}

#[test]
fn limits_after_a_cap_are_as_without_it() {
    let mut disk = Timeline::new("iops-total=100");
    disk.queue_reads(1000);
    let group = disk.group;
    set_cap(&mut disk, group, "iops-total=10");
    assert_eq!(disk.admitted_between(s(0), s(1)), 10);
    assert_eq!(
        (disk.tree.limits(group), disk.tree.cap(group)),
        (limits("iops-total=100"), Some(limits("iops-total=10")))
    );
    set_cap(&mut disk, group, "");
    assert_eq!(disk.tree.cap(group), None);
    assert_eq!(disk.admitted_between(s(1), s(2)), 11 + 99, "the limit's bucket has leaked meanwhile");
}

#[test]
fn lifted_limits_do_not_lift_the_cap() {
    let mut disk = Timeline::new("iops-total=5");
    disk.queue_reads(100);
    let group = disk.group;
    disk.tree.enforce(group, Enforcement::Lifted, s(0));
    set_cap(&mut disk, group, "iops-total=10");
    assert_eq!(disk.admitted_between(s(0), s(1)), 10);
}

#[test]
fn members_share_the_cap_of_their_group_by_weight() {
    let mut disks = Timeline::new("");
    let group = disks.group;
    let [light, heavy] = [100, 300].map(|each| disks.add_with(weight(each), Workload::READS.depth(8)));
    set_cap(&mut disks, group, "iops-total=100");
    for (client, expected) in [(light, 250.0), (heavy, 750.0)] {
        assert_within_percent(2.0, disks.admitted_of(client, s(1), s(11)) as f64, expected);
    }
}

#[test]
fn no_more_than_the_cap_is_admitted_for_a_reservation() {
    let mut disks = Timeline::new("");
    let group = disks.group;
    let reserved = disks.add_with(reserved_share(50, 0), Workload::READS.depth(8));
    disks.add(Workload::READS.depth(8));
    set_cap(&mut disks, group, "iops-total=10");
    assert_eq!(disks.admitted_between(s(0), s(10)), 100);
    assert!(disks.admitted_of(reserved, s(0), s(10)) >= 95, "the reservation precedes the weight");
}

#[test]
fn a_large_request_under_a_cap_is_charged_in_slices() {
    let mut disks = Timeline::new("");
    let group = disks.group;
    set_cap(&mut disks, group, "bps-total=1000000");
    disks.add(Workload::READS.with_length(4 << 20).queued(1));
    let small = disks.add(Workload::READS.with_length(1000).paced(Duration::from_millis(50)));
    disks.run_until(s(6));
    assert!(disks.longest_wait_of(small) <= Duration::from_millis(200), "not the 4 s of the large one");
}

#[test]
fn the_cap_is_a_cause_of_its_own() {
    let mut disk = Timeline::new("iops-total=50");
    disk.add(Workload::READS.depth(8));
    let group = disk.group;
    let cause = |disk: &Timeline| disk.tree.stats(group, disk.now).throttle_cause;
    set_cap(&mut disk, group, "iops-total=10");
    disk.run_until(s(5));
    assert_eq!(cause(&disk), Some(CauseKind::LatencyTarget));
    assert_eq!(disk.tree.last_cause(), Some(LevelCause { level: 1, kind: CauseKind::LatencyTarget }));
    assert_within_percent(1.0, disk.tree.stats(group, s(5)).throttled_ns as f64, 5e9);
    // The second time because requests wait now.
    assert!(disk.tree.take_cap_wait(group) && disk.tree.take_cap_wait(group));
    for looser in ["", "iops-total=100"] {
        set_cap(&mut disk, group, looser);
        let end = disk.now + Duration::from_secs(5);
        disk.run_until(end);
        let by_limit = CauseKind::Limit(LimitKind::IopsTotal);
        assert_eq!(cause(&disk), Some(by_limit));
        assert_eq!(disk.tree.last_cause(), Some(LevelCause { level: 1, kind: by_limit }));
        assert!(!disk.tree.take_cap_wait(group));
    }
}

#[test]
fn wait_for_the_cap_is_reported_once_after_its_end() {
    let (mut tree, disk) = capped("iops-total=10");
    assert!(!tree.take_cap_wait(disk));
    assert!(tree.try_admit(disk, Read, &RequestCost::one(1), s(0)));
    assert!(matches!(tree.submit(disk, Read, RequestCost::one(1), 7, s(0)), AdmissionResult::Queued(_)));
    assert_eq!(tree.poll(ms(100)), PollDecision::Admit(7));
    assert!(tree.take_cap_wait(disk));
    assert!(!tree.take_cap_wait(disk));
}

#[test]
fn a_write_that_waits_for_the_cap_precedes_reads() {
    let (mut tree, disk) = capped("iops-total=10");
    assert!(tree.try_admit(disk, Write, &RequestCost::one(1), s(0)));
    assert!(matches!(tree.submit(disk, Write, RequestCost::one(1), 7, s(0)), AdmissionResult::Queued(_)));
    assert!(!tree.try_admit(disk, Read, &RequestCost::one(1), ms(100)), "the write is due");
    assert!(!tree.try_admit_read_ahead(disk, &RequestCost::one(1), SpareRefund::NONE, ms(100)));
    assert_eq!(tree.poll(ms(100)), PollDecision::Admit(7));
}

#[test]
fn read_ahead_uses_what_guests_leave_of_the_cap() {
    // A limit beside the cap, which throttles nothing here, changes nothing.
    for own_limits in ["", "bps-total=100000000"] {
        let (mut tree, disk) = capped("bps-total=1000000");
        tree.configure(disk, limits(own_limits), NodeShare::default(), s(0)).unwrap();
        let read_ahead = |tree: &mut ThrottleTree<u32>, refund, now| {
            tree.try_admit_read_ahead(disk, &RequestCost::one(100_000), refund, now)
        };
        assert!(read_ahead(&mut tree, SpareRefund::NONE, s(0)), "a full bucket admits one request");
        assert!(!read_ahead(&mut tree, SpareRefund::NONE, ms(99)));
        assert!(read_ahead(&mut tree, SpareRefund::NONE, ms(100)));
        assert!(tree.try_admit(disk, Read, &RequestCost::one(50_000), ms(100)));
        assert!(!read_ahead(&mut tree, SpareRefund::NONE, ms(249)), "250,000 in a bucket of 100,000");
        assert!(read_ahead(&mut tree, SpareRefund::NONE, ms(250)));
        let mut refund = SpareRefund::NONE;
        refund.add(100_000, 100_000);
        assert!(!read_ahead(&mut tree, SpareRefund::NONE, ms(250)));
        assert!(read_ahead(&mut tree, refund, ms(250)));
    }
}

#[test]
fn a_cap_is_not_inherited() {
    let (mut tree, disk) = capped("iops-total=10");
    assert!(tree.try_admit(disk, Read, &RequestCost::one(1), s(0)));
    assert!(!tree.is_unlimited(disk));
    assert_eq!(tree.snapshot(disk, s(0)), None);
    let charged = tree.carried_charges(disk, None, s(0));
    assert!(tree.remove(disk).is_empty());
    let successor = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
    tree.add_carried_charges(successor, charged, s(0));
    assert_eq!(tree.cap(successor), None);
    assert!(tree.is_unlimited(successor));
}

#[test]
fn an_invalid_cap_is_refused_and_the_old_stays_in_force() {
    let (mut tree, disk) = capped("iops-total=10");
    tree.set_cap(disk, Some(limits("iops-total=10,iops-read=5")), s(0)).unwrap_err();
    assert_eq!(tree.cap(disk), Some(limits("iops-total=10")));
}

proptest! {
    /// Without and with a burst of the user; cap and limits at the same node or at different ones.
    #[test]
    fn the_stricter_of_limits_and_cap_decides(
        rate in 5..500u64,
        burst in 0..4u64,
        cap in 5..500u64,
        on_disk in any::<bool>(),
    ) {
        let text = match burst {
            0 => format!("iops-total={rate}"),
            _ => format!("iops-total={rate},iops-total-max={}", rate * burst),
        };
        let size = if burst == 0 { rate as f64 / 10.0 } else { (rate * burst) as f64 };
        let mut disk = Timeline::new(&text);
        let client = disk.add(Workload::READS.depth(4));
        let node = if on_disk { disk.disk(client) } else { disk.group };
        set_cap(&mut disk, node, &format!("iops-total={cap}"));
        for seconds in 1..=10 {
            let by_limit = (rate * seconds) as f64 + size;
            // One request overruns a bucket.
            let expected = by_limit.min((cap * seconds) as f64) + 1.0;
            let admitted = disk.admitted_between(s(0), s(seconds)) as f64;
            prop_assert!((admitted - expected).abs() <= 1.001, "{} of {} in {} s", admitted, expected, seconds);
        }
    }

    #[test]
    fn changes_of_a_cap_grant_no_burst(
        caps in prop::collection::vec((5..500u64, 1..2_000u64), 1..20),
    ) {
        let mut disk = Timeline::new("");
        disk.add(Workload::READS.depth(4));
        let (group, mut expected) = (disk.group, 1.0);
        for (rate, milliseconds) in caps {
            set_cap(&mut disk, group, &format!("iops-total={rate}"));
            let end = disk.now + Duration::from_millis(milliseconds);
            disk.run_until(end);
            expected += (rate * milliseconds) as f64 / 1000.0;
        }
        let end = disk.now;
        let admitted = disk.admitted_between(s(0), end) as f64;
        prop_assert!((admitted - expected).abs() <= 1.001, "{} of {}", admitted, expected);
    }
}

#[test]
fn background_work_without_a_queue_waits_for_a_cap_only_if_the_cap_refuses_it() {
    let (mut tree, disk) = capped("bps-total=1000");
    let cost = RequestCost::one(100);
    tree.record_cap_wait(disk, s(10));
    assert!(!tree.take_cap_wait(disk), "the cap has spare capacity");
    while tree.try_admit_read_ahead(disk, &cost, SpareRefund::NONE, s(10)) {}
    tree.record_cap_wait(disk, s(10));
    assert!(tree.take_cap_wait(disk));
    assert!(!tree.take_cap_wait(disk), "it is reset");
}
