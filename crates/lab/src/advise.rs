//! `weir advise`: the limits, bursts, weights and reservations that keep a target for the tenants
//! of a trace with the least capacity; and the smallest number of devices that they fit on.
//!
//! ```text
//!   traces ─► arrivals.rs ─► house.rs: tenants and their devices
//!                              │
//!        each alone            ▼         together on a device        choice of the device
//!        need.rs ──────────────┬──────── shared.rs ───────────────── packing.rs
//!         │ search.rs          │          │                           │
//!         │ envelope.rs: waits from arrivals alone                    │
//!         │ certainty.rs: confidence intervals by bootstrap           │
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
mod arrivals;
mod certainty;
mod envelope;
mod house;
mod need;
mod packing;
mod search;
mod settings;
mod shared;
mod target;
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

use advice::{Advice, Between, Joins, Line, OnDevice, Smallest};
use anyhow::{Context as _, anyhow};
pub use arguments::{AdviseArgs, EXAMPLES};
use arrivals::Arrivals;
use certainty::{Blocks, Interval};
use console::{Failure, figures, print, print_json, progress::Spinner};
use house::House;
use need::{Need, Search};
use packing::Supply;
use policy::{
    throttle::{Limits, Part, Setting, Share, Unit},
    watermark::Watermark,
};
use recording::{Merged, Options};
use settings::Change;
use shared::{Found, Shared};
use trial::{Felt, Judge, Trial};

use crate::{
    interruption::Interruption,
    latencies,
    simulate::{DeviceSpec, device_of},
};

/// Name of a group that the advice creates.
const GROUP: &str = "shared";

/// Computes the advice, prints it, and writes the requested config file.
///
/// # Errors
/// Unreadable or inconsistent input; and, after printing, a trace that was not read to its end or a
/// target that cannot be kept.
pub fn run(arguments: AdviseArgs) -> Result<(), Failure> {
    if arguments.over.is_zero() {
        return Err(Failure::Usage(anyhow!("--over: a burst cannot be spread over no time (say 60s)")));
    }
    let stop = Arc::new(AtomicBool::new(false));
    let heard = Arc::clone(&stop);
    Interruption::watch(move || heard.store(true, Ordering::Relaxed), || {})?;
    let progress = Spinner::new();
    let options = Options { outcomes: true, ..arguments.reading.options() };
    // Traces are merged by time, so that disks recorded in separate files compete as they did.
    let mut source = Merged::open(&arguments.traces, &options)?;
    let tell = |requests: u64| progress.say(|| format!("{} requests read", figures::count(requests as f64)));
    let arrivals = Arrivals::read(&mut source, &stop, &tell)?;
    // Releases the readers' buffers: the search needs the memory for its simulations.
    drop(source);
    // An interrupted trace is analyzed as far as it was read; the next signal interrupts the
    // analysis.
    stop.store(false, Ordering::Relaxed);
    let house = House::new(&arguments, &arrivals)?;
    // Without any device the latency equals the wait, and whole-latency targets would be
    // meaningless.
    let judge = Judge {
        target: arguments.keep,
        whole: house.has_device || arguments.devices.pack,
        blocks: Blocks::new(arrivals.length_ns),
    };
    let over_s = arguments.over.as_secs_f64();
    let search = Search { house: &house, arrivals: &arrivals, judge, over_s, stop: &stop };
    let advice = if arguments.devices.pack {
        pack(&search, &arguments)?
    } else {
        let before = arguments.config.as_deref();
        advise(&search, before, &|what| progress.say(|| what.to_owned()))?
    };
    // Clears the progress line before the tables are printed.
    drop(progress);
    finish(&arguments, &advice)
}

fn finish(arguments: &AdviseArgs, advice: &Advice) -> Result<(), Failure> {
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
        Some(why) => Err(Failure::Failed(anyhow!("not read to the end: {why}"))),
        None if !advice.kept => {
            Err(Failure::Failed(anyhow!("the target cannot be kept for all (see above what could be)")))
        }
        None => Ok(()),
    }
}

