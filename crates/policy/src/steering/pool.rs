//! One set of limits and the members that share it: the current rates of each, and when to measure
//! again.
//!
//! Protocol: call [`observe`](SteeringPool::observe) for each member that is due, then
//! [`decide`](SteeringPool::decide) once, and set the returned rates in the kernel in their order.
//! [`next_measurement`](SteeringPool::next_measurement) returns the time of the next measurement of
//! a member. A single control group is a pool with one member.
//!
//! **Why few measurements suffice.** The kernel enforces the burst rate, so a bucket cannot be full
//! before (its remaining capacity) ÷ (burst rate − rate) has passed, and that is when it is
//! measured. An idle member is measured once a second; an unshared pool without bursts, never.
//!
//! Never exceeds the limits in a transition: rates are lowered before others are raised.

use alloc::vec::Vec;

use super::IoMaxRates;
use super::demand::MemberDemand;
use super::division::{RateClaim, divide_rate};
use crate::counter;
use crate::request::Direction;
use crate::throttle::{
    AdmissionCounters, CauseKind, Enforcement, KernelBuckets, LimitKind, Limits, RateLimit, ThrottleStats,
    WaitSummary,
};
use crate::time::{Duration, Instant};

/// Cumulative counters of a member's reads and writes.
pub type IoCounters = [AdmissionCounters; 2];

/// Minimum interval between two measurements of a member.
const MIN_INTERVAL: Duration = Duration::from_millis(20);
/// Cap on the predicted length of a burst in seconds (about 30 years).
const MAX_S: f64 = 1e9;
/// Maximum intervals between two measurements of an active and of an idle member.
const ACTIVE: Duration = Duration::from_millis(100);
const IDLE: Duration = Duration::from_secs(1);
/// Time after its last I/O for which a member counts as active.
const STILL_ACTIVE: Duration = Duration::from_secs(2);
/// A burst ends this many seconds before its bucket is full, because setting rates takes time.
const NEARLY_FULL_S: f64 = 0.01;
/// A new burst starts when its bucket has capacity for this many seconds of it.
const BURST_RESTART_S: f64 = 0.1;
/// Seconds without I/O or waiting after which a member's demand is forgotten.
const DEMAND_EXPIRY_S: f64 = 0.5;
/// A member that waits longer without I/O waits for another device or a network.
const MAX_STUCK_S: f64 = 5.0;
/// Part of its share that an idle member keeps for its next requests: more if waiting is not
/// measured, because then it cannot show that it needs more.
const IDLE_PART: f64 = 0.02;
const IDLE_PART_UNSEEN: f64 = 0.1;
const MIN_KERNEL_RATE: u64 = 2;
/// Factors by which a rate must rise or fall to be set again. Setting `io.max` discards the budget
/// that the kernel has accumulated for a waiting request (measured: a loss of 4 % at 4 MB/s, set
/// every 50 ms).
const RISE_THRESHOLD: f64 = 1.03;
const FALL_THRESHOLD: f64 = 0.995;
/// As [`FALL_THRESHOLD`], while another member's rate rises, so that the sum stays within the
/// limit.
const SHARED_FALL_THRESHOLD: f64 = 0.999;
/// As [`FALL_THRESHOLD`], under a watermark, which is not exact; and for idle members.
const WATERMARK_FALL_THRESHOLD: f64 = 0.97;
const IDLE_FALL_THRESHOLD: f64 = 0.9;

/// Units of rates, and the limits in each.
const UNITS: [UnitLimits; 2] = [
    UnitLimits { total: LimitKind::BpsTotal, by_direction: [LimitKind::BpsRead, LimitKind::BpsWrite] },
    UnitLimits { total: LimitKind::IopsTotal, by_direction: [LimitKind::IopsRead, LimitKind::IopsWrite] },
];

struct UnitLimits {
    total: LimitKind,
    /// Limits of reads and writes.
    by_direction: [LimitKind; 2],
}

/// A member of a pool.
#[derive(Clone, Debug)]
pub struct SteeredMember {
    weight: u32,
    last_measurement: Option<(Instant, IoCounters)>,
    active: Option<Instant>,
    waiting_seen: bool,
    demand: [[MemberDemand; 2]; 2],
    rates_set: Option<IoMaxRates>,
    /// Seconds for which requests have waited and none has completed.
    stuck_s: f64,
    /// Seconds without I/O and without waiting.
    idle_s: f64,
    /// True if the member is absent and its part is given to present ones.
    is_absent: bool,
    is_unmeasurable: bool,
}

