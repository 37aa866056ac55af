//! Limits of a tenant alone: the smallest ones that keep its target without neighbours on its
//! device.

use std::sync::atomic::AtomicBool;

use policy::throttle::{LimitKind, Limits, RateLimit, ReservationUnit};

use super::{
    arrival_curve::demand,
    arrivals::{TraceArrival, TraceArrivals},
    confidence::{self, ConfidenceInterval, TraceBlocks},
    search::{RequestVolume, SearchTerms, SmallestLimits, smallest, valid_rate},
    tenants::{TenantWorld, Tenants},
    trial::{SimulatedTrial, TrialCriterion, TrialResult},
};

/// Steps in which insufficient limits are raised: by 1 %, doubling each time.
const RAISES: i32 = 10;
/// Bisection steps between a sufficient and an insufficient limit.
const HALVINGS: u32 = 5;

/// Result for a tenant whose requests move data.
#[derive(Clone, Debug)]
pub(super) struct TenantLimits {
    /// By unit; `None` if that unit is not limited.
    pub(super) smallest: [Option<SmallestLimits>; 2],
    /// Confidence interval of each, or the reason why there is none.
    pub(super) intervals: [Option<Result<ConfidenceInterval, String>>; 2],
    /// Simulated alone with these limits.
    pub(super) result: TrialResult,
    /// Latency at the percentile if the target is missed even without limits and neighbours.
    pub(super) impossible_ns: Option<u64>,
}

impl TenantLimits {
    pub(super) fn limits(&self) -> Limits {
        limits_of(self.smallest.map(|smallest| smallest.map(|found| found.limit)))
    }
}

pub(super) const fn total_limit_kind(unit: ReservationUnit) -> LimitKind {
    match unit {
        ReservationUnit::Iops => LimitKind::IopsTotal,
        ReservationUnit::Bps => LimitKind::BpsTotal,
    }
}

pub(super) fn limits_of(by_unit: [Option<RateLimit>; 2]) -> Limits {
    let mut limits = Limits::default();
    for (unit, limit) in ReservationUnit::ALL.into_iter().zip(by_unit) {
        *limits.limit_mut(total_limit_kind(unit)) = limit.unwrap_or(RateLimit::NONE);
    }
    limits
}

pub(super) fn amount(arrivals: &TraceArrivals, disks: &[usize], unit: ReservationUnit) -> RequestVolume {
    let blocks = TraceBlocks::new(arrivals.length_ns);
    let (mut amount, mut in_block) = (RequestVolume::default(), vec![0.0; blocks.count]);
    for stream in disks.iter().map(|&disk| &arrivals.streams[disk]) {
        amount.requests += stream.requests;
        amount.units += if unit == ReservationUnit::Iops { stream.requests } else { stream.moved_bytes };
        amount.peak = amount.peak.saturating_add(stream.peak[unit.index()]);
        demand(stream.iter(), unit).for_each(|(at_ns, units)| in_block[blocks.of(at_ns)] += units);
    }
    // The lower bound: a rate over an instant is meaningless.
    let seconds = blocks.seconds(arrivals.length_ns).max(0.1);
    amount.busiest = in_block.into_iter().fold(0.0, f64::max) / seconds;
    amount
}

/// Requests of a tenant by time, without their disks.
pub(super) fn merged_arrivals<'a>(
    arrivals: &'a TraceArrivals,
    disks: &'a [usize],
) -> Box<dyn Iterator<Item = TraceArrival> + 'a> {
    match disks {
        [only] => Box::new(arrivals.streams[*only].iter()),
        _ => Box::new(arrivals.merged(disks).map(|(_, arrival)| arrival)),
    }
}

/// Common input of all searches.
#[derive(Clone, Copy)]
pub(super) struct AdviseSearch<'a> {
    pub(super) tenants: &'a Tenants,
    pub(super) arrivals: &'a TraceArrivals,
    pub(super) criterion: TrialCriterion,
    pub(super) over_s: f64,
    pub(super) stop: &'a AtomicBool,
}