/// Results for one tenant.
struct Told {
    need: Option<Need>,
    before: Option<Felt>,
    after: Option<Felt>,
    set: Option<Limits>,
    joins: Option<Joins>,
    between: Option<Between>,
}

fn advise(search: &Search<'_>, config: Option<&Path>, tell: &dyn Fn(&str)) -> anyhow::Result<Advice> {
    let Search { house, arrivals, judge, .. } = *search;
    let mut told = Vec::with_capacity(house.tenants.len());
    for (number, tenant) in house.tenants.iter().enumerate() {
        tell(&format!("{number} of {} tenants: {}", house.tenants.len(), tenant.name));
        // With a shared device or group, only the unit that it has least of matters. Otherwise that
        // unit is unknown, and both are searched.
        let is_shared = judge.whole || house.limited_around(number).next().is_some();
        let units = if is_shared { vec![shared::cost(search, number).0] } else { Unit::ALL.to_vec() };
        let need = if tenant.is_kept || is_shared { search.need(number, &units)? } else { None };
        told.push(Told { need, before: None, after: None, set: None, joins: None, between: None });
    }
    let mut remarks = house.remarks.clone();
    remarks.extend((0..house.tenants.len()).filter_map(|tenant| held_back(search, tenant)));
    let mut changes = Vec::new();
    let is_held = house.world.is_limited();
    // The present state, for the comparison. `bare` is the start of a search: without tenants'
    // limits.
    let before = (judge.whole || is_held).then(|| everything(search, &house.world)).transpose()?;
    // A search starts without limits; the comparison is with the limits of the file.
    let bare = match &before {
        Some(_) if is_held => Some(everything(search, &house.bare)?),
        other => other.clone(),
    };
    // Tenants without a common resource are independent, and their own limits suffice.
    for neighbours in house.neighbours() {
        match &bare {
            Some(bare) if neighbours.len() > 1 => {
                tell("those that share a device or a group");
                share(search, &neighbours, bare, &mut told, &mut changes, &mut remarks)?;
            }
            _ => {
                for &tenant in &neighbours {
                    by_itself(search, tenant, &mut told[tenant], &mut remarks);
                }
            }
        }
    }
    // Compared with the recording only once, in the world as it was recorded.
    for (tenant, before) in before.into_iter().flatten().enumerate() {
        remarks.extend(unlike(search, tenant, &before));
        told[tenant].before = Some(before);
    }
    for (tenant, told) in told.iter().enumerate() {
        let Some(limits) = told.set else { continue };
        if house.held(tenant).watermark != Watermark::ALWAYS {
            remarks.push(format!(
                "{}: its watermark lifts its limits while the device is not busy; all this is for limits that always hold.",
                house.tenants[tenant].name
            ));
        }
        changes.push(change(search, tenant, limits));
    }
    // Final check of all new limits together. Plans with a group were confirmed by the search.
    if is_held && !told.iter().any(|told| told.joins.is_some()) {
        let mut world = house.bare.clone();
        for (tenant, told) in told.iter().enumerate() {
            // Tenants without new limits keep those of the file.
            house.limit(&mut world, tenant, told.set.unwrap_or(house.held(tenant).limits));
        }
        for (told, after) in told.iter_mut().zip(everything(search, &world)?) {
            told.after = Some(after);
        }
        for (tenant, told) in told.iter().enumerate() {
            remarks.extend(too_narrow(search, &world, tenant, told)?);
        }
    }
    remarks.extend(own_limits_alone(search, &told));
    let before =
        config.map(::settings::config::read).transpose().context("the config file cannot be read")?;
    let lines: Vec<Line> = told.iter().enumerate().map(|(tenant, told)| line(search, tenant, told)).collect();
    let text = (!changes.is_empty()).then(|| settings::config(before.as_deref(), &changes)).transpose()?;
    Ok(Advice {
        keep: judge.target.name(),
        keep_ns: judge.target.time_ns,
        judged: if judge.whole { "latency" } else { "wait" },
        seconds: arrivals.length_ns as f64 / 1e9,
        kept: lines.iter().all(|line| !line.asked || line.kept != Some(false)),
        tenants: lines,
        devices: None,
        commands: changes.iter().map(Change::command).collect(),
        config: text.or(before),
        remarks,
        partial: arrivals.partial.clone(),
    })
}

