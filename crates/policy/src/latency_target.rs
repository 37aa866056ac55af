//! Latency targets: throttles the other members of a device so that a member keeps its percentile.
//!
//! ```text
//!   completions of the target ─► tail.rs ─► setpoint: response time of the device
//!                                               │
//!   completions, in flight ──► response time ─► budget.rs ─► rate of all controlled members
//!        ▲                                                       │
//!        └── device ◄── throttle tree ◄── caps ◄── division.rs ◄─┘
//! ```
//!
//! **Two loops.** The inner one (`budget.rs`) keeps the device's mean response time at a setpoint.
//! Thousands of completions per second of all members measure it, so it reacts within 100 ms to a
//! new load or a slower device. It admits as much as completes, plus or minus a correction, and
//! therefore needs no capacity. The outer one (`tail.rs`) moves the setpoint until the target's
//! percentile is met. Its input is the number of late completions, because a percentile of the few
//! completions of a short interval is noise.
//!
//! **Order.** A single budget is divided (`division.rs`): first ordinary members, by weight and
//! demand, then spare-capacity work. Each gets at least its reservation and its floor. A member
//! whose target is looser than the strictest one in control counts as ordinary.
//!
//! **Targets that cannot be met.** If all controlled members are at their minimum for
//! [`GIVE_UP`] and the target is still missed, throttling is useless. The state reports the
//! percentile that the device then achieved, and the members are released for [`RETRY`], or until
//! the device's throughput changes by a factor of two.
//!
//! Decision 72 compares this law with others. Never caps a member below its reservation or its
//! floor, nor before a target has been missed; the sum of all caps is at most the sum of these
//! minima, or twice the device's highest recent throughput.

mod budget;
mod claim;
mod division;
mod members;
mod reserved;
mod tail;
mod target;

pub use members::{LatencyMemberSettings, Membership, PlacedDisk, memberships};
pub use target::{LatencySettings, PercentileTarget, TargetDirections};

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::histogram::LatencyHistogram;
use crate::throttle::{LimitKind, Limits, MAX_VALUE, NodeShare};
use crate::time::{Duration, Instant};
use budget::{BudgetLoop, RateBounds, ResponseSample};
use claim::{MemberClaim, default_floor, spread};
use division::{BudgetClaim, divide_budget};
use tail::TailLoop;

/// Bytes of a unit of work. A member's work is the larger of its requests and its bytes in these
/// units, as if a device with 10,000 IOPS transferred 650 MB/s. Devices differ, but a wrong ratio
/// only shifts shares between members: the budget follows from the response time.
pub const UNIT_BYTES: u64 = 64 * 1024;

/// Time for which all controlled members are at their minimum before a missed target counts as
/// impossible.
pub const GIVE_UP: Duration = Duration::from_secs(5);
/// Time after which a target that could not be met is tried again.
pub const RETRY: Duration = Duration::from_secs(60);
/// Time without a member that waits for its cap after which caps are removed.
pub const SLACK: Duration = Duration::from_secs(2);
/// Time without requests of a target after which it no longer causes caps.
pub const IDLE: Duration = Duration::from_secs(10);

/// Interval between steps above which measurements are discarded.
const STALE_S: f64 = 1.0;
/// Time constant of the decaying maximum of the device's throughput, from which floors follow.
const PEAK_S: f64 = 60.0;
/// Time constant of the smoothed throughput that detects a new load after a release, and the time
/// that it takes to settle.
const LOAD_S: f64 = 1.0;
const LOAD_SETTLED_S: f64 = 5.0;
/// Change of throughput after which a target is tried again.
const LOAD_FACTOR: f64 = 2.0;
/// The budget counts as the sum of the minima below this multiple of it.
const AT_MINIMUM: f64 = 1.01;
/// Largest budget as a multiple of the highest recent throughput.
const MAX_BUDGET: f64 = 2.0;

/// Priority of a member's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberClass {
    /// Work that may only use spare capacity: prefetch, background jobs. Throttled first.
    SpareCapacity,
    /// Work without a target.
    Ordinary,
    /// Work with a target. Throttled only for a stricter target.
    Target(PercentileTarget),
}

