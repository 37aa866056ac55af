//! What other limits would have done to requests that were recorded, felt by those who sent them.
//!
//! ```text
//!   recorded requests ─► chains: who came when another ─► Engine ─► once for the buckets,
//!   of each disk         was answered                               and once that counts
//! ```
//!
//! A program that has 32 requests in flight sends the next when one is answered: with half the
//! limit it sends half as many. So each request is sent as long after the answer before it as it
//! was, and not at the time of day when it was. Each takes of its device what it took.
//!
//! Whoever is through begins anew until all are. The first time fills the buckets, so that a burst
//! is not felt that nobody has any more. What it does not know: that a device gets slower, or
//! reaches its end, as more is asked of it; a watermark; data that was read ahead.
//!
//! Requests of a disk under a limit were recorded at the rate of that limit, because clients wait
//! for answers. Sending them at the recorded times would show no effect of a higher limit and an
//! endless queue under a lower one. So recorded requests are divided into chains: a request follows
//! the latest earlier answer that has no follower, after the same delay as recorded. Clients that
//! do not wait for answers are treated as if they did, which understates the effect of a limit that
//! is too low.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::atomic::{AtomicBool, Ordering},
};

use policy::prefetch;
pub use recording::{Op, Past};

use super::{
    client::Chain,
    device::Place,
    engine::{Engine, Row, STEPS},
    tally::Tally,
    world::{Disk, DiskSettings, Group, UNKNOWN_SIZE, World},
};

/// A group, as it would be.
#[derive(Clone, Debug)]
pub struct GroupThen {
    /// For messages.
    pub name: String,
    /// Its limits and share.
    pub settings: DiskSettings,
    /// Its place among the groups, smaller than this one's.
    pub parent: Option<usize>,
}

/// A disk, as it would be, with what it was asked.
#[derive(Clone, Debug)]
pub struct DiskThen {
    /// For messages.
    pub name: String,
    /// Its limits and share.
    pub settings: DiskSettings,
    /// Its place among the groups.
    pub group: Option<usize>,
    /// In any order.
    pub past: Vec<Past>,
}

/// How requests of one disk, or of several, were served.
#[derive(Clone, Debug, Default)]
pub struct Felt(Tally);

impl Felt {
    /// What was recorded.
    pub fn was(past: &[Past]) -> Self {
        let mut tally = Tally::default();
        for request in past {
            let admitted_ns = request.arrived_ns.saturating_add(request.wait_ns);
            let ended_ns = admitted_ns.saturating_add(request.service_ns);
            tally.note(request.arrived_ns, admitted_ns, ended_ns, request.length);
        }
        // They came in any order.
        tally.first = past.iter().map(|request| request.arrived_ns).min();
        Self(tally)
    }

    /// With those of another disk.
    pub fn add(&mut self, other: &Self) {
        self.0.add(&other.0);
    }

    /// How many.
    pub fn requests(&self) -> u64 {
        self.0.requests
    }

    /// Seconds from the first request to the last answer.
    pub fn seconds(&self) -> f64 {
        self.0.seconds()
    }

    /// Requests in a second.
    pub fn operations_per_second(&self) -> f64 {
        self.0.a_second(self.0.requests)
    }

    /// Their bytes in a second.
    pub fn bytes_per_second(&self) -> f64 {
        self.0.a_second(self.0.bytes)
    }

    /// The time from arrival to answer that such a part of requests took at most, from 0 to 1.
    pub fn latency_ns(&self, part: f64) -> u64 {
        self.0.latency.value_at_quantile(part)
    }

    /// The same until limits let them pass.
    pub fn wait_ns(&self, part: f64) -> u64 {
        self.0.waited.value_at_quantile(part)
    }

    /// Which part of requests had to wait for longer than a microsecond.
    pub fn waiting_ratio(&self) -> f64 {
        let waited = &self.0.waited;
        let at_once = waited.count_between(0, 1000);
        match waited.len() {
            0 => 0.0,
            all => (all - at_once.min(all)) as f64 / all as f64,
        }
    }
}

