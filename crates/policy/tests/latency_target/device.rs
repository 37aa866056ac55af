//! A device with parallel servers, one queue and noisy service times, and clients with a fixed
//! number of requests in flight, behind a real throttle tree.
//!
//! ```text
//!   client, depth d ─► throttle tree with caps ─► queue ─► servers ─► completion
//!        ▲                                                                      │
//!        └──────────────────────── next request ────────────────────────────────┘
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use policy::cluster::simulated::SeededRandom;
use policy::histogram::LatencyHistogram;
use policy::request::Direction;
use policy::throttle::{AdmissionResult, Limits, NodeId, NodeShare, PollDecision, RequestCost, ThrottleTree};
use policy::time::Instant;

pub(crate) const MS: u64 = 1_000_000;
pub(crate) const S: u64 = 1000 * MS;

/// Service of the device. The mean is that of one request of up to 64 KiB on one server.
#[derive(Clone, Debug)]
pub(crate) struct ParallelDevice {
    pub(crate) servers: usize,
    pub(crate) mean_ns: f64,
    /// Standard deviation of the logarithm of a service time.
    pub(crate) sigma: f64,
    /// Factors on the speed, each from its instant.
    pub(crate) speeds: Vec<(u64, f64)>,
}

/// A client: a member of the device with `depth` requests in flight, from each instant on.
#[derive(Clone, Debug)]
pub(crate) struct ClientModel {
    pub(crate) depths: Vec<(u64, u32)>,
    pub(crate) bytes: u64,
}

/// Part of the device that a law allows a member.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Allowance {
    pub(crate) limits: Limits,
    /// Bound on requests in flight below the throttle layer; only laws that weir cannot enforce.
    pub(crate) window: Option<u32>,
}

/// Counters of one member since the last step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) in_flight: u32,
    pub(crate) is_waiting: bool,
    pub(crate) latencies: [LatencyHistogram; 2],
}

struct Member {
    node: NodeId,
    model: ClientModel,
    depth: u32,
    /// Requests of the client that are not complete.
    outstanding: u32,
    in_flight: u32,
    window: Option<u32>,
    /// Admitted requests that wait for the window.
    pending: u32,
    sample: Sample,
    /// Completed requests since the start.
    completed: u64,
}

/// The simulated device and its clients. The first client is the one with a target.
pub(crate) struct Simulation {
    pub(crate) now: u64,
    model: ParallelDevice,
    tree: ThrottleTree<usize>,
    members: Vec<Member>,
    queue: VecDeque<(usize, u64)>,
    busy: BinaryHeap<Reverse<(u64, usize, u64)>>,
    wake: u64,
    random: SeededRandom,
    factors: Vec<f64>,
    /// Instants and latencies of the first client's completions.
    pub(crate) latencies: Vec<(u64, u64)>,
}

impl Simulation {
    pub(crate) fn new(model: ParallelDevice, clients: &[ClientModel], seed: u64) -> Self {
        let mut tree = ThrottleTree::new(Instant::ZERO);
        let members = clients
            .iter()
            .map(|client| Member {
                node: tree.add(None, Limits::default(), NodeShare::default()).unwrap(),
                model: client.clone(),
                depth: 0,
                outstanding: 0,
                in_flight: 0,
                window: None,
                pending: 0,
                sample: Sample::default(),
                completed: 0,
            })
            .collect();
        let factors = lognormal_quantiles(model.sigma);
        Self {
            now: 0,
            model,
            tree,
            members,
            queue: VecDeque::new(),
            busy: BinaryHeap::new(),
            wake: u64::MAX,
            random: SeededRandom::new(seed),
            factors,
            latencies: Vec::new(),
        }
    }

    /// Runs until `end`.
    pub(crate) fn run_until(&mut self, end: u64) {
        for member in 0..self.members.len() {
            self.update_depth(member);
        }
        loop {
            let completion = self.busy.peek().map_or(u64::MAX, |Reverse((at, ..))| *at);
            let next = completion.min(self.wake).min(end);
            self.now = next;
            if completion <= next {
                self.complete();
            } else if self.wake <= next {
                self.poll();
            } else {
                return;
            }
        }
    }

    /// Counters since the last call.
    pub(crate) fn take_samples(&mut self) -> Vec<Sample> {
        let take = |member: &mut Member| {
            let is_waiting = self.tree.take_cap_wait(member.node) || member.pending > 0;
            let sample = std::mem::take(&mut member.sample);
            Sample { in_flight: member.in_flight, is_waiting, ..sample }
        };
        self.members.iter_mut().map(take).collect()
    }