/// Measurements of one member since the last step.
#[derive(Clone, Copy, Debug)]
pub struct MemberSample<'a> {
    /// Identifies the member in all steps. A disk and its prefetch are two members; a group with a
    /// target is one.
    pub key: u64,
    /// Priority.
    pub class: MemberClass,
    /// Weight and reservation.
    pub share: NodeShare,
    /// Minimum rate in units per second ([`UNIT_BYTES`]); `None` for the default: 1 % of the
    /// device's highest throughput of the last minute, and at most 10 % for all members together.
    pub floor: Option<u64>,
    /// Completed requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests admitted and not completed now, by direction.
    pub in_flight: [u64; 2],
    /// Mean number of requests in flight since the last step; 0 if it is unknown. With a few
    /// requests in flight, their number at one instant is noise.
    pub mean_in_flight: f64,
    /// True if requests waited for the cap since the last step, or wait now. Waits for the member's
    /// own limits or its groups' do not count.
    pub is_waiting: bool,
    /// Times from admission to completion, by direction
    /// ([`Direction::index`](crate::request::Direction::index)). Required for a target, ignored
    /// otherwise.
    pub latencies: Option<&'a [LatencyHistogram; 2]>,
}

impl MemberSample<'_> {
    fn units(&self) -> f64 {
        (self.requests as f64).max(self.bytes as f64 / UNIT_BYTES as f64)
    }
}

/// Bound on the rate of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RateCap {
    units_per_s: u64,
}

impl RateCap {
    /// A cap of this rate, which is at least 1 unit per second.
    pub const fn new(units_per_s: u64) -> Self {
        Self { units_per_s: if units_per_s == 0 { 1 } else { units_per_s } }
    }

    /// The rate in units per second, at least 1 ([`UNIT_BYTES`]).
    pub const fn units_per_s(self) -> u64 {
        self.units_per_s
    }

    /// The cap as limits for [`ThrottleTree::set_cap`](crate::throttle::ThrottleTree::set_cap);
    /// always valid. Ordinary limits would grant a member that was idle a tenth of a second of its
    /// rate at once.
    pub fn limits(self) -> Limits {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = self.units_per_s.min(MAX_VALUE);
        limits.limit_mut(LimitKind::BpsTotal).rate =
            self.units_per_s.saturating_mul(UNIT_BYTES).min(MAX_VALUE);
        limits
    }
}

/// State of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetState {
    /// Met without caps, or not tested because there are too few completions.
    Met,
    /// Other members are capped for it.
    Controlling,
    /// Missed although all others were at their minimum. They are released until it is tried again.
    CannotBeMet {
        /// The percentile that the target's member had beside members at their minimum.
        alone_ns: u64,
        /// The latest time at which it is tried again.
        retry: Instant,
    },
}

/// A target, its measurements and its state.
#[derive(Clone, Debug)]
struct TargetControl {
    tail: TailLoop,
    state: TargetState,
    idle_s: f64,
}

/// Throughput after a release, to detect a new load.
#[derive(Clone, Copy, Debug)]
struct ReleasedLoad {
    rate: f64,
    /// Throughput once it has settled.
    reference: Option<f64>,
    since: Instant,
}

/// Decides the caps of all members of one device.
///
/// Call [`step`](LatencyController::step) about every 50 ms with the measurements of all members,
/// then set the [`cap`](LatencyController::cap) of each.
#[derive(Clone, Debug, Default)]
pub struct LatencyController {
    last: Option<Instant>,
    /// Decaying maximum of the device's throughput, in units per second.
    peak_rate: f64,
    targets: BTreeMap<u64, TargetControl>,
    claims: BTreeMap<u64, MemberClaim>,
    caps: BTreeMap<u64, RateCap>,
    /// `None` without caps.
    budget: Option<BudgetLoop>,
    slack_s: f64,
    at_minimum_s: f64,
    released: Option<ReleasedLoad>,
}

impl LatencyController {
    /// A controller without measurements; no member has a cap.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cap of a member; `None` if it is not throttled.
    pub fn cap(&self, member: u64) -> Option<RateCap> {
        self.caps.get(&member).copied()
    }

