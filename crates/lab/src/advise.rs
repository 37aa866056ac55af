//! `weir advise`: the limits, bursts, weights and reservations that keep a target for the tenants
//! of a trace with the least capacity; and the smallest number of devices that they fit on.
//!
//! ```text
//!   traces ─► arrivals.rs ─► tenants.rs: tenants and their devices
//!                              │
//!        each alone            ▼         together on a device        choice of the device
//!        tenant_limits.rs ─────┬──────── neighbours.rs ───────────── packing.rs
//!         │                    │         latency_target.rs            │
//!         │ search.rs          │          │                           │
//!         │ arrival_curve.rs: waits from arrivals alone               │
//!         │ confidence.rs: confidence intervals by bootstrap          │
//!         └────────────────► trial.rs: simulate's engine ◄────────────┘
//!                              │
//!                              ▼
//!                            advice.rs, settings.rs: tables, JSON, commands, a config file
//! ```
//!
//! Every result is confirmed by a simulation with the daemon's own decisions. A target that cannot
//! be kept is reported, with the nearest one that can. Never changes a daemon: it prints commands.

mod advice;
mod arguments;
mod arrival_curve;
mod arrivals;
mod confidence;
mod latency_target;
mod neighbours;
mod packing;
mod search;
mod settings;
mod target;
mod tenant_limits;
mod tenants;
#[cfg(test)]
mod tests;
mod trial;

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use advice::{Advice, GroupMembership, PackedDevice, RateInterval, SmallestLimit, TenantAdvice};
use anyhow::{Context as _, anyhow};
pub use arguments::{AdviseArgs, EXAMPLES};
use arrivals::TraceArrivals;
use confidence::{ConfidenceInterval, TraceBlocks};
use console::{CommandFailure, figures, print, print_json, progress::ActivitySpinner};
use neighbours::{NeighbourAdvice, Neighbours};
use packing::AvailableDevices;
use policy::{
    latency_target::PercentileTarget,
    throttle::{LimitPart, LimitSetting, Limits, NodeShare, ReservationUnit},
    watermark::Watermark,
};
use recording::{MergedTraces, TraceOptions};
use settings::AdvisedChange;
use tenant_limits::{AdviseSearch, TenantLimits};
use tenants::Tenants;
use trial::{SimulatedTrial, TrialCriterion, TrialResult};

use crate::{
    interruption::SignalInterruption,
    latencies,
    simulate::{DeviceSpec, device_of},
};

/// Name of a group that the advice creates.
const GROUP: &str = "shared";

/// Computes the advice, prints it, and writes the requested config file.
///
/// # Errors
/// Fails on unreadable or inconsistent input; and, after printing, on a trace that was not read to
/// its end or a target that cannot be kept.
pub fn run(arguments: AdviseArgs) -> Result<(), CommandFailure> {
    if arguments.over.is_zero() {
        return Err(CommandFailure::Usage(anyhow!(
            "--over: a burst cannot be spread over no time (say 60s)"
        )));
    }
    let stop = Arc::new(AtomicBool::new(false));
    let stop_on_signal = Arc::clone(&stop);
    SignalInterruption::watch(move || stop_on_signal.store(true, Ordering::Relaxed), || {})?;
    let progress = ActivitySpinner::new();
    let options = TraceOptions { outcomes: true, ..arguments.reading.options() };
    // Traces are merged by time, so that disks recorded in separate files compete as they did.
    let mut source = MergedTraces::open(&arguments.traces, &options)?;
    let report_progress =
        |requests: u64| progress.set_message(|| format!("{} requests read", figures::count(requests as f64)));
    let arrivals = TraceArrivals::read(&mut source, &stop, &report_progress)?;
    // Releases the readers' buffers: the search needs the memory for its simulations.
    drop(source);
    // An interrupted trace is analyzed as far as it was read; the next signal interrupts the
    // analysis.
    stop.store(false, Ordering::Relaxed);
    let all_tenants = Tenants::new(&arguments, &arrivals)?;
    // Without any device the latency equals the wait, and whole-latency targets would be
    // meaningless.
    let judge = TrialCriterion {
        target: arguments.keep,
        is_latency: all_tenants.has_device || arguments.devices.pack,
        blocks: TraceBlocks::new(arrivals.length_ns),
    };
    let over_s = arguments.over.as_secs_f64();
    let search =
        AdviseSearch { tenants: &all_tenants, arrivals: &arrivals, criterion: judge, over_s, stop: &stop };
    let advice = if arguments.devices.pack {
        pack(&search, &arguments)?
    } else {
        let before = arguments.config.as_deref();
        advise(&search, before, &|progress_text| progress.set_message(|| progress_text.to_owned()))?
    };
    // Clears the progress line before the tables are printed.
    drop(progress);
    finish(&arguments, &advice)
}

