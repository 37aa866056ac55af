//! Events: one type, one ring of the latest events, and a sequence number for each.
//!
//! ```text
//!   control/watch  disks, groups, devices each second, by judge ─┐                    ┌─► log
//!                  changes of the running state, with the actor  ├─► Events: latest   ├─► QMP: X_WEIR_EVENT
//!   NBD and vhost-user clients, from their servers ──────────────┘                    └─► HTTP
//! ```
//!
//! Every consumer reads at its own pace: [`Events::since`] returns the events after a number,
//! [`Events::listen`] wakes. A slow consumer never delays a producer. Rate limits apply per event
//! type before a number is assigned, so the ring, the log, all clients and all commands share one
//! bound; dropped events are counted.
//!
//! Never on the path of a request: a client causes two events, at its connection and at its end.

mod deliveries;
mod gate;
pub(crate) mod judge;
mod kind;
mod log;
mod visits;

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use event_listener::EventListener;
use policy::time::Instant;

pub use deliveries::Deliveries;
use gate::SharedGate;
pub use kind::Event;
pub use kind::Kind;
pub use kind::News;
pub use log::log;

/// Capacity of the ring: less than two megabytes with messages of maximum length.
const KEPT: usize = 1024;
/// Number of events of each type that other types cannot evict.
const ROOM: usize = 30;
// Ensures that in a full ring at least one type exceeds its protected number.
const _: () = assert!(ROOM * Kind::ALL.len() < KEPT);
/// Burst for each event type. A disk has a share of it: a thousand disks may reach their limits at
/// the same time.
const BURST: u64 = 512;
const PER_SECOND: u64 = 10;
/// Event numbers per second since the Epoch. The first number of a process derives from its start
/// time, so numbers rise across restarts unless the clock is set back. They stay below 2⁵³, the
/// largest integers that JSON readers with doubles distinguish.
const NUMBERS_A_SECOND: u64 = 1_000_000;
/// Numbers reserved for events that the old process of an upgrade records after it has sent its
/// last number.
const NUMBERS_LEFT: u64 = 100_000;

/// Ring of the latest events. Clones share it.
#[derive(Clone)]
pub struct Events(Arc<Shared>);

struct Shared {
    ring: Mutex<Ring>,
    woken: event_listener::Event,
}

struct Ring {
    next: u64,
    kept: VecDeque<Arc<Event>>,
    gates: Vec<SharedGate>,
    /// By event type: recorded events, and events that the rate limit dropped.
    counts: Vec<[u64; 2]>,
}

impl Ring {
    /// Evicts the oldest event among the types that exceed [`ROOM`], so that frequent connections
    /// cannot evict a rare image error.
    fn make_room(&mut self) {
        if self.kept.len() < KEPT {
            return;
        }
        let mut of_kind = [0; Kind::ALL.len()];
        self.kept.iter().for_each(|event| of_kind[event.kind as usize] += 1);
        // Linear in the capacity, which is constant, and only in a full ring.
        let oldest = self.kept.iter().position(|event| of_kind[event.kind as usize] > ROOM);
        self.kept.remove(oldest.unwrap_or(0));
    }
}

impl Default for Events {
    fn default() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::from(since.as_secs().saturating_mul(NUMBERS_A_SECOND))
    }
}

impl Events {
    fn from(next: u64) -> Self {
        let ring = Ring {
            next: next.max(1),
            kept: VecDeque::new(),
            gates: vec![SharedGate::new(BURST, PER_SECOND); Kind::ALL.len()],
            counts: vec![[0; 2]; Kind::ALL.len()],
        };
        Self(Arc::new(Shared { ring: Mutex::new(ring), woken: event_listener::Event::new() }))
    }

    /// Continues the numbering after `last`, the old process's number, with a gap for the events
    /// that the old process still records.
    pub(crate) fn go_on_after(&self, last: u64) {
        let mut ring = self.ring();
        ring.next = ring.next.max(last.saturating_add(NUMBERS_LEFT));
    }

