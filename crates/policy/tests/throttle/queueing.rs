//! The tree's protocol, call by call: queueing, cancelling, removing, and deadlines.

use crate::timeline::{limits, ms, s};
use policy::request::Direction::{self, Read, Write};
use policy::throttle::{
    Admission, Cost, Decision, Held, LimitKind, Limits, NodeId, Returned, Share, Ticket, Tree,
};
use policy::time::Instant;

struct Disks {
    tree: Tree<&'static str>,
    group: NodeId,
}

impl Disks {
    fn new(text: &str) -> Self {
        let mut tree = Tree::new(s(0));
        let group = tree.add(None, limits(text), Share::default()).unwrap();
        Self { tree, group }
    }

    fn add(&mut self) -> NodeId {
        self.tree.add(Some(self.group), Limits::default(), Share::default()).unwrap()
    }

    fn waiting(&self, direction: Direction) -> usize {
        self.tree.waiting(self.group, direction)
    }

    fn remove(&mut self, disk: NodeId) -> Vec<&'static str> {
        self.tree.remove(disk).into_iter().map(|Returned { token, .. }| token).collect()
    }
}

/// A group at its limit, so that all further requests wait; and its disk.
fn full_group() -> (Disks, NodeId) {
    let mut disks = Disks::new("iops-total=10");
    let disk = disks.add();
    for _ in 0..2 {
        assert_eq!(disks.tree.request(disk, Read, Cost::one(1), "", s(0)), Admission::Admitted(""));
    }
    (disks, disk)
}

#[track_caller]
fn queue(group: &mut Disks, disk: NodeId, direction: Direction, token: &'static str) -> Ticket {
    match group.tree.request(disk, direction, Cost::one(512), token, s(0)) {
        Admission::Queued(ticket) => ticket,
        Admission::Admitted(token) => panic!("{token} did not wait"),
    }
}

/// Tokens in the order of admission when each deadline is met exactly.
fn drain(group: &mut Disks) -> Vec<&'static str> {
    let mut now = s(0);
    let mut passed = Vec::new();
    loop {
        match group.tree.poll(now) {
            Decision::Admit(token) => passed.push(token),
            Decision::Wait { until } => now = until,
            Decision::Idle => return passed,
        }
    }
}

#[test]
fn a_deadline_is_exact() {
    let (mut group, disk) = full_group();
    assert_eq!(group.tree.poll(s(0)), Decision::Idle);
    queue(&mut group, disk, Read, "a");
    let until = ms(100);
    assert_eq!(group.tree.poll(s(0)), Decision::Wait { until });
    assert_eq!(group.tree.poll(Instant::from_nanos(until.as_nanos() - 1)), Decision::Wait { until });
    assert_eq!(group.tree.poll(until), Decision::Admit("a"));
    assert_eq!(group.tree.poll(until), Decision::Idle);
}

#[test]
fn what_held_a_request_is_the_limit_that_let_go_last() {
    let mut tree = Tree::new(s(0));
    let group = tree.add(None, limits("bps-total=4096"), Share::default()).unwrap();
    let (own, none) = (limits("iops-read=10"), Limits::default());
    let [disk, other] = [own, none].map(|limits| tree.add(Some(group), limits, Share::default()).unwrap());
    let mut after = |disk, bytes, count, from: u64| {
        for token in 0..count {
            let _ = tree.request(disk, Read, Cost::one(bytes), token, s(from));
        }
        let mut now = s(from);
        let mut held = Vec::new();
        loop {
            match tree.poll(now) {
                Decision::Admit(_) => held.push(tree.held()),
                Decision::Wait { until } => now = until,
                Decision::Idle => return held,
            }
        }
    };
    let by = |level, kind| Some(Held { level, kind });
    // Small requests are throttled by the disk's own limit, large ones by the group's.
    assert!(after(disk, 1, 10, 0).ends_with(&[by(0, LimitKind::IopsRead); 5]));
    assert!(after(disk, 8192, 4, 100).ends_with(&[by(1, LimitKind::BpsTotal); 2]));
    assert!(after(other, 8192, 4, 200).ends_with(&[by(1, LimitKind::BpsTotal); 2]));
}