fn finish(arguments: &AdviseArgs, advice: &Advice) -> Result<(), CommandFailure> {
    let to = arguments.output.write_config.as_deref();
    if arguments.output.json {
        print_json(advice)?;
    } else {
        print(&advice.text(to.is_none() && arguments.config.is_none()))?;
    }
    if let (Some(to), Some(config)) = (to, &advice.config) {
        let name = to.display();
        fs::write(to, config).with_context(|| format!("{name}: the config file cannot be written"))?;
    }
    // Reported after the output: a partial or unsatisfiable result is printed nevertheless.
    match &advice.partial {
        Some(why) => Err(CommandFailure::Failed(anyhow!("not read to the end: {why}"))),
        None if !advice.kept => Err(CommandFailure::Failed(anyhow!(
            "the target cannot be met for all (see above for targets that can)"
        ))),
        None => Ok(()),
    }
}

/// Results for one tenant.
struct TenantResult {
    need: Option<TenantLimits>,
    before: Option<TrialResult>,
    after: Option<TrialResult>,
    set: Option<Limits>,
    joins: Option<GroupMembership>,
    between: Option<RateInterval>,
    /// Result under a latency target instead of limits, and the target if it is this tenant's.
    targeted: Option<TrialResult>,
    latency_target: Option<PercentileTarget>,
}

impl TenantResult {
    const fn new(need: Option<TenantLimits>, after: Option<TrialResult>) -> Self {
        Self {
            need,
            before: None,
            after,
            set: None,
            joins: None,
            between: None,
            targeted: None,
            latency_target: None,
        }
    }
}

