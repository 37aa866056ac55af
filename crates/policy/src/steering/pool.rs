//! One set of limits and the members that share it: what each may have now, and when to look again.
//!
//! Protocol: [`observe`](Pool::observe) each member when it is due, then [`decide`](Pool::decide)
//! once, and set the changes in the kernel in their order. [`due`](Pool::due) says when to look at
//! a member again. A control group alone is a pool of one.
//!
//! **Why so few looks are enough.** The kernel enforces the burst rate, so a bucket cannot be full
//! before what remains of it ÷ (burst rate − rate) has passed, and the last look is made then. An
//! idle member is looked at once a second; a pool without bursts that nobody shares, never.
//!
//! Never gives more than the limits allow at that moment: rates that fall come first.

use alloc::vec::Vec;

use super::Rates;
use super::demand::Demand;
use super::division::{Claim, divide};
use crate::counter;
use crate::request::Direction;
use crate::throttle::{Counters, Enforcement, Ledger, Limit, LimitKind, Limits, Stats, WaitSummary};
use crate::time::{Duration, Instant};

/// A member's reads and writes, counted from some start.
pub type Passed = [Counters; 2];

/// How soon a member is looked at again, at the soonest.
const SHORTEST: Duration = Duration::from_millis(20);
/// Longest time ahead that is told: years.
const LONGEST_S: f64 = 1e9;
/// The same while it does something.
const ACTIVE: Duration = Duration::from_millis(100);
const IDLE: Duration = Duration::from_secs(1);
/// A member counts as active for this long.
const STILL_ACTIVE: Duration = Duration::from_secs(2);
/// A burst whose bucket is full within this time is over: telling takes some time as well.
const NEARLY_FULL_S: f64 = 0.01;
/// A burst is there again once its bucket has room for so many seconds of it.
const ROOM_AGAIN_S: f64 = 0.1;
/// Seconds without anything passing or waiting after which a member's wants are forgotten.
const FORGOTTEN_AFTER_S: f64 = 0.5;
/// Who waits for longer, and nothing passes, waits for another device or a network.
const STUCK_AT_MOST_S: f64 = 5.0;
/// What an idle member keeps of its share, so that it can begin: more where waiting is not seen.
const IDLE_PART: f64 = 0.02;
const IDLE_PART_UNSEEN: f64 = 0.1;
const LEAST: u64 = 2;
/// A rate is told anew if it rises or falls by these factors. Each telling loses what the kernel
/// had saved up for a waiting request (measured: 4 % of 4 MB/s, told every 50 ms).
const RISE_WORTH_TELLING: f64 = 1.03;
const FALL_WORTH_TELLING: f64 = 0.995;
/// The same while another member gains, so that the parts add up.
const SHARED_FALL_WORTH_TELLING: f64 = 0.999;
/// The same under a watermark, which is no promise to the last percent; and for idle members.
const LOOSE_FALL_WORTH_TELLING: f64 = 0.97;
const IDLE_FALL_WORTH_TELLING: f64 = 0.9;

/// The units that rates are in, and the limits on each.
const UNITS: [Unit; 2] = [
    Unit { total: LimitKind::BpsTotal, of: [LimitKind::BpsRead, LimitKind::BpsWrite] },
    Unit { total: LimitKind::IopsTotal, of: [LimitKind::IopsRead, LimitKind::IopsWrite] },
];

struct Unit {
    total: LimitKind,
    /// By direction.
    of: [LimitKind; 2],
}

/// Who shares the limits of a pool.
#[derive(Clone, Debug)]
pub struct Member {
    weight: u32,
    seen: Option<(Instant, Passed)>,
    active: Option<Instant>,
    waiting_seen: bool,
    demand: [[Demand; 2]; 2],
    told: Option<Rates>,
    /// Seconds for which something has waited and nothing passed.
    stuck_s: f64,
    /// Seconds for which nothing has passed or waited.
    idle_s: f64,
    /// It leaves its part to the others.
    is_gone: bool,
    is_unseen: bool,
}