#[test]
fn whoever_waits_for_its_group_for_most_of_the_time_is_held_by_that_and_not_by_a_full_host() {
    let mut tree = Tree::new(s(0));
    let host = tree.add(None, limits("bps-total=40960"), Share::default()).unwrap();
    // The disk's group admits 2 per second; the host is always busy because of the greedy disk.
    let own = tree.add(Some(host), limits("iops-total=2"), Share::default()).unwrap();
    let disk = tree.add(Some(own), Limits::default(), Share::default()).unwrap();
    let greedy = tree.add(Some(host), Limits::default(), Share::default()).unwrap();
    for number in 0..240 {
        let of = if number < 40 { disk } else { greedy };
        let _ = tree.request(of, Read, Cost::one(4096), of == disk, s(0));
    }
    let (mut now, mut mine, mut others) = (s(0), Vec::new(), Vec::new());
    loop {
        match tree.poll(now) {
            Decision::Admit(is_mine) => if is_mine { &mut mine } else { &mut others }.push(tree.held()),
            Decision::Wait { until } => now = until,
            Decision::Idle => break,
        }
    }
    assert!(mine.len() > 30 && others.len() > 150);
    let by = |level, kind| Some(Held { level, kind });
    // Without the first ones, which were admitted before the buckets were full.
    assert!(mine[10..].iter().all(|held| *held == by(1, LimitKind::IopsTotal)), "{mine:?}");
    assert!(others[50..].iter().all(|held| *held == by(1, LimitKind::BpsTotal)), "{others:?}");
}

#[test]
fn a_disk_s_requests_pass_in_order_and_disks_take_turns() {
    let mut group = Disks::new("iops-total=10");
    let (a, b) = (group.add(), group.add());
    for disk in [a, b] {
        assert_eq!(group.tree.request(disk, Read, Cost::one(1), "", s(0)), Admission::Admitted(""));
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
fn a_cancelled_request_comes_back_once_and_the_others_keep_their_order() {
    let (mut group, disk) = full_group();
    let tickets = ["a", "b", "c", "d"].map(|token| queue(&mut group, disk, Write, token));
    assert_eq!(group.tree.cancel(tickets[2]), Some("c"));
    assert_eq!(group.tree.cancel(tickets[2]), None);
    assert_eq!(group.tree.cancel(tickets[0]), Some("a"));
    assert_eq!(drain(&mut group), ["b", "d"]);
    assert_eq!(group.tree.cancel(tickets[1]), None, "admitted already");
}

#[test]
fn a_member_with_all_cancelled_holds_up_nobody() {
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
    assert_eq!(group.tree.poll(s(0)), Decision::Wait { until: ms(100) });
    assert_eq!(group.tree.poll(ms(100)), Decision::Admit("b"));
    assert_eq!(group.tree.stats(group.group, s(1)).reads.requests, 3);
}

#[test]
fn leaving_gives_back_what_waits_in_the_order_of_arrival() {
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
    let b = group.tree.add(Some(group.group), Limits::default(), Share::new(500).unwrap()).unwrap();
    queue(&mut group, b, Read, "b");
    assert_ne!(a, b);
    assert_eq!(group.tree.cancel(ticket), None);
    assert_eq!(group.tree.share(b).weight(), 500);
    assert_eq!(group.tree.stats(b, s(0)).reads.requests, 0);
    assert_eq!(drain(&mut group), ["b"]);
}

#[test]
#[should_panic(expected = "the node was removed")]
fn asking_after_leaving_is_a_mistake() {
    let (mut group, disk) = full_group();
    group.remove(disk);
    let _ = group.tree.request(disk, Read, Cost::one(1), "", s(0));
}

#[test]
fn instants_out_of_order_count_as_the_latest_so_far() {
    let (mut group, disk) = full_group();
    assert_eq!(group.tree.poll(ms(50)), Decision::Idle);
    queue(&mut group, disk, Read, "a");
    assert_eq!(group.tree.poll(ms(10)), Decision::Wait { until: ms(100) });
    assert_eq!(group.tree.poll(ms(100)), Decision::Admit("a"));
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
    let merged = group.tree.request(disk, Write, Cost::merged(&[4096; 6]), "merged", s(0));
    assert_eq!(merged, Admission::Admitted("merged"));
    assert_eq!(group.tree.request(disk, Write, Cost::one(1), "full", s(0)), Admission::Admitted("full"));
    queue(&mut group, disk, Write, "next");
    // Seven operations, of which the bucket holds six.
    assert_eq!(group.tree.poll(s(0)), Decision::Wait { until: Instant::from_nanos(16_666_667) });
    let writes = group.tree.stats(group.group, s(0)).writes;
    assert_eq!((writes.requests, writes.bytes), (7, 6 * 4096 + 1));
}

#[test]
fn weights_have_a_range() {
    assert_eq!(Share::default().weight(), 100);
    for (weight, valid) in [(0, false), (1, true), (10_000, true), (10_001, false)] {
        assert_eq!(Share::new(weight).is_some(), valid, "{weight}");
    }
}