fn advise(
    search: &AdviseSearch<'_>,
    config: Option<&Path>,
    report_progress: &dyn Fn(&str),
) -> anyhow::Result<Advice> {
    let AdviseSearch { tenants: all_tenants, arrivals, criterion: judge, .. } = *search;
    let mut results = Vec::with_capacity(all_tenants.tenants.len());
    for (number, tenant) in all_tenants.tenants.iter().enumerate() {
        report_progress(&format!("{number} of {} tenants: {}", all_tenants.tenants.len(), tenant.name));
        // With a shared device or group, only the unit that it has least of matters. Otherwise that
        // unit is unknown, and both are searched.
        let is_shared = judge.is_latency || all_tenants.limited_around(number).next().is_some();
        let units =
            if is_shared { vec![neighbours::cost(search, number).0] } else { ReservationUnit::ALL.to_vec() };
        let need = if tenant.has_target || is_shared { search.limits_alone(number, &units)? } else { None };
        results.push(TenantResult::new(need, None));
    }
    let mut remarks = all_tenants.remarks.clone();
    remarks.extend((0..all_tenants.tenants.len()).filter_map(|tenant| remark_throttled(search, tenant)));
    let mut changes = Vec::new();
    let is_held = all_tenants.world.is_limited();
    // The present state, for the comparison with the advice.
    let before =
        (judge.is_latency || is_held).then(|| simulate_all(search, &all_tenants.world)).transpose()?;
    // A search starts without limits; the comparison is with the limits of the file.
    let unlimited = match &before {
        Some(_) if is_held => Some(simulate_all(search, &all_tenants.unlimited_world)?),
        other => other.clone(),
    };
    let mut with_target = Vec::new();
    // Tenants without a common resource are independent, and their own limits suffice.
    for neighbours in all_tenants.neighbours() {
        match &unlimited {
            Some(unlimited) if neighbours.len() > 1 => {
                report_progress("those that share a device or a group");
                advise_neighbours(search, &neighbours, unlimited, &mut results, &mut changes, &mut remarks)?;
                report_progress("a latency target instead of limits");
                if latency_target::advise_target(search, &neighbours, unlimited, &mut results)? {
                    with_target.push(neighbours);
                }
            }
            _ => {
                for &tenant in &neighbours {
                    advise_alone(search, tenant, &mut results[tenant], &mut remarks);
                }
            }
        }
    }
    // Compared with the recording only once, in the world as it was recorded.
    for (tenant, before) in before.into_iter().flatten().enumerate() {
        remarks.extend(remark_difference(search, tenant, &before));
        results[tenant].before = Some(before);
    }
    for (tenant, result) in results.iter().enumerate() {
        let Some(limits) = result.set else { continue };
        if all_tenants.configured(tenant).watermark != Watermark::ALWAYS {
            remarks.push(format!(
                "{}: its watermark lifts its limits while the device is not busy; all this is for \
                 limits that always hold.",
                all_tenants.tenants[tenant].name
            ));
        }
        changes.push(change(search, tenant, limits));
    }
    // Final check of all new limits together. Plans with a group were confirmed by the search.
    if is_held && !results.iter().any(|result| result.joins.is_some()) {
        let mut world = all_tenants.unlimited_world.clone();
        for (tenant, result) in results.iter().enumerate() {
            // Tenants without new limits keep those of the file.
            all_tenants.set_limits(
                &mut world,
                tenant,
                result.set.unwrap_or(all_tenants.configured(tenant).limits),
            );
        }
        for (result, after) in results.iter_mut().zip(simulate_all(search, &world)?) {
            result.after = Some(after);
        }
        for (tenant, result) in results.iter().enumerate() {
            remarks.extend(remark_own_limits(search, &world, tenant, result)?);
        }
    }
    // The final check has replaced the results of the searches.
    remarks.extend(with_target.iter().filter_map(|of| latency_target::remark(search, of, &results)));
    remarks.extend(own_limits_alone(search, &results));
    let before =
        config.map(::settings::config::read).transpose().context("the config file cannot be read")?;
    let lines: Vec<TenantAdvice> =
        results.iter().enumerate().map(|(tenant, result)| line(search, tenant, result)).collect();
    let text = (!changes.is_empty()).then(|| settings::config(before.as_deref(), &changes)).transpose()?;
    let latency_target = latency_target::target_plan(search, &results, before.as_deref())?;
    Ok(Advice {
        keep: judge.target.name(),
        keep_ns: judge.target.time_ns,
        judged: if judge.is_latency { "latency" } else { "wait" },
        seconds: arrivals.length_ns as f64 / 1e9,
        kept: lines.iter().all(|line| !line.has_target || line.kept != Some(false)),
        tenants: lines,
        devices: None,
        commands: changes.iter().map(AdvisedChange::command).collect(),
        config: text.or(before),
        latency_target,
        remarks,
        partial: arrivals.partial.clone(),
    })
}

/// Simulates all requests in one world.
fn simulate_all(
    search: &AdviseSearch<'_>,
    world: &simulator::world::WorldSpec,
) -> anyhow::Result<Vec<TrialResult>> {
    let Tenants { disks, tenants, tenant_of, .. } = search.tenants;
    let all: Vec<usize> = (0..search.arrivals.streams.len()).collect();
    let trial = SimulatedTrial { world, disks, tenants: tenant_of, count: tenants.len() };
    trial.run(search.arrivals.merged(&all), &search.criterion, search.stop)
}

/// Remark about a tenant that misses the target because of its configured limits alone.
fn remark_own_limits(
    search: &AdviseSearch<'_>,
    world: &simulator::world::WorldSpec,
    tenant: usize,
    result: &TenantResult,
) -> anyhow::Result<Option<String>> {
    let AdviseSearch { tenants: all_tenants, criterion: TrialCriterion { target, .. }, .. } = search;
    let details = &all_tenants.tenants[tenant];
    let misses = result.after.as_ref().is_some_and(|after| after.requests > 0 && !after.holds(target));
    if !details.has_target
        || !misses
        || result.set.is_some()
        || all_tenants.configured(tenant).limits.is_unlimited()
    {
        return Ok(None);
    }
    // The counterfactual: everything else unchanged, only this tenant without limits.
    let mut world = world.clone();
    all_tenants.set_limits(&mut world, tenant, Limits::default());
    let unlimited = simulate_all(search, &world)?.swap_remove(tenant);
    Ok(unlimited.holds(target).then(|| {
        format!(
            "{}: its own limits, of the config file, are what keeps it from the target: without \
             them its {} is {}. Raise them, or take them out.",
            details.name,
            target.name(),
            figures::time(unlimited.latency.value_at_quantile(target.share()))
        )
    }))
}

