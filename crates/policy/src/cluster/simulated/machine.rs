//! A host's tree with clients that keep it busy, or do not.

use super::{MS, Random};
use crate::cluster::{ByKind, Host, Usage};
use crate::request::Direction;
use crate::throttle::{Admission, Cost, Decision, Lent, Limits, NodeId, Share, Tree};
use crate::time::Instant;
use alloc::vec::Vec;

/// How many requests a client has in flight that does not wait for its answers.
const MOST_IN_FLIGHT: u64 = 16;

/// What a client does from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Nothing.
    Idle,
    /// So many requests in flight, each done a millisecond after it passed.
    Greedy(u64),
    /// A request each so many nanoseconds.
    Paced(u64),
    /// Requests that come by themselves, so many nanoseconds apart on average.
    Random(u64),
}

/// Who reads from a disk of its own.
#[derive(Clone, Copy, Debug)]
pub struct Client {
    /// What it does.
    pub load: Load,
    /// Bytes of each request.
    pub length: u64,
    /// Of its disk.
    pub weight: u32,
    /// Promised to its disk, in operations a second.
    pub reserved: u64,
    /// Requests that wait or are being done.
    in_flight: u64,
    disk: Option<NodeId>,
    due: u64,
    random: Random,
}

impl Client {
    /// Valid weights and promises that fit.
    pub const fn new(load: Load, length: u64, weight: u32, reserved: u64) -> Self {
        Self { load, length, weight, reserved, in_flight: 0, disk: None, due: 0, random: Random::new(0) }
    }

    /// Begins anew now.
    pub(super) const fn begin(&mut self, load: Load, now: u64) {
        (self.load, self.due) = (load, now);
        if let Load::Random(mean) = load {
            self.due += self.random.gap(mean);
        }
    }

    const fn sends(&self, now: u64) -> bool {
        match self.load {
            Load::Idle => false,
            Load::Greedy(depth) => self.in_flight < depth,
            Load::Paced(_) | Load::Random(_) => self.due <= now && self.in_flight < MOST_IN_FLIGHT,
        }
    }

    /// One has been sent.
    fn send(&mut self, now: u64) {
        self.in_flight += 1;
        // What it could not send in time it does not send later.
        match self.load {
            Load::Paced(pace) => self.due = (self.due + pace).max(now.saturating_sub(pace)),
            Load::Random(mean) => self.due = self.due.max(now.saturating_sub(mean)) + self.random.gap(mean),
            Load::Idle | Load::Greedy(_) => {}
        }
    }
}

/// The process on one host, in one of its runs. Its times are those of its clock.
#[derive(Debug)]
pub struct Machine {
    /// Its side of the cluster.
    pub host: Host,
    pub(super) tree: Tree<usize>,
    pub(super) group: NodeId,
    /// Those of its disks.
    pub clients: Vec<Client>,
    done: Vec<(u64, usize)>,
    pub(super) last: Usage,
    /// When to call [`Machine::run`] next.
    pub(super) next: u64,
}

impl Machine {
    pub(super) fn new(host: Host, clients: &[Client], seed: u64, now: u64) -> Self {
        let mut tree = Tree::new(Instant::from_nanos(now));
        let group = tree.add(None, Limits::default(), Share::default()).unwrap();
        tree.divide(group, host.limits(), [0; 6], Instant::from_nanos(now)).unwrap();
        let mut machine = Self {
            host,
            tree,
            group,
            clients: clients.to_vec(),
            done: Vec::new(),
            last: Usage::default(),
            next: now,
        };
        machine.lend();
        let Self { tree, clients, .. } = &mut machine;
        for (number, client) in clients.iter_mut().enumerate() {
            let share = Share::new(client.weight).unwrap_or_default().with_reservation(client.reserved, 0);
            // What is promised on all hosts fits into the limits: the caller's promise.
            client.disk = Some(tree.add(Some(group), Limits::default(), share).expect("a promise that fits"));
            client.random = Random::new(seed ^ (number as u64) << 40);
            client.in_flight = 0;
            client.begin(client.load, now);
        }
        machine
    }

    /// Tells the tree when the lease ends: it looks at that by itself, whoever asks first.
    pub(super) fn lend(&mut self) {
        let Self { host, tree, group, .. } = self;
        let (safe, whole) = (host.safe(), *host.spec().limits());
        tree.lend(*group, Lent { until: host.next(), safe, whole, left: [None; 2] });
    }

    /// What the daemon does at each tick, and before each word.
    pub(super) fn look_at_the_clock(&mut self, now: u64) {
        let Self { host, tree, group, .. } = self;
        host.run_out(Instant::from_nanos(now), |limits, credit, at| {
            tree.divide(*group, limits, credit, at).unwrap()
        });
    }

    pub(super) fn usage(&mut self, demand: ByKind, now: u64) -> Usage {
        let wanted = self.tree.wanted(self.group, Instant::from_nanos(now));
        Usage { demand, waiting_ns: wanted.waiting_ns, weight: wanted.weight, reserved: wanted.reserved }
    }

    /// Clients send what is due, and the tree lets pass what may; `passed` hears of each client's.
    pub(super) fn run(&mut self, now: u64, mut passed: impl FnMut(usize)) {
        let at = Instant::from_nanos(now);
        let mut wake = u64::MAX;
        self.done.sort_unstable();
        let over = self.done.partition_point(|(done, _)| *done <= now);
        for (_, client) in self.done.drain(..over) {
            self.clients[client].in_flight -= 1;
        }
        for number in 0..self.clients.len() {
            while self.clients[number].sends(now) {
                let client = &mut self.clients[number];
                client.send(now);
                let Some(disk) = client.disk else { break };
                match self.tree.request(disk, Direction::Read, Cost::one(client.length), number, at) {
                    Admission::Admitted(number) => {
                        self.done.push((now + MS, number));
                        passed(number);
                    }
                    Admission::Queued(_) => {}
                }
            }
        }
        loop {
            match self.tree.poll(at) {
                Decision::Admit(number) => {
                    passed(number);
                    self.done.push((now + MS, number));
                }
                Decision::Wait { until } => {
                    wake = wake.min(until.as_nanos());
                    break;
                }
                Decision::Idle => break,
            }
        }
        for client in &self.clients {
            let comes = matches!(client.load, Load::Paced(_) | Load::Random(_));
            if comes && client.in_flight < MOST_IN_FLIGHT {
                wake = wake.min(client.due.max(now + 1));
            }
        }
        wake = self.done.iter().map(|(done, _)| *done).fold(wake, u64::min);
        // Once it has passed, the tree knows.
        let ends = Some(self.host.next().as_nanos()).filter(|ends| *ends > now);
        self.next = wake.min(ends.unwrap_or(u64::MAX)).max(now + 1);
    }
}