/// Serves what was asked again, with these limits; what each disk would have felt. `None` where
/// `stop` was set meanwhile.
///
/// # Errors
/// Where a group cannot keep its promises.
pub fn replay(
    groups: &[GroupThen],
    disks: &[DiskThen],
    stop: &AtomicBool,
) -> anyhow::Result<Option<Vec<Felt>>> {
    let world = World {
        groups: groups
            .iter()
            .map(|group| Group { name: group.name.clone(), hold: group.settings, parent: group.parent })
            .collect(),
        disks: disks.iter().map(disk).collect(),
        ..World::default()
    };
    let mut engine = Engine::new(&world, true)?;
    let all = || disks.iter().flat_map(|disk| &disk.past);
    let begin = all().map(|past| past.arrived_ns).min().unwrap_or(0);
    let end = all().map(|past| past.arrived_ns + past.wait_ns + past.service_ns).max().unwrap_or(0);
    for (index, disk) in disks.iter().enumerate() {
        for chain in chains(index, &disk.past, begin, end) {
            engine.add_chain(chain);
        }
    }
    let mut phase = Phase::new(disks);
    let mut first_ns = None;
    loop {
        let goes_on = engine.run(STEPS);
        for row in engine.take_rows() {
            match first_ns {
                // This time is for the buckets.
                None if phase.is_over(&row) => {
                    first_ns = Some(row.admitted_ns);
                    phase = Phase::new(disks);
                }
                None => {}
                // As long again.
                Some(first_ns) if row.admitted_ns >= 2 * first_ns || phase.has_enough() => {
                    return Ok(Some(phase.felt()));
                }
                Some(_) => {}
            }
            phase.note(&row);
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        if !goes_on {
            // Nothing was asked.
            return Ok(Some(phase.felt()));
        }
    }
}

/// What is served while the recorded requests are gone through once.
struct Phase {
    /// Of each disk, requests that are still to come.
    left: Vec<usize>,
    felt: Vec<Tally>,
    rows: usize,
    most: usize,
}

impl Phase {
    /// A disk that is let go faster than others comes again meanwhile, so many times at most.
    const MOST: usize = 4;

    fn new(disks: &[DiskThen]) -> Self {
        let left: Vec<_> = disks.iter().map(|disk| disk.past.len()).collect();
        let most = Self::MOST * left.iter().sum::<usize>();
        Self { felt: vec![Tally::default(); disks.len()], rows: 0, most, left }
    }

    /// Whether all has been served once, with this one.
    fn is_over(&mut self, row: &Row) -> bool {
        let left = &mut self.left[row.request.disk];
        *left = left.saturating_sub(1);
        self.left.iter().all(|left| *left == 0) || self.has_enough()
    }

    fn has_enough(&self) -> bool {
        self.rows >= self.most
    }

    fn note(&mut self, row: &Row) {
        self.rows += 1;
        let tally = &mut self.felt[row.request.disk];
        tally.note(row.request.at_ns, row.admitted_ns, row.completed_ns, row.request.length);
    }

    fn felt(self) -> Vec<Felt> {
        self.felt.into_iter().map(Felt).collect()
    }
}

fn disk(disk: &DiskThen) -> Disk {
    Disk {
        name: disk.name.clone(),
        hold: disk.settings,
        group: disk.group,
        prefetch: prefetch::Settings::off(),
        size_bytes: UNKNOWN_SIZE,
        place: Place::default(),
        watched: None,
    }
}

/// A chain that is found.
struct Recorded {
    chain: Chain,
    /// When its last request was answered.
    free_ns: u64,
    /// The longest that one of its requests took.
    longest_ns: u64,
}

/// Requests that came one after the other's answer, from the beginning of all to the end. Of those
/// that were answered and have no follower yet, the latest is followed.
fn chains(disk: usize, past: &[Past], begin_ns: u64, end_ns: u64) -> Vec<Chain> {
    let mut past: Vec<_> = past.to_vec();
    past.sort_by_key(|request| request.arrived_ns);
    let mut chains: Vec<Recorded> = Vec::new();
    let mut asked: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut answered: Vec<usize> = Vec::new();
    for request in past {
        while let Some(&Reverse((at, chain))) = asked.peek()
            && at <= request.arrived_ns
        {
            asked.pop();
            answered.push(chain);
        }
        let place = answered.pop().unwrap_or_else(|| {
            chains.push(Recorded { chain: Chain::new(disk), free_ns: begin_ns, longest_ns: 0 });
            chains.len() - 1
        });
        let Recorded { chain, free_ns, longest_ns } = &mut chains[place];
        let think_ns = request.arrived_ns - *free_ns;
        chain.add(think_ns, request.op, request.length, request.service_ns);
        let took_ns = request.wait_ns + request.service_ns;
        *free_ns = request.arrived_ns + took_ns;
        *longest_ns = took_ns.max(*longest_ns);
        asked.push(Reverse((*free_ns, place)));
    }
    let again = |Recorded { chain, free_ns, longest_ns }: Recorded| {
        chain.again_after(end_ns.saturating_sub(free_ns), longest_ns, end_ns - begin_ns)
    };
    chains.into_iter().map(again).collect()
}

#[cfg(test)]
mod tests {
    use policy::throttle::{Limit, LimitKind, Limits};

    use super::*;
    use crate::client::{Client, ClientSpec};

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;

    fn iops(rate: u64) -> DiskSettings {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = rate;
        DiskSettings { limits, ..DiskSettings::default() }
    }

    fn bytes(rate: u64) -> DiskSettings {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::BpsTotal).rate = rate;
        DiskSettings { limits, ..DiskSettings::default() }
    }

    /// What disks with these limits and devices serve to clients of so many requests in flight, as
    /// a recorder sees it; from the tenth second on, for thirty.
    fn record(
        groups: &[GroupThen],
        disks: &[(DiskSettings, Option<usize>)],
        clients: &[(usize, u32, u64)],
    ) -> Vec<Vec<Past>> {
        let mut world = World {
            groups: groups
                .iter()
                .map(|group| Group { name: group.name.clone(), hold: group.settings, parent: group.parent })
                .collect(),
            ..World::default()
        };
        for (settings, group) in disks {
            let then = DiskThen { name: String::new(), settings: *settings, group: *group, past: Vec::new() };
            let service = crate::device::Service::fixed(MS / 5);
            let station = world.add_station(crate::device::StationSpec {
                read: service,
                write: service,
                ..Default::default()
            });
            world.disks.push(Disk { place: Place { station: Some(station), budget: None }, ..disk(&then) });
        }
        let mut engine = Engine::new(&world, true).unwrap();
        for &(disk, depth, length) in clients {
            engine.add_client(Client::new(ClientSpec {
                disk,
                op: Op::Read,
                length,
                region: 0..1 << 30,
                random: Some(disk as u64),
                depth,
                think_ns: 20_000,
                count: None,
                time: 0..25 * SECOND,
            }));
        }
        while engine.run(STEPS) {}
        let mut all = vec![Vec::new(); disks.len()];
        for row in engine.take_rows() {
            let request = row.request;
            if request.at_ns >= 10 * SECOND {
                all[request.disk].push(Past {
                    arrived_ns: request.at_ns,
                    wait_ns: row.admitted_ns - request.at_ns,
                    service_ns: row.completed_ns - row.admitted_ns,
                    length: request.length,
                    op: request.op,
                });
            }
        }
        all
    }

    fn replayed(groups: &[GroupThen], disks: Vec<DiskThen>) -> Vec<Felt> {
        replay(groups, &disks, &AtomicBool::new(false)).unwrap().unwrap()
    }

    fn alone(settings: DiskSettings, past: Vec<Past>) -> Felt {
        let then = DiskThen { name: "a".into(), settings, group: None, past };
        replayed(&[], vec![then]).remove(0)
    }

    /// Within a tenth: rate, latencies and waits.
    fn assert_near(predicted: &Felt, happened: &Felt, about: &str) {
        let figures = |felt: &Felt| {
            [
                felt.operations_per_second(),
                felt.bytes_per_second(),
                felt.latency_ns(0.5) as f64,
                felt.latency_ns(0.99) as f64,
                felt.wait_ns(0.5) as f64,
            ]
        };
        for (predicted, happened) in figures(predicted).into_iter().zip(figures(happened)) {
            let is_near =
                (predicted / happened.max(1.0) - 1.0).abs() < 0.1 || (predicted < 2e4 && happened < 2e4);
            assert!(is_near, "{about}: {predicted} was predicted, and {happened} happened");
        }
    }

    #[test]
    fn a_steady_load_feels_what_was_foreseen_to_a_tenth() {
        let settings = [
            ("2000", iops(2000)),
            ("500", iops(500)),
            ("8000", iops(8000)),
            ("none", DiskSettings::default()),
            ("10 MiB/s", bytes(10 << 20)),
        ];
        for depth in [1, 32] {
            let all: Vec<_> = settings
                .iter()
                .map(|(name, settings)| {
                    (name, *settings, record(&[], &[(*settings, None)], &[(0, depth, 4096)]).remove(0))
                })
                .collect();
            for (before, _, past) in &all {
                for (after, settings, happened) in &all {
                    let predicted = alone(*settings, past.clone());
                    let about = format!("depth {depth}, from {before} to {after}");
                    assert_near(&predicted, &Felt::was(happened), &about);
                }
            }
        }
    }

    #[test]
    fn a_burst_that_is_used_up_is_not_felt_again() {
        let mut long = iops(1000);
        *long.limits.limit_mut(LimitKind::IopsTotal) =
            Limit { rate: 1000, burst_rate: 5000, burst_length_s: 2 };
        let past = record(&[], &[(iops(1000), None)], &[(0, 32, 4096)]).remove(0);
        let felt = alone(long, past);
        assert!(
            (felt.operations_per_second() / 1000.0 - 1.0).abs() < 0.05,
            "{}",
            felt.operations_per_second()
        );
    }

    #[test]
    fn members_of_a_group_feel_what_the_others_do() {
        let of = |rate| [GroupThen { name: "g".into(), settings: iops(rate), parent: None }];
        let disks = [(DiskSettings::default(), Some(0)), (DiskSettings::default(), Some(0))];
        let clients = [(0, 1, 4096), (1, 64, 4096)];
        let past = record(&of(3000), &disks, &clients);
        let happened = record(&of(1000), &disks, &clients);
        let then = past.into_iter().map(|past| DiskThen {
            name: String::new(),
            settings: DiskSettings::default(),
            group: Some(0),
            past,
        });
        let predicted = replayed(&of(1000), then.collect());
        for (disk, (predicted, happened)) in predicted.iter().zip(&happened).enumerate() {
            assert_near(predicted, &Felt::was(happened), &format!("disk {disk}"));
        }
    }

    #[test]
    fn who_asks_seldom_asks_as_seldom_again() {
        // One request each 10 ms, of 1 ms.
        let past: Vec<_> = (0..1000)
            .map(|number| Past {
                arrived_ns: number * 10 * MS,
                wait_ns: 0,
                service_ns: MS,
                length: 4096,
                op: Op::Write,
            })
            .collect();
        let felt = alone(DiskSettings::default(), past.clone());
        assert!(felt.requests().abs_diff(1000) <= 1, "{}", felt.requests());
        assert!((felt.operations_per_second() / 100.0 - 1.0).abs() < 0.01);
        assert!((felt.latency_ns(0.99) as f64 / 1e6 - 1.0).abs() < 0.02);
        assert_eq!(felt.waiting_ratio(), 0.0);
        assert!(alone(iops(50), past).waiting_ratio() > 0.9);
    }

    #[test]
    fn answers_that_took_no_time_keep_nobody_from_asking_as_fast_again() {
        // 32 at a time, of which the recorder sees no service: one chain, that does not pause.
        let batches = |between_ns: u64, wait_ns: u64| {
            let past = (0..3200).map(|number| Past {
                arrived_ns: number / 32 * between_ns,
                wait_ns,
                service_ns: 0,
                length: 4096,
                op: Op::Read,
            });
            past.collect::<Vec<_>>()
        };
        let felt = alone(DiskSettings::default(), batches(92_000, 0));
        let recorded = 32.0 / 92e-6;
        let ratio = felt.operations_per_second() / recorded;
        assert!((0.9..1.1).contains(&ratio), "{ratio}");
        // Of those whom a limit held, nobody knows how fast they would be.
        let felt = alone(DiskSettings::default(), batches(32 * MS, 32 * MS));
        let clients = 32.0;
        assert!(felt.operations_per_second() <= clients * 1.3e5, "{}", felt.operations_per_second());
    }

    #[test]
    fn nothing_is_felt_where_nothing_was_asked() {
        let felt = alone(iops(10), Vec::new());
        assert_eq!((felt.requests(), felt.operations_per_second(), felt.latency_ns(0.5)), (0, 0.0, 0));
        let stopped = replay(&[], &[], &AtomicBool::new(true)).unwrap();
        assert!(stopped.is_none());
    }
}
