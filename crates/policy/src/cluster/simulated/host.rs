//! A simulated host: its tree, and clients with configurable load.

use super::{NANOS_PER_MS, SeededRandom};
use crate::cluster::{ByKind, HostQuota, ReportedDemand};
use crate::request::Direction;
use crate::throttle::{
    AdmissionResult, Limits, NodeId, NodeShare, PollDecision, QuotaLease, RequestCost, ThrottleTree,
};
use crate::time::Instant;
use alloc::vec::Vec;

/// Maximum number of requests in flight of an open-loop client (paced or random).
const MAX_IN_FLIGHT: u64 = 16;

/// Arrival pattern of a client's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientLoad {
    /// No requests.
    Idle,
    /// Closed loop with this queue depth; each request completes a millisecond after admission.
    Greedy(u64),
    /// Requests at intervals of this many nanoseconds.
    Paced(u64),
    /// Requests at random instants, with this mean interval in nanoseconds.
    Random(u64),
}

/// A client that reads from its own disk.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedClient {
    /// Arrival pattern.
    pub load: ClientLoad,
    /// Size of each request in bytes.
    pub length: u64,
    /// Weight of the disk.
    pub weight: u32,
    /// Reservation of the disk, in operations per second.
    pub reserved: u64,
    /// Requests that wait or are in service.
    in_flight: u64,
    disk: Option<NodeId>,
    due: u64,
    random: SeededRandom,
}

impl SimulatedClient {
    /// The weight must be valid and the reservation must fit.
    pub const fn new(load: ClientLoad, length: u64, weight: u32, reserved: u64) -> Self {
        Self {
            load,
            length,
            weight,
            reserved,
            in_flight: 0,
            disk: None,
            due: 0,
            random: SeededRandom::new(0),
        }
    }

    /// Starts a new load at `now`.
    pub(super) const fn start_load(&mut self, load: ClientLoad, now: u64) {
        (self.load, self.due) = (load, now);
        if let ClientLoad::Random(mean) = load {
            self.due += self.random.arrival_gap(mean);
        }
    }

    const fn may_send(&self, now: u64) -> bool {
        match self.load {
            ClientLoad::Idle => false,
            ClientLoad::Greedy(depth) => self.in_flight < depth,
            ClientLoad::Paced(_) | ClientLoad::Random(_) => self.due <= now && self.in_flight < MAX_IN_FLIGHT,
        }
    }

    /// Counts a request that was just sent.
    fn send(&mut self, now: u64) {
        self.in_flight += 1;
        // An open-loop client skips arrivals that it could not send in time.
        match self.load {
            ClientLoad::Paced(pace) => self.due = (self.due + pace).max(now.saturating_sub(pace)),
            ClientLoad::Random(mean) => {
                self.due = self.due.max(now.saturating_sub(mean)) + self.random.arrival_gap(mean);
            }
            ClientLoad::Idle | ClientLoad::Greedy(_) => {}
        }
    }
}

/// One run of weir's process on a host. Times are those of the host's clock.
#[derive(Debug)]
pub struct SimulatedHost {
    /// The host's side of the quota protocol.
    pub host: HostQuota,
    pub(super) tree: ThrottleTree<usize>,
    pub(super) group: NodeId,
    /// Clients of the host's disks.
    pub clients: Vec<SimulatedClient>,
    completions: Vec<(u64, usize)>,
    pub(super) last: ReportedDemand,
    /// Time of the next call of [`SimulatedHost::run`].
    pub(super) next: u64,
}