fn advise_alone(
    search: &AdviseSearch<'_>,
    tenant: usize,
    result: &mut TenantResult,
    remarks: &mut Vec<String>,
) {
    let details = &search.tenants.tenants[tenant];
    let Some(need) = &result.need else {
        if details.has_target {
            remarks.push(format!("{}: sends only flushes, which limits do not throttle.", details.name));
        }
        return;
    };
    result.after = Some(need.result.clone());
    // No limit shortens a latency that is too long without one.
    if let Some(ns) = need.impossible_ns {
        remarks.push(impossible(search, tenant, ns));
    } else if details.has_target {
        result.set = Some(need.limits()).filter(|limits| !limits.is_unlimited());
        if result.set.is_none() {
            remarks.push(format!("{}: it needs more than the maximum of a limit.", details.name));
        }
    }
    remark_no_interval(&details.name, need, remarks);
}

fn impossible(search: &AdviseSearch<'_>, tenant: usize, ns: u64) -> String {
    let percentile = search.criterion.target.name();
    let (details, latency_text, above) =
        (&search.tenants.tenants[tenant], figures::time(ns), target_above(ns));
    let name = &details.name;
    // The cause differs by kind of tenant: other disks of the group, the enclosing group, or the
    // device.
    if details.disks.len() > 1 {
        return format!(
            "{name}: without limits and alone on its device its {percentile} is {latency_text}; no limit \
             of the group shortens it, but a limit of a disk in the group may (give --for with the \
             disk that must meet the target, or a target of --keep {percentile}={above})."
        );
    }
    let around = search.tenants.limited_around(tenant).next();
    if let Some(group) = around.map(|group| &search.tenants.world.groups[group].name) {
        return format!(
            "{name}: without own limits and alone in {group} its {percentile} is {latency_text}; no limit \
             of a disk shortens it, but higher limits of {group} may (or a target of --keep \
             {percentile}={above})."
        );
    }
    format!(
        "{name}: without limits and alone on its device its {percentile} is {latency_text}; no limit \
         shortens it (give a target of --keep {percentile}={above}, or use a faster device)."
    )
}

/// Remark about a tenant with a target that gets a limit itself. Limits of its neighbours are not
/// recommended, because no resource that they share is known.
fn own_limits_alone(search: &AdviseSearch<'_>, results: &[TenantResult]) -> Option<String> {
    // With a device, or if every tenant has a target, the choice needs no explanation.
    let tenants = &search.tenants.tenants;
    if search.criterion.is_latency || tenants.iter().all(|tenant| tenant.has_target) {
        return None;
    }
    let limited =
        tenants.iter().zip(results).filter(|(tenant, result)| tenant.has_target && result.set.is_some());
    let names: Vec<_> = limited.map(|(tenant, _)| tenant.name.as_str()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "{}: this is the smallest limit of the disk itself. No limits of other disks are \
             recommended, because without a device they do not slow it: specify their shared \
             device by --device, --rate or --config.",
            names.join(", ")
        )
    })
}

/// Remark about a tenant that was throttled when it was recorded.
fn remark_throttled(search: &AdviseSearch<'_>, tenant: usize) -> Option<String> {
    let details = &search.tenants.tenants[tenant];
    let streams = || details.disks.iter().map(|&disk| &search.arrivals.streams[disk]);
    let [held, requests] =
        [streams().map(|stream| stream.throttled).sum::<u64>(), streams().map(|of| of.requests).sum()]
            .map(|count| count as f64);
    (held > requests * REMARKED_SHARE).then(|| {
        format!(
            "{}: limits throttled {:.0} % of its requests during the recording. Clients that wait \
             for replies then submit fewer requests, so it may need more than reported here: \
             record it without these limits, or with higher ones.",
            details.name,
            held / requests * 100.0
        )
    })
}

