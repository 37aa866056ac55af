//! Events: one type, one ring of the latest events, and a sequence number for each.
//!
//! ```text
//!   watch     disks, groups, devices, by hysteresis ─┐              ┌─► log
//!             changes, with their actor ─────────────┼─► EventLog ──┼─► QMP: X_WEIR_EVENT
//!   servers   NBD clients, vhost-user front ends ────┘              └─► HTTP
//! ```
//!
//! Every consumer reads at its own pace: [`EventLog::since`] returns the events after a number, and
//! [`EventLog::listen`] wakes the consumer. A slow consumer never delays a producer. Rate limits
//! apply per event type before a number is assigned, so the ring, the log, all clients and all
//! commands share one bound; dropped events are counted.
//!
//! Never on the path of a request: a client causes two events, when it connects and disconnects.

mod client_events;
mod deliveries;
mod event_type;
pub(crate) mod hysteresis;
mod log;
mod rate_limit;

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use event_listener::EventListener;
use policy::time::Instant;

pub use deliveries::DeliveryCounters;
pub use event_type::Kind;
pub use event_type::NewEvent;
pub use event_type::RecordedEvent;
pub use log::log_events;
use rate_limit::SharedEventRateLimit;

/// Capacity of the ring: less than two megabytes with messages of maximum length.
const RING_CAPACITY: usize = 1024;
/// Number of events of each type that other types cannot evict.
const PROTECTED_PER_TYPE: usize = 20;
// Ensures that in a full ring at least one type exceeds its protected number.
const _: () = assert!(PROTECTED_PER_TYPE * Kind::ALL.len() < RING_CAPACITY);
/// Burst for each event type. A disk has a share of it: a thousand disks may reach their limits at
/// the same time.
const BURST: u64 = 512;
const PER_SECOND: u64 = 10;
/// Event numbers per second since the Epoch. The first number of a process derives from its start
/// time, so numbers rise across restarts unless the clock is set back. They stay below 2⁵³, the
/// largest integers that JSON readers with doubles distinguish.
const NUMBERS_PER_SECOND: u64 = 1_000_000;
/// Numbers reserved for events that the old process of an upgrade records after it has sent its
/// last number.
const UPGRADE_NUMBER_GAP: u64 = 100_000;

/// Ring of the latest events. Clones share it.
#[derive(Clone)]
pub struct EventLog(Arc<EventLogShared>);

struct EventLogShared {
    ring: Mutex<EventRing>,
    woken: event_listener::Event,
}

struct EventRing {
    next: u64,
    events: VecDeque<Arc<RecordedEvent>>,
    rate_limits: Vec<SharedEventRateLimit>,
    /// By event type: recorded events, and events that the rate limit dropped.
    counts: Vec<[u64; 2]>,
}

impl EventRing {
    /// Evicts the oldest event among the types that exceed [`PROTECTED_PER_TYPE`], so that frequent
    /// connections cannot evict a rare image error.
    fn evict(&mut self) {
        if self.events.len() < RING_CAPACITY {
            return;
        }
        let mut of_kind = [0; Kind::ALL.len()];
        self.events.iter().for_each(|event| of_kind[event.kind as usize] += 1);
        // Linear in the capacity, which is constant, and only in a full ring.
        let oldest = self.events.iter().position(|event| of_kind[event.kind as usize] > PROTECTED_PER_TYPE);
        self.events.remove(oldest.unwrap_or(0));
    }
}

impl Default for EventLog {
    fn default() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::starting_at(since.as_secs().saturating_mul(NUMBERS_PER_SECOND))
    }
}

impl EventLog {
    fn starting_at(next: u64) -> Self {
        let ring = EventRing {
            next: next.max(1),
            events: VecDeque::new(),
            rate_limits: vec![SharedEventRateLimit::new(BURST, PER_SECOND); Kind::ALL.len()],
            counts: vec![[0; 2]; Kind::ALL.len()],
        };
        Self(Arc::new(EventLogShared { ring: Mutex::new(ring), woken: event_listener::Event::new() }))
    }

    /// Continues the numbering after `last`, the old process's number, with a gap for the events
    /// that the old process still records.
    pub(crate) fn continue_after(&self, last: u64) {
        let mut ring = self.lock_ring();
        ring.next = ring.next.max(last.saturating_add(UPGRADE_NUMBER_GAP));
    }

