//! A host's tree with clients that keep it busy, or do not.

use crate::MS;
use policy::cluster::{Host, Usage};
use policy::request::Direction;
use policy::throttle::{Admission, Cost, Decision, Lent, Limits, NodeId, Share, Tree};
use policy::time::Instant;

/// What a client does from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    Idle,
    /// So many requests in flight, each done a millisecond after it passed.
    Greedy(u64),
    /// A request each so many nanoseconds.
    Paced(u64),
}

#[derive(Clone, Copy)]
pub(crate) struct Client {
    pub(crate) load: Load,
    pub(crate) length: u64,
    pub(crate) weight: u32,
    pub(crate) reserved: u64,
    /// Requests that wait or are being done.
    in_flight: u64,
    disk: Option<NodeId>,
    due: u64,
    oldest: u64,
}

impl Client {
    pub(crate) const fn new(load: Load, length: u64, weight: u32, reserved: u64) -> Self {
        Self { load, length, weight, reserved, in_flight: 0, disk: None, due: 0, oldest: 0 }
    }

    /// Begins anew now.
    pub(crate) const fn due(&mut self, now: u64) {
        self.due = now;
    }
}

/// The process on one host, in one of its runs. Its times are those of its clock.
pub(crate) struct Machine {
    pub(crate) host: Host,
    pub(crate) tree: Tree<usize>,
    pub(crate) group: NodeId,
    pub(crate) clients: Vec<Client>,
    done: Vec<(u64, usize)>,
    pub(crate) last_demand: [u64; 6],
    /// When to call [`Machine::run`] next.
    pub(crate) next: u64,
}

impl Machine {
    pub(crate) fn new(host: Host, clients: &[Client], now: u64) -> Self {
        let mut tree = Tree::new(Instant::from_nanos(now));
        let group = tree.add(None, Limits::default(), Share::default()).unwrap();
        tree.divide(group, host.limits(), [0; 6], Instant::from_nanos(now)).unwrap();
        let mut clients = clients.to_vec();
        for client in &mut clients {
            let share = Share::new(client.weight).unwrap();
            client.disk = Some(tree.add(Some(group), Limits::default(), share).unwrap());
            (client.in_flight, client.due) = (0, now);
        }
        let mut machine =
            Self { host, tree, group, clients, done: Vec::new(), last_demand: [0; 6], next: now };
        machine.lend();
        machine
    }

    /// Tells the tree when the lease ends: it looks at that by itself, whoever asks first.
    pub(crate) fn lend(&mut self) {
        let Self { host, tree, group, .. } = self;
        let (safe, whole) = (host.safe(), *host.spec().limits());
        tree.lend(*group, Lent { until: host.next(), safe, whole, left: [None; 2] });
    }

    /// What the daemon does at each tick, and before each word.
    pub(crate) fn look_at_the_clock(&mut self, now: u64) {
        let Self { host, tree, group, .. } = self;
        host.run_out(Instant::from_nanos(now), |limits, credit, at| {
            tree.divide(*group, limits, credit, at).unwrap()
        });
    }

    pub(crate) fn usage(&self, demand: [u64; 6], now: u64) -> Usage {
        let busy = self.clients.iter().filter(|client| client.load != Load::Idle);
        let oldest = self.clients.iter().filter(|client| client.oldest > 0).map(|client| client.oldest).min();
        Usage {
            demand,
            waiting_ns: oldest.map_or(0, |oldest| now - oldest),
            weight: busy.clone().map(|client| u64::from(client.weight)).sum(),
            reserved: [busy.map(|client| client.reserved).sum(), 0],
        }
    }

    /// Clients send what is due, and the tree lets pass what may; `passed` hears of each client's.
    pub(crate) fn run(&mut self, now: u64, mut passed: impl FnMut(usize)) {
        let at = Instant::from_nanos(now);
        let mut wake = u64::MAX;
        self.done.sort_unstable();
        let over = self.done.partition_point(|(done, _)| *done <= now);
        for (_, client) in self.done.drain(..over) {
            self.clients[client].in_flight -= 1;
        }
        for number in 0..self.clients.len() {
            loop {
                let client = &mut self.clients[number];
                let sends = match client.load {
                    Load::Idle => false,
                    Load::Greedy(depth) => client.in_flight < depth,
                    Load::Paced(_) => client.due <= now && client.in_flight < 16,
                };
                if !sends {
                    break;
                }
                if let Load::Paced(pace) = client.load {
                    // What it could not send in time it does not send later.
                    client.due = (client.due + pace).max(now.saturating_sub(pace));
                }
                client.in_flight += 1;
                let (disk, cost) = (client.disk.unwrap(), Cost::one(client.length));
                match self.tree.request(disk, Direction::Read, cost, number, at) {
                    Admission::Admitted(number) => self.done.push((now + MS, number)),
                    Admission::Queued(_) => {
                        client.oldest = if client.oldest == 0 { now } else { client.oldest };
                        continue;
                    }
                }
                passed(number);
            }
        }
        loop {
            match self.tree.poll(at) {
                Decision::Admit(number) => {
                    passed(number);
                    self.done.push((now + MS, number));
                    self.clients[number].oldest = now;
                }
                Decision::Wait { until } => {
                    wake = wake.min(until.as_nanos());
                    break;
                }
                Decision::Idle => break,
            }
        }
        for client in &mut self.clients {
            let waiting = self.tree.waiting(client.disk.unwrap(), Direction::Read);
            client.oldest = if waiting == 0 { 0 } else { client.oldest };
            if matches!(client.load, Load::Paced(_)) && client.in_flight < 16 {
                wake = wake.min(client.due.max(now + 1));
            }
        }
        wake = self.done.iter().map(|(done, _)| *done).fold(wake, u64::min);
        // Once it has passed, the tree knows.
        let ends = Some(self.host.next().as_nanos()).filter(|ends| *ends > now);
        self.next = wake.min(ends.unwrap_or(u64::MAX)).max(now + 1);
    }
}