impl SteeredMember {
    /// A member with this weight. Until its first measurement it counts as demanding everything.
    pub fn new(weight: u32) -> Self {
        Self {
            weight: weight.max(1),
            last_measurement: None,
            active: None,
            waiting_seen: false,
            demand: Default::default(),
            rates_set: None,
            stuck_s: 0.0,
            idle_s: 0.0,
            is_absent: false,
            is_unmeasurable: true,
        }
    }

    /// Rates set last.
    pub const fn rates_set(&self) -> Option<IoMaxRates> {
        self.rates_set
    }

    /// Counters at the last measurement.
    pub fn passed(&self) -> Option<IoCounters> {
        self.last_measurement.map(|(_, passed)| passed)
    }
}

/// Limits and the members that share them.
#[derive(Clone, Debug)]
pub struct SteeringPool {
    buckets: KernelBuckets,
    members: Vec<SteeredMember>,
    /// True for limits at their burst rate, by [`LimitKind::index`].
    bursting: [bool; 6],
    /// I/O of all members since the creation.
    passed: IoCounters,
    /// True if the limits are a part of larger ones and have been replaced: then no rate may exceed
    /// its part, not even slightly.
    is_quota: bool,
    has_changed: bool,
    decided_at: Option<Instant>,
    /// As [`ThrottleStats::throttled_ns`] and [`ThrottleStats::throttle_cause`].
    throttled_ns: u64,
    throttle_cause: Option<LimitKind>,
}

impl SteeringPool {
    /// A pool without members. The limits must be valid.
    pub fn new(limits: &Limits, now: Instant) -> Self {
        Self {
            buckets: KernelBuckets::new(limits, now),
            members: Vec::new(),
            bursting: LimitKind::ALL.map(|kind| limits.limit(kind).burst_rate > 0),
            passed: IoCounters::default(),
            is_quota: false,
            has_changed: false,
            decided_at: None,
            throttled_ns: 0,
            throttle_cause: None,
        }
    }

    /// Replaces the limits, which must be valid and a part of limits that other hosts share. The
    /// next [`decide`](SteeringPool::decide) lowers every rate above its part, by however little.
    /// Bucket levels are kept.
    pub fn set_limits(&mut self, limits: &Limits, now: Instant) {
        self.buckets.leak_to(now);
        let (levels, enforcement) = (self.buckets.levels(), self.enforcement());
        self.buckets = KernelBuckets::new(limits, now);
        self.buckets.enforce(enforcement);
        self.buckets.restore(levels);
        (self.is_quota, self.has_changed) = (true, true);
    }

    /// I/O and throttled time, for `cluster::DemandEstimator`. The number of waiting requests is
    /// unknown.
    pub fn stats(&self) -> ThrottleStats {
        let [reads, writes] = self.passed;
        ThrottleStats {
            reads,
            writes,
            waits: WaitSummary::default(),
            recent_waits: WaitSummary::default(),
            throttled_ns: self.throttled_ns,
            throttle_cause: self.throttle_cause.map(CauseKind::Limit),
            tokens: [None; 6],
            levels: [None; 6],
            waiting: [0; 2],
            reservation: None,
        }
    }

    /// Sum of the weights of the active members.
    pub fn weight(&self, now: Instant) -> u64 {
        let active = self.members.iter().filter(|member| member.is_active(now));
        active.map(|member| u64::from(member.weight)).sum()
    }

    /// A limit that some member uses entirely.
    fn throttling_limit(&self) -> Option<LimitKind> {
        let takes_all = |unit: usize, directions: core::ops::Range<usize>| {
            let present = self.members.iter().filter(|member| !member.is_absent && !member.is_unmeasurable);
            present
                .flat_map(|member| &member.demand[unit][directions.clone()])
                .any(|demand| demand.demand().is_infinite())
        };
        let of_unit = |(unit, UnitLimits { total, by_direction: of }): (usize, &UnitLimits)| {
            let kinds = [(*total, 0..2), (of[0], 0..1), (of[1], 1..2)];
            let mut kinds = kinds.into_iter().filter(|(kind, _)| self.limits().limit(*kind).rate > 0);
            kinds.find(|(_, directions)| takes_all(unit, directions.clone())).map(|(kind, _)| kind)
        };
        UNITS.iter().enumerate().find_map(of_unit)
    }