impl AdviseSearch<'_> {
    /// The smallest limits of a tenant; `None` if it has no request that is ever limited.
    pub(super) fn limits_alone(
        &self,
        tenant: usize,
        units: &[ReservationUnit],
    ) -> anyhow::Result<Option<TenantLimits>> {
        let disks = &self.tenants.tenants[tenant].disks;
        let requests = amount(self.arrivals, disks, ReservationUnit::Iops).requests;
        if requests == 0 {
            return Ok(None);
        }
        let tenant_world = self.tenants.world_of(&self.tenants.unlimited_world, &[tenant]);
        let target = self.criterion.target;
        let mut need = TenantLimits {
            smallest: [None; 2],
            intervals: [None, None],
            result: self.simulate_alone(&tenant_world, tenant, [None; 2])?,
            impossible_ns: None,
        };
        // Further search is pointless: no limit improves the latency of a tenant that is alone.
        if !need.result.holds(&target) {
            need.impossible_ns = Some(need.result.judged_ns(&self.criterion));
            return Ok(Some(need));
        }
        // Waits may use only the time that the device leaves of the target.
        let free_ns = target.time_ns.saturating_sub(need.result.judged_ns(&self.criterion));
        let terms = SearchTerms { target, wait_s: free_ns as f64 / 1e9, over_s: self.over_s };
        for &unit in units {
            let found = smallest(
                || merged_arrivals(self.arrivals, disks),
                unit,
                &amount(self.arrivals, disks, unit),
                &terms,
            );
            need.smallest[unit.index()] = found;
        }
        // The computed limits ignore the device's queue; a common factor corrects them.
        let (factor, felt) = self.fit_to_simulation(&tenant_world, tenant, &need)?;
        for unit in ReservationUnit::ALL {
            if let Some(smallest) = &mut need.smallest[unit.index()] {
                smallest.limit = scaled(smallest.limit, factor, unit);
                smallest.steady = scale(smallest.steady, factor, unit);
            }
        }
        // Waits in the simulation at the target's percentile: together with the device they just
        // meet it.
        let wait_s = if self.criterion.is_latency {
            felt.waited.value_at_quantile(target.share()) as f64 / 1e9
        } else {
            terms.wait_s
        };
        need.result = felt;
        for unit in ReservationUnit::ALL {
            let Some(SmallestLimits { limit, .. }) = need.smallest[unit.index()] else { continue };
            let demand = demand(merged_arrivals(self.arrivals, disks), unit);
            let terms = SearchTerms { wait_s, ..terms };
            need.intervals[unit.index()] =
                Some(confidence::limit_interval(demand, unit, limit, &terms, self.criterion.blocks));
        }
        Ok(Some(need))
    }

    /// The smallest factor on the limits that suffices in a simulation, and its result.
    fn fit_to_simulation(
        &self,
        tenant_world: &TenantWorld,
        tenant: usize,
        need: &TenantLimits,
    ) -> anyhow::Result<(f64, TrialResult)> {
        let limits = |factor: f64| {
            ReservationUnit::ALL
                .map(|unit| need.smallest[unit.index()].map(|smallest| scaled(smallest.limit, factor, unit)))
        };
        let trial = |factor: f64| self.simulate_alone(tenant_world, tenant, limits(factor));
        let holds = |result: &TrialResult| result.holds(&self.criterion.target);
        let (mut low, mut high) = (1.0, 1.0);
        let mut result = trial(1.0)?;
        if holds(&result) {
            if !self.criterion.is_latency {
                return Ok((1.0, result));
            }
            // The device's time at a percentile and the wait at a percentile do not add up, so the
            // computed limit may be too large.
            low = 0.5;
        } else {
            // Exponential search for a sufficient factor; bisection follows.
            for raise in 0..RAISES {
                (low, high) = (high, 1.0 + 0.01 * f64::from(1 << raise));
                result = trial(high)?;
                if holds(&result) {
                    break;
                }
            }
        }
        for _ in 0..HALVINGS {
            // Invariant: `high` suffices (or is the last one tried), `low` does not.
            let middle = f64::midpoint(low, high);
            let tried = trial(middle)?;
            if holds(&tried) {
                (high, result) = (middle, tried);
            } else {
                low = middle;
            }
        }
        Ok((high, result))
    }

    fn simulate_alone(
        &self,
        tenant_world: &TenantWorld,
        tenant: usize,
        limits: [Option<RateLimit>; 2],
    ) -> anyhow::Result<TrialResult> {
        let TenantWorld { world, disks, tenant_of } = tenant_world;
        let details = &self.tenants.tenants[tenant];
        let mut world = world.clone();
        // The world has only this tenant's disks, so a lone disk has index 0.
        let hold = match details.group {
            Some(group) => &mut world.groups[group].settings,
            None => &mut world.disks[0].settings,
        };
        hold.limits = limits_of(limits);
        let trial = SimulatedTrial { world: &world, disks, tenants: tenant_of, count: 1 };
        let results = match details.disks[..] {
            // One stream is ordered already.
            [only] => {
                let arrivals = self.arrivals.streams[only].iter().map(|arrival| (only, arrival));
                trial.run(arrivals, &self.criterion, self.stop)?
            }
            _ => trial.run(self.arrivals.merged(&details.disks), &self.criterion, self.stop)?,
        };
        Ok(results.into_iter().next().expect("there is one tenant"))
    }
}

fn scale(rate: u64, factor: f64, unit: ReservationUnit) -> u64 {
    // The common case, exact without rounding.
    if factor == 1.0 { rate } else { valid_rate(rate as f64 * factor, unit) }
}

fn scaled(limit: RateLimit, factor: f64, unit: ReservationUnit) -> RateLimit {
    let rate = scale(limit.rate, factor, unit);
    let burst_rate = if limit.burst_rate == 0 { 0 } else { scale(limit.burst_rate, factor, unit).max(rate) };
    RateLimit { rate, burst_rate, ..limit }
}