    /// Inserts the old process's events that are older than the first own event, and adds its
    /// counters. Listeners are not woken.
    pub(crate) fn merge_transferred(
        &self,
        events: Vec<RecordedEvent>,
        counts: impl Iterator<Item = (Kind, [u64; 2])>,
    ) {
        let mut ring = self.lock_ring();
        // Ids stay sorted in the ring, which `since` relies on for its binary search.
        let first = ring.events.front().map_or(ring.next, |event| event.id);
        for event in events.into_iter().rev().filter(|event| event.id < first) {
            // Both rings together may exceed the capacity; the oldest events are dropped.
            if ring.events.len() < RING_CAPACITY {
                ring.events.push_front(Arc::new(event));
            }
        }
        for (kind, [recorded, dropped]) in counts {
            let [own_recorded, own_dropped] = &mut ring.counts[kind as usize];
            *own_recorded = own_recorded.saturating_add(recorded);
            *own_dropped = own_dropped.saturating_add(dropped);
        }
    }

    fn lock_ring(&self) -> MutexGuard<'_, EventRing> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event now. Callable from any thread; takes microseconds.
    pub fn record(&self, event: NewEvent) {
        self.record_at(reactor::real_time(), SystemTime::now(), event);
    }

    fn record_at(&self, now: Instant, time: SystemTime, event: NewEvent) {
        let mut ring = self.lock_ring();
        let kind = event.kind as usize;
        // Checked before a number is assigned: dropped events leave no gap in the numbers.
        let Some(dropped) = ring.rate_limits[kind].admit(event.disk.as_ref(), now) else {
            ring.counts[kind][1] += 1;
            return;
        };
        ring.counts[kind][0] += 1;
        let id = ring.next;
        ring.next += 1;
        ring.evict();
        ring.events.push_back(Arc::new(event.recorded_at(id, time, dropped)));
        // Woken after the lock is released: a woken listener takes the lock at once.
        drop(ring);
        self.0.woken.notify(usize::MAX);
    }

    /// Events after this number, oldest first. Events that were evicted leave a gap. 0 returns all.
    pub fn since(&self, id: u64) -> Vec<Arc<RecordedEvent>> {
        let ring = self.lock_ring();
        let first = ring.events.partition_point(|event| event.id <= id);
        ring.events.range(first..).cloned().collect()
    }

    /// Number of the latest event; one less than the first number if there is none yet.
    pub fn last(&self) -> u64 {
        self.lock_ring().next - 1
    }

    /// Becomes ready after the next event, on any runtime. Call [`EventLog::since`] after this and
    /// before waiting, or an event between the two calls is missed.
    pub fn listen(&self) -> EventListener {
        self.0.woken.listen()
    }

    /// By event type: recorded events, and events that the rate limit dropped.
    pub fn counts(&self) -> Vec<(Kind, [u64; 2])> {
        let ring = self.lock_ring();
        Kind::ALL.iter().map(|kind| (*kind, ring.counts[*kind as usize])).collect()
    }

