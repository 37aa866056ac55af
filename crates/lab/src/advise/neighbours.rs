//! Tenants that share a device, or the limits of a group: how strictly the noisy ones must be
//! limited to keep the target, and whether weights or reservations achieve it at lower cost.
//!
//! ```text
//!   level: upper bound of each tenant's share of the device
//!
//!      1 ┤ █              tenants that need more are limited to the level, in operations or bytes,
//!        │ █              whichever uses more of the device; the rest is not limited
//!  level ┼─█───█───       result: the highest level that keeps the target of the unlimited ones
//!        │ █ █ █ █
//! ```
//!
//! If the target applies to limited tenants as well, the lowest level that keeps it is chosen: it
//! has the least capacity. Otherwise the highest is chosen: it does the least harm. The harm of a
//! plan is the highest mean latency among the limited tenants.
//!
//! A group over the device is tried as well. Its limit makes requests wait in the group, where
//! shares decide, instead of in the device's queue. The unlimited tenants get higher weights, which
//! guarantee nothing, or reservations. The plan that keeps the target with the least harm wins; at
//! equal harm, the simplest. If the disks are in one group with limits already, that group keeps
//! its limits, and other weights are tried in it.
//!
//! The search uses the parts of the trace with late requests, at most [`MAX_SEARCHED`] requests,
//! always of all disks. Its result is confirmed on the whole trace.

mod group;

use policy::throttle::{LimitKind, Limits, NodeShare, RateLimit, ReservationUnit};
use simulator::{device::SimulatedDevices, world::WorldSpec};

use super::{
    arrivals::TraceArrival,
    confidence::{ConfidenceInterval, LateRequests, interval_of_tried},
    tenant_limits::{AdviseSearch, TenantLimits, amount, limits_of},
    tenants::TenantWorld,
    trial::{SimulatedTrial, TrialResult},
};

const MAX_SEARCHED: u64 = 2_000_000;
/// Lower bound of the level, as a share of the device.
const LOWEST: f64 = 1e-3;
/// Levels closer than this factor count as equal.
const CLOSE: f64 = 1.02;
/// Number of times that a plan failing on the whole trace is tightened, by a twentieth each.
const TIGHTENINGS: usize = 6;
/// A plan does less harm than another only if its harm is below this factor times the other's.
const HARM_RATIO: f64 = 0.95;

/// Settings for the tenants of a device.
#[derive(Clone, Debug)]
pub(super) struct NeighbourPlan {
    /// By index among the neighbours; `None` for no limit.
    pub(super) limits: Vec<Option<Limits>>,
    /// Puts all of them in one group with these limits, and their shares in it. If they are in a
    /// common group already, its limits stay.
    pub(super) group: Option<(Limits, Vec<NodeShare>)>,
}

/// Result of the search.
#[derive(Debug)]
pub(super) struct NeighbourAdvice {
    pub(super) plan: NeighbourPlan,
    /// Simulated results, in the order of the neighbours.
    pub(super) results: Vec<TrialResult>,
    pub(super) meets_target: bool,
    /// The shortest time of a target that all could keep, of all plans tried; set if the target is
    /// missed.
    pub(super) reachable_ns: Option<u64>,
    /// Confidence interval of the limits, or of the group's limit.
    pub(super) interval: Option<ConfidenceInterval>,
}

/// A plan simulated on the whole trace, the results, and true if it keeps the target.
type ConfirmedPlan = (NeighbourPlan, Vec<TrialResult>, bool);

/// A tenant's share of a device, or of a group's limit, whichever is larger.
#[derive(Clone, Copy, Debug)]
struct TenantLoad {
    unit: ReservationUnit,
    /// Seconds of the whole device that a unit takes.
    unit_s: f64,
    /// The smallest rate without a burst at which the tenant alone keeps its target. A tenant whose
    /// level admits this rate is not limited.
    steady: f64,
    /// Units of the whole trace, and seconds of the whole device.
    units: f64,
    work_s: f64,
}

