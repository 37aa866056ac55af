//! The tree's protocol, call by call: queueing, cancelling, removing, and deadlines.

use crate::timeline::{limits, ms, s};
use policy::request::Direction::{self, Read, Write};
use policy::throttle::{
    AdmissionResult, CauseKind, LevelCause, LimitKind, Limits, NodeId, NodeShare, PollDecision,
    QueuedRequestId, RequestCost, ReturnedRequest, ThrottleTree,
};
use policy::time::Instant;

struct Disks {
    tree: ThrottleTree<&'static str>,
    group: NodeId,
}

impl Disks {
    fn new(text: &str) -> Self {
        let mut tree = ThrottleTree::new(s(0));
        let group = tree.add(None, limits(text), NodeShare::default()).unwrap();
        Self { tree, group }
    }

    fn add(&mut self) -> NodeId {
        self.tree.add(Some(self.group), Limits::default(), NodeShare::default()).unwrap()
    }

    fn waiting(&self, direction: Direction) -> usize {
        self.tree.waiting(self.group, direction)
    }

    fn remove(&mut self, disk: NodeId) -> Vec<&'static str> {
        self.tree.remove(disk).into_iter().map(|ReturnedRequest { token, .. }| token).collect()
    }
}

/// A group at its limit, so that all further requests wait; and its disk.
fn full_group() -> (Disks, NodeId) {
    let mut disks = Disks::new("iops-total=10");
    let disk = disks.add();
    for _ in 0..2 {
        assert_eq!(
            disks.tree.submit(disk, Read, RequestCost::one(1), "", s(0)),
            AdmissionResult::Admitted("")
        );
    }
    (disks, disk)
}

#[track_caller]
fn queue(group: &mut Disks, disk: NodeId, direction: Direction, token: &'static str) -> QueuedRequestId {
    match group.tree.submit(disk, direction, RequestCost::one(512), token, s(0)) {
        AdmissionResult::Queued(ticket) => ticket,
        AdmissionResult::Admitted(token) => panic!("{token} did not wait"),
    }
}

/// Tokens in the order of admission when each deadline is met exactly.
fn drain(group: &mut Disks) -> Vec<&'static str> {
    let mut now = s(0);
    let mut passed = Vec::new();
    loop {
        match group.tree.poll(now) {
            PollDecision::Admit(token) => passed.push(token),
            PollDecision::Wait { until } => now = until,
            PollDecision::Idle => return passed,
        }
    }
}

#[test]
fn a_deadline_is_exact() {
    let (mut group, disk) = full_group();
    assert_eq!(group.tree.poll(s(0)), PollDecision::Idle);
    queue(&mut group, disk, Read, "a");
    let until = ms(100);
    assert_eq!(group.tree.poll(s(0)), PollDecision::Wait { until });
    assert_eq!(group.tree.poll(Instant::from_nanos(until.as_nanos() - 1)), PollDecision::Wait { until });
    assert_eq!(group.tree.poll(until), PollDecision::Admit("a"));
    assert_eq!(group.tree.poll(until), PollDecision::Idle);
}

#[test]
fn cause_is_the_limit_that_released_last() {
    let mut tree = ThrottleTree::new(s(0));
    let group = tree.add(None, limits("bps-total=4096"), NodeShare::default()).unwrap();
    let (own_limits, none) = (limits("iops-read=10"), Limits::default());
    let [disk, other] =
        [own_limits, none].map(|limits| tree.add(Some(group), limits, NodeShare::default()).unwrap());
    let mut after = |disk, bytes, count, from: u64| {
        for token in 0..count {
            let _ = tree.submit(disk, Read, RequestCost::one(bytes), token, s(from));
        }
        let mut now = s(from);
        let mut causes = Vec::new();
        loop {
            match tree.poll(now) {
                PollDecision::Admit(_) => causes.push(tree.last_cause()),
                PollDecision::Wait { until } => now = until,
                PollDecision::Idle => return causes,
            }
        }
    };
    let cause = |level, kind| Some(LevelCause { level, kind: CauseKind::Limit(kind) });
    // Small requests are throttled by the disk's own limit, large ones by the group's.
    assert!(after(disk, 1, 10, 0).ends_with(&[cause(0, LimitKind::IopsRead); 5]));
    assert!(after(disk, 8192, 4, 100).ends_with(&[cause(1, LimitKind::BpsTotal); 2]));
    assert!(after(other, 8192, 4, 200).ends_with(&[cause(1, LimitKind::BpsTotal); 2]));
}