impl SimulatedHost {
    pub(super) fn new(host: HostQuota, clients: &[SimulatedClient], seed: u64, now: u64) -> Self {
        let mut tree = ThrottleTree::new(Instant::from_nanos(now));
        let group = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
        tree.set_quota(group, host.limits(), [0; 6], Instant::from_nanos(now)).unwrap();
        let mut machine = Self {
            host,
            tree,
            group,
            clients: clients.to_vec(),
            completions: Vec::new(),
            last: ReportedDemand::default(),
            next: now,
        };
        machine.install_lease();
        let Self { tree, clients, .. } = &mut machine;
        for (number, client) in clients.iter_mut().enumerate() {
            let share =
                NodeShare::new(client.weight).unwrap_or_default().with_reservation(client.reserved, 0);
            // The caller guarantees that the reservations of all hosts fit into the limits.
            client.disk =
                Some(tree.add(Some(group), Limits::default(), share).expect("the reservation fits"));
            client.random = SeededRandom::new(seed ^ (number as u64) << 40);
            client.in_flight = 0;
            client.start_load(client.load, now);
        }
        machine
    }

    /// Passes the end of the lease to the tree, which applies it on its own at any later call.
    pub(super) fn install_lease(&mut self) {
        let Self { host, tree, group, .. } = self;
        let (fallback, cluster_limits) = (host.fallback_limits(), *host.spec().limits());
        tree.set_lease(
            *group,
            QuotaLease { until: host.lease_end(), fallback, cluster_limits, reservation_bounds: [None; 2] },
        );
    }

    /// Expires the lease, as the daemon does at each tick and before each message.
    pub(super) fn expire_lease(&mut self, now: u64) {
        let Self { host, tree, group, .. } = self;
        host.expire_lease(Instant::from_nanos(now), |limits, credit, at| {
            tree.set_quota(*group, limits, credit, at).unwrap()
        });
    }

    pub(super) fn usage(&mut self, demand: ByKind, now: u64) -> ReportedDemand {
        let members = self.tree.member_demands(self.group, Instant::from_nanos(now));
        ReportedDemand {
            demand,
            waiting_ns: members.waiting_ns,
            weight: members.weight,
            reserved: members.reserved,
        }
    }

    /// Sends the requests that are due and admits those that the tree allows; calls `passed` with
    /// the client of each admission.
    pub(super) fn run(&mut self, now: u64, mut passed: impl FnMut(usize)) {
        let at = Instant::from_nanos(now);
        let mut next_event = u64::MAX;
        self.completions.sort_unstable();
        let completed = self.completions.partition_point(|(done, _)| *done <= now);
        for (_, client) in self.completions.drain(..completed) {
            self.clients[client].in_flight -= 1;
        }
        for number in 0..self.clients.len() {
            // New requests first, so that those admitted by `poll` below compete with them.
            while self.clients[number].may_send(now) {
                let client = &mut self.clients[number];
                client.send(now);
                let Some(disk) = client.disk else { break };
                match self.tree.submit(disk, Direction::Read, RequestCost::one(client.length), number, at) {
                    AdmissionResult::Admitted(number) => {
                        self.completions.push((now + NANOS_PER_MS, number));
                        passed(number);
                    }
                    AdmissionResult::Queued(_) => {}
                }
            }
        }
        loop {
            match self.tree.poll(at) {
                PollDecision::Admit(number) => {
                    passed(number);
                    self.completions.push((now + NANOS_PER_MS, number));
                }
                PollDecision::Wait { until } => {
                    next_event = next_event.min(until.as_nanos());
                    break;
                }
                PollDecision::Idle => break,
            }
        }
        for client in &self.clients {
            let is_open_loop = matches!(client.load, ClientLoad::Paced(_) | ClientLoad::Random(_));
            if is_open_loop && client.in_flight < MAX_IN_FLIGHT {
                next_event = next_event.min(client.due.max(now + 1));
            }
        }
        next_event = self.completions.iter().map(|(done, _)| *done).fold(next_event, u64::min);
        // The tree has already handled an end of the lease that lies in the past.
        let lease_end = Some(self.host.lease_end().as_nanos()).filter(|ends| *ends > now);
        self.next = next_event.min(lease_end.unwrap_or(u64::MAX)).max(now + 1);
    }
}