    /// Inserts the old process's events that are older than the first own event, and adds its
    /// counters. Listeners are not woken.
    pub(crate) fn go_on_from(&self, events: Vec<Event>, counts: impl Iterator<Item = (Kind, [u64; 2])>) {
        let mut ring = self.ring();
        // Ids stay sorted in the ring, which `since` relies on for its binary search.
        let first = ring.kept.front().map_or(ring.next, |event| event.id);
        for event in events.into_iter().rev().filter(|event| event.id < first) {
            // Both rings together may exceed the capacity; the oldest events are dropped.
            if ring.kept.len() < KEPT {
                ring.kept.push_front(Arc::new(event));
            }
        }
        for (kind, [told, left_out]) in counts {
            let [own, own_left_out] = &mut ring.counts[kind as usize];
            *own = own.saturating_add(told);
            *own_left_out = own_left_out.saturating_add(left_out);
        }
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event now. Callable from any thread; takes microseconds.
    pub fn tell(&self, news: News) {
        self.tell_at(reactor::real_time(), SystemTime::now(), news);
    }

    fn tell_at(&self, now: Instant, time: SystemTime, news: News) {
        let mut ring = self.ring();
        let kind = news.kind as usize;
        // Checked before a number is assigned: dropped events leave no gap in the numbers.
        let Some(left_out) = ring.gates[kind].pass(news.disk.as_ref(), now) else {
            ring.counts[kind][1] += 1;
            return;
        };
        ring.counts[kind][0] += 1;
        let id = ring.next;
        ring.next += 1;
        ring.make_room();
        ring.kept.push_back(Arc::new(news.at(id, time, left_out)));
        // Woken after the lock is released, so that listeners do not run into it.
        drop(ring);
        self.0.woken.notify(usize::MAX);
    }

    /// Events after this number, oldest first. Events that were evicted leave a gap. 0 returns all.
    pub fn since(&self, id: u64) -> Vec<Arc<Event>> {
        let ring = self.ring();
        let first = ring.kept.partition_point(|event| event.id <= id);
        ring.kept.range(first..).cloned().collect()
    }

    /// Number of the latest event; one less than the first number if there is none yet.
    pub fn last(&self) -> u64 {
        self.ring().next - 1
    }

    /// Becomes ready after the next event, on any runtime. Call [`Events::since`] after this and
    /// before waiting, or an event between the two calls is missed.
    pub fn listen(&self) -> EventListener {
        self.0.woken.listen()
    }

    /// By event type: recorded events, and events that the rate limit dropped.
    pub fn counts(&self) -> Vec<(Kind, [u64; 2])> {
        let ring = self.ring();
        Kind::ALL.iter().map(|kind| (*kind, ring.counts[*kind as usize])).collect()
    }

    /// Calls `take` for each later event, on this thread. Ends when the handle is dropped.
    pub(crate) fn each(&self, take: impl Fn(&Arc<Event>) + 'static) -> reactor::JoinHandle<()> {
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

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("last", &self.last()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn news(kind: Kind) -> News {
        News::new(kind, "it has happened")
    }

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn what_another_has_told_comes_before() {
        let before = Events::from(1);
        // More than the ring holds, slowly enough to pass the rate limit.
        (0..2000_u64).for_each(|s| before.tell_at(at(s * 1000), UNIX_EPOCH, news(Kind::DiskAdded)));
        let events = Events::from(1500);
        events.go_on_after(before.last());
        events.tell_at(at(0), UNIX_EPOCH, news(Kind::DiskStopped));
        let told = before.since(0).iter().filter_map(|event| Event::from_json(&event.to_json())).collect();
        events.go_on_from(told, before.counts().into_iter());
        let known: Vec<_> = events.since(0).iter().map(|event| event.id).collect();
        assert!(known.is_sorted() && known.len() == KEPT, "{known:?}");
        assert_eq!(known[..KEPT - 1], before.since(0).iter().map(|event| event.id).collect::<Vec<_>>()[1..]);
        let count = |kind| events.counts().into_iter().find(|(other, _)| *other == kind).expect("a kind").1;
        assert_eq!((count(Kind::DiskAdded), count(Kind::DiskStopped)), ([2000, 0], [1, 0]));
    }

    #[test]
    fn the_last_ones_are_kept_in_order_and_nobody_has_one_twice() {
        let events = Events::from(5);
        assert_eq!((events.last(), events.since(0).len()), (4, 0));
        for ms in 0..3000_u64 {
            events.tell_at(at(ms * 1000), UNIX_EPOCH, news(Kind::DiskAdded));
        }
        let all = events.since(0);
        assert_eq!((all.len(), all[0].id, events.last()), (KEPT, 3005 - KEPT as u64, 3004));
        let ids: Vec<_> = events.since(3002).iter().map(|event| event.id).collect();
        assert_eq!(ids, [3003, 3004]);
        assert_eq!(events.since(3004).len(), 0);
    }

    #[test]
    fn too_many_of_a_kind_are_counted_and_others_are_told() {
        let events = Events::from(0);
        for _ in 0..10_000 {
            events.tell_at(at(1000), UNIX_EPOCH, news(Kind::ClientIn));
        }
        events.tell_at(at(1000), UNIX_EPOCH, news(Kind::ImageError));
        assert_eq!(events.since(0).len(), BURST as usize + 1);
        events.tell_at(at(1200), UNIX_EPOCH, news(Kind::ClientIn));
        let last = events.since(0).pop().unwrap();
        assert_eq!(last.data["suppressed"], 10_000 - BURST);
        let of = |wanted: Kind| events.counts().into_iter().find(|(kind, _)| *kind == wanted).unwrap().1;
        assert_eq!((of(Kind::ClientIn), of(Kind::ImageError)), ([BURST + 1, 10_000 - BURST], [1, 0]));
    }

    #[test]
    fn a_machine_that_comes_and_goes_does_not_silence_another_disk() {
        let events = Events::from(0);
        let came = |disk: &str| {
            let before = events.last();
            events.tell_at(at(1000), UNIX_EPOCH, news(Kind::ClientIn).of_disk(disk));
            events.last() > before
        };
        // Half of the common burst includes the disk's own share.
        assert_eq!((0..10_000).filter(|_| came("noisy")).count(), BURST as usize / 2);
        assert!((0..10).all(|_| came("quiet")), "it has its share");
    }

    #[test]
    fn clients_that_come_and_go_do_not_hide_an_error() {
        let events = Events::from(0);
        for ms in 0..5000_u64 {
            let kinds = [Kind::ClientIn, Kind::ClientOut, Kind::LimitHit, Kind::LimitReleased];
            kinds.into_iter().for_each(|kind| events.tell_at(at(ms * 100), UNIX_EPOCH, news(kind)));
            if ms % 100 == 0 {
                events.tell_at(at(ms * 100), UNIX_EPOCH, news(Kind::ImageError));
            }
        }
        let all = events.since(0);
        let of = |wanted: Kind| all.iter().filter(|event| event.kind == wanted).count();
        assert_eq!((all.len(), of(Kind::ImageError)), (KEPT, ROOM));
        assert!(of(Kind::ClientIn) >= ROOM && of(Kind::ClientOut) >= ROOM);
        assert!(all.is_sorted_by_key(|event| event.id));
    }

    #[test]
    fn who_goes_on_for_another_has_larger_numbers() {
        let (old, new) = (Events::from(7), Events::from(7));
        let tell = |events: &Events| events.tell_at(at(0), UNIX_EPOCH, news(Kind::ClientOut));
        (0..3).for_each(|_| tell(&old));
        new.go_on_after(old.last());
        (0..3).for_each(|_| tell(&old));
        tell(&new);
        assert!(new.last() > old.last(), "{} and {}", new.last(), old.last());
        let last = new.last();
        new.go_on_after(1);
        tell(&new);
        assert_eq!(new.last(), last + 1);
    }

    #[test]
    fn who_listens_is_woken() {
        use std::sync::mpsc;

        let events = Events::from(0);
        let woken = events.listen();
        let (told, heard) = mpsc::channel();
        let waiting = std::thread::spawn(move || {
            event_listener::Listener::wait(woken);
            told.send(()).unwrap();
        });
        assert!(heard.try_recv().is_err());
        events.tell_at(at(0), UNIX_EPOCH, news(Kind::ClientIn));
        heard.recv().unwrap();
        waiting.join().unwrap();
    }
}
