//! A latency target for the tenants that must meet the advised one, in place of limits on their
//! neighbours: the daemon's controller throttles these only while the target is at risk.
//!
//! ```text
//!   --keep p99=TIME kept by the controller? ── yes ──► latency-target = TIME
//!                   │ no
//!                   ▼
//!   TIME … p99 without any limit: bisection  ──────► the smallest target found that is kept
//! ```
//!
//! Each trial simulates the whole trace with the controller that the daemon and `weir simulate`
//! run. Never replaces the advised limits: the caller prints both, with their effects.

use console::figures;
use policy::{
    latency_target::{PercentileTarget, TargetDirections},
    throttle::Limits,
};

use super::{
    TenantResult,
    advice::TargetPlan,
    change,
    settings::{self, AdvisedChange},
    tenant_limits::AdviseSearch,
    tenants::TenantWorld,
    trial::{SimulatedTrial, TrialCriterion, TrialResult},
};

/// Trials of the bisection: they divide a factor of 1,000 into steps of 12 %.
const TRIALS: usize = 6;
/// The bisection ends when the times differ by less than this factor.
const CLOSE: f64 = 1.1;

/// Adds the results of a latency target that takes the place of the limits of these neighbours.
/// Returns false if there is no target.
pub(super) fn advise_target(
    search: &AdviseSearch<'_>,
    neighbours: &[usize],
    unlimited: &[TrialResult],
    tenant_results: &mut [TenantResult],
) -> anyhow::Result<bool> {
    let tenants = &search.tenants.tenants;
    let unlimited: Vec<TrialResult> = neighbours.iter().map(|&tenant| unlimited[tenant].clone()).collect();
    let Some(kept) = smallest_kept(search, neighbours, &unlimited)? else { return Ok(false) };
    for (&tenant, result) in neighbours.iter().zip(kept.results) {
        tenant_results[tenant].latency_target = tenants[tenant].has_target.then_some(kept.target);
        tenant_results[tenant].targeted = Some(result);
    }
    Ok(true)
}

