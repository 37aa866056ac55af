//! Throttle groups alone, without disks: tasks of several members ask, wait, give up, while limits change. Every admission is held against
//! naive buckets.
//!
//! - Never too early: what passes finds room in every bucket that applies to it.
//! - Never too late: while a request waits, its direction's buckets have no room; at the very nanosecond when they do,
//!   something passes.
//! - In order: of one member's requests of one direction, none passes before one that came earlier.
//! - The group's counters count exactly what passed.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use block::{
    layer::throttle::{DiskSettings, Group, GroupSettings, Member},
    reactor::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout},
};
use policy::{
    request::Direction,
    throttle::{Cost, Limit, LimitKind, Limits},
    time::{Duration, Instant},
};

use crate::{
    bucket::{Buckets, Charge, SLACK_S},
    client::chance,
    seeds,
};

#[test]
fn groups_are_exact_and_fair() {
    let mut waited = 0;
    let seeds = seeds::for_each("--test simulation", "groups_are_exact_and_fair", 3000, |seed| {
        waited += sim::run(seed, contend());
    });
    assert!(seeds < 100 || waited > 10 * seeds, "only {waited} requests of {seeds} seeds had to wait");
}

/// What happened to the requests of a group, in order.
#[derive(Clone, Copy, Debug)]
enum Event {
    Asked,
    Passed(Charge),
    GaveUp,
    /// No limits were in force.
    PassedFreely(Charge),
    Limits(Limits),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Instant,
    member: usize,
    direction: Direction,
    /// Tells requests apart.
    request: u64,
    event: Event,
}

#[derive(Default)]
struct Log {
    entries: Vec<Entry>,
    requests: u64,
}

type SharedLog = Rc<RefCell<Log>>;

/// One run; returns how many requests had to wait.
async fn contend() -> u64 {
    let first = draw_limits();
    let group = Group::with_limits("group", first).expect("drawn valid");
    let log = SharedLog::default();
    log.borrow_mut().push_limits(first);
    let count = sim::random(|random| random.usize(1..=4));
    let members: Vec<_> = (0..count)
        .map(|member| {
            let membership = Member::new(DiskSettings::default(), Some(&group)).expect("nothing is promised");
            let asker = Asker {
                member,
                membership: membership.into(),
                group: Arc::clone(&group),
                log: Rc::clone(&log),
            };
            spawn_joinable(asker.run())
        })
        .collect();
    let changing = spawn_joinable(change_limits(Arc::clone(&group), Rc::clone(&log)));
    for member in members {
        timeout(Duration::from_secs(24 * 3600), member).await.expect("all pass within a day of virtual time");
    }
    changing.cancel().await;
    let log = log.borrow();
    check_buckets(&log.entries);
    check_order(&log.entries, count);
    check_counters(&log.entries, &group);
    let stats = group.stats();
    stats.reads.throttled + stats.writes.throttled
}

/// Any of the six limits that go together, none so low that a request would be paid for in slices.
fn draw_limits() -> Limits {
    let mut limits = Limits::default();
    let mut draw = |kind: LimitKind, least: f64| {
        if !chance(50) {
            return;
        }
        *limits.limit_mut(kind) = sim::random(|random| {
            let rate = (least * 10_f64.powf(3.0 * random.f64())) as u64;
            let burst_rate = if random.bool() { 0 } else { rate * random.u64(1..8) };
            let burst_length_s = if burst_rate == 0 { 1 } else { random.u64(1..5) };
            Limit { rate, burst_rate, burst_length_s }
        });
    };
    if chance(50) {
        draw(LimitKind::IopsTotal, 40.0);
    } else {
        draw(LimitKind::IopsRead, 40.0);
        draw(LimitKind::IopsWrite, 40.0);
    }
    if chance(50) {
        draw(LimitKind::BpsTotal, 500_000.0);
    } else {
        draw(LimitKind::BpsRead, 500_000.0);
        draw(LimitKind::BpsWrite, 500_000.0);
    }
    limits
}