/// Remark about a tenant whose recorded latency differs from the simulated one.
fn remark_difference(search: &AdviseSearch<'_>, tenant: usize, simulated: &TrialResult) -> Option<String> {
    let AdviseSearch {
        criterion: TrialCriterion { target, is_latency: whole, .. },
        arrivals,
        tenants: all_tenants,
        ..
    } = search;
    let details = &all_tenants.tenants[tenant];
    let streams = || details.disks.iter().map(|&disk| &arrivals.streams[disk]);
    let mut measured = latencies::growing();
    for latencies in streams().filter_map(|stream| stream.measured.as_ref()) {
        measured.add(latencies).expect("it grows");
    }
    // A comparison needs recorded latencies, a complete simulation and enough requests.
    if !whole || simulated.abandoned || measured.len() < target.min_requests() {
        return None;
    }
    let [is_ns, was_ns] =
        [&simulated.latency, &measured].map(|times| times.value_at_quantile(target.share()));
    // Times far below the target do not affect the advice.
    if is_ns.max(was_ns).saturating_mul(IGNORED_FRACTION) < target.time_ns {
        return None;
    }
    let [in_a_row, requests] =
        [streams().map(|of| of.sequential).sum::<u64>(), streams().map(|of| of.requests).sum()];
    // The simulation cannot merge adjacent requests, because offsets are not stored.
    let why = if is_ns > was_ns.saturating_mul(REMARKED_FACTOR) && in_a_row > requests / 2 {
        "most of its requests are sequential: weir merges these, unlike the simulation, so they \
         need less than it reports"
    } else if is_ns > was_ns.saturating_mul(REMARKED_FACTOR) {
        "the device is faster than specified, limits of others were in force, or weir merged \
         sequential requests of a neighbour"
    } else if was_ns > is_ns.saturating_mul(REMARKED_FACTOR) {
        "the device is slower than specified, or limits were in force (give them with --config)"
    } else {
        return None;
    };
    Some(format!(
        "{}: its {} is {} in the simulation, and was {} when it was recorded: {why}.",
        details.name,
        target.name(),
        figures::time(is_ns),
        figures::time(was_ns)
    ))
}

/// Share of throttled requests above which it is remarked; less is an occasional burst.
const REMARKED_SHARE: f64 = 0.1;
/// Factor between recorded and simulated times above which the difference is remarked.
const REMARKED_FACTOR: u64 = 2;
/// Times below the target divided by this are not compared.
const IGNORED_FRACTION: u64 = 4;

/// Formats a time as an option's value, rounded up.
fn target_above(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns}ns"),
        10_000..10_000_000 => format!("{}us", ns.div_ceil(1000)),
        _ => format!("{}ms", ns.div_ceil(1_000_000)),
    }
}

fn remark_no_interval(name: &str, need: &TenantLimits, remarks: &mut Vec<String>) {
    let why = need.intervals.iter().flatten().find_map(|certainty| certainty.as_ref().err());
    if let Some(why) = why {
        remarks
            .push(format!("{name}: {why}. The limit fits this trace; its confidence interval is unknown."));
    }
}

