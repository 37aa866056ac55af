//! What happened to the requests of a tree, in order, and what may be said of it: see `limits`.

use block::reactor::now;
use policy::{request::Direction, throttle::Limits, time::Instant};

use crate::bucket::{Buckets, Charge, SLACK_S};

/// What happened.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Asked,
    Passed(Charge),
    GaveUp,
    /// Other limits are in force at the node.
    Limits(Limits),
    /// The node is in another group, or in none.
    Moved(Option<usize>),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Instant,
    node: usize,
    direction: Direction,
    /// Tells requests apart.
    request: u64,
    event: Event,
}

/// Everything that happened in one run.
#[derive(Default)]
pub(crate) struct Ledger {
    /// What each node began with.
    nodes: Vec<(Limits, Option<usize>)>,
    entries: Vec<Entry>,
    requests: u64,
}

/// The nodes as they are at one moment.
struct Nodes {
    limits: Vec<Limits>,
    parents: Vec<Option<usize>>,
}

impl Nodes {
    fn path(&self, node: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(node), |&node| self.parents[node])
    }

    fn is_unlimited(&self, node: usize) -> bool {
        self.path(node).all(|node| self.limits[node].is_unlimited())
    }

    fn apply(&mut self, entry: &Entry) {
        match entry.event {
            Event::Limits(limits) => self.limits[entry.node] = limits,
            Event::Moved(parent) => self.parents[entry.node] = parent,
            _ => {}
        }
    }
}

impl Ledger {
    /// Adds a node with a number one higher than the one before.
    pub(crate) fn add(&mut self, limits: Limits, parent: Option<usize>) {
        self.nodes.push((limits, parent));
    }

    pub(crate) fn begin(&mut self, node: usize, direction: Direction) -> u64 {
        self.requests += 1;
        self.push(node, direction, self.requests, Event::Asked);
        self.requests
    }

    pub(crate) fn push(&mut self, node: usize, direction: Direction, request: u64, event: Event) {
        self.entries.push(Entry { at: now(), node, direction, request, event });
    }

    /// Panics unless every request passed when it was to pass, and in its order.
    pub(crate) fn check(&self) {
        self.check_buckets();
        self.check_order();
    }

    /// Requests and bytes that each node is to have counted: those that passed while it was on their way up. What no limit held for when it
    /// came did not ask.
    pub(crate) fn count(&self) -> Vec<(u64, u64)> {
        let mut nodes = self.nodes();
        let mut asked_freely = vec![false; self.requests as usize + 1];
        let mut counted = vec![(0, 0); self.nodes.len()];
        for entry in &self.entries {
            nodes.apply(entry);
            match entry.event {
                Event::Asked => asked_freely[entry.request as usize] = nodes.is_unlimited(entry.node),
                Event::Passed(charge) if !asked_freely[entry.request as usize] => {
                    for node in nodes.path(entry.node) {
                        counted[node].0 += charge.operations as u64;
                        counted[node].1 += charge.bytes as u64;
                    }
                }
                _ => {}
            }
        }
        counted
    }

    fn nodes(&self) -> Nodes {
        let (limits, parents) = self.nodes.iter().copied().unzip();
        Nodes { limits, parents }
    }

    /// Never too early, never too late.
    fn check_buckets(&self) {
        let mut nodes = self.nodes();
        let mut buckets: Vec<_> =
            nodes.limits.iter().map(|limits| Buckets::new(limits, Instant::ZERO)).collect();
        let mut waiting = vec![[0_u64; 2]; buckets.len()];
        let mut before = Instant::ZERO;
        for instant in self.entries.chunk_by(|one, next| one.at == next.at) {
            let at = instant[0].at;
            let waited_s = (at - before).as_secs_f64();
            for (node, waiting) in waiting.iter().enumerate() {
                for direction in Direction::ALL.into_iter().filter(|direction| waiting[direction.index()] > 0)
                {
                    let wait_s =
                        nodes.path(node).map(|node| buckets[node].wait_s(direction)).fold(0.0, f64::max);
                    assert!(
                        waited_s <= wait_s + SLACK_S,
                        "{direction:?}s of node {node} waited from {before:?} to {at:?} ({waited_s} s), though there was room after {wait_s} s"
                    );
                }
            }
            buckets.iter_mut().for_each(|buckets| buckets.leak_to(at));
            let mut charges = vec![Vec::new(); buckets.len()];
            for entry in instant {
                let waiting = &mut waiting[entry.node][entry.direction.index()];
                nodes.apply(entry);
                match entry.event {
                    Event::Asked => *waiting += 1,
                    Event::GaveUp => *waiting -= 1,
                    Event::Passed(charge) => {
                        *waiting -= 1;
                        nodes.path(entry.node).for_each(|node| charges[node].push(charge));
                    }
                    Event::Limits(_) | Event::Moved(_) => {
                        charges[entry.node].clear();
                        buckets[entry.node] = Buckets::new(&nodes.limits[entry.node], at);
                    }
                }
            }
            for (buckets, charges) in buckets.iter_mut().zip(charges) {
                buckets.charge(&charges);
            }
            before = at;
        }
    }

    /// In order. Numbers rise with every request; tasks that are let go at the same instant may run in any order.
    fn check_order(&self) {
        // By node and direction: the highest number let go before this instant, and at it.
        let mut highest = vec![[(0, 0); 2]; self.nodes.len()];
        for instant in self.entries.chunk_by(|one, next| one.at == next.at) {
            for entry in instant.iter().filter(|entry| matches!(entry.event, Event::Passed(_))) {
                let (before, now) = &mut highest[entry.node][entry.direction.index()];
                assert!(entry.request > *before, "{entry:?} passed after request {before} of its queue");
                *now = entry.request.max(*now);
            }
            highest.iter_mut().flatten().for_each(|(before, now)| *before = *now);
        }
    }
}