/// Neighbours on a device.
pub(super) struct Neighbours<'a> {
    search: AdviseSearch<'a>,
    tenants: &'a [usize],
    loads: Vec<TenantLoad>,
    has_target: Vec<bool>,
    tenant_world: TenantWorld,
    disks: Vec<usize>,
    /// The group with limits that contains all of them.
    common: Option<usize>,
    /// Blocks that the search uses, and the number of late requests allowed in them, by tenant.
    blocks: Vec<bool>,
    allowed: Vec<u64>,
    tried: Vec<TriedPlan>,
}

/// Record of a tried level or group.
struct TriedPlan {
    /// `None` for a group.
    level: Option<f64>,
    worst_ns: u64,
    /// Requests of the unlimited tenants, and of the limited ones.
    late_requests: [LateRequests; 2],
}

/// Factors around the level found, tried for the confidence interval.
const LEVEL_FACTORS: [f64; 10] = [0.25, 0.35, 0.5, 0.7, 0.85, 1.15, 1.4, 2.0, 3.0, 4.0];

/// The unit in which a tenant uses the larger share of its device or groups, with the seconds of
/// the whole device or limit per unit, and for all units.
pub(super) fn cost(search: &AdviseSearch<'_>, tenant: usize) -> (ReservationUnit, f64, f64) {
    let details = &search.tenants.tenants[tenant];
    let place = search.tenants.world.disks[search.tenants.disks[details.disks[0]]].place;
    // Comparing full and minimal lengths shows whether operations or bytes dominate the service
    // time.
    let world = &search.tenants.world;
    let worked_s = |with_length: bool| {
        let mut devices = SimulatedDevices::default();
        devices.follow(&world.stations, &world.budgets);
        for arrival in details.disks.iter().flat_map(|&disk| search.arrivals.streams[disk].iter()) {
            // One sector: the service time of a request without its payload.
            let length = if with_length { arrival.length } else { arrival.length.min(512) };
            devices.begin(place, arrival.op, length, 0);
        }
        devices.worked_ns(place, u64::MAX / 2) as f64 / 1e9
    };
    let (total_s, small) = (worked_s(true), worked_s(false));
    // Fixed costs dominate if minimal requests take more than half of the time.
    let of_device =
        (if small >= total_s / 2.0 { ReservationUnit::Iops } else { ReservationUnit::Bps }, total_s);
    let groups = search.tenants.limited_around(tenant).map(|group| &world.groups[group].settings.limits);
    let of_groups = groups
        .flat_map(|limits| LimitKind::ALL.map(|kind| seconds_of_limit(search, &details.disks, limits, kind)));
    let (unit, total_s) = std::iter::once(of_device)
        .chain(of_groups)
        .max_by(|one, other| one.1.total_cmp(&other.1))
        .expect("there is one");
    let units = amount(search.arrivals, &details.disks, unit).units.max(1) as f64;
    (unit, total_s / units, total_s)
}

/// Seconds in which a limit admits as much as these disks request.
fn seconds_of_limit(
    search: &AdviseSearch<'_>,
    disks: &[usize],
    limits: &Limits,
    kind: LimitKind,
) -> (ReservationUnit, f64) {
    let unit = if kind.counts_bytes() { ReservationUnit::Bps } else { ReservationUnit::Iops };
    let arrivals = disks.iter().flat_map(|&disk| search.arrivals.streams[disk].iter());
    let applies = |arrival: &TraceArrival| {
        arrival.op.direction().is_some_and(|direction| LimitKind::applying_to(direction).contains(&kind))
    };
    let units = |arrival: TraceArrival| match (unit, limits.iops_size) {
        (ReservationUnit::Bps, _) => arrival.length as f64,
        (ReservationUnit::Iops, 0) => 1.0,
        (ReservationUnit::Iops, size) => (arrival.length as f64 / size as f64).max(1.0),
    };
    let rate = limits.limit(kind).rate;
    let units: f64 = arrivals.filter(applies).map(units).sum();
    (unit, if rate == 0 { 0.0 } else { units / rate as f64 })
}