    /// Calls `take` for each later event, on this thread. Ends when the handle is dropped.
    pub(crate) fn for_each_later(
        &self,
        take: impl Fn(&Arc<RecordedEvent>) + 'static,
    ) -> reactor::JoinHandle<()> {
        let (events, mut last) = (self.clone(), self.last());
        reactor::spawn_joinable(async move {
            loop {
                let woken = events.listen();
                for event in events.since(last) {
                    last = event.id;
                    take(&event);
                }
                woken.await;
            }
        })
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("last", &self.last()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_event(kind: Kind) -> NewEvent {
        NewEvent::new(kind, "it has happened")
    }

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn transferred_events_precede_own_events() {
        let before = EventLog::starting_at(1);
        // More than the ring holds, slowly enough to pass the rate limit.
        (0..2000_u64).for_each(|s| before.record_at(at(s * 1000), UNIX_EPOCH, new_event(Kind::DiskAdded)));
        let events = EventLog::starting_at(1500);
        events.continue_after(before.last());
        events.record_at(at(0), UNIX_EPOCH, new_event(Kind::DiskStopped));
        let transferred =
            before.since(0).iter().filter_map(|event| RecordedEvent::from_json(&event.to_json())).collect();
        events.merge_transferred(transferred, before.counts().into_iter());
        let known: Vec<_> = events.since(0).iter().map(|event| event.id).collect();
        assert!(known.is_sorted() && known.len() == RING_CAPACITY, "{known:?}");
        assert_eq!(
            known[..RING_CAPACITY - 1],
            before.since(0).iter().map(|event| event.id).collect::<Vec<_>>()[1..]
        );
        let count = |kind| events.counts().into_iter().find(|(other, _)| *other == kind).expect("a kind").1;
        assert_eq!((count(Kind::DiskAdded), count(Kind::DiskStopped)), ([2000, 0], [1, 0]));
    }

    #[test]
    fn ring_keeps_the_latest_events_in_order() {
        let events = EventLog::starting_at(5);
        assert_eq!((events.last(), events.since(0).len()), (4, 0));
        for ms in 0..3000_u64 {
            events.record_at(at(ms * 1000), UNIX_EPOCH, new_event(Kind::DiskAdded));
        }
        let all = events.since(0);
        assert_eq!((all.len(), all[0].id, events.last()), (RING_CAPACITY, 3005 - RING_CAPACITY as u64, 3004));
        let ids: Vec<_> = events.since(3002).iter().map(|event| event.id).collect();
        assert_eq!(ids, [3003, 3004]);
        assert_eq!(events.since(3004).len(), 0);
    }

    #[test]
    fn rate_limit_drops_and_counts_per_event_type() {
        let events = EventLog::starting_at(0);
        for _ in 0..10_000 {
            events.record_at(at(1000), UNIX_EPOCH, new_event(Kind::SessionStarted));
        }
        events.record_at(at(1000), UNIX_EPOCH, new_event(Kind::ImageError));
        assert_eq!(events.since(0).len(), BURST as usize + 1);
        events.record_at(at(1200), UNIX_EPOCH, new_event(Kind::SessionStarted));
        let last = events.since(0).pop().unwrap();
        assert_eq!(last.data["suppressed"], 10_000 - BURST);
        let counts_of =
            |wanted: Kind| events.counts().into_iter().find(|(kind, _)| *kind == wanted).unwrap().1;
        assert_eq!(
            (counts_of(Kind::SessionStarted), counts_of(Kind::ImageError)),
            ([BURST + 1, 10_000 - BURST], [1, 0])
        );
    }

    #[test]
    fn reconnecting_guest_does_not_suppress_events_of_other_disks() {
        let events = EventLog::starting_at(0);
        let came = |disk: &str| {
            let before = events.last();
            events.record_at(at(1000), UNIX_EPOCH, new_event(Kind::SessionStarted).of_disk(disk));
            events.last() > before
        };
        // Half of the common burst includes the disk's own share.
        assert_eq!((0..10_000).filter(|_| came("noisy")).count(), BURST as usize / 2);
        assert!((0..10).all(|_| came("quiet")), "it has its share");
    }

    #[test]
    fn frequent_events_do_not_evict_errors() {
        let events = EventLog::starting_at(0);
        for ms in 0..5000_u64 {
            let kinds = [Kind::SessionStarted, Kind::SessionEnded, Kind::LimitHit, Kind::LimitReleased];
            kinds.into_iter().for_each(|kind| events.record_at(at(ms * 100), UNIX_EPOCH, new_event(kind)));
            if ms % 100 == 0 {
                events.record_at(at(ms * 100), UNIX_EPOCH, new_event(Kind::ImageError));
            }
        }
        let all = events.since(0);
        let count_of = |wanted: Kind| all.iter().filter(|event| event.kind == wanted).count();
        assert_eq!((all.len(), count_of(Kind::ImageError)), (RING_CAPACITY, PROTECTED_PER_TYPE));
        assert!(
            count_of(Kind::SessionStarted) >= PROTECTED_PER_TYPE
                && count_of(Kind::SessionEnded) >= PROTECTED_PER_TYPE
        );
        assert!(all.is_sorted_by_key(|event| event.id));
    }

    #[test]
    fn new_process_continues_with_larger_numbers() {
        let (old, new) = (EventLog::starting_at(7), EventLog::starting_at(7));
        let record = |events: &EventLog| events.record_at(at(0), UNIX_EPOCH, new_event(Kind::SessionEnded));
        (0..3).for_each(|_| record(&old));
        new.continue_after(old.last());
        (0..3).for_each(|_| record(&old));
        record(&new);
        assert!(new.last() > old.last(), "{} and {}", new.last(), old.last());
        let last = new.last();
        new.continue_after(1);
        record(&new);
        assert_eq!(new.last(), last + 1);
    }

    #[test]
    fn listener_is_woken_by_an_event() {
        use std::sync::mpsc;

        let events = EventLog::starting_at(0);
        let woken = events.listen();
        let (sender, receiver) = mpsc::channel();
        let waiting = std::thread::spawn(move || {
            event_listener::Listener::wait(woken);
            sender.send(()).unwrap();
        });
        assert!(receiver.try_recv().is_err());
        events.record_at(at(0), UNIX_EPOCH, new_event(Kind::SessionStarted));
        receiver.recv().unwrap();
        waiting.join().unwrap();
    }
}