fn advise_neighbours(
    search: &AdviseSearch<'_>,
    neighbours: &[usize],
    unlimited: &[TrialResult],
    tenant_results: &mut [TenantResult],
    changes: &mut Vec<AdvisedChange>,
    remarks: &mut Vec<String>,
) -> anyhow::Result<()> {
    let all_tenants = search.tenants;
    let target = search.criterion.target;
    let mut is_possible = true;
    for &tenant in neighbours {
        let name = &all_tenants.tenants[tenant].name;
        let need = tenant_results[tenant].need.as_ref();
        if let Some(ns) =
            need.and_then(|need| need.impossible_ns).filter(|_| all_tenants.tenants[tenant].has_target)
        {
            is_possible = false;
            remarks.push(impossible(search, tenant, ns));
        }
        need.into_iter().for_each(|need| remark_no_interval(name, need, remarks));
    }
    // Results of the unlimited world, in the neighbours' order, as `Neighbours` expects them.
    let unlimited_results: Vec<TrialResult> =
        neighbours.iter().map(|&tenant| unlimited[tenant].clone()).collect();
    let holds = |&tenant: &usize| !all_tenants.tenants[tenant].has_target || unlimited[tenant].holds(&target);
    let names = |members: &mut dyn Iterator<Item = usize>| {
        members.map(|tenant| all_tenants.tenants[tenant].name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let group =
        all_tenants.common_group(neighbours).map(|group| all_tenants.world.groups[group].name.clone());
    let is_device = group.is_none() && search.criterion.is_latency;
    let place = match &group {
        Some(group) => format!("in {group}"),
        None if is_device => "on their device".to_owned(),
        None => "in their groups".to_owned(),
    };
    // Nothing to limit: the neighbours keep the target together.
    if neighbours.iter().all(holds) {
        for (&tenant, result) in neighbours.iter().zip(unlimited_results) {
            tenant_results[tenant].after = Some(result);
        }
        let tenant_names = names(&mut neighbours.iter().copied());
        remarks.push(format!("{tenant_names}: together {place} they meet the target without any limit."));
        return Ok(());
    }
    let needs: Vec<Option<TenantLimits>> = tenant_results.iter().map(|result| result.need.clone()).collect();
    let NeighbourAdvice {
        plan,
        results: trial_results,
        meets_target: is_kept,
        reachable_ns: could_ns,
        interval,
    } = Neighbours::new(*search, neighbours, &needs, &unlimited_results).best_plan()?;
    for ((&tenant, limits), trial_result) in neighbours.iter().zip(&plan.limits).zip(trial_results) {
        tenant_results[tenant].after = Some(trial_result);
        tenant_results[tenant].set = *limits;
        tenant_results[tenant].between = limits
            .zip(interval)
            .map(|(limits, interval)| RateInterval::of(limited_unit(&limits).1, interval));
        if let (Some(limits), Some(interval)) = (limits, interval) {
            let details = &all_tenants.tenants[tenant];
            let spares = if details.has_target {
                ""
            } else {
                " At the lower end the others meet the target on most of them."
            };
            remarks.push(interval_text(search, &details.name, limits, interval) + spares);
        }
    }
    // Weights and reservations are alternatives; a plan never has both.
    if let Some((limits, shares)) = plan.group {
        let name = group.clone().unwrap_or_else(|| group_name(all_tenants));
        let are_weights = shares.iter().any(|share| share.weight() != NodeShare::default().weight());
        let divided_by = if are_weights { "weights" } else { "reservations" };
        if group.is_none() {
            changes.push(AdvisedChange {
                is_group: true,
                is_new: true,
                name: name.clone(),
                limits,
                ..AdvisedChange::default()
            });
        }
        for (&tenant, share) in neighbours.iter().zip(shares) {
            tenant_results[tenant].joins = Some(GroupMembership::of(&name, share));
            changes.push(AdvisedChange {
                group: Some(name.clone()),
                share,
                is_weighed: are_weights,
                ..change(search, tenant, Limits::default())
            });
        }
        remarks.push(match &group {
            Some(_) => format!(
                "With other {divided_by} in {name} no limit is needed: limits on only the noisy disks \
                 would make these wait longer."
            ),
            None => format!(
                "In one group, {name}, requests wait where {divided_by} apply, and not in the device's \
                 queue: limits on only the noisy disks would make these wait longer."
            ),
        });
        remarks.extend(interval.map(|interval| interval_text(search, &name, &limits, interval)));
    }
    // Each tenant alone could keep its target, so the shortage is in the shared resource.
    if !is_kept && is_possible {
        let late = |&&tenant: &&usize| {
            all_tenants.tenants[tenant].has_target
                && tenant_results[tenant].after.as_ref().is_some_and(|after| !after.holds(&target))
        };
        let late_names = names(&mut neighbours.iter().filter(late).copied());
        let percentile = target.name();
        let cannot = if is_device {
            "the device cannot meet the target".to_owned()
        } else {
            format!("the target cannot be met {place}")
        };
        let more = if is_device { " (--pack computes the number of devices needed)" } else { "" };
        remarks.push(match could_ns {
            Some(ns) => format!(
                "{late_names}: {cannot} for all. With the printed limits the others meet the target; all \
                 of them can meet about --keep {percentile}={} (or give --for with the disks that \
                 must meet it).",
                target_above(ns)
            ),
            None => format!("{late_names}: {cannot}, even with the strictest limits on the others{more}."),
        });
    }
    Ok(())
}

/// The limited unit and its rate.
fn limited_unit(limits: &Limits) -> (ReservationUnit, u64) {
    let rate = |unit: ReservationUnit| limits.limit(tenant_limits::total_limit_kind(unit)).rate;
    let unit = if rate(ReservationUnit::Iops) > 0 { ReservationUnit::Iops } else { ReservationUnit::Bps };
    (unit, rate(unit))
}

fn interval_text(
    search: &AdviseSearch<'_>,
    name: &str,
    limits: &Limits,
    interval: ConfidenceInterval,
) -> String {
    let (unit, rate) = limited_unit(limits);
    let setting = LimitSetting::Limit(tenant_limits::total_limit_kind(unit), LimitPart::Rate);
    let rate_shown =
        if unit == ReservationUnit::Bps { ::settings::exact_size(rate) } else { rate.to_string() };
    let prefix = format!("{name}: {setting} {rate_shown} is for this trace");
    let blocks = search.criterion.blocks.name();
    let other_days = format!("on 95 of 100 other days made of the same {blocks} it would be");
    let RateInterval { low, high } = RateInterval::of(rate, interval);
    let [low_shown, high_shown] = [low, high.unwrap_or(0)].map(|value| advice::count(value as f64, unit));
    match high {
        Some(_) => format!("{prefix}; {other_days} between {low_shown} and {high_shown}."),
        None if low > 0 => {
            format!(
                "{prefix}; {other_days} at least {low_shown}, and this trace does not show how much at most."
            )
        }
        None => {
            format!("{prefix}, whose {blocks} differ too much to estimate it for other days.")
        }
    }
}

/// A group name that is not in use.
fn group_name(tenants: &Tenants) -> String {
    let is_taken = |name: &str| {
        tenants.world.groups.iter().any(|group| group.name == name)
            || tenants.world.disks.iter().any(|disk| disk.name == name)
    };
    // Groups and disks share one namespace in the daemon.
    let numbered = (2..).map(|number| format!("{GROUP}-{number}"));
    std::iter::once(GROUP.to_owned())
        .chain(numbered)
        .find(|name| !is_taken(name))
        .expect("numbers do not end")
}

fn change(search: &AdviseSearch<'_>, tenant: usize, limits: Limits) -> AdvisedChange {
    let details = &search.tenants.tenants[tenant];
    let size = |disk: &usize| search.arrivals.streams[*disk].end_bytes;
    AdvisedChange {
        is_group: details.group.is_some(),
        name: details.name.clone(),
        limits,
        before: *search.tenants.configured(tenant),
        size_bytes: details.disks.iter().map(size).max().unwrap_or(0),
        ..AdvisedChange::default()
    }
}

fn line(search: &AdviseSearch<'_>, tenant: usize, result: &TenantResult) -> TenantAdvice {
    let details = &search.tenants.tenants[tenant];
    let target = &search.criterion.target;
    let smallest = |unit: ReservationUnit| {
        let need = result.need.as_ref()?;
        let found = need.smallest[unit.index()]?;
        let certainty = need.intervals[unit.index()].as_ref();
        Some(SmallestLimit {
            limit: found.limit,
            rate_without_burst: found.steady,
            between: certainty
                .and_then(|certainty| certainty.as_ref().ok())
                .map(|interval| RateInterval::of(found.limit.rate, *interval)),
            unsure: certainty.and_then(|certainty| certainty.as_ref().err().cloned()),
        })
    };
    let set = result.set.map(|limits| {
        let settings = LimitSetting::ALL.iter().filter(|setting| settings::is_set(&limits, **setting));
        settings.map(|setting| (setting.name().to_owned(), limits.get(*setting))).collect()
    });
    TenantAdvice {
        kind: details.kind(),
        name: details.name.clone(),
        requests: details.disks.iter().map(|&disk| search.arrivals.streams[disk].requests).sum(),
        has_target: details.has_target,
        kept: result.after.as_ref().filter(|after| after.requests > 0).map(|felt| felt.holds(target)),
        smallest_iops: smallest(ReservationUnit::Iops),
        smallest_bps: smallest(ReservationUnit::Bps),
        set,
        joins: result.joins.clone(),
        set_between: result.between,
        before: result.before.as_ref().filter(|before| before.requests > 0).map(|felt| felt.figures(target)),
        after: result.after.as_ref().filter(|after| after.requests > 0).map(|felt| felt.figures(target)),
        latency_target_ns: result.latency_target.map(PercentileTarget::bound_ns),
        with_latency_target: result
            .targeted
            .as_ref()
            .filter(|felt| felt.requests > 0)
            .map(|felt| felt.figures(target)),
    }
}

fn pack(search: &AdviseSearch<'_>, arguments: &AdviseArgs) -> anyhow::Result<Advice> {
    let devices = &arguments.devices;
    let resolve = |spec| device_of(spec, devices.state.as_deref());
    // A single device means any number of that kind; several are an inventory.
    let supply = match &devices.device[..] {
        [only] => AvailableDevices::Identical(resolve(only)?),
        several => AvailableDevices::Inventory(several.iter().map(resolve).collect::<anyhow::Result<_>>()?),
    };
    let AdviseSearch { tenants: all_tenants, arrivals, criterion: judge, .. } = *search;
    let packing = packing::pack(search, &supply)?;
    let name = |tenant: usize| all_tenants.tenants[tenant].name.clone();
    let mut remarks = Vec::new();
    let mut results: Vec<Option<TrialResult>> = vec![None; all_tenants.tenants.len()];
    let on_device = |packed: &packing::DeviceAssignment| PackedDevice {
        device: match supply {
            AvailableDevices::Identical(_) => (packed.device + 1).to_string(),
            AvailableDevices::Inventory(_) => match &devices.device[packed.device] {
                DeviceSpec::Probed(path) => path.display().to_string(),
                DeviceSpec::Modelled { .. } => (packed.device + 1).to_string(),
            },
        },
        disks: packed.tenants.iter().map(|&tenant| name(tenant)).collect(),
        busiest: packed.busiest,
        latency_ns: packed.results.iter().map(|result| result.judged_ns(&judge)).max().unwrap_or(0),
    };
    let on_devices: Vec<PackedDevice> = packing.devices.iter().map(on_device).collect();
    let (count, target) = (packing.devices.len(), judge.target);
    let disks: usize = packing.devices.iter().map(|packed| packed.tenants.len()).sum();
    if count > 0 {
        let optimum = if packing.at_least == count { ", and fewer do not suffice" } else { "" };
        let (all, devices) = (
            if disks == 1 { "disk fits" } else { "disks fit" },
            if count == 1 { "device" } else { "devices" },
        );
        remarks.push(format!(
            "{disks} {all} on {count} of these {devices} with {} <= {}{optimum}.",
            target.name(),
            figures::time(target.time_ns)
        ));
    }
    if !packing.left_over.is_empty() {
        let names: Vec<_> = packing.left_over.iter().map(|&tenant| name(tenant)).collect();
        remarks.push(format!("No device meets the target for: {}.", names.join(", ")));
    }
    for packed in packing.devices {
        for (tenant, one) in packed.tenants.into_iter().zip(packed.results) {
            results[tenant] = Some(one);
        }
    }
    // Packing sets no limits, so only the simulated results are reported.
    let lines = results
        .into_iter()
        .enumerate()
        .map(|(tenant, after)| line(search, tenant, &TenantResult::new(None, after)));
    Ok(Advice {
        keep: target.name(),
        keep_ns: target.time_ns,
        judged: "latency",
        seconds: arrivals.length_ns as f64 / 1e9,
        kept: packing.left_over.is_empty(),
        tenants: lines.collect(),
        devices: Some(on_devices),
        commands: Vec::new(),
        config: None,
        latency_target: None,
        remarks,
        partial: arrivals.partial.clone(),
    })
}