impl<'a> Neighbours<'a> {
    /// `before` has the results without limits, in the order of `tenants`.
    pub(super) fn new(
        search: AdviseSearch<'a>,
        tenants: &'a [usize],
        needs: &[Option<TenantLimits>],
        before: &[TrialResult],
    ) -> Self {
        let load = |&tenant: &usize| {
            let (unit, unit_s, work_s) = cost(&search, tenant);
            let units = amount(search.arrivals, &search.tenants.tenants[tenant].disks, unit).units as f64;
            let smallest = needs[tenant].as_ref().and_then(|need| need.smallest[unit.index()]);
            // Without a known steady rate no limit is capped.
            let steady = smallest.map_or(f64::INFINITY, |smallest| smallest.steady as f64);
            TenantLoad { unit, unit_s, steady, units, work_s }
        };
        let tenant_world = search.tenants.world_of(&search.tenants.unlimited_world, tenants);
        let disks: Vec<usize> =
            tenants.iter().flat_map(|&tenant| search.tenants.tenants[tenant].disks.iter().copied()).collect();
        let has_target = tenants
            .iter()
            .map(|&tenant| search.tenants.tenants[tenant].has_target && needs[tenant].is_some())
            .collect::<Vec<_>>();
        let mut shared = Self {
            search,
            tenants,
            loads: tenants.iter().map(load).collect(),
            has_target,
            tenant_world,
            disks,
            common: search.tenants.common_group(tenants),
            blocks: Vec::new(),
            allowed: Vec::new(),
            tried: Vec::new(),
        };
        // Needs the results without limits: they show where requests are late.
        shared.choose_blocks(before);
        shared
    }

    /// Selects the blocks with the most late requests; all blocks of a short trace.
    fn choose_blocks(&mut self, before: &[TrialResult]) {
        let criterion = &self.search.criterion;
        let mut requests = vec![0_u64; criterion.blocks.count];
        for (_, arrival) in self.search.arrivals.merged(&self.disks) {
            requests[criterion.blocks.of(arrival.at_ns)] += 1;
        }
        let over = |block: usize| {
            let targeted = before.iter().zip(&self.has_target).filter(|(_, has_target)| **has_target);
            targeted.map(|(result, _)| u64::from(result.late_in[block])).sum::<u64>()
        };
        let mut order: Vec<usize> = (0..requests.len()).collect();
        order.sort_by_key(|&block| std::cmp::Reverse(over(block)));
        let all = requests.iter().sum::<u64>() <= MAX_SEARCHED;
        self.blocks = vec![false; requests.len()];
        let mut sum = 0;
        for block in order {
            // At least one block is searched, even if it alone exceeds the bound.
            if all || sum == 0 || over(block) > 0 && sum + requests[block] <= MAX_SEARCHED {
                sum += requests[block];
                self.blocks[block] = true;
            }
        }
        let allowed = |result: &TrialResult| {
            let of_blocks = result.late_in.iter().zip(&self.blocks);
            let inside: u64 = of_blocks.filter(|(_, is_in)| **is_in).map(|(over, _)| u64::from(*over)).sum();
            let allowed = criterion.target.allowed_late(result.requests);
            // Blocks that are not searched keep their share of the allowance.
            if result.late == 0 {
                allowed
            } else {
                (u128::from(allowed) * u128::from(inside) / u128::from(result.late)) as u64
            }
        };
        self.allowed = before.iter().map(allowed).collect();
    }

    fn limited(&self, level: f64) -> Vec<Option<Limits>> {
        let is_for_some = self.search.tenants.tenants.iter().any(|tenant| !tenant.has_target);
        let limit = |(load, &has_target): (&TenantLoad, &bool)| {
            let rate = level / load.unit_s;
            // A tenant with a target is spared only if other tenants have none.
            let spared = is_for_some && has_target || rate >= load.steady || !rate.is_finite();
            (!spared).then(|| {
                let mut by_unit = [None; 2];
                by_unit[load.unit.index()] =
                    Some(RateLimit { rate: (rate as u64).max(1), ..RateLimit::NONE });
                limits_of(by_unit)
            })
        };
        self.loads.iter().zip(&self.has_target).map(limit).collect()
    }

