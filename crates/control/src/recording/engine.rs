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
    limits::{LimitKey, LimitsByOwner, OwnerLimits},
    names::RecordedDiskEntry,
};

/// Interval between collections: a third of the time in which half a million requests per second
/// fill a ring.
const INTERVAL: Duration = Duration::from_millis(20);

/// Recording thread; ends when dropped. The sinks then write their buffered records.
#[derive(Debug)]
pub(super) struct RecordingEngine {
    /// `None` only during the drop.
    orders: Option<Sender<EngineMessage>>,
    thread: Option<JoinHandle<()>>,
}

/// Dropped when the sink has ended, with or without an error.
pub(super) type EndSignal = async_channel::Sender<Infallible>;

/// Destination of a recording.
pub(super) trait RecordingOutput: Send {
    /// Adds a request of a recorded disk. `limits` are those in force, with which a new file
    /// begins.
    fn add_request(&mut self, finished: &RequestRecord, named: &RecordedDiskEntry, limits: &LimitsByOwner);

    /// Adds limits in force from an instant on. Called first for each recorded disk and its
    /// ancestor groups, then for each change.
    fn add_limits(&mut self, _limits: &OwnerLimits, _at: Instant) {}

    /// Called after each collection; `lost` is the number of requests of its disks whose records
    /// were dropped.
    fn write_due(&mut self, lost: u64);

    /// Announces that no further records follow.
    fn end(&mut self);

    /// True if everything is written or failed. Called after each [`RecordingOutput::write_due`].
    fn has_ended(&mut self) -> bool;
}

/// Message from the main thread.
enum EngineMessage {
    Add(u64, Box<dyn RecordingOutput>, EndSignal),
    End(u64),
    /// Disks, with the limits in force from that instant on.
    UpdateDisks(Vec<(RecordedDiskEntry, Vec<u64>)>, Instant),
    /// Limits in force from that instant on.
    Limits(Box<OwnerLimits>, Instant),
    /// A disk or group was removed at that instant.
    Remove(LimitKey, Instant),
    Confirm(EndSignal),
}

impl RecordingEngine {
    pub(super) fn start() -> io::Result<Self> {
        // A process has one collector, as the workers write to one set of rings.
        let collector = Collector::begin()
            .ok_or_else(|| io::Error::other("another recording engine runs in this process"))?;
        let (orders, receiver) = mpsc::channel();
        let work = EngineThread { collector, disks: Vec::new(), sinks: Vec::new() };
        let thread = Builder::new().name("weir-record".to_owned()).spawn(move || work.run(&receiver))?;
        Ok(Self { orders: Some(orders), thread: Some(thread) })
    }

    pub(super) fn add(&self, id: u64, output: Box<dyn RecordingOutput>, signal: EndSignal) {
        self.send(EngineMessage::Add(id, output, signal));
    }

    /// Ends a sink once it has written everything.
    pub(super) fn end(&self, id: u64) {
        self.send(EngineMessage::End(id));
    }

    /// Updates disks, each with the ids of its sinks. Changed limits are in force from `at` on.
    pub(super) fn update_disks(&self, disks: Vec<(RecordedDiskEntry, Vec<u64>)>, at: Instant) {
        self.send(EngineMessage::UpdateDisks(disks, at));
    }

    /// Changes limits for the sinks that have the disk or group.
    pub(super) fn change_limits(&self, limits: OwnerLimits, at: Instant) {
        self.send(EngineMessage::Limits(limits.into(), at));
    }

    /// Ends the limits of a disk or group for the sinks that have it.
    pub(super) fn remove(&self, owner: LimitKey, at: Instant) {
        self.send(EngineMessage::Remove(owner, at));
    }

    /// Drops the signal after all earlier messages are handled.
    pub(super) fn confirm(&self, signal: EndSignal) {
        self.send(EngineMessage::Confirm(signal));
    }

    fn send(&self, order: EngineMessage) {
        // The receiver lives until this engine is dropped.
        let _ = self.orders.as_ref().map(|orders| orders.send(order));
    }
}

