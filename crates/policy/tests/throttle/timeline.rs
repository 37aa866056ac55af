//! A virtual clock, a tree of disks and groups, clients that load it, and a log of admissions.
//!
//! A client behaves like fio: it keeps `depth` requests in flight and sends the next when one
//! completes. A request completes `latency` after its admission. Timers may be late by a random
//! time from a seed, as on a busy machine.

use policy::request::Direction;
use policy::throttle::{
    AdmissionResult, LimitSetting, Limits, NodeId, NodeShare, PollDecision, RequestCost, ThrottleTree,
};
use policy::time::{Duration, Instant};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

pub(crate) fn s(seconds: u64) -> Instant {
    ms(seconds * 1000)
}

pub(crate) fn ms(milliseconds: u64) -> Instant {
    Instant::from_nanos(milliseconds * 1_000_000)
}

/// Limits in the syntax of users: `iops-total=100,iops-total-max=2000`.
pub(crate) fn limits(text: &str) -> Limits {
    let mut limits = Limits::default();
    for (name, value) in text.split(',').filter_map(|setting| setting.split_once('=')) {
        let setting = LimitSetting::from_name(name).unwrap_or_else(|| panic!("no setting {name}"));
        limits.set(setting, value.parse().unwrap()).unwrap();
    }
    limits
}

pub(crate) fn weight(weight: u32) -> NodeShare {
    NodeShare::new(weight).unwrap()
}

pub(crate) fn reserved_share(iops: u64, bps: u64) -> NodeShare {
    NodeShare::default().with_reservation(iops, bps)
}

/// Load of a client. Default: requests of 4 KiB, queue depth 1, no latency, unlimited number.
#[derive(Clone, Copy)]
pub(crate) struct Workload {
    pub(crate) direction: Direction,
    pub(crate) length: u64,
    pub(crate) depth: u64,
    pub(crate) latency: Duration,
    /// Minimum interval between two requests.
    pub(crate) pace: Duration,
    pub(crate) count: u64,
}

impl Workload {
    pub(crate) const READS: Self = Self {
        direction: Direction::Read,
        length: 4096,
        depth: 1,
        latency: Duration::ZERO,
        pace: Duration::ZERO,
        count: u64::MAX,
    };
    pub(crate) const WRITES: Self = Self { direction: Direction::Write, ..Self::READS };

    pub(crate) const fn with_length(self, length: u64) -> Self {
        Self { length, ..self }
    }

    pub(crate) const fn depth(self, depth: u64) -> Self {
        Self { depth, ..self }
    }

    pub(crate) const fn latency(self, latency: Duration) -> Self {
        Self { latency, ..self }
    }

    pub(crate) const fn paced(self, pace: Duration) -> Self {
        Self { pace, ..self }
    }

    pub(crate) const fn queued(self, count: u64) -> Self {
        Self { count, depth: count, ..self }
    }
}

struct Client {
    disk: NodeId,
    workload: Workload,
    unsent: u64,
    /// Time of the last request; meaningful for a queue depth of 1.
    sent: Instant,
    longest_wait: Duration,
}

#[derive(Clone, Copy)]
struct Passed {
    at: Instant,
    client: usize,
    bytes: u64,
}

/// The virtual clock with its tree, clients and log; see the module documentation. Clients are
/// numbered in the order in which they were added.
pub(crate) struct Timeline {
    pub(crate) tree: ThrottleTree<usize>,
    /// The default group of new disks.
    pub(crate) group: NodeId,
    pub(crate) now: Instant,
    clients: Vec<Client>,
    /// Times at which clients may send their next requests.
    sends: BinaryHeap<Reverse<(Instant, usize)>>,
    timer: Instant,
    latest_timer: Duration,
    random: u64,
    log: Vec<Passed>,
}

impl Timeline {
    pub(crate) fn new(text: &str) -> Self {
        Self::with_limits(limits(text))
    }

