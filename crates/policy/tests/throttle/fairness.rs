//! No starvation: members are served in rounds, and arriving requests do not overtake waiting ones.

use crate::timeline::{Timeline, Workload, ms, s};
use policy::request::Direction;
use policy::throttle::{AdmissionResult, NodeId, NodeShare, PollDecision, RequestCost, ThrottleTree};
use policy::time::Duration;

#[test]
fn shallow_queue_gets_the_same_share_as_a_deep_one() {
    let mut disks = Timeline::new("iops-total=1000");
    let shallow = disks.add(Workload::READS.depth(2));
    let deep = disks.add(Workload::READS.depth(64));
    assert_eq!(disks.admitted_of(shallow, s(1), s(11)), 5000);
    assert_eq!(disks.admitted_of(deep, s(1), s(11)), 5000);
}

#[test]
fn no_member_with_work_waits_longer_than_a_round() {
    let mut disks = Timeline::new("iops-total=1000").with_late_timers(Duration::from_millis(5));
    let clients: Vec<_> = (1..=20)
        .map(|depth| {
            let workload = if depth % 2 == 0 { Workload::READS } else { Workload::WRITES };
            disks.add(workload.depth(depth).latency(Duration::from_micros(100)))
        })
        .collect();
    for client in clients {
        // A round is 20 requests, 20 ms; a late timer adds at most 5 ms.
        let gap = disks.longest_gap_of(client, s(1), s(11));
        assert!(gap <= Duration::from_millis(26), "client {client} waited {gap:?}");
    }
}

#[test]
fn reads_overtake_writes_that_wait_for_a_write_limit() {
    let mut disk = Timeline::new("iops-write=10,iops-read=100000");
    let writes = disk.add(Workload::WRITES.queued(1000));
    disk.run_until(s(1));
    let reads = disk.add_to(disk.disk(writes), Workload::READS.queued(1000));
    assert_eq!(disk.admitted_of(reads, s(1), ms(1001)), 1000);
}

/// A group in which a read is due that has not been polled.
fn tree_with_overdue_read() -> (ThrottleTree<&'static str>, NodeId) {
    let mut group = ThrottleTree::new(s(0));
    let disk = group.add(None, crate::timeline::limits("iops-total=10"), NodeShare::default()).unwrap();
    for token in ["first", "second"] {
        let admission = group.submit(disk, Direction::Read, RequestCost::one(512), token, s(0));
        assert_eq!(admission, AdmissionResult::Admitted(token));
    }
    assert!(matches!(
        group.submit(disk, Direction::Read, RequestCost::one(512), "overdue", s(0)),
        AdmissionResult::Queued(_)
    ));
    (group, disk)
}

#[test]
fn a_request_does_not_overtake_one_whose_timer_is_late() {
    for direction in Direction::ALL {
        let (mut group, disk) = tree_with_overdue_read();
        let latecomer = group.submit(disk, direction, RequestCost::one(512), "latecomer", ms(100));
        assert!(matches!(latecomer, AdmissionResult::Queued(_)), "{direction:?}");
        assert_eq!(group.poll(ms(100)), PollDecision::Admit("overdue"));
        assert_eq!(group.poll(ms(100)), PollDecision::Wait { until: ms(200) });
        assert_eq!(group.poll(ms(200)), PollDecision::Admit("latecomer"));
    }
}

#[test]
fn requests_without_a_shared_limit_do_not_wait_for_each_other() {
    let mut group = ThrottleTree::new(s(0));
    let disk =
        group.add(None, crate::timeline::limits("iops-read=10,iops-write=10"), NodeShare::default()).unwrap();
    for number in 0..3 {
        let read = group.submit(disk, Direction::Read, RequestCost::one(512), number, s(0));
        assert_eq!(matches!(read, AdmissionResult::Queued(_)), number == 2);
    }
    assert_eq!(
        group.submit(disk, Direction::Write, RequestCost::one(512), 3, s(0)),
        AdmissionResult::Admitted(3)
    );
}