impl Member {
    /// A member with this weight; its part is kept for it until it is observed.
    pub fn new(weight: u32) -> Self {
        Self {
            weight: weight.max(1),
            seen: None,
            active: None,
            waiting_seen: false,
            demand: Default::default(),
            told: None,
            stuck_s: 0.0,
            idle_s: 0.0,
            is_gone: false,
            is_unseen: true,
        }
    }

    /// What the kernel was told last.
    pub const fn told(&self) -> Option<Rates> {
        self.told
    }

    /// What had passed at the last look.
    pub fn passed(&self) -> Option<Passed> {
        self.seen.map(|(_, passed)| passed)
    }
}

/// Limits and their members.
#[derive(Clone, Debug)]
pub struct Pool {
    ledger: Ledger,
    members: Vec<Member>,
    /// By [`LimitKind::index`].
    bursting: [bool; 6],
    /// What ever passed for all.
    passed: Passed,
    /// Its limits are a part of others' and have been changed: no rate may stay above them.
    is_part: bool,
    has_changed: bool,
    decided_at: Option<Instant>,
    /// As [`Stats::limited_ns`] and [`Stats::binding`].
    limited_ns: u64,
    binding: Option<LimitKind>,
}

impl Pool {
    /// A pool without members yet. The limits must be valid.
    pub fn new(limits: &Limits, now: Instant) -> Self {
        Self {
            ledger: Ledger::new(limits, now),
            members: Vec::new(),
            bursting: LimitKind::ALL.map(|kind| limits.limit(kind).burst_rate > 0),
            passed: Passed::default(),
            is_part: false,
            has_changed: false,
            decided_at: None,
            limited_ns: 0,
            binding: None,
        }
    }

    /// Other valid limits from now on, which are a part of what others share as well: the next
    /// [`decide`](Pool::decide) tells whoever has more than its part of them, by however little.
    /// What is in the buckets stays there.
    pub fn put(&mut self, limits: &Limits, now: Instant) {
        self.ledger.leak_to(now);
        let (levels, enforcement) = (self.ledger.levels(), self.enforcement());
        self.ledger = Ledger::new(limits, now);
        self.ledger.enforce(enforcement);
        self.ledger.restore(levels);
        (self.is_part, self.has_changed) = (true, true);
    }

    /// What has passed, and for how long limits held somebody back: for
    /// [`cluster::Demand`](crate::cluster::Demand). Nobody knows what waits.
    pub fn stats(&self) -> Stats {
        let [reads, writes] = self.passed;
        Stats {
            reads,
            writes,
            waits: WaitSummary::default(),
            recent_waits: WaitSummary::default(),
            limited_ns: self.limited_ns,
            binding: self.binding,
            tokens: [None; 6],
            levels: [None; 6],
            waiting: [0; 2],
            kept: None,
        }
    }

    /// The weights of members that did something lately, together.
    pub fn weight(&self, now: Instant) -> u64 {
        let active = self.members.iter().filter(|member| member.is_active(now));
        active.map(|member| u64::from(member.weight)).sum()
    }

    /// A limit that somebody takes all of.
    fn holds_back(&self) -> Option<LimitKind> {
        let takes_all = |unit: usize, directions: core::ops::Range<usize>| {
            let there = self.members.iter().filter(|member| !member.is_gone && !member.is_unseen);
            there
                .flat_map(|member| &member.demand[unit][directions.clone()])
                .any(|demand| demand.wants().is_infinite())
        };
        let of_unit = |(unit, Unit { total, of }): (usize, &Unit)| {
            let kinds = [(*total, 0..2), (of[0], 0..1), (of[1], 1..2)];
            let mut kinds = kinds.into_iter().filter(|(kind, _)| self.limits().limit(*kind).rate > 0);
            kinds.find(|(_, directions)| takes_all(unit, directions.clone())).map(|(kind, _)| kind)
        };
        UNITS.iter().enumerate().find_map(of_unit)
    }