    /// Adds a member. Its index is the previous number of members.
    pub fn add(&mut self, member: SteeredMember) {
        self.members.push(member);
    }

    /// All members, by index.
    pub fn members(&self) -> &[SteeredMember] {
        &self.members
    }

    /// The limits of the pool.
    pub fn limits(&self) -> &Limits {
        self.buckets.limits()
    }

    /// I/O of all members since the creation.
    pub const fn passed(&self) -> &IoCounters {
        &self.passed
    }

    /// Bucket levels by [`LimitKind::index`], for [`resume`](SteeringPool::resume).
    pub fn levels(&self) -> [u64; 6] {
        self.buckets.levels()
    }

    /// Takes over the state of another pool: its bucket levels, and the counters of its members as
    /// of `since`. I/O after `since` is charged at the next measurement.
    pub fn resume(&mut self, since: Instant, levels: [u64; 6], passed: &[Option<IoCounters>]) {
        self.buckets.restore(levels);
        for (member, passed) in self.members.iter_mut().zip(passed) {
            member.last_measurement = passed.map(|passed| (since, passed));
        }
    }

    /// Changes how the limits are enforced, with the next [`decide`](SteeringPool::decide).
    pub fn enforce(&mut self, enforcement: Enforcement) {
        self.buckets.enforce(enforcement);
    }

    /// Current enforcement of the limits.
    pub const fn enforcement(&self) -> Enforcement {
        self.buckets.enforcement()
    }

    /// Records that setting a member's rates failed, so that the next decision sets them again.
    pub fn retry_setting(&mut self, member: usize) {
        self.members[member].rates_set = None;
    }

    /// Marks a member as absent. Until it is measured again, its part is divided among those
    /// present.
    pub fn set_absent(&mut self, member: usize) {
        let member = &mut self.members[member];
        *member = SteeredMember { is_absent: true, ..SteeredMember::new(member.weight) };
    }

    /// Marks a member as unmeasurable: it is set to the rates of
    /// [`rates_without_steering`](SteeringPool::rates_without_steering) and counts as demanding
    /// everything until it is measured again.
    pub fn set_unmeasurable(&mut self, member: usize) {
        let member = &mut self.members[member];
        *member = SteeredMember::new(member.weight);
    }

    /// Records a member's counters at `now`, and if it has waited since the last measurement
    /// (`None` if unknown).
    pub fn observe(&mut self, member: usize, now: Instant, passed: IoCounters, waited: Option<bool>) {
        let observed = &mut self.members[member];
        (observed.is_absent, observed.is_unmeasurable) = (false, false);
        let Some((before_at, before)) = observed.last_measurement.replace((now, passed)) else { return };
        observed.waiting_seen = waited.is_some();
        let elapsed_s = now.nanos_since(before_at) as f64 / 1e9;
        let counters = |passed: &IoCounters| passed.map(|passed| [passed.bytes, passed.requests]);
        let since =
            |direction: usize| counter::growths(&counters(&before)[direction], &counters(&passed)[direction]);
        // A counter fell: the cgroup was recreated, and its I/O since the last call is unknown.
        let (Some(read), Some(written)) = (since(0), since(1)) else { return };
        let since = [read, written];
        let is_idle = since.iter().flatten().all(|units| *units == 0);
        observed.stuck_s = if waited == Some(true) && is_idle { observed.stuck_s + elapsed_s } else { 0.0 };
        observed.idle_s = if waited == Some(false) && is_idle { observed.idle_s + elapsed_s } else { 0.0 };
        if observed.idle_s >= DEMAND_EXPIRY_S {
            observed.demand = Default::default();
        }
        let is_stuck = observed.stuck_s > 0.0 && observed.stuck_s < MAX_STUCK_S;
        // A stuck member demands more in the directions that it has used. Without waiting
        // statistics by direction, its recent rates are the only hint.
        let stuck = if is_stuck { observed.active_directions() } else { [false; 2] };
        let rates_set = observed.rates_set.unwrap_or_default();
        for direction in Direction::ALL {
            let index = direction.index();
            let [bytes, operations] = since[index];
            for (unit, unit_rates) in [rates_set.bps[index], rates_set.iops[index]].into_iter().enumerate() {
                let allowed = unit_rates.map(|rate| rate as f64);
                observed.demand[unit][index].observe(since[index][unit], elapsed_s, allowed, stuck[index]);
            }
            self.buckets.charge(direction, operations, bytes);
            let sum = &mut self.passed[index];
            sum.bytes = sum.bytes.saturating_add(bytes);
            sum.requests = sum.requests.saturating_add(operations);
        }
        let is_active = !is_idle || waited == Some(true);
        if is_active {
            observed.active = Some(now);
        }
    }