/// Puts other limits in force now and then.
async fn change_limits(group: Arc<Group>, log: SharedLog) {
    while chance(60) {
        // At an odd nanosecond, when nothing else happens: then it is clear which limits were in force.
        sleep_until(now() + Duration::from_nanos(sim::random(|random| random.u64(..3_000_000_000) | 1)))
            .await;
        let limits = draw_limits();
        log.borrow_mut().push_limits(limits);
        group.set(GroupSettings { limits, ..group.settings() }).expect("drawn valid");
    }
}

/// A member and its tasks.
struct Asker {
    member: usize,
    membership: Rc<Member>,
    group: Arc<Group>,
    log: SharedLog,
}

impl Asker {
    async fn run(self) {
        let this = Rc::new(self);
        let tasks: Vec<JoinHandle<()>> = (0..sim::random(|random| random.usize(1..=6)))
            .map(|_| {
                spawn_joinable(Rc::clone(&this).ask_repeatedly(sim::random(|random| random.usize(1..40))))
            })
            .collect();
        for task in tasks {
            task.await;
        }
    }

    async fn ask_repeatedly(self: Rc<Self>, times: usize) {
        for _ in 0..times {
            if chance(30) {
                sleep_until(now() + Duration::from_micros(sim::random(|random| random.u64(..50_000)))).await;
            }
            self.ask().await;
        }
    }

    async fn ask(&self) {
        let direction = if chance(50) { Direction::Read } else { Direction::Write };
        let lengths: Vec<u64> = sim::random(|random| {
            let count = if random.u8(..4) == 0 { random.usize(1..4) } else { 1 };
            (0..count).map(|_| random.u64(1..16_384)).collect()
        });
        let cost = Cost::merged(&lengths);
        let charge = Charge { direction, bytes: cost.bytes() as f64, operations: cost.requests() as f64 };
        let request = self.log.borrow_mut().begin(self.member, direction);
        let patience = match sim::random(|random| random.u8(..12)) {
            0 => Duration::ZERO,
            1 => Duration::from_micros(sim::random(|random| random.u64(..200_000))),
            _ => Duration::from_secs(24 * 3600),
        };
        // Polls the admission first, so what was admitted by then is known to have been.
        let event = match timeout(patience, self.membership.admit(direction, cost)).await {
            Ok(()) if self.group.settings().limits.is_unlimited() => Event::PassedFreely(charge),
            Ok(()) => Event::Passed(charge),
            Err(_) => Event::GaveUp,
        };
        self.log.borrow_mut().push(self.member, direction, request, event);
    }
}

impl Log {
    fn push_limits(&mut self, limits: Limits) {
        let nobody = usize::MAX;
        let event = Event::Limits(limits);
        self.entries.push(Entry { at: now(), member: nobody, direction: Direction::Read, request: 0, event });
    }

    fn begin(&mut self, member: usize, direction: Direction) -> u64 {
        self.requests += 1;
        self.push(member, direction, self.requests, Event::Asked);
        self.requests
    }

    fn push(&mut self, member: usize, direction: Direction, request: u64, event: Event) {
        self.entries.push(Entry { at: now(), member, direction, request, event });
    }
}

/// Never too early, never too late.
fn check_buckets(entries: &[Entry]) {
    let mut buckets = Buckets::new(&Limits::default(), Instant::ZERO);
    let mut waiting = [0_u64; 2];
    let mut before = Instant::ZERO;
    for instant in entries.chunk_by(|one, next| one.at == next.at) {
        let at = instant[0].at;
        for direction in Direction::ALL.into_iter().filter(|direction| waiting[direction.index()] > 0) {
            let (wait_s, waited_s) = (buckets.wait_s(direction), (at - before).as_secs_f64());
            assert!(
                waited_s <= wait_s + SLACK_S,
                "{direction:?}s waited from {before:?} to {at:?} ({waited_s} s), though there was room after {wait_s} s"
            );
        }
        buckets.leak_to(at);
        let mut charges = Vec::new();
        for entry in instant {
            let waiting = &mut waiting[entry.direction.index()];
            match entry.event {
                Event::Asked => *waiting += 1,
                Event::GaveUp | Event::PassedFreely(_) => *waiting -= 1,
                Event::Passed(charge) => {
                    *waiting -= 1;
                    charges.push(charge);
                }
                Event::Limits(limits) => {
                    charges.clear();
                    buckets = Buckets::new(&limits, at);
                }
            }
        }
        buckets.charge(&charges);
        before = at;
    }
}