    fn at_level(&self, level: f64) -> NeighbourPlan {
        NeighbourPlan { limits: self.limited(level), group: None }
    }

    /// Simulates a plan, on the searched blocks or on everything.
    fn run(&self, plan: &NeighbourPlan, everything: bool) -> anyhow::Result<Vec<TrialResult>> {
        let world = self.world(plan);
        let TenantWorld { disks, tenant_of, .. } = &self.tenant_world;
        let trial = SimulatedTrial { world: &world, disks, tenants: tenant_of, count: self.tenants.len() };
        let blocks = self.search.criterion.blocks;
        let arrivals = self.search.arrivals.merged(&self.disks);
        // Skipped blocks leave gaps in time, in which queues drain as in reality.
        let arrivals = arrivals.filter(|(_, arrival)| everything || self.blocks[blocks.of(arrival.at_ns)]);
        trial.run(arrivals, &self.search.criterion, self.search.stop)
    }

    fn world(&self, plan: &NeighbourPlan) -> WorldSpec {
        let tenants = self.search.tenants;
        let mut world = tenants.unlimited_world.clone();
        for (&tenant, limits) in self.tenants.iter().zip(&plan.limits) {
            if let Some(limits) = limits {
                tenants.set_limits(&mut world, tenant, *limits);
            }
        }
        if let Some((_, shares)) = &plan.group {
            self.tenants
                .iter()
                .zip(shares)
                .for_each(|(&tenant, share)| tenants.share(&mut world, tenant, *share));
        }
        let mut world = tenants.world_of(&world, self.tenants).world;
        if let Some((limits, _)) = &plan.group
            // An existing group keeps its limits; only the shares in it change.
            && self.common.is_none()
        {
            world.add_common_group(*limits);
        }
        world
    }

    /// True if all selected tenants that have a target keep it.
    fn keeps(&self, results: &[TrialResult], is_selected: impl Fn(usize) -> bool) -> bool {
        let mut selected =
            results.iter().enumerate().filter(|(place, _)| self.has_target[*place] && is_selected(*place));
        selected.all(|(place, result)| result.late <= self.allowed[place])
    }

    fn worst_ns(&self, results: &[TrialResult], is_selected: impl Fn(usize) -> bool) -> u64 {
        let selected =
            results.iter().enumerate().filter(|(place, _)| self.has_target[*place] && is_selected(*place));
        selected
            .map(
                |(_, result)| {
                    if result.abandoned { u64::MAX } else { result.judged_ns(&self.search.criterion) }
                },
            )
            .max()
            .unwrap_or(0)
    }

    fn record_tried(&mut self, level: Option<f64>, plan: &NeighbourPlan, results: &[TrialResult]) {
        let worst_ns = self.worst_ns(results, |_| true);
        let late_requests = [false, true].map(|is_limited| {
            self.late_requests(results, |place| plan.limits[place].is_some() == is_limited)
        });
        self.tried.push(TriedPlan { level, worst_ns, late_requests });
    }

    /// Late and all requests by block, of the selected tenants that have a target.
    fn late_requests(&self, results: &[TrialResult], is_selected: impl Fn(usize) -> bool) -> LateRequests {
        let selected =
            results.iter().enumerate().filter(|(place, _)| self.has_target[*place] && is_selected(*place));
        selected.map(|(_, result)| (result.late_in.clone(), result.requests_in.clone())).collect()
    }

    /// True if all blocks are searched. Otherwise they are selected by their late requests and are
    /// no sample of the trace, so they give no confidence interval.
    fn is_all_searched(&self) -> bool {
        self.blocks.iter().all(|&is_in| is_in)
    }