    /// The rates to set now, with the index of the member: those that fall come first.
    pub fn decide(&mut self, now: Instant) -> Vec<(usize, IoMaxRates)> {
        self.buckets.leak_to(now);
        if let Some(kind) = self.throttling_limit() {
            let since = self.decided_at.unwrap_or(now);
            self.throttled_ns = self.throttled_ns.saturating_add(now.nanos_since(since));
            self.throttle_cause = Some(kind);
        }
        self.decided_at = Some(now);
        let has_changed = core::mem::take(&mut self.has_changed);
        for kind in LimitKind::ALL {
            self.bursting[kind.index()] = self.may_burst(kind);
        }
        let rates = self.divided(|limit, kind| self.rate_now(limit, kind), MemberDemand::demand);
        let is_scaled = matches!(self.enforcement(), Enforcement::Scaled(_));
        let fall_threshold_of = |member: &SteeredMember| match (member.is_active(now), is_scaled) {
            (false, _) => IDLE_FALL_THRESHOLD,
            (true, true) => WATERMARK_FALL_THRESHOLD,
            (true, false) => FALL_THRESHOLD,
        };
        let rank_with = |member: &SteeredMember, rates: &IoMaxRates, fall: f64| {
            if member.is_absent || member.is_unmeasurable {
                None
            } else {
                change_rank(member.rates_set, *rates, fall)
            }
        };
        let pairs = || self.members.iter().zip(&rates);
        // If one member's rate rises, others must fall by as much, so even small falls are set.
        let any_gains = pairs().any(|(member, rates)| {
            rank_with(member, rates, fall_threshold_of(member)).is_some()
                && any_rate_rises(member.rates_set, *rates)
        });
        let rank_of = |(member, rates): (&SteeredMember, &IoMaxRates)| {
            let fall_threshold = match (self.is_quota, any_gains) {
                (true, true) => 1.0,
                (true, false) if has_changed => 1.0,
                (_, true) => SHARED_FALL_THRESHOLD,
                (_, false) => fall_threshold_of(member),
            };
            rank_with(member, rates, fall_threshold)
        };
        let ranks: Vec<Option<u8>> = pairs().map(rank_of).collect();
        let mut changes = Vec::new();
        for (index, (rank, rates)) in ranks.into_iter().zip(rates).enumerate() {
            if let Some(rank) = rank {
                self.members[index].rates_set = Some(rates);
                changes.push((rank, index, rates));
            }
        }
        changes.sort_by_key(|&(order, index, _)| (order, index));
        changes.into_iter().map(|(_, index, rates)| (index, rates)).collect()
    }

    /// Time of the next measurement of a member; `None` if only a watermark can change its rates.
    pub fn next_measurement(&self, member: usize, now: Instant) -> Option<Instant> {
        self.is_steered().then(|| self.next_measurement_of_any(member, now))
    }

    /// As [`next_measurement`](SteeringPool::next_measurement), for a caller that measures every
    /// pool because of a watermark.
    pub fn next_measurement_of_any(&self, member: usize, now: Instant) -> Instant {
        let member = &self.members[member];
        let Some((measured_at, _)) = member.last_measurement else { return now };
        let latest = measured_at + if member.is_active(now) { ACTIVE } else { IDLE };
        self.bursts_end(now).map_or(latest, |end| latest.min(end))
    }