    /// A part of the device's highest throughput of about the last minute, in units per second
    /// ([`UNIT_BYTES`]): the floor of a member.
    pub fn floor_rate(&self, permyriad: u16) -> u64 {
        (self.peak_rate * f64::from(permyriad) / 10_000.0) as u64
    }

    /// State of a member's target; `None` if it has none.
    pub fn state(&self, member: u64) -> Option<TargetState> {
        Some(self.targets.get(&member)?.state)
    }

    /// Adds the measurements of all members of the device since the last step, taken at `now`, and
    /// decides the caps. After more than a second without a step, all caps are removed.
    pub fn step(&mut self, now: Instant, samples: &[MemberSample<'_>]) {
        let elapsed_s = self.last.map_or(f64::INFINITY, |last| now.nanos_since(last) as f64 / 1e9);
        if elapsed_s <= 0.0 {
            return;
        }
        self.last = Some(now);
        self.update_members(samples);
        if elapsed_s > STALE_S {
            // The counters cover an interval of unknown length.
            return self.release();
        }
        let rate = samples.iter().map(MemberSample::units).sum::<f64>() / elapsed_s;
        self.peak_rate = (self.peak_rate * (1.0 - elapsed_s / PEAK_S)).max(rate);
        let load_changed = self.observe_released_load(rate, now, elapsed_s);
        self.observe_targets(samples, now, elapsed_s, load_changed);
        let in_control = || self.targets.values().filter(|control| control.is_controlling());
        let Some(bound_ns) = in_control().map(|control| control.tail.target().bound_ns()).min() else {
            return self.release();
        };
        let setpoint_ns =
            in_control().map(|control| control.tail.setpoint_ns()).fold(f64::INFINITY, f64::min);
        let is_controlled = |sample: &&MemberSample<'_>| match sample.class {
            MemberClass::Target(target) => target.bound_ns() > bound_ns,
            MemberClass::SpareCapacity | MemberClass::Ordinary => true,
        };
        let controlled: Vec<&MemberSample<'_>> = samples.iter().filter(is_controlled).collect();
        self.control(&controlled, &ResponseSample::new(samples, &controlled, elapsed_s), setpoint_ns);
        self.finish(now, elapsed_s);
    }