/// Compares the target of these neighbours with their limits, whose results must be final. `None`
/// without a target.
pub(super) fn remark(
    search: &AdviseSearch<'_>,
    neighbours: &[usize],
    tenant_results: &[TenantResult],
) -> Option<String> {
    let tenants = &search.tenants.tenants;
    let target = neighbours.iter().find_map(|tenant| tenant_results[*tenant].latency_target)?;
    let of_all = |is_targeted: bool| {
        let chosen = neighbours.iter().filter(|tenant| tenants[**tenant].has_target == is_targeted);
        chosen.map(|tenant| tenants[*tenant].name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let effect = |result: fn(&TenantResult) -> &Option<TrialResult>| {
        let others = neighbours.iter().filter(|tenant| !tenants[**tenant].has_target);
        let results = others.filter_map(|tenant| result(&tenant_results[*tenant]).as_ref());
        let figures = results.map(|result| result.figures(&search.criterion.target));
        let (iops, latency_ns) = figures.fold((0.0, 0), |(iops, latency_ns): (f64, u64), figures| {
            (iops + figures.iops, latency_ns.max(figures.latency_ns))
        });
        format!("{} operations a second within {}", figures::count(iops), figures::time(latency_ns))
    };
    let (with_limits, with_target) = (effect(|result| &result.after), effect(|result| &result.targeted));
    let is_advised =
        |tenant: &usize| tenant_results[*tenant].set.is_some() || tenant_results[*tenant].joins.is_some();
    let is_limited = |tenant: &usize| !search.tenants.configured(*tenant).limits.is_unlimited();
    let with = if neighbours.iter().any(is_advised) {
        "with the limits above"
    } else if neighbours.iter().any(is_limited) {
        "with the limits of the config file"
    } else {
        "without limits"
    };
    let percentile = search.criterion.target.name();
    Some(format!(
        "{}: instead of limits, a latency-target of {} at {percentile} is kept by throttling the others \
         only while it is at risk: {} would complete {with_target} at {percentile}, and {with_limits} \
         {with}. Limits fit this trace; a target follows the load.",
        of_all(true),
        figures::time(target.bound_ns()),
        of_all(false),
    ))
}

/// Commands and a config file with the latency targets instead of limits; `None` if there are none.
pub(super) fn target_plan(
    search: &AdviseSearch<'_>,
    results: &[TenantResult],
    before: Option<&str>,
) -> anyhow::Result<Option<TargetPlan>> {
    let mut changes: Vec<AdvisedChange> = Vec::new();
    for (tenant, result) in results.iter().enumerate().filter(|(_, result)| result.targeted.is_some()) {
        let is_limited = !search.tenants.configured(tenant).limits.is_unlimited();
        // Limits of the file would hold beside the target, and were not simulated.
        if result.latency_target.is_some() || is_limited {
            let latency_target = result.latency_target;
            changes.push(AdvisedChange { latency_target, ..change(search, tenant, Limits::default()) });
        }
    }
    if changes.is_empty() {
        return Ok(None);
    }
    Ok(Some(TargetPlan {
        commands: changes.iter().map(AdvisedChange::command).collect(),
        config: settings::config(before, &changes)?,
    }))
}

/// A target that the controller keeps.
#[derive(Debug)]
struct KeptTarget {
    target: PercentileTarget,
    /// Simulated results, in the order of the neighbours.
    results: Vec<TrialResult>,
}

/// The smallest target found, from the advised one on, that the controller keeps for all neighbours
/// that have a target. `None` if there is none, if all neighbours have a target, or if the daemon
/// accepts no target of this percentile or of these disks.
///
/// `unlimited` has the results without limits, in the order of the neighbours.
fn smallest_kept(
    search: &AdviseSearch<'_>,
    neighbours: &[usize],
    unlimited: &[TrialResult],
) -> anyhow::Result<Option<KeptTarget>> {
    let tenants = &search.tenants.tenants;
    let has_target = |&&tenant: &&usize| tenants[tenant].has_target;
    if !search.criterion.is_latency || neighbours.iter().all(|tenant| has_target(&tenant)) {
        return Ok(None);
    }
    let mut targeted = neighbours.iter().filter(has_target);
    if !targeted.all(|tenant| search.tenants.may_have_latency_target(*tenant)) {
        return Ok(None);
    }
    let Some(permyriad) = search.criterion.target.permyriad() else { return Ok(None) };
    let attempt = |time_ns: u64| -> anyhow::Result<Option<KeptTarget>> {
        let Some(target) = PercentileTarget::new(time_ns, permyriad, TargetDirections::All) else {
            return Ok(None);
        };
        let results = simulate(search, neighbours, target)?;
        let judged = search.criterion.target.with_time(time_ns);
        let is_kept = neighbours.iter().zip(&results).all(|(tenant, result)| {
            !tenants[*tenant].has_target || result.requests == 0 || result.holds(&judged)
        });
        Ok(is_kept.then_some(KeptTarget { target, results }))
    };
    let asked_ns = search.criterion.target.time_ns.max(*PercentileTarget::BOUNDS_NS.start());
    if let Some(kept) = attempt(asked_ns)? {
        return Ok(Some(kept));
    }
    let judged = neighbours.iter().zip(unlimited).filter(|(tenant, _)| tenants[**tenant].has_target);
    // At the present percentile the controller throttles hardly anything.
    let present_ns = judged.map(|(_, result)| result.judged_ns(&search.criterion)).max().unwrap_or(0);
    let (mut missed_ns, mut high_ns) = (asked_ns as f64, round_up(present_ns) as f64);
    let mut best = None;
    for _ in 0..TRIALS {
        if high_ns / missed_ns < CLOSE {
            break;
        }
        let middle_ns = round_up((missed_ns * high_ns).sqrt() as u64);
        match attempt(middle_ns)? {
            Some(kept) => (high_ns, best) = (middle_ns as f64, Some(kept)),
            None => missed_ns = middle_ns as f64,
        }
    }
    Ok(best)
}

fn simulate(
    search: &AdviseSearch<'_>,
    neighbours: &[usize],
    target: PercentileTarget,
) -> anyhow::Result<Vec<TrialResult>> {
    let all_tenants = search.tenants;
    let mut world = all_tenants.unlimited_world.clone();
    for &tenant in neighbours.iter().filter(|tenant| all_tenants.tenants[**tenant].has_target) {
        all_tenants.set_latency_target(&mut world, tenant, target);
    }
    let TenantWorld { world, disks, tenant_of } = all_tenants.world_of(&world, neighbours);
    let trial = SimulatedTrial { world: &world, disks: &disks, tenants: &tenant_of, count: neighbours.len() };
    let traced: Vec<usize> =
        neighbours.iter().flat_map(|&tenant| all_tenants.tenants[tenant].disks.iter().copied()).collect();
    let criterion =
        TrialCriterion { target: search.criterion.target.with_time(target.bound_ns()), ..search.criterion };
    trial.run(search.arrivals.merged(&traced), &criterion, search.stop)
}

/// Rounds up to two significant digits, as an operator would write it.
fn round_up(time_ns: u64) -> u64 {
    let step = 10_u64.pow(time_ns.max(1).ilog10().saturating_sub(1));
    time_ns.div_ceil(step).saturating_mul(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_digits() {
        for (ns, rounded) in
            [(0, 0), (7, 7), (99, 99), (101, 110), (13_700_001, 14_000_000), (99_500, 100_000)]
        {
            assert_eq!(round_up(ns), rounded, "{ns}");
        }
    }
}
