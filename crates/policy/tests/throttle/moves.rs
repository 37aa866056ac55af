//! Disks that move between groups: the contents that they carry along, and those they leave behind.

use crate::timeline::{limits, ms, s};
use policy::request::Direction;
use policy::throttle::{
    AdmissionResult, NodeId, NodeShare, PollDecision, QueuedRequestId, RequestCost, ThrottleTree,
};
use policy::time::Instant;

/// Groups with the same limits, and disks whose clients keep one request waiting.
struct Groups {
    tree: ThrottleTree<usize>,
    now: Instant,
    groups: Vec<NodeId>,
    disks: Vec<NodeId>,
    passed: Vec<u64>,
    /// Ticket of the request queued last.
    ticket: Option<QueuedRequestId>,
}

impl Groups {
    fn new(groups: &[&str]) -> Self {
        let mut tree = ThrottleTree::new(Instant::ZERO);
        let groups = groups.iter().map(|text| tree.add(None, limits(text), NodeShare::default()).unwrap());
        let groups = groups.collect();
        Self { tree, now: Instant::ZERO, groups, disks: Vec::new(), passed: Vec::new(), ticket: None }
    }

    /// A disk without requests until [`Groups::ask`].
    fn add(&mut self, group: usize) -> usize {
        let parent = Some(self.groups[group]);
        let disk = self.tree.add(parent, limits(""), NodeShare::default()).unwrap();
        self.disks.push(disk);
        self.passed.push(0);
        self.disks.len() - 1
    }

    /// Moves a disk like the block layer does. `None` is outside of all groups.
    fn move_to(&mut self, disk: usize, group: Option<usize>) {
        let parent = group.map(|group| self.groups[group]);
        let old = self.disks[disk];
        let new = self.tree.add_replacing(old, parent, limits(""), NodeShare::default()).unwrap();
        let charged = self.tree.carried_charges(old, Some(new), self.now);
        let waiting = self.tree.remove(old);
        self.tree.add_carried_charges(new, charged, self.now);
        self.disks[disk] = new;
        for request in waiting {
            let result = self.tree.submit(new, request.direction, request.cost, request.token, self.now);
            match result {
                AdmissionResult::Admitted(disk) => {
                    self.passed[disk] += 1;
                    self.submit_until_queued(disk);
                }
                AdmissionResult::Queued(ticket) => self.ticket = Some(ticket),
            }
        }
    }

    /// Starts a greedy client of a disk.
    fn submit_until_queued(&mut self, disk: usize) {
        loop {
            let node = self.disks[disk];
            match self.tree.submit(node, Direction::Read, RequestCost::one(512), disk, self.now) {
                AdmissionResult::Admitted(disk) => self.passed[disk] += 1,
                AdmissionResult::Queued(ticket) => {
                    self.ticket = Some(ticket);
                    return;
                }
            }
        }
    }

    fn run_until(&mut self, end: Instant) {
        loop {
            match self.tree.poll(self.now) {
                PollDecision::Admit(disk) => {
                    self.passed[disk] += 1;
                    self.submit_until_queued(disk);
                }
                PollDecision::Wait { until } if until <= end => self.now = until,
                _ => break,
            }
        }
        self.now = end;
    }
}

const BURST: &str = "iops-total=100,iops-total-max=5000";

#[test]
fn a_move_grants_no_burst() {
    let mut all = Groups::new(&[BURST; 3]);
    let disk = all.add(0);
    all.submit_until_queued(disk);
    for (group, until) in [(1, s(2)), (2, s(4)), (0, s(6))] {
        all.run_until(until);
        all.move_to(disk, Some(group));
    }
    assert!((5600..=5610).contains(&all.passed[disk]), "{}", all.passed[disk]);
}

/// Three patterns of moves, as of a user that tries to evade limits: to a new group each time; out
/// of all groups and into one again; and back and forth between two groups.
#[test]
fn moves_five_times_a_second_give_the_rate() {
    for (setting, max_passed) in [("iops-total=500", 5_060), ("iops-total=500,iops-total-max=2000", 7_010)] {
        for (groups, by_way_of_none) in [(50, false), (50, true), (2, false)] {
            let mut all = Groups::new(&vec![setting; groups]);
            let disk = all.add(0);
            all.submit_until_queued(disk);
            for fifth in 1..=50 {
                all.run_until(ms(fifth * 200));
                let waits = all.tree.waiting(all.disks[disk], Direction::Read);
                assert_eq!(waits, 1, "the client keeps one request waiting");
                if by_way_of_none {
                    // Outside of all groups a waiting request would be admitted, so it is
                    // cancelled.
                    let ticket = all.ticket.take().expect("one waits");
                    all.tree.cancel(ticket);
                    all.move_to(disk, None);
                }
                all.move_to(disk, Some(fifth as usize % groups));
                if by_way_of_none {
                    all.submit_until_queued(disk);
                }
            }
            let passed = all.passed[disk];
            assert!(passed <= max_passed && passed >= 4_950, "{setting}, {groups} groups: {passed}");
        }
    }
}

/// A disk that was idle in a full group carries nothing to the next. One that filled it uses up the
/// burst of the next group, but none of its rate, however often it moves.
#[test]
fn idle_disk_carries_nothing() {
    let mut all = Groups::new(&[BURST, BURST]);
    let (busy, other, idle) = (all.add(0), all.add(1), all.add(0));
    all.submit_until_queued(busy);
    all.run_until(s(10));
    let ticket = all.ticket.expect("the group is full");
    all.tree.cancel(ticket);
    all.move_to(idle, Some(1));
    all.submit_until_queued(other);
    all.run_until(s(11));
    assert!((5_100..=5_102).contains(&all.passed[other]), "{}", all.passed[other]);
    for tenth in 111..=210 {
        all.run_until(ms(tenth * 100));
        all.move_to(busy, Some(tenth as usize % 2));
    }
    assert!((6_100..=6_102).contains(&all.passed[other]), "{}", all.passed[other]);
}