    pub(crate) fn allow(&mut self, member: usize, allowance: Allowance) {
        let now = Instant::from_nanos(self.now);
        self.tree.set_cap(self.members[member].node, Some(allowance.limits), now).unwrap();
        self.members[member].window = allowance.window;
        self.start_pending(member);
        self.poll();
    }

    pub(crate) fn completed(&self, member: usize) -> u64 {
        self.members[member].completed
    }

    fn update_depth(&mut self, member: usize) {
        let now = self.now;
        let Member { model, depth, .. } = &mut self.members[member];
        *depth = value_at(&model.depths, now);
        while self.members[member].outstanding < self.members[member].depth {
            self.submit(member);
        }
    }

    fn submit(&mut self, member: usize) {
        let Member { node, model, .. } = &self.members[member];
        let cost = RequestCost::one(model.bytes);
        let now = Instant::from_nanos(self.now);
        let result = self.tree.submit(*node, Direction::Read, cost, member, now);
        self.members[member].outstanding += 1;
        match result {
            AdmissionResult::Admitted(member) => self.admit(member),
            AdmissionResult::Queued(_) => self.poll(),
        }
    }

    fn poll(&mut self) {
        self.wake = loop {
            match self.tree.poll(Instant::from_nanos(self.now)) {
                PollDecision::Admit(member) => self.admit(member),
                PollDecision::Wait { until } => break until.as_nanos().max(self.now + 1),
                PollDecision::Idle => break u64::MAX,
            }
        };
    }

    fn admit(&mut self, member: usize) {
        self.members[member].pending += 1;
        self.start_pending(member);
    }

    fn start_pending(&mut self, member: usize) {
        loop {
            let Member { pending, in_flight, window, .. } = &mut self.members[member];
            if *pending == 0 || window.is_some_and(|window| *in_flight >= window) {
                return;
            }
            *pending -= 1;
            *in_flight += 1;
            self.queue.push_back((member, self.now));
            self.serve();
        }
    }

    fn serve(&mut self) {
        if self.busy.len() < self.model.servers
            && let Some((member, admitted)) = self.queue.pop_front()
        {
            let units = (self.members[member].model.bytes as f64 / 65_536.0).max(1.0);
            let noise = self.factors[self.random.below(self.factors.len() as u64) as usize];
            let speed = value_at(&self.model.speeds, self.now);
            let service_ns = self.model.mean_ns * units * noise / speed;
            self.busy.push(Reverse((self.now + service_ns as u64, member, admitted)));
        }
    }

    fn complete(&mut self) {
        let Some(Reverse((_, member, admitted))) = self.busy.pop() else { return };
        self.serve();
        let latency_ns = self.now - admitted;
        let state = &mut self.members[member];
        state.outstanding -= 1;
        state.in_flight -= 1;
        state.completed += 1;
        state.sample.requests += 1;
        state.sample.bytes += state.model.bytes;
        if member == 0 {
            state.sample.latencies[0].add(latency_ns, 1);
            self.latencies.push((self.now, latency_ns));
        }
        self.start_pending(member);
        self.update_depth(member);
    }
}

/// The value of the last entry that is not after `now`.
pub(crate) fn value_at<T: Copy>(entries: &[(u64, T)], now: u64) -> T {
    entries[entries.partition_point(|(from, _)| *from <= now).max(1) - 1].1
}

/// Quantiles of a lognormal distribution with mean 1: service times are drawn from them.
fn lognormal_quantiles(sigma: f64) -> Vec<f64> {
    const QUANTILES: usize = 4096;
    let quantile = |index: usize| (sigma * normal_quantile((index as f64 + 0.5) / QUANTILES as f64)).exp();
    let quantiles: Vec<f64> = (0..QUANTILES).map(quantile).collect();
    let mean = quantiles.iter().sum::<f64>() / QUANTILES as f64;
    quantiles.into_iter().map(|quantile| quantile / mean).collect()
}

/// Quantile of the normal distribution, by bisection of its distribution function; accurate to
/// 10⁻⁶, which is enough for a model.
fn normal_quantile(probability: f64) -> f64 {
    let (mut low, mut high) = (-6.0, 6.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        if normal_distribution(middle) < probability { low = middle } else { high = middle }
    }
    low
}

/// Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17.
fn normal_distribution(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * x.abs());
    let polynomial = t
        * (0.319_381_530
            + t * (-0.356_563_782 + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    let upper = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * polynomial;
    if x >= 0.0 { 1.0 - upper } else { upper }
}