    pub(crate) fn with_limits(limits: Limits) -> Self {
        let mut tree = ThrottleTree::new(Instant::ZERO);
        let group = tree.add(None, limits, NodeShare::default()).unwrap();
        Self {
            tree,
            group,
            now: Instant::ZERO,
            clients: Vec::new(),
            sends: BinaryHeap::new(),
            timer: Instant::MAX,
            latest_timer: Duration::ZERO,
            random: 0x9e37_79b9_7f4a_7c15,
            log: Vec::new(),
        }
    }

    /// Makes timers up to `by_up_to` late.
    pub(crate) fn with_late_timers(mut self, by_up_to: Duration) -> Self {
        self.latest_timer = by_up_to;
        self
    }

    pub(crate) fn add(&mut self, workload: Workload) -> usize {
        self.add_with(NodeShare::default(), workload)
    }

    pub(crate) fn add_with(&mut self, share: NodeShare, workload: Workload) -> usize {
        self.add_below(self.group, "", share, workload)
    }

    /// Adds a disk with separate limits in another group.
    pub(crate) fn add_below(
        &mut self,
        group: NodeId,
        text: &str,
        share: NodeShare,
        workload: Workload,
    ) -> usize {
        let disk = self.tree.add(Some(group), limits(text), share).unwrap();
        self.add_to(disk, workload)
    }

    pub(crate) fn add_to(&mut self, disk: NodeId, workload: Workload) -> usize {
        let client = self.clients.len();
        self.clients.push(Client {
            disk,
            workload,
            unsent: workload.count,
            sent: self.now,
            longest_wait: Duration::ZERO,
        });
        for _ in 0..workload.depth.min(workload.count) {
            self.sends.push(Reverse((self.now, client)));
        }
        client
    }

    pub(crate) fn disk(&self, client: usize) -> NodeId {
        self.clients[client].disk
    }

    pub(crate) fn queue_reads(&mut self, count: u64) -> usize {
        self.add(Workload::READS.queued(count))
    }

    /// Changes the limits of the group and polls.
    pub(crate) fn change_limits(&mut self, text: &str) {
        self.tree.configure(self.group, limits(text), NodeShare::default(), self.now).unwrap();
        self.poll_now();
    }

    /// Advances time to `end`, excluding events at `end`.
    pub(crate) fn run_until(&mut self, end: Instant) {
        loop {
            let next_send = self.sends.peek().map_or(Instant::MAX, |Reverse((at, _))| *at);
            let next = next_send.min(self.timer);
            if next >= end {
                self.now = self.now.max(end);
                return;
            }
            self.now = next;
            if self.timer <= self.now {
                self.poll();
            } else {
                self.send();
            }
        }
    }

    /// Polls, as callers must after any change.
    pub(crate) fn poll_now(&mut self) {
        self.timer = self.now;
    }

    fn send(&mut self) {
        let Some(Reverse((_, number))) = self.sends.pop() else { return };
        let client = &mut self.clients[number];
        if client.unsent == 0 {
            return;
        }
        client.unsent -= 1;
        client.sent = self.now;
        let Workload { direction, length, .. } = client.workload;
        match self.tree.submit(client.disk, direction, RequestCost::one(length), number, self.now) {
            AdmissionResult::Admitted(number) => self.on_admitted(number),
            AdmissionResult::Queued(_) => self.poll(),
        }
    }

    /// Polls, as callers must after queueing and when the timer fires.
    fn poll(&mut self) {
        loop {
            match self.tree.poll(self.now) {
                PollDecision::Admit(number) => self.on_admitted(number),
                PollDecision::Wait { until } => {
                    assert!(until > self.now, "a deadline that has passed");
                    // Polling must not postpone a timer that is armed for ever.
                    if self.timer <= self.now || until < self.timer {
                        self.timer = until + self.random_delay();
                    }
                    return;
                }
                PollDecision::Idle => {
                    self.timer = Instant::MAX;
                    return;
                }
            }
        }
    }