    /// Earliest possible end of a burst, when all members must be measured; `None` without a burst.
    pub fn bursts_end(&self, now: Instant) -> Option<Instant> {
        let scale = self.scale();
        let present = self.members.iter().filter(|member| !member.is_absent);
        // I/O since the oldest measurement is not in the buckets yet; the burst rate bounds it.
        let oldest = present.filter_map(|member| Some(member.last_measurement?.0)).min().unwrap_or(now);
        let unknown_s = now.nanos_since(oldest) as f64 / 1e9;
        let burst_duration_s = |kind: LimitKind| {
            let RateLimit { rate, burst_rate, .. } = self.limits().limit(kind);
            let remaining = self.buckets.remaining(kind).filter(|_| self.bursting[kind.index()])?;
            let surplus = burst_rate.saturating_sub(rate) as f64 * scale;
            let known_credit = (remaining as f64 - burst_rate as f64 * scale * unknown_s).max(0.0);
            (surplus > 0.0).then(|| known_credit / surplus)
        };
        let shortest_s = LimitKind::ALL.into_iter().filter_map(burst_duration_s).reduce(f64::min)?;
        Some(now + Duration::from_secs_f64(shortest_s.min(MAX_S)).max(MIN_INTERVAL))
    }

    /// True if this pool needs steering ([`is_steered`]).
    pub fn is_steered(&self) -> bool {
        is_steered(self.limits(), self.members.len())
    }

    /// Rates to set when steering stops: limits without bursts, divided by weight.
    pub fn rates_without_steering(&self) -> Vec<IoMaxRates> {
        let rate = |limit: RateLimit, _| (limit.rate > 0).then_some(limit.rate as f64);
        self.divided(rate, |_| f64::INFINITY)
    }

    fn may_burst(&self, kind: LimitKind) -> bool {
        let RateLimit { rate, burst_rate, .. } = self.limits().limit(kind);
        let Some(remaining) = self.buckets.remaining(kind).filter(|_| burst_rate > 0) else { return false };
        let scale = self.scale();
        if self.bursting[kind.index()] {
            remaining as f64 > burst_rate.saturating_sub(rate) as f64 * scale * NEARLY_FULL_S
        } else {
            remaining as f64 >= burst_rate as f64 * scale * BURST_RESTART_S
        }
    }

    fn scale(&self) -> f64 {
        self.enforcement().scale().thousandths() as f64 / 1000.0
    }

    fn rate_now(&self, limit: RateLimit, kind: LimitKind) -> Option<f64> {
        if limit.rate == 0 || self.enforcement() == Enforcement::Lifted {
            return None;
        }
        let rate = if self.bursting[kind.index()] { limit.burst_rate } else { limit.rate };
        Some(rate as f64 * self.scale())
    }