#[test]
fn cause_is_the_group_that_throttled_most_not_a_busy_host() {
    let mut tree = ThrottleTree::new(s(0));
    let host = tree.add(None, limits("bps-total=40960"), NodeShare::default()).unwrap();
    // The disk's group admits 2 per second; the host is always busy because of the greedy disk.
    let group = tree.add(Some(host), limits("iops-total=2"), NodeShare::default()).unwrap();
    let disk = tree.add(Some(group), Limits::default(), NodeShare::default()).unwrap();
    let greedy = tree.add(Some(host), Limits::default(), NodeShare::default()).unwrap();
    for number in 0..240 {
        let submitter = if number < 40 { disk } else { greedy };
        let _ = tree.submit(submitter, Read, RequestCost::one(4096), submitter == disk, s(0));
    }
    let (mut now, mut disk_causes, mut greedy_causes) = (s(0), Vec::new(), Vec::new());
    loop {
        match tree.poll(now) {
            PollDecision::Admit(of_disk) => {
                if of_disk { &mut disk_causes } else { &mut greedy_causes }.push(tree.last_cause());
            }
            PollDecision::Wait { until } => now = until,
            PollDecision::Idle => break,
        }
    }
    assert!(disk_causes.len() > 30 && greedy_causes.len() > 150);
    let cause = |level, kind| Some(LevelCause { level, kind: CauseKind::Limit(kind) });
    // Without the first ones, which were admitted before the buckets were full.
    assert!(disk_causes[10..].iter().all(|held| *held == cause(1, LimitKind::IopsTotal)), "{disk_causes:?}");
    assert!(
        greedy_causes[50..].iter().all(|held| *held == cause(1, LimitKind::BpsTotal)),
        "{greedy_causes:?}"
    );
}

#[test]
fn a_disk_s_requests_pass_in_order_and_disks_take_turns() {
    let mut group = Disks::new("iops-total=10");
    let (a, b) = (group.add(), group.add());
    for disk in [a, b] {
        assert_eq!(
            group.tree.submit(disk, Read, RequestCost::one(1), "", s(0)),
            AdmissionResult::Admitted("")
        );
    }
    for token in ["a1", "a2", "a3"] {
        queue(&mut group, a, Read, token);
    }
    for token in ["b1", "b2"] {
        queue(&mut group, b, Read, token);
    }
    assert_eq!(group.waiting(Read), 5);
    // Alternating between the disks, although a's requests arrived first.
    assert_eq!(drain(&mut group), ["a1", "b1", "a2", "b2", "a3"]);
    assert_eq!(group.waiting(Read), 0);
}

#[test]
fn cancelled_request_is_returned_once_and_order_is_kept() {
    let (mut group, disk) = full_group();
    let tickets = ["a", "b", "c", "d"].map(|token| queue(&mut group, disk, Write, token));
    assert_eq!(group.tree.cancel(tickets[2]), Some("c"));
    assert_eq!(group.tree.cancel(tickets[2]), None);
    assert_eq!(group.tree.cancel(tickets[0]), Some("a"));
    assert_eq!(drain(&mut group), ["b", "d"]);
    assert_eq!(group.tree.cancel(tickets[1]), None, "admitted already");
}

#[test]
fn cancelled_member_delays_no_other() {
    let (mut group, a) = full_group();
    let b = group.add();
    let ticket = queue(&mut group, a, Read, "a");
    queue(&mut group, b, Read, "b");
    group.tree.cancel(ticket);
    assert_eq!(drain(&mut group), ["b"]);
    // A cancelled request leaves nothing behind that would keep the member from being served.
    queue(&mut group, a, Read, "again");
    assert_eq!(drain(&mut group), ["again"]);
}

