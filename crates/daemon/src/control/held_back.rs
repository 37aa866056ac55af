//! Logs every ten seconds, at target `weir::limits`, which disks and groups were held back by their
//! limits.

use std::{
    collections::HashMap,
    rc::{Rc, Weak},
};

use block::reactor::{self, JoinHandle};
use policy::{
    throttle::{Part, Setting, Stats},
    time::Duration,
};

use super::inventory::Inventory;

const INTERVAL: Duration = Duration::from_secs(10);

/// Looks every [`INTERVAL`] until the handle is dropped, or the inventory is.
pub(crate) fn watch(inventory: &Rc<Inventory>) -> JoinHandle<()> {
    let inventory = Rc::downgrade(inventory);
    reactor::spawn_joinable(async move {
        let mut last = Last::default();
        loop {
            reactor::sleep_until(reactor::now() + INTERVAL).await;
            let Some(inventory) = Weak::upgrade(&inventory) else { return };
            last.look(&inventory);
        }
    })
}

#[derive(Debug, Default)]
struct Last(HashMap<String, Seen>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    throttled: u64,
    waited_ns: u64,
    limited_ns: u64,
}

impl Seen {
    fn of(stats: &Stats) -> Self {
        Self {
            throttled: stats.reads.throttled.saturating_add(stats.writes.throttled),
            waited_ns: stats.reads.waited_ns.saturating_add(stats.writes.waited_ns),
            limited_ns: stats.limited_ns,
        }
    }

    /// What came after `before`. Counters begin anew where a name is given again.
    fn since(self, before: Self) -> Self {
        Self {
            throttled: self.throttled.saturating_sub(before.throttled),
            waited_ns: self.waited_ns.saturating_sub(before.waited_ns),
            limited_ns: self.limited_ns.saturating_sub(before.limited_ns),
        }
    }
}

impl Last {
    fn look(&mut self, inventory: &Inventory) {
        let disks = inventory.disks();
        let disks = disks.iter().map(|disk| (disk.disk.name().to_string(), disk.disk.throttle().stats()));
        let groups = inventory.groups();
        let groups = groups.iter().map(|group| (group.name().to_owned(), group.stats()));
        let now: Vec<_> = disks.chain(groups).collect();
        for (name, stats) in &now {
            let before = self.0.get(name).copied().unwrap_or_default();
            if let Some(seen) = held_back(stats, before) {
                log(name, stats, seen);
            }
        }
        self.0 = now.iter().map(|(name, stats)| (name.clone(), Seen::of(stats))).collect();
    }
}

/// What happened since `before`; `None` if nothing was held back and nothing is.
fn held_back(stats: &Stats, before: Seen) -> Option<Seen> {
    let seen = Seen::of(stats).since(before);
    (seen != Seen::default() || stats.waiting != [0, 0]).then_some(seen)
}

fn log(name: &str, stats: &Stats, seen: Seen) {
    let [waiting_reads, waiting_writes] = stats.waiting;
    tracing::info!(
        target: "weir::limits",
        name,
        throttled = seen.throttled,
        waited_ns = seen.waited_ns,
        limited_percent = seen.limited_ns.saturating_mul(100) / INTERVAL.as_nanos() as u64,
        // Since the start: what they say of ten seconds alone would be noise.
        wait_p50_ns = stats.waits.p50_ns,
        wait_p99_ns = stats.waits.p99_ns,
        wait_max_ns = stats.waits.max_ns,
        binding = stats.binding.map(|kind| Setting::Limit(kind, Part::Rate).name()),
        waiting_reads,
        waiting_writes,
        "held back by limits"
    );
}

#[cfg(test)]
mod tests {
    use policy::throttle::{Counters, WaitSummary};

    use super::*;

    fn stats(throttled: u64, waiting: [usize; 2]) -> Stats {
        let reads = Counters { throttled, waited_ns: 10 * throttled, ..Counters::default() };
        Stats {
            reads,
            writes: Counters::default(),
            waits: WaitSummary::default(),
            limited_ns: 5 * throttled,
            binding: None,
            tokens: [None; 6],
            waiting,
        }
    }

    #[test]
    fn only_what_is_new_counts() {
        assert_eq!(held_back(&stats(0, [0, 0]), Seen::default()), None);
        let before = Seen::of(&stats(3, [0, 0]));
        assert_eq!(held_back(&stats(3, [0, 0]), before), None);
        let seen = Seen { throttled: 2, waited_ns: 20, limited_ns: 10 };
        assert_eq!(held_back(&stats(5, [0, 0]), before), Some(seen));
    }

    #[test]
    fn who_waits_is_held_back_although_nothing_has_passed_yet() {
        assert_eq!(held_back(&stats(3, [0, 1]), Seen::of(&stats(3, [0, 0]))), Some(Seen::default()));
    }

    #[test]
    fn a_name_that_is_given_again_begins_anew() {
        assert_eq!(held_back(&stats(1, [0, 0]), Seen::of(&stats(9, [0, 0]))), None);
    }
}
