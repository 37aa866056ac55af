//! Thread that collects the records of all disks and passes them to the sinks.

use std::{
    convert::Infallible,
    io,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use block::recorder::{Collector, RequestRecord};
use policy::time::Instant;

use super::{
    limits::{LimitKey, LimitsByOwner, LimitsInForce},
    names::Named,
};

/// Interval between collections: a third of the time in which half a million requests per second
/// fill a ring.
const INTERVAL: Duration = Duration::from_millis(20);

/// Recording thread; ends when dropped. The sinks then write their buffered records.
#[derive(Debug)]
pub(super) struct Engine {
    /// `None` only during the drop.
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

/// Dropped when the sink has ended, with or without an error.
pub(super) type Ended = async_channel::Sender<Infallible>;

/// Destination of a recording.
pub(super) trait Output: Send {
    /// Adds a request of a recorded disk. `limits` are those in force, with which a new file
    /// begins.
    fn take(&mut self, finished: &RequestRecord, named: &Named, limits: &LimitsByOwner);

    /// Adds limits in force from an instant on. Called first for each recorded disk and its
    /// ancestor groups, then for each change.
    fn limits(&mut self, _limits: &LimitsInForce, _at: Instant) {}

    /// Called after each collection; `lost` is the number of requests of its disks whose records
    /// were dropped.
    fn turn(&mut self, lost: u64);

    /// Announces that no further records follow.
    fn end(&mut self);

    /// True if everything is written or failed. Called after each turn.
    fn has_ended(&mut self) -> bool;
}

/// Message from the main thread.
enum Order {
    Add(u64, Box<dyn Output>, Ended),
    End(u64),
    /// Disks, with the limits in force from that instant on.
    Know(Vec<(Named, Vec<u64>)>, Instant),
    /// Limits in force from that instant on.
    Limits(Box<LimitsInForce>, Instant),
    /// A disk or group was removed at that instant.
    Remove(LimitKey, Instant),
    Hear(Ended),
}

impl Engine {
    pub(super) fn start() -> io::Result<Self> {
        // A process has one collector, as the workers write to one set of rings.
        let collector = Collector::begin().ok_or_else(|| io::Error::other("something records already"))?;
        let (orders, receiver) = mpsc::channel();
        let work = Work { collector, disks: Vec::new(), sinks: Vec::new() };
        let thread = Builder::new().name("weir-record".to_owned()).spawn(move || work.run(&receiver))?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    pub(super) fn add(&self, id: u64, output: Box<dyn Output>, ended: Ended) {
        self.order(Order::Add(id, output, ended));
    }

    /// Ends a sink once it has written everything.
    pub(super) fn end(&self, id: u64) {
        self.order(Order::End(id));
    }

    /// Updates disks, each with the ids of its sinks. Changed limits are in force from `at` on.
    pub(super) fn know(&self, disks: Vec<(Named, Vec<u64>)>, at: Instant) {
        self.order(Order::Know(disks, at));
    }

    /// Changes limits for the sinks that have the disk or group.
    pub(super) fn change_limits(&self, limits: LimitsInForce, at: Instant) {
        self.order(Order::Limits(limits.into(), at));
    }

    /// Ends the limits of a disk or group for the sinks that have it.
    pub(super) fn remove(&self, owner: LimitKey, at: Instant) {
        self.order(Order::Remove(owner, at));
    }

    /// Drops `heard` after all earlier orders are executed.
    pub(super) fn hear(&self, heard: Ended) {
        self.order(Order::Hear(heard));
    }

    fn order(&self, order: Order) {
        // The receiver lives until this engine is dropped.
        let _ = self.orders.as_ref().map(|orders| orders.send(order));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.orders = None;
        // Joined: there is only one collector, and the next engine needs it.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Work {
    collector: Collector,
    /// Disks by number, without hashing per request. Removed disks stay, as records of theirs may
    /// still arrive.
    disks: Vec<Option<(Named, Vec<u64>)>>,
    /// Few, hence a list.
    sinks: Vec<Sink>,
}

struct Sink {
    id: u64,
    output: Box<dyn Output>,
    /// Dropped requests that its output has not received yet.
    lost: u64,
    /// Limits that its output has received.
    limits: LimitsByOwner,
    /// Signals the end by its drop.
    _ended: Ended,
}

impl Sink {
    fn limits(&mut self, limits: &LimitsInForce, at: Instant) {
        let key = limits.key();
        if self.limits.get(&key) != Some(limits) {
            self.output.limits(limits, at);
            self.limits.insert(key, limits.clone());
        }
    }

    fn remove(&mut self, owner: &LimitKey, at: Instant) {
        let before = self.limits.remove(owner);
        if before.is_some_and(|before| !before.is_none()) {
            self.output.limits(&LimitsInForce::removed(owner.clone()), at);
        }
    }
}

impl Work {
    fn run(mut self, orders: &Receiver<Order>) {
        loop {
            match orders.recv_timeout(INTERVAL) {
                Ok(order) => self.obey(order),
                Err(RecvTimeoutError::Timeout) => self.take(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.take();
        self.sinks.iter_mut().for_each(|sink| sink.output.end());
        self.write();
    }

    // In each case records are collected before the state that they refer to changes.
    fn obey(&mut self, order: Order) {
        match order {
            Order::Add(id, output, ended) => {
                let limits = LimitsByOwner::new();
                self.sinks.push(Sink { id, output, lost: 0, limits, _ended: ended });
            }
            Order::End(id) => {
                self.take();
                if let Some(sink) = self.sinks.iter_mut().find(|sink| sink.id == id) {
                    sink.output.end();
                }
                self.write();
            }
            Order::Limits(limits, at) => {
                change(&mut self.sinks, &limits, at);
            }
            Order::Remove(owner, at) => {
                self.sinks.iter_mut().for_each(|sink| sink.remove(&owner, at));
            }
            Order::Know(disks, at) => {
                let most = disks.iter().map(|(named, _)| named.number as usize + 1).max();
                self.disks.resize_with(self.disks.len().max(most.unwrap_or(0)), || None);
                // Disks produce records as soon as they have a number: new disks may already have
                // some.
                let is_new = |named: &Named| self.disks[named.number as usize].is_none();
                let (new, known): (Vec<_>, Vec<_>) = disks.into_iter().partition(|(named, _)| is_new(named));
                self.put(new, at);
                // Earlier records of known disks belong to their previous names and limits.
                self.take();
                self.put(known, at);
            }
            Order::Hear(heard) => drop(heard),
        }
    }

    fn put(&mut self, disks: Vec<(Named, Vec<u64>)>, at: Instant) {
        for (named, sinks) in disks {
            for sink in self.sinks.iter_mut().filter(|sink| sinks.contains(&sink.id)) {
                named.in_force.iter().for_each(|limits| sink.limits(limits, at));
            }
            let place = named.number as usize;
            self.disks[place] = Some((named, sinks));
        }
    }

    fn take(&mut self) {
        let Self { collector, disks, sinks, .. } = self;
        let have_lost = collector.take(|finished: &RequestRecord| {
            let Some(Some((named, of))) = disks.get(finished.disk as usize) else { return };
            for sink in sinks.iter_mut().filter(|sink| of.contains(&sink.id)) {
                sink.output.take(finished, named, &sink.limits);
            }
        });
        if have_lost {
            share(disks, sinks);
        }
        self.write();
    }

    fn write(&mut self) {
        self.sinks.iter_mut().for_each(|sink| sink.output.turn(std::mem::take(&mut sink.lost)));
        // Dropping the sink signals its end.
        self.sinks.retain_mut(|sink| !sink.output.has_ended());
    }
}

/// Changes limits for the sinks that have their owner.
fn change(sinks: &mut [Sink], limits: &LimitsInForce, at: Instant) {
    let key = limits.key();
    let having = sinks.iter_mut().filter(|sink| sink.limits.contains_key(&key));
    having.for_each(|sink| sink.limits(limits, at));
}

/// Adds the dropped requests of each disk to its sinks.
fn share(disks: &[Option<(Named, Vec<u64>)>], sinks: &mut [Sink]) {
    for (named, of) in disks.iter().flatten() {
        // Taken once per disk and added to each of its sinks.
        let lost = named.lost.take();
        sinks.iter_mut().filter(|sink| of.contains(&sink.id)).for_each(|sink| sink.lost += lost);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use recording::LimitOwner;

    use super::*;

    struct Nothing;

    impl Output for Nothing {
        fn take(&mut self, _: &RequestRecord, _: &Named, _: &LimitsByOwner) {}
        fn turn(&mut self, _: u64) {}
        fn end(&mut self) {}
        fn has_ended(&mut self) -> bool {
            false
        }
    }

    /// Stores the limits that it receives, with times in milliseconds.
    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<(u64, LimitsInForce)>>>);

    impl Output for Kept {
        fn take(&mut self, _: &RequestRecord, _: &Named, _: &LimitsByOwner) {}
        fn limits(&mut self, limits: &LimitsInForce, at: Instant) {
            self.0.lock().unwrap().push((at.as_nanos() / 1_000_000, limits.clone()));
        }
        fn turn(&mut self, _: u64) {}
        fn end(&mut self) {}
        fn has_ended(&mut self) -> bool {
            false
        }
    }

    #[test]
    fn a_sink_receives_each_change_of_the_limits_that_it_has_once() {
        let kept = Kept::default();
        let output = Box::new(kept.clone());
        let (ended, limits) = (async_channel::bounded(1).0, LimitsByOwner::new());
        let mut sinks = [Sink { id: 1, output, lost: 0, limits, _ended: ended }];
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let gold = |iops| LimitsInForce::of_group_with("gold", iops);
        sinks[0].limits(&gold(100), at(1));
        // Sent again for each disk of the group.
        sinks[0].limits(&gold(100), at(2));
        change(&mut sinks, &gold(200), at(3));
        change(&mut sinks, &gold(200), at(4));
        change(&mut sinks, &LimitsInForce::of_group_with("silver", 5), at(5));
        // Ends only the limits of an owner that has some.
        let group = |name: &str| (LimitOwner::Group, name.into());
        sinks[0].limits(&gold(0), at(6));
        sinks[0].remove(&group("gold"), at(7));
        sinks[0].limits(&gold(300), at(8));
        sinks[0].remove(&group("silver"), at(9));
        sinks[0].remove(&group("gold"), at(10));
        sinks[0].remove(&group("gold"), at(11));
        assert!(sinks[0].limits.is_empty());
        let received = [(1, gold(100)), (3, gold(200)), (6, gold(0)), (8, gold(300)), (10, gold(0))];
        assert_eq!(*kept.0.lock().unwrap(), received);
    }

    #[test]
    fn a_sink_has_lost_what_its_own_disks_have() {
        let sink = |id| Sink {
            id,
            output: Box::new(Nothing),
            lost: 0,
            limits: LimitsByOwner::new(),
            _ended: async_channel::bounded(1).0,
        };
        let mut sinks = [sink(1), sink(2), sink(3)];
        let disk = |number, of: &[u64], lost| {
            let named = Named::alone(number, "a disk");
            named.lost.add(lost);
            Some((named, of.to_vec()))
        };
        let disks = [disk(0, &[1, 3], 5), None, disk(2, &[3], 7), disk(3, &[], 9)];
        for _ in 0..2 {
            share(&disks, &mut sinks);
        }
        assert_eq!(sinks.map(|sink| sink.lost), [5, 0, 12]);
    }
}