    fn on_admitted(&mut self, number: usize) {
        let client = &mut self.clients[number];
        client.longest_wait = client.longest_wait.max(self.now - client.sent);
        let Client { workload, sent, .. } = *client;
        self.log.push(Passed { at: self.now, client: number, bytes: workload.length });
        let next = (self.now + workload.latency).max(sent + workload.pace);
        self.sends.push(Reverse((next, number)));
    }

    fn random_delay(&mut self) -> Duration {
        // xorshift64; any fixed sequence would do.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let latest_ns = self.latest_timer.as_nanos() as u64;
        Duration::from_nanos(self.random.checked_rem(latest_ns).unwrap_or(0))
    }

    fn between(&mut self, from: Instant, to: Instant) -> impl Iterator<Item = Passed> + '_ {
        self.run_until(to);
        // The log is in order of time.
        let start = self.log.partition_point(|passed| passed.at < from);
        let end = self.log.partition_point(|passed| passed.at < to);
        self.log[start..end].iter().copied()
    }

    /// Number of requests admitted from `from` to `to`, excluding `to`. Advances time to `to`.
    pub(crate) fn admitted_between(&mut self, from: Instant, to: Instant) -> usize {
        self.between(from, to).count()
    }

    pub(crate) fn admitted_of(&mut self, client: usize, from: Instant, to: Instant) -> usize {
        self.between(from, to).filter(|passed| passed.client == client).count()
    }

    pub(crate) fn bytes_of(&mut self, client: usize, from: Instant, to: Instant) -> u64 {
        self.between(from, to).filter(|passed| passed.client == client).map(|passed| passed.bytes).sum()
    }

    /// Longest wait of admitted requests; only for clients with a queue depth of 1.
    pub(crate) fn longest_wait_of(&self, client: usize) -> Duration {
        assert_eq!(self.clients[client].workload.depth, 1);
        self.clients[client].longest_wait
    }

    pub(crate) fn bytes_between(&mut self, from: Instant, to: Instant) -> u64 {
        self.between(from, to).map(|passed| passed.bytes).sum()
    }

    /// Bytes per second between the first and the last admission, because a window holds only whole
    /// requests.
    pub(crate) fn rate_between(&mut self, from: Instant, to: Instant) -> f64 {
        let passed: Vec<_> = self.between(from, to).collect();
        let [all_but_last @ .., last] = &passed[..] else { return 0.0 };
        let bytes: u64 = all_but_last.iter().map(|passed| passed.bytes).sum();
        bytes as f64 / (last.at - passed[0].at).as_secs_f64()
    }

    /// Longest time between two admissions of a client, including both ends of the window.
    pub(crate) fn longest_gap_of(&mut self, client: usize, from: Instant, to: Instant) -> Duration {
        let mut last = from;
        let mut longest = Duration::ZERO;
        for passed in self.between(from, to).filter(|passed| passed.client == client) {
            longest = longest.max(passed.at - last);
            last = passed.at;
        }
        longest.max(to - last)
    }

    /// Maximum units, bytes or requests, admitted in any second.
    pub(crate) fn peak_per_second(&self, units: impl Fn(Direction, u64) -> u64) -> u64 {
        let second = Duration::from_secs(1);
        let units_of = |passed: &Passed| units(self.clients[passed.client].workload.direction, passed.bytes);
        let (mut sum, mut peak, mut oldest) = (0, 0, 0);
        for passed in &self.log {
            sum += units_of(passed);
            while self.log[oldest].at + second <= passed.at {
                sum -= units_of(&self.log[oldest]);
                oldest += 1;
            }
            peak = peak.max(sum);
        }
        peak
    }
}

#[track_caller]
pub(crate) fn assert_within_percent(percent: f64, measured: f64, expected: f64) {
    let error = (measured / expected - 1.0) * 100.0;
    assert!(error.abs() <= percent, "{measured} is {error:+.3} % from {expected}");
}
