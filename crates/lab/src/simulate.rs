//! `weir simulate`: the effect of limits, groups, watermarks and prefetching on the requests of a
//! trace, in virtual time.
//!
//! ```text
//!   traces ───────┐                      ┌─► limits ─► prefetch ─► device ─┐
//!   or a workload ┼─► drive.rs: requests ┤   an engine with the limits     ├─► output.rs: before and after
//!   options, or   │                      └─► device ───────────────────────┘   findings.rs: for `weir report`
//!   --config ─────┴─► setup.rs: a world       one without them                 events.rs: each request
//! ```
//!
//! With `--cluster`, [`cluster`] simulates many hosts that share limits instead.
//!
//! The decisions are those of the `policy` crate; time jumps from event to event. Devices are
//! modelled (`simulator::device`). Merging and the processing time of the daemon are not: merging
//! happens before a trace is recorded. Never opens an image, and always reports a trace that was
//! not read to its end.

mod arguments;
pub mod cluster;
mod device_spec;
mod drive;
mod events;
mod findings;
mod generator;
mod keys;
mod output;
mod scenario;
mod scenario_table;
mod setup;
mod sweep;
mod sweep_result;
#[cfg(test)]
mod tests;
mod two_streams;
mod workload;

use std::{
    num::NonZeroUsize,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::anyhow;
pub(crate) use arguments::DefaultDiskSettings;
pub use arguments::{EXAMPLES, SimulateArgs};
pub(crate) use cluster::ClusterSpec;
use console::{CommandFailure, figures, print, print_json, progress::ActivitySpinner};
pub(crate) use device_spec::DeviceSpec;
use drive::{EmptySource, SimulationInput, SimulationJob, simulate};
use events::EventsFile;
use generator::WorkloadGenerator;
use output::SimulationSummary;
use policy::throttle::LimitSetting;
use recording::MergedTraces;
use scenario_table::ScenarioTable;
use serde::Serialize;
pub(crate) use setup::{DiskResolver, MAX_DISKS, SimulationSetup, device_of};
pub(crate) use sweep::SweepValues;
use sweep_result::{SweepPoint, SweepResult, SweptNames, sweep};
use workload::names;
pub(crate) use workload::{Workload, generators};

use super::{
    interruption::SignalInterruption,
    result::{ResultFile, ResultHeader},
};

const SCENARIO_OPTIONS: [&str; 4] = ["workload", "json", "result", "report"];

/// Simulates, prints and saves the result.
///
/// # Errors
/// Fails on anything that prevents the simulation or ends it early; the partial result is printed
/// in the latter case.
pub fn run(arguments: SimulateArgs) -> Result<(), CommandFailure> {
    if let Some(spec) = &arguments.cluster {
        return run_cluster(&arguments, spec);
    }
    if let Some(Workload::Scenario(scenario)) = &arguments.input.workload {
        if let Some(option) = arguments.given.first_but(&SCENARIO_OPTIONS) {
            return Err(CommandFailure::Usage(anyhow!(
                "--{option}: this workload brings its own limits, devices and disks (leave \
                 --{option} out, or use another --workload)"
            )));
        }
        return report_scenario(&arguments, &scenario::simulate(scenario).map_err(|error| anyhow!(error))?);
    }
    if let (Some(Workload::Sequential(_)), Some("seed")) =
        (&arguments.input.workload, arguments.given.first_of(&["seed"]))
    {
        return Err(CommandFailure::Usage(anyhow!(
            "--seed: nothing of the workload sequential is drawn at random (leave it out)"
        )));
    }
    // Only rates have a monotonic effect on latency.
    if let (Some(values), Some(_)) = (&arguments.sweep.sweep, arguments.sweep.p99)
        && !values.has_smallest()
    {
        return Err(CommandFailure::Usage(anyhow!(
            "--p99: {} is no rate, so no smallest sufficient value exists (leave --p99 out, or sweep a rate)",
            values.setting
        )));
    }
    arguments.results.check()?;
    let stop = Arc::new(AtomicBool::new(false));
    let stop_on_signal = Arc::clone(&stop);
    SignalInterruption::watch(move || stop_on_signal.store(true, Ordering::Relaxed), || {})?;
    let setup = SimulationSetup::new(&arguments)?;
    match &arguments.sweep.sweep {
        Some(values) => run_sweep(&arguments, &setup, values, &stop),
        None => run_once(&arguments, &setup, &stop),
    }
}

fn run_cluster(arguments: &SimulateArgs, spec: &ClusterSpec) -> Result<(), CommandFailure> {
    let known: Vec<_> =
        LimitSetting::ALL.into_iter().map(LimitSetting::name).chain(cluster::CLUSTER_OPTIONS).collect();
    if let Some(option) = arguments.given.first_but(&known) {
        return Err(CommandFailure::Usage(anyhow!(
            "--{option}: is not for --cluster, which brings its own hosts, disks and requests \
             (leave --{option} out)"
        )));
    }
    arguments.results.check()?;
    let settings = arguments.terms().map_err(|error| CommandFailure::Usage(error.into()))?.disk;
    let stop = Arc::new(AtomicBool::new(false));
    let stop_on_signal = Arc::clone(&stop);
    SignalInterruption::watch(move || stop_on_signal.store(true, Ordering::Relaxed), || {})?;
    let header_start = ResultHeader::begin();
    let simulated = cluster::simulate(spec, settings.to_disk_settings().limits, arguments.input.seed, &stop)?;
    let summary = &simulated.summary;
    let mut result = ResultFile::new(header_start.end(None), simulated.findings.clone());
    result.partial.clone_from(&summary.partial);
    print_and_save(arguments, summary, || summary.text(), &result)?;
    fail_if_partial(simulated.failure())
}

fn report_scenario(arguments: &SimulateArgs, table: &ScenarioTable) -> Result<(), CommandFailure> {
    let header_start = ResultHeader::begin();
    let result = ResultFile::new(header_start.end(None), findings::of_scenario(table));
    Ok(print_and_save(arguments, &table.table(), || table.text(), &result)?)
}

/// Prints and saves; attempts both, so that a closed standard output does not lose the file.
/// Returns the first error.
fn print_and_save(
    arguments: &SimulateArgs,
    json: &impl Serialize,
    text: impl FnOnce() -> String,
    result: &ResultFile,
) -> anyhow::Result<()> {
    let printed = if arguments.output.json { print_json(json) } else { print(&text()) };
    printed.and(arguments.results.save_files(result))
}

fn run_once(
    arguments: &SimulateArgs,
    setup: &SimulationSetup,
    stop: &AtomicBool,
) -> Result<(), CommandFailure> {
    let header_start = ResultHeader::begin();
    // Opened before the events file is created, which could be one of the inputs.
    let input = input(arguments)?;
    let inputs = || arguments.traces.iter().chain(&arguments.config);
    let events =
        arguments.output.events.as_deref().map(|path| EventsFile::create(path, inputs())).transpose()?;
    let events = events.map(|events| Arc::new(Mutex::new(events)));
    let progress = ActivitySpinner::new();
    let tell = |requests, at| {
        let requests = figures::count(requests as f64);
        progress.set_message(|| format!("{requests} requests, {} simulated", figures::time(at)));
    };
    let outcome = simulate(SimulationJob {
        threads: threads(arguments),
        events: events.clone(),
        report_progress: &tell,
        ..SimulationJob::new(setup, input, stop)
    })?;
    drop(progress);
    // The simulation has released its clone, so the file can be completed.
    let events = events.and_then(Arc::into_inner).map(Mutex::into_inner);
    let events = events.map(|events| events.unwrap_or_else(PoisonError::into_inner));
    let written = events.map_or(Ok(()), EventsFile::finish);
    let summary = SimulationSummary::new(&outcome, &setup.remarks);
    let mut result = ResultFile::new(header_start.end(None), findings::of_run(&summary, &outcome));
    result.partial.clone_from(&outcome.partial);
    // An incomplete events file is an error, but must not suppress the summary.
    print_and_save(arguments, &summary, || summary.text(), &result).and(written)?;
    fail_if_partial(outcome.partial)
}

fn run_sweep(
    arguments: &SimulateArgs,
    setup: &SimulationSetup,
    values: &SweepValues,
    stop: &AtomicBool,
) -> Result<(), CommandFailure> {
    if arguments.traces.iter().any(|path| path.as_os_str() == "-") {
        return Err(CommandFailure::Usage(anyhow!(
            "--sweep: standard input can be read once only (write the trace to a file)"
        )));
    }
    let header_start = ResultHeader::begin();
    let of = arguments.sweep.sweep_of.as_deref();
    let judged = arguments.sweep.p99_of.as_deref();
    let between = SweptNames { limited: of, judged };
    // All values are validated before the first simulation, which may take long.
    let setups = values.values.iter().map(|&value| setup.with_limit(of, values.setting, value));
    setups.collect::<anyhow::Result<Vec<_>>>().map_err(CommandFailure::Usage)?;
    let progress = ActivitySpinner::new();
    let simulate_value = |value| {
        let setup = setup.with_limit(of, values.setting, value)?;
        // Each value on one thread; values run in parallel.
        let outcome =
            simulate(SimulationJob { before: false, ..SimulationJob::new(&setup, input(arguments)?, stop) })?;
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        Ok(Some((SweepPoint::new(value, &outcome, between)?, outcome.partial)))
    };
    let count = values.values.len();
    let points = sweep(&values.values, threads(arguments), simulate_value, |done| {
        progress.set_message(|| format!("{done} of {count} simulations"));
    })?;
    drop(progress);
    let (points, partial): (Vec<_>, Vec<_>) = points.into_iter().unzip();
    let interrupted = stop.load(Ordering::Relaxed).then(|| "interrupted".to_owned());
    // The same trace is read each time, so the reason is the same for all values.
    let partial = partial.into_iter().flatten().next().or(interrupted);
    let below_ns = arguments.sweep.p99.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    let swept = SweepResult::new(values, points, below_ns.map(|below_ns| (below_ns, judged.or(of))), partial);
    let mut result = ResultFile::new(header_start.end(None), findings::of_sweep(&swept));
    result.partial.clone_from(&swept.partial);
    print_and_save(arguments, &swept, || swept.text(), &result)?;
    fail_if_partial(swept.partial)
}

fn fail_if_partial(partial: Option<String>) -> Result<(), CommandFailure> {
    match partial {
        None => Ok(()),
        Some(why) => Err(CommandFailure::Failed(anyhow!("{why}"))),
    }
}

fn threads(arguments: &SimulateArgs) -> usize {
    let all = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
    arguments.output.threads.map_or_else(all, NonZeroUsize::get)
}

fn input(arguments: &SimulateArgs) -> anyhow::Result<SimulationInput> {
    Ok(match &arguments.input.workload {
        None => {
            let options = arguments.input.reading.options();
            SimulationInput::of(MergedTraces::open(&arguments.traces, &options)?)
        }
        Some(Workload::Sequential(sequential)) => SimulationInput {
            disks: names(sequential.disks),
            clients: sequential.clients(),
            ..SimulationInput::of(EmptySource)
        },
        Some(Workload::Open(open)) => SimulationInput::of(WorkloadGenerator::new(open, arguments.input.seed)),
        Some(Workload::Scenario(scenario)) => {
            unreachable!("{scenario:?} is described and not simulated here")
        }
    })
}