    /// Adds a member, whose number is the count of those before.
    pub fn add(&mut self, member: Member) {
        self.members.push(member);
    }

    /// All members.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// What its limits are.
    pub fn limits(&self) -> &Limits {
        self.ledger.limits()
    }

    /// What passed for all members since the pool was made.
    pub const fn passed(&self) -> &Passed {
        &self.passed
    }

    /// How full the buckets are, by [`LimitKind::index`], for [`resume`](Pool::resume).
    pub fn levels(&self) -> [u64; 6] {
        self.ledger.levels()
    }

    /// Goes on from where another pool left off: with buckets so full, and members of which so much
    /// had passed. What has passed since is charged at the next look.
    pub fn resume(&mut self, since: Instant, levels: [u64; 6], passed: &[Option<Passed>]) {
        self.ledger.restore(levels);
        for (member, passed) in self.members.iter_mut().zip(passed) {
            member.seen = passed.map(|passed| (since, passed));
        }
    }

    /// Applies the limits so from now on; [`decide`](Pool::decide) tells.
    pub fn enforce(&mut self, enforcement: Enforcement) {
        self.ledger.enforce(enforcement);
    }

    /// How they are applied at present.
    pub const fn enforcement(&self) -> Enforcement {
        self.ledger.enforcement()
    }

    /// Forgets what a member was told, as it did not arrive: the next decision tells it again.
    pub fn not_told(&mut self, member: usize) {
        self.members[member].told = None;
    }

    /// A member is gone: until it is observed again, the others have its part.
    pub fn gone(&mut self, member: usize) {
        let member = &mut self.members[member];
        *member = Member { is_gone: true, ..Member::new(member.weight) };
    }

    /// A member cannot be seen, and is told what [`settled`](Pool::settled) grants it: until it is
    /// observed again it counts as wanting all it can get.
    pub fn unseen(&mut self, member: usize) {
        let member = &mut self.members[member];
        *member = Member::new(member.weight);
    }

    /// Takes in what has passed for a member by `now`, and whether it waited since the last time
    /// (`None` if nobody knows).
    pub fn observe(&mut self, member: usize, now: Instant, passed: Passed, waited: Option<bool>) {
        let of = &mut self.members[member];
        (of.is_gone, of.is_unseen) = (false, false);
        let Some((before_at, before)) = of.seen.replace((now, passed)) else { return };
        of.waiting_seen = waited.is_some();
        let elapsed_s = now.nanos_since(before_at) as f64 / 1e9;
        let counters = |passed: &Passed| passed.map(|passed| [passed.bytes, passed.requests]);
        let since =
            |direction: usize| counter::growths(&counters(&before)[direction], &counters(&passed)[direction]);
        // A counter that falls: the cgroup was made again, and its work since then is unknown.
        let (Some(read), Some(written)) = (since(0), since(1)) else { return };
        let since = [read, written];
        let nothing = since.iter().flatten().all(|units| *units == 0);
        of.stuck_s = if waited == Some(true) && nothing { of.stuck_s + elapsed_s } else { 0.0 };
        of.idle_s = if waited == Some(false) && nothing { of.idle_s + elapsed_s } else { 0.0 };
        if of.idle_s >= FORGOTTEN_AFTER_S {
            of.demand = Default::default();
        }
        let is_stuck = of.stuck_s > 0.0 && of.stuck_s < STUCK_AT_MOST_S;
        let stuck = if is_stuck { of.lately() } else { [false; 2] };
        let told = of.told.unwrap_or_default();
        for direction in Direction::ALL {
            let index = direction.index();
            let [bytes, operations] = since[index];
            for (unit, told) in [told.bps[index], told.iops[index]].into_iter().enumerate() {
                let allowed = told.map(|rate| rate as f64);
                of.demand[unit][index].observe(since[index][unit], elapsed_s, allowed, stuck[index]);
            }
            self.ledger.charge(direction, operations, bytes);
            let sum = &mut self.passed[index];
            sum.bytes = sum.bytes.saturating_add(bytes);
            sum.requests = sum.requests.saturating_add(operations);
        }
        let any = !nothing || waited == Some(true);
        if any {
            of.active = Some(now);
        }
    }