    /// Bootstrap confidence interval of the level: over days drawn from the blocks of the trace.
    /// `None` if not all blocks are searched.
    fn interval(&mut self, level: f64, is_highest: bool) -> anyhow::Result<Option<ConfidenceInterval>> {
        if !self.is_all_searched() {
            return Ok(None);
        }
        // Adds levels around the result, between which the bootstrap can place the boundary.
        for factor in LEVEL_FACTORS {
            self.try_level(level * factor)?;
        }
        let tried = self.tried.iter_mut().filter_map(|tried| {
            let late_requests = std::mem::take(&mut tried.late_requests[usize::from(!is_highest)]);
            tried.level.map(|level| (level, late_requests)).filter(|(_, judged)| !judged.is_empty())
        });
        let tried: Vec<_> = tried.collect();
        let found = interval_of_tried(&tried, is_highest, &self.search.criterion.target);
        Ok(found.map(|(low, high)| ConfidenceInterval::around(low / level, high / level)))
    }

    fn try_level(&mut self, level: f64) -> anyhow::Result<(bool, bool)> {
        let plan = self.at_level(level);
        let results = self.run(&plan, false)?;
        self.record_tried(Some(level), &plan, &results);
        let left_alone = |place: usize| plan.limits[place].is_none();
        // A trial is abandoned when too many requests wait, which are those of limited tenants.
        let is_whole = results.iter().all(|result| !result.abandoned);
        Ok((self.keeps(&results, left_alone), is_whole && self.keeps(&results, |place| !left_alone(place))))
    }

    /// The best plan, confirmed on the whole trace.
    pub(super) fn best_plan(mut self) -> anyhow::Result<NeighbourAdvice> {
        let by_level = self.by_level()?;
        let (mut best, mut interval) = (None, None);
        if let Some((level, is_highest)) = by_level {
            // Before confirming: the interval is about the search's level, not the tightened one.
            interval = self.interval(level, is_highest)?;
            best = Some(self.confirm(|neighbours, step| neighbours.at_level(level * 0.95_f64.powi(step)))?);
            let limited: Vec<bool> = self.limited(level).iter().map(Option::is_some).collect();
            for group in [self.by_weight(&limited)?, self.by_reservation(&limited)?].into_iter().flatten() {
                let (size, shares) = group;
                let of_group =
                    self.confirm(|neighbours, step| neighbours.grouped(size * 0.95_f64.powi(step), &shares))?;
                if best.as_ref().is_none_or(|before| self.is_better(&of_group, before, &limited)) {
                    interval = self.interval_of_group(size, &shares, &limited)?;
                    best = Some(of_group);
                }
            }
        }
        // Weights in the existing group need no new limit; tried last, and preferred only if
        // better.
        if let Some(weighed) = self.by_existing_group_weight()? {
            let limited: Vec<bool> = self.limited(LOWEST).iter().map(Option::is_some).collect();
            if best.as_ref().is_none_or(|before| self.is_better(&weighed, before, &limited)) {
                (best, interval) = (Some(weighed), None);
            }
        }
        let (plan, results, meets_target) = match best {
            Some(best) => best,
            None => {
                // No level suffices, even with all others limited to the minimum.
                let plan = NeighbourPlan { limits: vec![None; self.tenants.len()], group: None };
                let results = self.run(&plan, true)?;
                (plan, results, false)
            }
        };
        let reachable_ns = (!meets_target)
            .then(|| self.tried.iter().map(|tried| tried.worst_ns).filter(|&ns| ns < u64::MAX).min())
            .flatten();
        Ok(NeighbourAdvice { plan, results, meets_target, reachable_ns, interval })
    }