/// Simulates all requests in one world.
fn everything(search: &Search<'_>, world: &simulator::world::World) -> anyhow::Result<Vec<Felt>> {
    let House { disks, tenants, tenant_of, .. } = search.house;
    let all: Vec<usize> = (0..search.arrivals.streams.len()).collect();
    let trial = Trial { world, disks, tenants: tenant_of, count: tenants.len() };
    trial.run(search.arrivals.of(&all), &search.judge, search.stop)
}

/// Remark about a tenant that misses the target because of its configured limits alone.
fn too_narrow(
    search: &Search<'_>,
    world: &simulator::world::World,
    tenant: usize,
    told: &Told,
) -> anyhow::Result<Option<String>> {
    let Search { house, judge: Judge { target, .. }, .. } = search;
    let of = &house.tenants[tenant];
    let misses = told.after.as_ref().is_some_and(|felt| felt.requests > 0 && !felt.holds(target));
    if !of.is_kept || !misses || told.set.is_some() || house.held(tenant).limits.is_unlimited() {
        return Ok(None);
    }
    // The counterfactual: everything else unchanged, only this tenant without limits.
    let mut world = world.clone();
    house.limit(&mut world, tenant, Limits::default());
    let felt = everything(search, &world)?.swap_remove(tenant);
    Ok(felt.holds(target).then(|| {
        format!(
            "{}: its own limits, of the config file, are what keeps it from the target: without them its {} is {}. Raise them, or take them out.",
            of.name,
            target.name(),
            figures::time(felt.latency.value_at_quantile(target.share()))
        )
    }))
}

fn by_itself(search: &Search<'_>, tenant: usize, told: &mut Told, remarks: &mut Vec<String>) {
    let of = &search.house.tenants[tenant];
    let Some(need) = &told.need else {
        if of.is_kept {
            remarks.push(format!("{}: it only flushes, which no limit holds.", of.name));
        }
        return;
    };
    told.after = Some(need.felt.clone());
    // No limit shortens a latency that is too long without one.
    if let Some(ns) = need.impossible_ns {
        remarks.push(impossible(search, tenant, ns));
    } else if of.is_kept {
        told.set = Some(need.limits()).filter(|limits| !limits.is_unlimited());
        if told.set.is_none() {
            remarks.push(format!("{}: it asks for more than any limit may be.", of.name));
        }
    }
    unsure(&of.name, need, remarks);
}

fn impossible(search: &Search<'_>, tenant: usize, ns: u64) -> String {
    let percentile = search.judge.target.name();
    let (of, took, above) = (&search.house.tenants[tenant], figures::time(ns), above(ns));
    let name = &of.name;
    // The cause differs by kind of tenant: other disks of the group, the enclosing group, or the
    // device.
    if of.disks.len() > 1 {
        return format!(
            "{name}: without limits and alone on its device its {percentile} is {took}; no limit of the group makes it shorter, though one of a disk in it may (--for the disk that is to be spared; or --keep {percentile}={above} could be kept)."
        );
    }
    let around = search.house.limited_around(tenant).next();
    if let Some(group) = around.map(|group| &search.house.world.groups[group].name) {
        return format!(
            "{name}: without limits of its own and alone in {group} its {percentile} is {took}; no limit of a disk makes it shorter, though more for {group} may (--keep {percentile}={above} could be kept)."
        );
    }
    format!(
        "{name}: without limits and alone on its device its {percentile} is {took}; no limit makes it shorter (--keep {percentile}={above} could be kept, or on a faster device less)."
    )
}