    /// Rates of all members, given the `rate` of each limit and the demand `demand_of` each member.
    fn divided(
        &self,
        rate: impl Fn(RateLimit, LimitKind) -> Option<f64>,
        demand_of: impl Fn(&MemberDemand) -> f64,
    ) -> Vec<IoMaxRates> {
        let mut all: Vec<IoMaxRates> = self.members.iter().map(|_| IoMaxRates::NONE).collect();
        for (unit, UnitLimits { total, by_direction }) in UNITS.iter().enumerate() {
            for (kind, directions) in [(*total, 0..2), (by_direction[0], 0..1), (by_direction[1], 1..2)] {
                let Some(rate) = rate(self.limits().limit(kind), kind) else { continue };
                let parts = self.parts(rate, unit, directions.clone(), &demand_of);
                for (rates, parts) in all.iter_mut().zip(parts) {
                    let unit_rates = if unit == 0 { &mut rates.bps } else { &mut rates.iops };
                    for direction in directions.clone() {
                        // The kernel rejects rates below 2 (block/blk-throttle.c, tg_set_limit).
                        let part = (parts[direction] as u64).max(MIN_KERNEL_RATE);
                        unit_rates[direction] =
                            Some(unit_rates[direction].map_or(part, |current| current.min(part)));
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

    /// Divides one limit: by member, then by direction.
    fn parts(
        &self,
        rate: f64,
        unit: usize,
        directions: core::ops::Range<usize>,
        demand_of: impl Fn(&MemberDemand) -> f64,
    ) -> Vec<[f64; 2]> {
        let present = || self.members.iter().filter(|member| !member.is_absent);
        let weights: f64 = present().map(|member| f64::from(member.weight)).sum();
        let claim = |member: &SteeredMember| {
            let weight = f64::from(member.weight);
            let measured = || member.demand[unit][directions.clone()].iter().map(&demand_of).sum();
            let member_demand: f64 = if member.is_unmeasurable { f64::INFINITY } else { measured() };
            // An idle member keeps a small part: with a rate of nearly zero it could not show a new
            // demand.
            RateClaim { weight, demand: member_demand.max(rate * weight / weights * member.idle_part()) }
        };
        let claims: Vec<RateClaim> = present().map(claim).collect();
        let mut of_members = divide_rate(rate, &claims).into_iter();
        let of_directions = |(member, part): (&SteeredMember, f64)| {
            if directions.len() == 1 {
                return [part; 2];
            }
            let claim = |demand: &MemberDemand| RateClaim {
                weight: 1.0,
                demand: demand_of(demand).max(part / 2.0 * member.idle_part()),
            };
            // The kernel has no total: the member's part is split between its directions.
            let parts = divide_rate(part, &member.demand[unit].each_ref().map(claim));
            [parts[0], parts[1]]
        };
        let part =
            |member: &SteeredMember| if member.is_absent { 0.0 } else { of_members.next().unwrap_or(0.0) };
        let parts: Vec<f64> = self.members.iter().map(part).collect();
        self.members.iter().zip(parts).map(of_directions).collect()
    }
}

/// True if these limits have features that the kernel lacks: bursts, totals or several members.
pub fn is_steered(limits: &Limits, members: usize) -> bool {
    LimitKind::ALL.into_iter().any(|kind| {
        let RateLimit { rate, burst_rate, .. } = limits.limit(kind);
        let total = matches!(kind, LimitKind::BpsTotal | LimitKind::IopsTotal);
        burst_rate > 0 || (rate > 0 && (total || members > 1))
    })
}

impl SteeredMember {
    fn is_active(&self, now: Instant) -> bool {
        self.active.is_some_and(|active| now.nanos_since(active) < STILL_ACTIVE.as_nanos() as u64)
    }

    /// Directions with recent operations; both if neither has any.
    fn active_directions(&self) -> [bool; 2] {
        let operations = self.demand[1].each_ref().map(MemberDemand::rate);
        let total: f64 = operations.iter().sum();
        operations.map(|operations| operations >= total / 10.0)
    }

    fn idle_part(&self) -> f64 {
        if self.waiting_seen { IDLE_PART } else { IDLE_PART_UNSEEN }
    }
}

/// Bounds bytes by operations · `iops_size`, because the kernel counts an operation above
/// `iops-size` as one. A mixture of sizes may reach twice the limit in the worst case.
fn bound_sizes(rates: &mut IoMaxRates, iops_size: u64) {
    for direction in Direction::ALL.map(Direction::index) {
        let Some(operations) = rates.iops[direction] else { continue };
        let bytes = operations.saturating_mul(iops_size);
        rates.bps[direction] = Some(rates.bps[direction].map_or(bytes, |current| current.min(bytes)));
    }
}

/// Returns `None` if a change is too small to be set, otherwise its rank: 0 if a rate falls, so
/// that it is set before those that only rise (1).
fn change_rank(rates_set: Option<IoMaxRates>, rates: IoMaxRates, fall: f64) -> Option<u8> {
    let Some(rates_set) = rates_set else { return Some(1) };
    let (mut falls, mut rises) = (false, false);
    for (before, after) in
        rates_set.bps.iter().chain(&rates_set.iops).zip(rates.bps.iter().chain(&rates.iops))
    {
        match (before, after) {
            (None, None) => {}
            (None, Some(_)) => falls = true,
            (Some(_), None) => rises = true,
            (Some(before), Some(after)) => {
                let factor = *after as f64 / *before as f64;
                falls |= factor < fall;
                rises |= factor > RISE_THRESHOLD;
            }
        }
    }
    (falls || rises).then_some(u8::from(!falls))
}

fn any_rate_rises(rates_set: Option<IoMaxRates>, rates: IoMaxRates) -> bool {
    let rate_or_max = |rate: Option<u64>| rate.unwrap_or(u64::MAX);
    let Some(rates_set) = rates_set else { return true };
    let before = rates_set.bps.into_iter().chain(rates_set.iops).map(rate_or_max);
    before.zip(rates.bps.into_iter().chain(rates.iops).map(rate_or_max)).any(|(before, after)| after > before)
}