    /// What the kernel is to be told now, by member: those that get less first.
    pub fn decide(&mut self, now: Instant) -> Vec<(usize, Rates)> {
        self.ledger.leak_to(now);
        if let Some(kind) = self.holds_back() {
            let since = self.decided_at.unwrap_or(now);
            self.limited_ns = self.limited_ns.saturating_add(now.nanos_since(since));
            self.binding = Some(kind);
        }
        self.decided_at = Some(now);
        let has_changed = core::mem::take(&mut self.has_changed);
        for kind in LimitKind::ALL {
            self.bursting[kind.index()] = self.may_burst(kind);
        }
        let rates = self.divided(|limit, kind| self.rate_now(limit, kind), Demand::wants);
        let scaled = matches!(self.enforcement(), Enforcement::Scaled(_));
        let fall = |member: &Member| match (member.is_active(now), scaled) {
            (false, _) => IDLE_FALL_WORTH_TELLING,
            (true, true) => LOOSE_FALL_WORTH_TELLING,
            (true, false) => FALL_WORTH_TELLING,
        };
        let worth = |member: &Member, rates: &Rates, fall: f64| {
            if member.is_gone || member.is_unseen { None } else { worth_telling(member.told, *rates, fall) }
        };
        let both = || self.members.iter().zip(&rates);
        // What somebody gains others lose, and then that is told as well.
        let somebody_gains = both().any(|(member, rates)| {
            worth(member, rates, fall(member)).is_some() && gains(member.told, *rates)
        });
        let order = |(member, rates): (&Member, &Rates)| {
            let least = match (self.is_part, somebody_gains) {
                (true, true) => 1.0,
                (true, false) if has_changed => 1.0,
                (_, true) => SHARED_FALL_WORTH_TELLING,
                (_, false) => fall(member),
            };
            worth(member, rates, least)
        };
        let orders: Vec<Option<u8>> = both().map(order).collect();
        let mut changes = Vec::new();
        for (index, (order, rates)) in orders.into_iter().zip(rates).enumerate() {
            if let Some(order) = order {
                self.members[index].told = Some(rates);
                changes.push((order, index, rates));
            }
        }
        changes.sort_by_key(|&(order, index, _)| (order, index));
        changes.into_iter().map(|(_, index, rates)| (index, rates)).collect()
    }

    /// When a member is to be looked at again; `None` if only a watermark can change its rates.
    pub fn due(&self, member: usize, now: Instant) -> Option<Instant> {
        self.is_steered().then(|| self.next_look(member, now))
    }

    /// The same for who watches a pool in any case, for a watermark.
    pub fn next_look(&self, member: usize, now: Instant) -> Instant {
        let member = &self.members[member];
        let Some((seen, _)) = member.seen else { return now };
        let at_the_latest = seen + if member.is_active(now) { ACTIVE } else { IDLE };
        self.bursts_end(now).map_or(at_the_latest, |end| at_the_latest.min(end))
    }