/// In order. Numbers rise with every request; tasks that are let go at the same instant may run in any order.
fn check_order(entries: &[Entry], members: usize) {
    // By member and direction: the highest number let go before this instant, and at it.
    let mut highest = vec![[(0, 0); 2]; members];
    for instant in entries.chunk_by(|one, next| one.at == next.at) {
        for entry in instant.iter().filter(|entry| matches!(entry.event, Event::Passed(_))) {
            let (before, now) = &mut highest[entry.member][entry.direction.index()];
            assert!(entry.request > *before, "{entry:?} passed after request {before} of its queue");
            *now = entry.request.max(*now);
        }
        highest.iter_mut().flatten().for_each(|(before, now)| *before = *now);
    }
}

/// The counters count what passed under limits; what waited when the limits were lifted is counted as it passes.
fn check_counters(entries: &[Entry], group: &Group) {
    let (mut requests, mut bytes) = (0, 0);
    let mut asked = vec![Instant::ZERO; entries.len() + 1];
    let mut limits_changed = Instant::ZERO;
    for entry in entries {
        match entry.event {
            Event::Limits(_) => limits_changed = entry.at,
            Event::Asked => asked[entry.request as usize] = entry.at,
            Event::PassedFreely(_) if asked[entry.request as usize] >= limits_changed => {}
            Event::Passed(charge) | Event::PassedFreely(charge) => {
                requests += charge.operations as u64;
                bytes += charge.bytes as u64;
            }
            Event::GaveUp => {}
        }
    }
    assert_eq!(passed(group), [requests, bytes]);
}

/// Requests and bytes.
fn passed(group: &Group) -> [u64; 2] {
    let stats = group.stats();
    [stats.reads.requests + stats.writes.requests, stats.reads.bytes + stats.writes.bytes]
}

/// What a group has let pass, looked at now and then: for tests that do not see the admissions themselves.
pub(crate) struct Passed {
    group: Arc<Group>,
    /// Time, requests, bytes.
    looks: Vec<(Instant, [u64; 2])>,
    /// In bytes.
    longest_request: u64,
}

impl Passed {
    pub(crate) fn new(group: &Arc<Group>, longest_request: u64) -> Self {
        Self { group: Arc::clone(group), looks: Vec::new(), longest_request }
    }

    /// Notes what has passed by now.
    pub(crate) fn look(&mut self) {
        self.looks.push((now(), passed(&self.group)));
    }

    /// Over any second that begins and ends with a look, limits for both directions together are exceeded by no more than the burst,
    /// and the one request that is paid for afterwards.
    pub(crate) fn check(&self) {
        for (unit, kind, last) in
            [(0, LimitKind::IopsTotal, 1), (1, LimitKind::BpsTotal, self.longest_request)]
        {
            let limit = self.group.settings().limits.limit(kind);
            if limit.rate == 0 {
                continue;
            }
            let burst =
                if limit.burst_rate == 0 { limit.rate / 10 } else { limit.burst_rate * limit.burst_length_s };
            let most = limit.rate + burst + last;
            let mut end = 0;
            for (at, passed) in &self.looks {
                while self.looks.get(end).is_some_and(|(later, _)| *later <= *at + Duration::from_secs(1)) {
                    end += 1;
                }
                let count = self.looks[end - 1].1[unit] - passed[unit];
                assert!(count <= most, "{kind:?}: {count} passed in the second after {at:?}, {most} may");
            }
        }
    }
}
