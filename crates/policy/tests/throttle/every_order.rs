//! No starvation: all sequences of a number of events in a small tree, with each wait checked
//! against the bound.
//!
//! Three disks with weights 100, 100 and 300 in a group of 10 IOPS. The time from when a request
//! becomes the first of its queue until it is admitted never exceeds the bound in the documentation
//! of `throttle`.

use crate::timeline::{limits, s};
use policy::request::Direction;
use policy::throttle::{
    AdmissionResult, Limits, NodeId, NodeShare, PollDecision, QueuedRequestId, RequestCost, ThrottleTree,
};
use policy::time::{Duration, Instant};
use std::collections::VecDeque;

const WEIGHTS: [u32; 3] = [100, 100, 300];
/// Duration of one service at the lower of the two limits.
const SERVICE_MS: u64 = 100;
/// Operations of the large request, each one service.
const LARGE: u64 = 3;
/// Number of events in a sequence. All 9⁵ sequences take a second or two.
const EVENTS: u32 = 5;

#[derive(Clone, Copy, Debug)]
enum Event {
    Request(usize),
    Large,
    CancelNewest,
    Advance(u64),
    /// Changes the limit between 10 and 20 IOPS.
    Limit,
    /// Changes the third disk's weight between 300 and 100.
    Weight,
}

const ALL: [Event; 9] = [
    Event::Request(0),
    Event::Request(1),
    Event::Request(2),
    Event::Large,
    Event::CancelNewest,
    Event::Advance(50),
    Event::Advance(130),
    Event::Limit,
    Event::Weight,
];

struct Waiting {
    token: u64,
    requests: u64,
    ticket: QueuedRequestId,
}

struct Run {
    tree: ThrottleTree<u64>,
    group: NodeId,
    disks: [NodeId; 3],
    now: Instant,
    queues: [VecDeque<Waiting>; 3],
    /// Time since which the first request of each queue has been the first.
    first_since: [Instant; 3],
    next_token: u64,
    completed: u64,
    fast: bool,
    even: bool,
}

impl Run {
    fn new() -> Self {
        let mut tree = ThrottleTree::new(s(0));
        let group = tree.add(None, limits("iops-total=10"), NodeShare::default()).unwrap();
        let disks = WEIGHTS
            .map(|weight| tree.add(Some(group), Limits::default(), NodeShare::new(weight).unwrap()).unwrap());
        Self {
            tree,
            group,
            disks,
            now: s(0),
            queues: [const { VecDeque::new() }; 3],
            first_since: [s(0); 3],
            next_token: 0,
            completed: 0,
            fast: false,
            even: false,
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Request(disk) => self.request(disk, 1),
            Event::Large => self.request(0, LARGE),
            Event::CancelNewest => self.cancel_newest(),
            Event::Advance(ms) => self.now += Duration::from_millis(ms),
            Event::Limit => {
                self.fast = !self.fast;
                let text = if self.fast { "iops-total=20" } else { "iops-total=10" };
                self.tree.configure(self.group, limits(text), NodeShare::default(), self.now).unwrap();
            }
            Event::Weight => {
                self.even = !self.even;
                let weight = if self.even { 100 } else { WEIGHTS[2] };
                let share = NodeShare::new(weight).unwrap();
                self.tree.configure(self.disks[2], Limits::default(), share, self.now).unwrap();
            }
        }
        self.poll();
    }

    /// The second disk writes, the first and third read; they share a total limit.
    fn direction(disk: usize) -> Direction {
        if disk == 1 { Direction::Write } else { Direction::Read }
    }

    fn request(&mut self, disk: usize, requests: u64) {
        let token = self.next_token;
        self.next_token += 1;
        let cost = RequestCost::merged(&vec![512; requests as usize]);
        match self.tree.submit(self.disks[disk], Self::direction(disk), cost, token, self.now) {
            AdmissionResult::Admitted(_) => {
                assert!(self.queues[disk].is_empty());
                self.completed += 1;
            }
            AdmissionResult::Queued(ticket) => {
                if self.queues[disk].is_empty() {
                    self.first_since[disk] = self.now;
                }
                self.queues[disk].push_back(Waiting { token, requests, ticket });
            }
        }
    }

    fn cancel_newest(&mut self) {
        let newest = |disk: &usize| self.queues[*disk].back().map(|waiting| waiting.token);
        let Some(disk) = (0..3).max_by_key(newest).filter(|disk| newest(disk).is_some()) else { return };
        let Some(waiting) = self.queues[disk].pop_back() else { return };
        assert_eq!(self.tree.cancel(waiting.ticket), Some(waiting.token));
        self.completed += 1;
    }

    /// Polls until nothing more is admitted, and returns the deadline.
    fn poll(&mut self) -> Option<Instant> {
        loop {
            match self.tree.poll(self.now) {
                PollDecision::Admit(token) => self.on_admitted(token),
                PollDecision::Wait { until } => return Some(until),
                PollDecision::Idle => return None,
            }
        }
    }

    fn on_admitted(&mut self, token: u64) {
        let disk =
            self.queues.iter().position(|queue| queue.front().is_some_and(|first| first.token == token));
        let disk = disk.expect("the first of a queue");
        let Some(Waiting { requests: turns, .. }) = self.queues[disk].pop_front() else { return };
        let waited = self.now - self.first_since[disk];
        assert!(waited <= Self::bound(disk) * turns as u32, "disk {disk} waited {waited:?}");
        self.first_since[disk] = self.now;
        self.completed += 1;
    }

    /// Bound for one service. An advance may miss a deadline by its own length, like a late timer.
    fn bound(disk: usize) -> Duration {
        let weight = u64::from(WEIGHTS[disk]).min(100);
        let siblings = (0..3).filter(|other| *other != disk);
        let siblings_ms: u64 =
            siblings.map(|other| 2 * SERVICE_MS + SERVICE_MS * u64::from(WEIGHTS[other]) / weight).sum();
        Duration::from_millis(siblings_ms + SERVICE_MS + 40 + 130)
    }

    fn finish(&mut self) {
        while let Some(until) = self.poll() {
            assert!(until > self.now);
            self.now = until;
        }
        assert!(self.queues.iter().all(VecDeque::is_empty), "idle while requests wait");
        assert_eq!(self.completed, self.next_token, "every token is returned exactly once");
    }
}

#[test]
fn every_sequence_admits_requests_within_the_bound() {
    // An empty bucket; one filled as far as the first disk alone can; and all disks busy.
    let starts: [&[usize]; 3] = [&[], &[0, 0], &[0, 0, 0, 1, 2, 2, 0, 1, 2]];
    let all = ALL.len() as u32;
    for start in starts {
        for sequence in 0..all.pow(EVENTS) {
            let mut run = Run::new();
            start.iter().for_each(|&disk| run.request(disk, 1));
            let mut remaining_code = sequence;
            for _ in 0..EVENTS {
                run.take(ALL[(remaining_code % all) as usize]);
                remaining_code /= all;
            }
            run.finish();
        }
    }
}