    /// Searches the level, with true for the highest that suffices and false for the lowest. `None`
    /// if the unlimited tenants miss the target at every level.
    fn by_level(&mut self) -> anyhow::Result<Option<(f64, bool)>> {
        let highest = self
            .loads
            .iter()
            .map(|load| load.steady * load.unit_s)
            .filter(|level| level.is_finite())
            .fold(1.0, f64::max);
        // The bisection is on a logarithmic scale. It is skipped if even the strictest limits do
        // not help.
        if !self.try_level(LOWEST)?.0 {
            return Ok(None);
        }
        let (mut low, mut high) = (LOWEST, highest * CLOSE);
        while high / low > CLOSE {
            let middle = (low * high).sqrt();
            if self.try_level(middle)?.0 { low = middle } else { high = middle }
        }
        let max_level = low;
        // The limited tenants with a target miss it: no level suits both sides.
        if !self.try_level(max_level)?.1 {
            self.balance(max_level, highest)?;
            return Ok(Some((max_level, true)));
        }
        // Some limited tenant has no target: the highest level harms it least.
        if self
            .limited(max_level)
            .iter()
            .zip(&self.has_target)
            .any(|(limits, has_target)| limits.is_some() && !has_target)
        {
            return Ok(Some((max_level, true)));
        }
        let (mut low, mut high) = (LOWEST, max_level);
        while high / low > CLOSE {
            let middle = (low * high).sqrt();
            if self.try_level(middle)?.1 { high = middle } else { low = middle }
        }
        Ok(Some((high, false)))
    }

    /// Searches the level at which limited and unlimited tenants are equally late: the shortest
    /// time that a target for all could have.
    fn balance(&mut self, from: f64, highest: f64) -> anyhow::Result<()> {
        let (mut low, mut high) = (from, highest * CLOSE);
        for _ in 0..6 {
            let middle = (low * high).sqrt();
            let plan = self.at_level(middle);
            let results = self.run(&plan, false)?;
            self.record_tried(Some(middle), &plan, &results);
            let limited = self.worst_ns(&results, |place| plan.limits[place].is_some());
            if limited > self.worst_ns(&results, |place| plan.limits[place].is_none()) {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(())
    }

    /// Tightens a plan until it keeps the target on the whole trace; returns the last plan in any
    /// case.
    fn confirm(&self, plan: impl Fn(&Self, i32) -> NeighbourPlan) -> anyhow::Result<ConfirmedPlan> {
        let mut step = 0;
        loop {
            let plan = plan(self, step);
            let results = self.run(&plan, true)?;
            let target = self.search.criterion.target;
            let holds = |place: usize| !self.has_target[place] || results[place].holds(&target);
            let places = 0..self.tenants.len();
            let meets_target = places.clone().all(holds);
            // Tightening helps unlimited tenants only; without one that is late it can stop.
            let is_tight = places.clone().all(|place| plan.limits[place].is_some() || holds(place));
            step += 1;
            if meets_target || is_tight && plan.group.is_none() || step as usize > TIGHTENINGS {
                return Ok((plan, results, meets_target));
            }
        }
    }

    /// True if `one` keeps the target and `other` does not, or if it does less harm to the limited
    /// tenants.
    fn is_better(&self, one: &ConfirmedPlan, other: &ConfirmedPlan, limited: &[bool]) -> bool {
        let harm = |results: &[TrialResult]| {
            let limited = (0..self.tenants.len()).filter(|&place| limited[place]);
            limited.map(|place| results[place].latency.mean()).fold(0.0, f64::max)
        };
        match (one.2, other.2) {
            (true, false) => true,
            (false, true) => false,
            (true, true) => harm(&one.1) < HARM_RATIO * harm(&other.1),
            // Neither keeps the target for all: it must at least be kept for the unlimited tenants.
            (false, false) => {
                self.keeps_all(&one.1, |place| !limited[place]) && harm(&one.1) < HARM_RATIO * harm(&other.1)
            }
        }
    }

    fn keeps_all(&self, results: &[TrialResult], is_selected: impl Fn(usize) -> bool) -> bool {
        let target = self.search.criterion.target;
        let mut selected =
            results.iter().enumerate().filter(|(place, _)| self.has_target[*place] && is_selected(*place));
        selected.all(|(_, result)| result.holds(&target))
    }
}