    /// When a burst can be over: by then all members are to be looked at. `None` without one.
    pub fn bursts_end(&self, now: Instant) -> Option<Instant> {
        let scale = self.scale();
        let there = self.members.iter().filter(|member| !member.is_gone);
        // What passed for whoever was not looked at since is not in the bucket yet.
        let oldest = there.filter_map(|member| Some(member.seen?.0)).min().unwrap_or(now);
        let unknown_s = now.nanos_since(oldest) as f64 / 1e9;
        let lasts_s = |kind: LimitKind| {
            let Limit { rate, burst_rate, .. } = self.limits().limit(kind);
            let remaining = self.ledger.remaining(kind).filter(|_| self.bursting[kind.index()])?;
            let surplus = burst_rate.saturating_sub(rate) as f64 * scale;
            let known = (remaining as f64 - burst_rate as f64 * scale * unknown_s).max(0.0);
            (surplus > 0.0).then(|| known / surplus)
        };
        let shortest_s = LimitKind::ALL.into_iter().filter_map(lasts_s).reduce(f64::min)?;
        Some(now + Duration::from_secs_f64(shortest_s.min(LONGEST_S)).max(SHORTEST))
    }

    /// Whether there is anything to steer: see [`is_steered`].
    pub fn is_steered(&self) -> bool {
        is_steered(self.limits(), self.members.len())
    }

    /// What each member is held to when nobody steers: limits without bursts, divided by weight.
    pub fn settled(&self) -> Vec<Rates> {
        let rate = |limit: Limit, _| (limit.rate > 0).then_some(limit.rate as f64);
        self.divided(rate, |_| f64::INFINITY)
    }

    fn may_burst(&self, kind: LimitKind) -> bool {
        let Limit { rate, burst_rate, .. } = self.limits().limit(kind);
        let Some(remaining) = self.ledger.remaining(kind).filter(|_| burst_rate > 0) else { return false };
        let scale = self.scale();
        if self.bursting[kind.index()] {
            remaining as f64 > burst_rate.saturating_sub(rate) as f64 * scale * NEARLY_FULL_S
        } else {
            remaining as f64 >= burst_rate as f64 * scale * ROOM_AGAIN_S
        }
    }

    fn scale(&self) -> f64 {
        self.enforcement().scale().thousandths() as f64 / 1000.0
    }

    fn rate_now(&self, limit: Limit, kind: LimitKind) -> Option<f64> {
        if limit.rate == 0 || self.enforcement() == Enforcement::Lifted {
            return None;
        }
        let rate = if self.bursting[kind.index()] { limit.burst_rate } else { limit.rate };
        Some(rate as f64 * self.scale())
    }

    /// The rates of all members where limits let pass `rate` and members want `wants`.
    fn divided(
        &self,
        rate: impl Fn(Limit, LimitKind) -> Option<f64>,
        wants: impl Fn(&Demand) -> f64,
    ) -> Vec<Rates> {
        let mut all: Vec<Rates> = self.members.iter().map(|_| Rates::NONE).collect();
        for (unit, Unit { total, of }) in UNITS.iter().enumerate() {
            for (kind, directions) in [(*total, 0..2), (of[0], 0..1), (of[1], 1..2)] {
                let Some(rate) = rate(self.limits().limit(kind), kind) else { continue };
                let parts = self.parts(rate, unit, directions.clone(), &wants);
                for (rates, parts) in all.iter_mut().zip(parts) {
                    let told = if unit == 0 { &mut rates.bps } else { &mut rates.iops };
                    for direction in directions.clone() {
                        // The kernel takes no less than 2 (block/blk-throttle.c, tg_set_limit).
                        let part = (parts[direction] as u64).max(LEAST);
                        told[direction] = Some(told[direction].map_or(part, |told| told.min(part)));
                    }
                }
            }
        }
        let iops_size = self.limits().iops_size;
        if iops_size > 0 {
            all.iter_mut().for_each(|rates| bound_sizes(rates, iops_size));
        }
        all
    }