/// Explains why a tenant to be spared gets a limit, although its neighbours would be the
/// candidates: no resource that they share is known.
fn own_limits_alone(search: &Search<'_>, told: &[Told]) -> Option<String> {
    // With a device, or if every tenant has a target, the choice needs no explanation.
    let tenants = &search.house.tenants;
    if search.judge.whole || tenants.iter().all(|tenant| tenant.is_kept) {
        return None;
    }
    let limited = tenants.iter().zip(told).filter(|(tenant, told)| tenant.is_kept && told.set.is_some());
    let names: Vec<_> = limited.map(|(tenant, _)| tenant.name.as_str()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "{}: the limit is the smallest that it can have itself. No limit of other disks is advised, because without a device none of them slows it: specify the device that they share by --device, --rate or --config.",
            names.join(", ")
        )
    })
}

/// Remark about a tenant that was throttled when it was recorded.
fn held_back(search: &Search<'_>, tenant: usize) -> Option<String> {
    let of = &search.house.tenants[tenant];
    let streams = || of.disks.iter().map(|&disk| &search.arrivals.streams[disk]);
    let [held, requests] =
        [streams().map(|of| of.held).sum::<u64>(), streams().map(|of| of.requests).sum()].map(|it| it as f64);
    (held > requests * MUCH).then(|| {
        format!(
            "{}: limits held {:.0} % of its requests when it was recorded. Who waits for answers asks for less then, so that it may want more than is told here: record it without these limits, or with looser ones.",
            of.name,
            held / requests * 100.0
        )
    })
}

/// Remark about a tenant whose recorded latency differs from the simulated one.
fn unlike(search: &Search<'_>, tenant: usize, felt: &Felt) -> Option<String> {
    let Search { judge: Judge { target, whole, .. }, arrivals, house, .. } = search;
    let of = &house.tenants[tenant];
    let streams = || of.disks.iter().map(|&disk| &arrivals.streams[disk]);
    let mut measured = latencies::growing();
    for latencies in streams().filter_map(|stream| stream.measured.as_ref()) {
        measured.add(latencies).expect("it grows");
    }
    // A comparison needs recorded latencies, a complete simulation and enough requests.
    if !whole || felt.given_up || measured.len() < target.enough() {
        return None;
    }
    let [is_ns, was_ns] = [&felt.latency, &measured].map(|times| times.value_at_quantile(target.share()));
    // Times far below the target do not affect the advice.
    if is_ns.max(was_ns).saturating_mul(LITTLE) < target.time_ns {
        return None;
    }
    let [in_a_row, requests] =
        [streams().map(|of| of.in_a_row).sum::<u64>(), streams().map(|of| of.requests).sum()];
    // The simulation cannot merge adjacent requests, because offsets are not stored.
    let why = if is_ns > was_ns.saturating_mul(UNLIKE) && in_a_row > requests / 2 {
        "most of its requests begin where the one before ended: weir merges such, which no simulation does, so that they ask for less than it says"
    } else if is_ns > was_ns.saturating_mul(UNLIKE) {
        "the device is faster than was told, limits of others were in force, or weir merged what a neighbour asked for in a row"
    } else if was_ns > is_ns.saturating_mul(UNLIKE) {
        "the device is slower than was told, or limits were in force (--config tells them)"
    } else {
        return None;
    };
    Some(format!(
        "{}: its {} is {} in the simulation, and was {} when it was recorded: {why}.",
        of.name,
        target.name(),
        figures::time(is_ns),
        figures::time(was_ns)
    ))
}

/// Share of throttled requests above which it is remarked; less is an occasional burst.
const MUCH: f64 = 0.1;
/// Factor between recorded and simulated times above which the difference is remarked.
const UNLIKE: u64 = 2;
/// Times below the target divided by this are not compared.
const LITTLE: u64 = 4;

/// Formats a time as an option's value, rounded up.
fn above(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{ns}ns"),
        10_000..10_000_000 => format!("{}us", ns.div_ceil(1000)),
        _ => format!("{}ms", ns.div_ceil(1_000_000)),
    }
}