impl Drop for RecordingEngine {
    fn drop(&mut self) {
        self.orders = None;
        // Joined: there is only one collector, and the next engine needs it.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct EngineThread {
    collector: Collector,
    /// Disks by number, without hashing per request. Removed disks stay, as their last records may
    /// still arrive.
    disks: Vec<Option<(RecordedDiskEntry, Vec<u64>)>>,
    /// A list, as there are only a few.
    sinks: Vec<EngineSink>,
}

struct EngineSink {
    id: u64,
    output: Box<dyn RecordingOutput>,
    /// Dropped requests that its output has not received yet.
    dropped: u64,
    /// Limits that its output has received.
    limits: LimitsByOwner,
    /// Signals the end by its drop.
    _ended: EndSignal,
}

impl EngineSink {
    fn limits(&mut self, limits: &OwnerLimits, at: Instant) {
        let key = limits.key();
        if self.limits.get(&key) != Some(limits) {
            self.output.add_limits(limits, at);
            self.limits.insert(key, limits.clone());
        }
    }

    fn remove(&mut self, owner: &LimitKey, at: Instant) {
        let before = self.limits.remove(owner);
        if before.is_some_and(|before| !before.is_none()) {
            self.output.add_limits(&OwnerLimits::removed(owner.clone()), at);
        }
    }
}

impl EngineThread {
    fn run(mut self, orders: &Receiver<EngineMessage>) {
        loop {
            match orders.recv_timeout(INTERVAL) {
                Ok(order) => self.handle(order),
                Err(RecvTimeoutError::Timeout) => self.collect(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.collect();
        self.sinks.iter_mut().for_each(|sink| sink.output.end());
        self.turn_sinks();
    }

    // In each case records are collected before the state that they refer to changes.
    fn handle(&mut self, order: EngineMessage) {
        match order {
            EngineMessage::Add(id, output, signal) => {
                let limits = LimitsByOwner::new();
                self.sinks.push(EngineSink { id, output, dropped: 0, limits, _ended: signal });
            }
            EngineMessage::End(id) => {
                self.collect();
                if let Some(sink) = self.sinks.iter_mut().find(|sink| sink.id == id) {
                    sink.output.end();
                }
                self.turn_sinks();
            }
            EngineMessage::Limits(limits, at) => {
                change_limits_of(&mut self.sinks, &limits, at);
            }
            EngineMessage::Remove(owner, at) => {
                self.sinks.iter_mut().for_each(|sink| sink.remove(&owner, at));
            }
            EngineMessage::UpdateDisks(disks, at) => {
                let min_length = disks.iter().map(|(named, _)| named.number as usize + 1).max();
                self.disks.resize_with(self.disks.len().max(min_length.unwrap_or(0)), || None);
                // Disks produce records as soon as they have a number: new disks may already have
                // some.
                let is_new = |named: &RecordedDiskEntry| self.disks[named.number as usize].is_none();
                let (new, known): (Vec<_>, Vec<_>) = disks.into_iter().partition(|(named, _)| is_new(named));
                self.store(new, at);
                // Earlier records of known disks belong to their previous names and limits.
                self.collect();
                self.store(known, at);
            }
            EngineMessage::Confirm(heard) => drop(heard),
        }
    }

    fn store(&mut self, disks: Vec<(RecordedDiskEntry, Vec<u64>)>, at: Instant) {
        for (named, sinks) in disks {
            for sink in self.sinks.iter_mut().filter(|sink| sinks.contains(&sink.id)) {
                named.owner_limits.iter().for_each(|limits| sink.limits(limits, at));
            }
            let index = named.number as usize;
            self.disks[index] = Some((named, sinks));
        }
    }

    fn collect(&mut self) {
        let Self { collector, disks, sinks, .. } = self;
        let have_lost = collector.take(|finished: &RequestRecord| {
            let Some(Some((named, sink_ids))) = disks.get(finished.disk as usize) else { return };
            for sink in sinks.iter_mut().filter(|sink| sink_ids.contains(&sink.id)) {
                sink.output.add_request(finished, named, &sink.limits);
            }
        });
        if have_lost {
            distribute_dropped(disks, sinks);
        }
        self.turn_sinks();
    }

    fn turn_sinks(&mut self) {
        self.sinks.iter_mut().for_each(|sink| sink.output.write_due(std::mem::take(&mut sink.dropped)));
        // Dropping the sink signals its end.
        self.sinks.retain_mut(|sink| !sink.output.has_ended());
    }
}

/// Changes limits for the sinks that have their owner.
fn change_limits_of(sinks: &mut [EngineSink], limits: &OwnerLimits, at: Instant) {
    let key = limits.key();
    let having = sinks.iter_mut().filter(|sink| sink.limits.contains_key(&key));
    having.for_each(|sink| sink.limits(limits, at));
}

/// Adds the dropped requests of each disk to its sinks.
fn distribute_dropped(disks: &[Option<(RecordedDiskEntry, Vec<u64>)>], sinks: &mut [EngineSink]) {
    for (named, sink_ids) in disks.iter().flatten() {
        // Taken once per disk and added to each of its sinks.
        let lost = named.dropped.take();
        sinks.iter_mut().filter(|sink| sink_ids.contains(&sink.id)).for_each(|sink| sink.dropped += lost);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use recording::LimitOwner;

    use super::*;

    struct NullOutput;

    impl RecordingOutput for NullOutput {
        fn add_request(&mut self, _: &RequestRecord, _: &RecordedDiskEntry, _: &LimitsByOwner) {}
        fn write_due(&mut self, _: u64) {}
        fn end(&mut self) {}
        fn has_ended(&mut self) -> bool {
            false
        }
    }

    /// Stores the limits that it receives, with times in milliseconds.
    #[derive(Clone, Default)]
    struct CollectedLimits(Arc<Mutex<Vec<(u64, OwnerLimits)>>>);

    impl RecordingOutput for CollectedLimits {
        fn add_request(&mut self, _: &RequestRecord, _: &RecordedDiskEntry, _: &LimitsByOwner) {}
        fn add_limits(&mut self, limits: &OwnerLimits, at: Instant) {
            self.0.lock().unwrap().push((at.as_nanos() / 1_000_000, limits.clone()));
        }
        fn write_due(&mut self, _: u64) {}
        fn end(&mut self) {}
        fn has_ended(&mut self) -> bool {
            false
        }
    }

    #[test]
    fn sink_receives_each_limit_change_once() {
        let collected = CollectedLimits::default();
        let output = Box::new(collected.clone());
        let (sender, limits) = (async_channel::bounded(1).0, LimitsByOwner::new());
        let mut sinks = [EngineSink { id: 1, output, dropped: 0, limits, _ended: sender }];
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let gold = |iops| OwnerLimits::of_group_with("gold", iops);
        sinks[0].limits(&gold(100), at(1));
        // Sent again for each disk of the group.
        sinks[0].limits(&gold(100), at(2));
        change_limits_of(&mut sinks, &gold(200), at(3));
        change_limits_of(&mut sinks, &gold(200), at(4));
        change_limits_of(&mut sinks, &OwnerLimits::of_group_with("silver", 5), at(5));
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
        assert_eq!(*collected.0.lock().unwrap(), received);
    }

    #[test]
    fn dropped_records_count_for_the_disks_sinks() {
        let sink = |id| EngineSink {
            id,
            output: Box::new(NullOutput),
            dropped: 0,
            limits: LimitsByOwner::new(),
            _ended: async_channel::bounded(1).0,
        };
        let mut sinks = [sink(1), sink(2), sink(3)];
        let disk = |number, sink_ids: &[u64], lost| {
            let named = RecordedDiskEntry::without_group(number, "a disk");
            named.dropped.add(lost);
            Some((named, sink_ids.to_vec()))
        };
        let disks = [disk(0, &[1, 3], 5), None, disk(2, &[3], 7), disk(3, &[], 9)];
        for _ in 0..2 {
            distribute_dropped(&disks, &mut sinks);
        }
        assert_eq!(sinks.map(|sink| sink.dropped), [5, 0, 12]);
    }
}