#[test]
fn cancelling_costs_no_tokens() {
    let (mut group, disk) = full_group();
    let ticket = queue(&mut group, disk, Read, "a");
    queue(&mut group, disk, Read, "b");
    group.tree.cancel(ticket);
    assert_eq!(group.tree.poll(s(0)), PollDecision::Wait { until: ms(100) });
    assert_eq!(group.tree.poll(ms(100)), PollDecision::Admit("b"));
    assert_eq!(group.tree.stats(group.group, s(1)).reads.requests, 3);
}

#[test]
fn removal_returns_requests_in_order() {
    let (mut group, a) = full_group();
    let b = group.add();
    queue(&mut group, a, Read, "a1");
    queue(&mut group, b, Read, "b1");
    queue(&mut group, a, Write, "a2");
    queue(&mut group, a, Read, "a3");
    assert_eq!(group.remove(a), ["a1", "a2", "a3"]);
    assert_eq!(drain(&mut group), ["b1"]);
}

#[test]
fn ids_and_tickets_of_a_member_that_left_mean_nothing_to_its_successor() {
    let (mut group, a) = full_group();
    let ticket = queue(&mut group, a, Read, "a");
    group.remove(a);
    let b = group.tree.add(Some(group.group), Limits::default(), NodeShare::new(500).unwrap()).unwrap();
    queue(&mut group, b, Read, "b");
    assert_ne!(a, b);
    assert_eq!(group.tree.cancel(ticket), None);
    assert_eq!(group.tree.share(b).weight(), 500);
    assert_eq!(group.tree.stats(b, s(0)).reads.requests, 0);
    assert_eq!(drain(&mut group), ["b"]);
}

#[test]
#[should_panic(expected = "the node was removed")]
fn removed_node_panics() {
    let (mut group, disk) = full_group();
    group.remove(disk);
    let _ = group.tree.submit(disk, Read, RequestCost::one(1), "", s(0));
}

#[test]
fn instants_out_of_order_count_as_the_latest_so_far() {
    let (mut group, disk) = full_group();
    assert_eq!(group.tree.poll(ms(50)), PollDecision::Idle);
    queue(&mut group, disk, Read, "a");
    assert_eq!(group.tree.poll(ms(10)), PollDecision::Wait { until: ms(100) });
    assert_eq!(group.tree.poll(ms(100)), PollDecision::Admit("a"));
    assert_eq!(
        group.tree.stats(group.group, s(1)).reads.waited_ns,
        50_000_000,
        "it came at 0 by its own clock, at 50 ms by the group's"
    );
}

#[test]
fn merged_requests_are_charged_and_counted_as_the_client_sent_them() {
    let mut group = Disks::new("iops-total=60");
    let disk = group.add();
    let merged = group.tree.submit(disk, Write, RequestCost::merged(&[4096; 6]), "merged", s(0));
    assert_eq!(merged, AdmissionResult::Admitted("merged"));
    assert_eq!(
        group.tree.submit(disk, Write, RequestCost::one(1), "full", s(0)),
        AdmissionResult::Admitted("full")
    );
    queue(&mut group, disk, Write, "next");
    // Seven operations, of which the bucket holds six.
    assert_eq!(group.tree.poll(s(0)), PollDecision::Wait { until: Instant::from_nanos(16_666_667) });
    let writes = group.tree.stats(group.group, s(0)).writes;
    assert_eq!((writes.requests, writes.bytes), (7, 6 * 4096 + 1));
}

#[test]
fn weights_have_a_range() {
    assert_eq!(NodeShare::default().weight(), 100);
    for (weight, valid) in [(0, false), (1, true), (10_000, true), (10_001, false)] {
        assert_eq!(NodeShare::new(weight).is_some(), valid, "{weight}");
    }
}