fn unsure(name: &str, need: &Need, remarks: &mut Vec<String>) {
    let why = need.certainty.iter().flatten().find_map(|certainty| certainty.as_ref().err());
    if let Some(why) = why {
        remarks.push(format!("{name}: {why}. The limit is what this trace asks for, and no more is known."));
    }
}

fn share(
    search: &Search<'_>,
    neighbours: &[usize],
    bare: &[Felt],
    told: &mut [Told],
    changes: &mut Vec<Change>,
    remarks: &mut Vec<String>,
) -> anyhow::Result<()> {
    let house = search.house;
    let target = search.judge.target;
    let mut is_possible = true;
    for &tenant in neighbours {
        let name = &house.tenants[tenant].name;
        let need = told[tenant].need.as_ref();
        if let Some(ns) = need.and_then(|need| need.impossible_ns).filter(|_| house.tenants[tenant].is_kept) {
            is_possible = false;
            remarks.push(impossible(search, tenant, ns));
        }
        need.into_iter().for_each(|need| unsure(name, need, remarks));
    }
    // Results of the unlimited world, in the neighbours' order, as `Shared` expects them.
    let felt: Vec<Felt> = neighbours.iter().map(|&tenant| bare[tenant].clone()).collect();
    let holds = |&tenant: &usize| !house.tenants[tenant].is_kept || bare[tenant].holds(&target);
    let names = |tenants: &mut dyn Iterator<Item = usize>| {
        tenants.map(|tenant| house.tenants[tenant].name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let group = house.common_group(neighbours).map(|group| house.world.groups[group].name.clone());
    let is_device = group.is_none() && search.judge.whole;
    let place = match &group {
        Some(group) => format!("in {group}"),
        None if is_device => "on their device".to_owned(),
        None => "in their groups".to_owned(),
    };
    // Nothing to limit: the neighbours keep the target together.
    if neighbours.iter().all(holds) {
        for (&tenant, felt) in neighbours.iter().zip(felt) {
            told[tenant].after = Some(felt);
        }
        let who = names(&mut neighbours.iter().copied());
        remarks.push(format!("{who}: together {place} the target is kept without any limit."));
        return Ok(());
    }
    let needs: Vec<Option<Need>> = told.iter().map(|told| told.need.clone()).collect();
    let Found { plan, felt, is_kept, could_ns, interval } =
        Shared::new(*search, neighbours, &needs, &felt).find()?;
    for ((&tenant, limits), felt) in neighbours.iter().zip(&plan.limits).zip(felt) {
        told[tenant].after = Some(felt);
        told[tenant].set = *limits;
        told[tenant].between =
            limits.zip(interval).map(|(limits, interval)| Between::of(only(&limits).1, interval));
        if let (Some(limits), Some(interval)) = (limits, interval) {
            let of = &house.tenants[tenant];
            let spares = if of.is_kept { "" } else { " Its lower end spares the others on most of them." };
            remarks.push(lies_between(search, &of.name, limits, interval) + spares);
        }
    }
    // Weights and reservations are alternatives; a plan never has both.
    if let Some((limits, shares)) = plan.group {
        let name = group.clone().unwrap_or_else(|| group_name(house));
        let are_weights = shares.iter().any(|share| share.weight() != Share::default().weight());
        let what = if are_weights { "weights" } else { "promises" };
        if group.is_none() {
            changes.push(Change {
                is_group: true,
                is_new: true,
                name: name.clone(),
                limits,
                ..Change::default()
            });
        }
        for (&tenant, share) in neighbours.iter().zip(shares) {
            told[tenant].joins = Some(Joins::of(&name, share));
            changes.push(Change {
                group: Some(name.clone()),
                share,
                is_weighed: are_weights,
                ..change(search, tenant, Limits::default())
            });
        }
        remarks.push(match &group {
            Some(_) => format!("With other {what} in {name} it takes no limit: with limits on the noisy alone these would wait longer."),
            None => format!(
                "In one group, {name}, requests wait where {what} count, and not in the device's queue: with limits on the noisy alone these would wait longer."
            ),
        });
        remarks.extend(interval.map(|interval| lies_between(search, &name, &limits, interval)));
    }
    // Each tenant alone could keep its target, so the shortage is in the shared resource.
    if !is_kept && is_possible {
        let late = |&&tenant: &&usize| {
            house.tenants[tenant].is_kept
                && told[tenant].after.as_ref().is_some_and(|felt| !felt.holds(&target))
        };
        let who = names(&mut neighbours.iter().filter(late).copied());
        let percentile = target.name();
        let cannot = if is_device {
            "the device cannot do it".to_owned()
        } else {
            format!("it cannot be done {place}")
        };
        let more = if is_device { " (--pack tells how many it would take)" } else { "" };
        remarks.push(match could_ns {
            Some(ns) => format!(
                "{who}: {cannot} for all. With the limits told the others' target is kept; for all of them about --keep {percentile}={} could be (or --for says whose target counts).",
                above(ns)
            ),
            None => format!("{who}: {cannot}, however far the others are held back{more}."),
        });
    }
    Ok(())
}

/// The limited unit and its rate.
fn only(limits: &Limits) -> (Unit, u64) {
    let rate = |unit: Unit| limits.limit(need::kind(unit)).rate;
    let unit = if rate(Unit::Iops) > 0 { Unit::Iops } else { Unit::Bps };
    (unit, rate(unit))
}

fn lies_between(search: &Search<'_>, name: &str, limits: &Limits, interval: Interval) -> String {
    let (unit, rate) = only(limits);
    let setting = Setting::Limit(need::kind(unit), Part::Rate);
    let rate_shown = if unit == Unit::Bps { ::settings::exact_size(rate) } else { rate.to_string() };
    let this = format!("{name}: {setting} {rate_shown} is for this trace");
    let blocks = search.judge.blocks.name();
    let other_days = format!("on 95 of 100 other days made of the same {blocks} it would be");
    let Between { low, high } = Between::of(rate, interval);
    let [low_shown, high_shown] = [low, high.unwrap_or(0)].map(|value| advice::count(value as f64, unit));
    match high {
        Some(_) => format!("{this}; {other_days} between {low_shown} and {high_shown}."),
        None if low > 0 => {
            format!(
                "{this}; {other_days} at least {low_shown}, and this trace does not show how much at most."
            )
        }
        None => {
            format!("{this}, whose {blocks} differ too much to estimate it for other days.")
        }
    }
}

/// A group name that is not in use.
fn group_name(house: &House) -> String {
    let is_taken = |name: &str| {
        house.world.groups.iter().any(|group| group.name == name)
            || house.world.disks.iter().any(|disk| disk.name == name)
    };
    // Groups and disks share one namespace in the daemon.
    let numbered = (2..).map(|number| format!("{GROUP}-{number}"));
    std::iter::once(GROUP.to_owned())
        .chain(numbered)
        .find(|name| !is_taken(name))
        .expect("numbers do not end")
}

fn change(search: &Search<'_>, tenant: usize, limits: Limits) -> Change {
    let of = &search.house.tenants[tenant];
    let size = |disk: &usize| search.arrivals.streams[*disk].end_bytes;
    Change {
        is_group: of.group.is_some(),
        name: of.name.clone(),
        limits,
        held: *search.house.held(tenant),
        size_bytes: of.disks.iter().map(size).max().unwrap_or(0),
        ..Change::default()
    }
}

fn line(search: &Search<'_>, tenant: usize, told: &Told) -> Line {
    let of = &search.house.tenants[tenant];
    let target = &search.judge.target;
    let smallest = |unit: Unit| {
        let need = told.need.as_ref()?;
        let found = need.smallest[unit.index()]?;
        let certainty = need.certainty[unit.index()].as_ref();
        Some(Smallest {
            limit: found.limit,
            rate_without_burst: found.steady,
            between: certainty
                .and_then(|certainty| certainty.as_ref().ok())
                .map(|interval| Between::of(found.limit.rate, *interval)),
            unsure: certainty.and_then(|certainty| certainty.as_ref().err().cloned()),
        })
    };
    let set = told.set.map(|limits| {
        let settings = Setting::ALL.iter().filter(|setting| settings::is_set(&limits, **setting));
        settings.map(|setting| (setting.name().to_owned(), limits.get(*setting))).collect()
    });
    Line {
        kind: of.kind(),
        name: of.name.clone(),
        requests: of.disks.iter().map(|&disk| search.arrivals.streams[disk].requests).sum(),
        asked: of.is_kept,
        kept: told.after.as_ref().filter(|felt| felt.requests > 0).map(|felt| felt.holds(target)),
        smallest_iops: smallest(Unit::Iops),
        smallest_bps: smallest(Unit::Bps),
        set,
        joins: told.joins.clone(),
        set_between: told.between,
        before: told.before.as_ref().filter(|felt| felt.requests > 0).map(|felt| felt.figures(target)),
        after: told.after.as_ref().filter(|felt| felt.requests > 0).map(|felt| felt.figures(target)),
    }
}

fn pack(search: &Search<'_>, arguments: &AdviseArgs) -> anyhow::Result<Advice> {
    let devices = &arguments.devices;
    let resolve = |spec| device_of(spec, devices.state.as_deref());
    // One device stands for any number of the same kind; several are an inventory.
    let supply = match &devices.device[..] {
        [only] => Supply::Any(resolve(only)?),
        several => Supply::These(several.iter().map(resolve).collect::<anyhow::Result<_>>()?),
    };
    let Search { house, arrivals, judge, .. } = *search;
    let packing = packing::pack(search, &supply)?;
    let name = |tenant: usize| house.tenants[tenant].name.clone();
    let mut remarks = Vec::new();
    let mut felt: Vec<Option<Felt>> = vec![None; house.tenants.len()];
    let on_device = |packed: &packing::Packed| OnDevice {
        device: match supply {
            Supply::Any(_) => (packed.device + 1).to_string(),
            Supply::These(_) => match &devices.device[packed.device] {
                DeviceSpec::Probed(path) => path.display().to_string(),
                DeviceSpec::Given { .. } => (packed.device + 1).to_string(),
            },
        },
        disks: packed.tenants.iter().map(|&tenant| name(tenant)).collect(),
        busiest: packed.busiest,
        latency_ns: packed.felt.iter().map(|felt| felt.judged_ns(&judge)).max().unwrap_or(0),
    };
    let on_devices: Vec<OnDevice> = packing.devices.iter().map(on_device).collect();
    let (count, target) = (packing.devices.len(), judge.target);
    let disks: usize = packing.devices.iter().map(|packed| packed.tenants.len()).sum();
    if count > 0 {
        let most = if packing.at_least == count { ", and fewer cannot do" } else { "" };
        let (all, devices) = (
            if disks == 1 { "disk fits" } else { "disks fit" },
            if count == 1 { "device" } else { "devices" },
        );
        remarks.push(format!(
            "{disks} {all} on {count} of these {devices} with {} <= {}{most}.",
            target.name(),
            figures::time(target.time_ns)
        ));
    }
    if !packing.left_over.is_empty() {
        let names: Vec<_> = packing.left_over.iter().map(|&tenant| name(tenant)).collect();
        remarks.push(format!("No place keeps the target for: {}.", names.join(", ")));
    }
    for packed in packing.devices {
        for (tenant, one) in packed.tenants.into_iter().zip(packed.felt) {
            felt[tenant] = Some(one);
        }
    }
    // Packing sets no limits, so only the simulated results are reported.
    let lines = felt.into_iter().enumerate().map(|(tenant, after)| {
        line(search, tenant, &Told { need: None, before: None, after, set: None, joins: None, between: None })
    });
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
        remarks,
        partial: arrivals.partial.clone(),
    })
}