    /// Adapts the setpoint to the measured response time, then budget and caps to the setpoint.
    fn control(&mut self, controlled: &[&MemberSample<'_>], response: &ResponseSample, setpoint_ns: f64) {
        let elapsed_s = response.elapsed_s;
        let budget = self.budget.get_or_insert_with(|| BudgetLoop::new(response));
        let response_ns = budget.observe(response);
        for control in self.targets.values_mut().filter(|control| control.is_controlling()) {
            control.tail.adapt(response_ns, self.at_minimum_s > 0.0);
        }
        let (peak_rate, histories) = (self.peak_rate, &self.claims);
        let claim = |sample: &&MemberSample<'_>| {
            let floor = default_floor(peak_rate, controlled.len());
            histories.get(&sample.key).map(|history| history.claim(sample, floor, elapsed_s))
        };
        let claims: Vec<BudgetClaim> = controlled.iter().filter_map(claim).collect();
        let minimum = claims.iter().map(|claim| claim.minimum).sum();
        let bounds = RateBounds { minimum, maximum: self.peak_rate * MAX_BUDGET };
        let rate = budget.decide(response, setpoint_ns, bounds);
        let cap = |((sample, claim), part): ((&&MemberSample<'_>, &BudgetClaim), f64)| {
            let spread_part = part * (1.0 - spread(sample.key));
            (sample.key, RateCap { units_per_s: spread_part.max(claim.minimum) as u64 })
        };
        let parts = divide_budget(rate, &claims);
        self.caps = controlled.iter().zip(&claims).zip(parts).map(cap).collect();
        self.slack_s = if response.is_waiting { 0.0 } else { self.slack_s + elapsed_s };
        if rate > minimum * AT_MINIMUM {
            self.at_minimum_s = 0.0;
            return;
        }
        if self.at_minimum_s == 0.0 {
            self.restart_tests();
        }
        self.at_minimum_s += elapsed_s;
    }

    /// Ends control: because of slack, or because it is useless.
    fn finish(&mut self, now: Instant, elapsed_s: f64) {
        let is_slack = self.slack_s >= SLACK.as_secs_f64();
        let is_useless = self.at_minimum_s >= GIVE_UP.as_secs_f64();
        for control in self.targets.values_mut().filter(|control| control.is_controlling()) {
            if is_useless && control.tail.is_missed() {
                let alone_ns = control.tail.percentile_ns();
                control.state = TargetState::CannotBeMet { alone_ns, retry: now + RETRY };
                self.released = Some(ReleasedLoad { rate: 0.0, reference: None, since: now });
            } else if (is_slack && !control.tail.is_missed()) || control.idle_s >= IDLE.as_secs_f64() {
                control.state = TargetState::Met;
                control.tail.restart_test();
            }
        }
        if is_useless {
            // Targets that remain in control get a test of their own.
            self.at_minimum_s = elapsed_s;
            self.restart_tests();
        }
        if !self.targets.values().any(TargetControl::is_controlling) {
            self.release();
        }
    }

    fn restart_tests(&mut self) {
        for control in self.targets.values_mut().filter(|control| control.is_controlling()) {
            control.tail.restart_test();
        }
    }

    fn release(&mut self) {
        self.caps.clear();
        self.budget = None;
        (self.slack_s, self.at_minimum_s) = (0.0, 0.0);
    }

    /// Adds new members and targets, and removes those that no longer exist.
    fn update_members(&mut self, samples: &[MemberSample<'_>]) {
        let mut claims = core::mem::take(&mut self.claims);
        let mut targets = core::mem::take(&mut self.targets);
        for sample in samples {
            let mut claim = claims.remove(&sample.key).unwrap_or_default();
            claim.observe(sample);
            self.claims.insert(sample.key, claim);
            let MemberClass::Target(target) = sample.class else { continue };
            let unchanged = targets.remove(&sample.key).filter(|control| control.tail.target() == target);
            self.targets.insert(sample.key, unchanged.unwrap_or_else(|| TargetControl::new(target)));
        }
    }

    fn observe_targets(
        &mut self,
        samples: &[MemberSample<'_>],
        now: Instant,
        elapsed_s: f64,
        load_changed: bool,
    ) {
        for sample in samples {
            if let Some(control) = self.targets.get_mut(&sample.key) {
                control.observe(sample, now, elapsed_s, load_changed);
            }
        }
    }

    /// Returns true if the throughput has changed since a release by [`LOAD_FACTOR`].
    fn observe_released_load(&mut self, rate: f64, now: Instant, elapsed_s: f64) -> bool {
        let Some(released) = &mut self.released else { return false };
        released.rate += (rate - released.rate) * elapsed_s / (LOAD_S + elapsed_s);
        if now.nanos_since(released.since) as f64 / 1e9 < LOAD_SETTLED_S {
            return false;
        }
        let reference = *released.reference.get_or_insert(released.rate);
        let has_changed = released.rate > reference * LOAD_FACTOR || released.rate * LOAD_FACTOR < reference;
        if has_changed {
            self.released = None;
        }
        has_changed
    }
}

impl TargetControl {
    fn new(target: PercentileTarget) -> Self {
        Self { tail: TailLoop::new(target), state: TargetState::Met, idle_s: 0.0 }
    }

    fn is_controlling(&self) -> bool {
        self.state == TargetState::Controlling
    }

    fn observe(&mut self, sample: &MemberSample<'_>, now: Instant, elapsed_s: f64, load_changed: bool) {
        let is_idle = sample.requests == 0 && sample.in_flight == [0; 2];
        self.idle_s = if is_idle { self.idle_s + elapsed_s } else { 0.0 };
        self.tail.observe(sample, elapsed_s);
        match self.state {
            TargetState::Met if self.tail.is_missed() => self.state = TargetState::Controlling,
            TargetState::CannotBeMet { retry, .. }
                if now >= retry || load_changed || self.tail.is_clearly_met() =>
            {
                self.state = TargetState::Met;
                self.tail.restart_test();
            }
            _ => {}
        }
    }
}