    /// One limit in parts: by member, then by direction.
    fn parts(
        &self,
        rate: f64,
        unit: usize,
        directions: core::ops::Range<usize>,
        wants: impl Fn(&Demand) -> f64,
    ) -> Vec<[f64; 2]> {
        let there = || self.members.iter().filter(|member| !member.is_gone);
        let weights: f64 = there().map(|member| f64::from(member.weight)).sum();
        let claim = |member: &Member| {
            let weight = f64::from(member.weight);
            let seen = || member.demand[unit][directions.clone()].iter().map(&wants).sum();
            let wanted: f64 = if member.is_unseen { f64::INFINITY } else { seen() };
            Claim { weight, demand: wanted.max(rate * weight / weights * member.idle_part()) }
        };
        let claims: Vec<Claim> = there().map(claim).collect();
        let mut of_members = divide(rate, &claims).into_iter();
        let of_directions = |(member, part): (&Member, f64)| {
            if directions.len() == 1 {
                return [part; 2];
            }
            let claim = |demand: &Demand| Claim {
                weight: 1.0,
                demand: wants(demand).max(part / 2.0 * member.idle_part()),
            };
            let parts = divide(part, &member.demand[unit].each_ref().map(claim));
            [parts[0], parts[1]]
        };
        let part = |member: &Member| if member.is_gone { 0.0 } else { of_members.next().unwrap_or(0.0) };
        let parts: Vec<f64> = self.members.iter().map(part).collect();
        self.members.iter().zip(parts).map(of_directions).collect()
    }
}

/// Whether these limits have bursts or totals, or are shared, which the kernel does not keep.
pub fn is_steered(limits: &Limits, members: usize) -> bool {
    LimitKind::ALL.into_iter().any(|kind| {
        let Limit { rate, burst_rate, .. } = limits.limit(kind);
        let total = matches!(kind, LimitKind::BpsTotal | LimitKind::IopsTotal);
        burst_rate > 0 || (rate > 0 && (total || members > 1))
    })
}

impl Member {
    fn is_active(&self, now: Instant) -> bool {
        self.active.is_some_and(|active| now.nanos_since(active) < STILL_ACTIVE.as_nanos() as u64)
    }

    /// By direction: whether it was in use lately; both, if none was.
    fn lately(&self) -> [bool; 2] {
        let operations = self.demand[1].each_ref().map(Demand::rate);
        let all: f64 = operations.iter().sum();
        operations.map(|operations| operations >= all / 10.0)
    }

    fn idle_part(&self) -> f64 {
        if self.waiting_seen { IDLE_PART } else { IDLE_PART_UNSEEN }
    }
}

/// The kernel counts an operation larger than `iops-size` as one: so bytes are bounded to as many
/// as that many operations of that size. A mixture of sizes may pass twice the limit at the worst.
fn bound_sizes(rates: &mut Rates, iops_size: u64) {
    for direction in Direction::ALL.map(Direction::index) {
        let Some(operations) = rates.iops[direction] else { continue };
        let bytes = operations.saturating_mul(iops_size);
        rates.bps[direction] = Some(rates.bps[direction].map_or(bytes, |told| told.min(bytes)));
    }
}

/// Whether a change is worth telling, and when: 0 before 1, so that rates fall first.
fn worth_telling(told: Option<Rates>, rates: Rates, fall: f64) -> Option<u8> {
    let Some(told) = told else { return Some(1) };
    let (mut falls, mut rises) = (false, false);
    for (before, after) in told.bps.iter().chain(&told.iops).zip(rates.bps.iter().chain(&rates.iops)) {
        match (before, after) {
            (None, None) => {}
            (None, Some(_)) => falls = true,
            (Some(_), None) => rises = true,
            (Some(before), Some(after)) => {
                let factor = *after as f64 / *before as f64;
                falls |= factor < fall;
                rises |= factor > RISE_WORTH_TELLING;
            }
        }
    }
    (falls || rises).then_some(u8::from(!falls))
}

fn gains(told: Option<Rates>, rates: Rates) -> bool {
    let most = |rate: Option<u64>| rate.unwrap_or(u64::MAX);
    let Some(told) = told else { return true };
    let before = told.bps.into_iter().chain(told.iops).map(most);
    before.zip(rates.bps.into_iter().chain(rates.iops).map(most)).any(|(before, after)| after > before)
}
