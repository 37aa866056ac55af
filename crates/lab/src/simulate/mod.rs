//! `weir simulate`: what limits, groups, watermarks and reading ahead would have done to the requests of a trace, in virtual time.
//!
//! ```text
//!   traces ───────┐                      ┌─► limits ─► prefetch ─► device ─┐
//!   or a workload ┼─► drive.rs: requests ┤   engine.rs: with the limits    ├─► output.rs: before and after
//!   options, or   │                      └─► device ───────────────────────┘   findings.rs: for `weir report`
//!   --config ─────┴─► setup.rs: a World       without them                     events.rs: each request
//! ```
//!
//! The decisions are those of the `policy` crate, the very code that the daemon runs; time is a number that jumps from one event to the next. What is
//! modelled is the device (`device.rs`); what is not: merging of requests, which a trace was recorded behind, and the time that the daemon itself
//! takes.
//!
//! Never opens an image, and never says of a trace that could not be read to its end that it was.

mod arguments;
mod bucket;
mod client;
mod device;
mod device_spec;
mod drive;
mod engine;
mod events;
mod findings;
mod output;
mod prefetch;
mod progress;
mod request;
mod scenario;
mod setup;
mod sweep;
mod tally;
#[cfg(test)]
mod tests;
mod two_streams;
mod watermark;
mod workload;
mod world;

use std::{
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::{Context as _, anyhow};
pub use arguments::{EXAMPLES, SimulateArgs};
use client::ClientSpec;
use console::{Failure, print};
pub(crate) use device_spec::DeviceSpec;
use drive::{Job, Outcome, Silence, Source, simulate};
use events::Events;
use output::Summary;
use progress::Progress;
use scenario::Story;
use setup::Setup;
pub(crate) use sweep::Sweep;
use sweep::{Point, Swept, sweep};
use workload::{Generator, names};
pub(crate) use workload::{Workload, generators};

use super::{
    interruption::Interruption,
    result::{Header, ResultFile},
    trace::{self, Merged},
};

/// The options that a story takes.
const OF_STORIES: [&str; 4] = ["workload", "json", "result", "report"];

/// Simulates, prints and keeps what came of it.
///
/// # Errors
/// Whatever keeps it from being simulated, or to its end; what came before is printed all the same.
pub fn run(arguments: SimulateArgs) -> Result<(), Failure> {
    if let Some(Workload::Story(tale)) = &arguments.input.workload {
        if let Some(option) = arguments.given.first_but(&OF_STORIES) {
            return Err(Failure::Usage(anyhow!(
                "--{option}: this workload brings its own limits, devices and disks (leave --{option} out, or use another --workload)"
            )));
        }
        return tell(&arguments, &scenario::told(tale).map_err(|error| anyhow!(error))?);
    }
    if let (Some(Workload::Sequential(_)), Some("seed")) =
        (&arguments.input.workload, arguments.given.first_of(&["seed"]))
    {
        return Err(Failure::Usage(anyhow!(
            "--seed: nothing of the workload sequential is drawn at random (leave it out)"
        )));
    }
    if let (Some(values), Some(_)) = (&arguments.sweep.sweep, arguments.sweep.p99)
        && !values.has_smallest()
    {
        return Err(Failure::Usage(anyhow!(
            "--p99: {} is no rate, of which the smallest that is fast enough could be told (leave --p99 out, or sweep a rate)",
            values.setting
        )));
    }
    arguments.results.check()?;
    let stop = Arc::new(AtomicBool::new(false));
    let heard = Arc::clone(&stop);
    Interruption::watch(move || heard.store(true, Ordering::Relaxed), || {})?;
    let setup = Setup::new(&arguments)?;
    match &arguments.sweep.sweep {
        Some(values) => run_sweep(&arguments, &setup, values, &stop),
        None => run_once(&arguments, &setup, &stop),
    }
}

fn tell(arguments: &SimulateArgs, story: &Story) -> Result<(), Failure> {
    let begun = Header::begin();
    let text = if arguments.output.json {
        serde_json::to_string_pretty(&story.table()).context("the table cannot be told as JSON")? + "\n"
    } else {
        story.text()
    };
    let result = ResultFile::new(begun.end(None), findings::of_story(story));
    Ok(print_and_keep(arguments, &text, &result)?)
}

/// Both are tried, whatever becomes of the other: a closed standard output does not lose the file.
///
/// # Errors
/// The first of what went wrong.
fn print_and_keep(arguments: &SimulateArgs, text: &str, result: &ResultFile) -> anyhow::Result<()> {
    let printed = print(text);
    let kept = arguments.results.keep(result);
    printed.and(kept)
}

fn run_once(arguments: &SimulateArgs, setup: &Setup, stop: &AtomicBool) -> Result<(), Failure> {
    let begun = Header::begin();
    // Before anything is written, which may be what is to be read.
    let input = input(arguments)?;
    let inputs = || arguments.traces.iter().chain(&arguments.config);
    let mut events =
        arguments.output.events.as_deref().map(|path| Events::create(path, inputs())).transpose()?;
    let progress = Progress::new();
    let tell = |requests, at| progress.requests(requests, at);
    let how = How { threads: threads(arguments), before: true, events: events.as_mut(), tell: &tell };
    let outcome = simulated(input, setup, how, stop)?;
    drop(progress);
    let written = events.map_or(Ok(()), Events::finish);
    let summary = Summary::new(&outcome, setup.remarks());
    let text = if arguments.output.json { summary.json()? } else { summary.text() };
    let mut result = ResultFile::new(begun.end(None), findings::of_run(&summary, &outcome));
    result.partial.clone_from(&outcome.partial);
    print_and_keep(arguments, &text, &result).and(written)?;
    ended(outcome.partial)
}

fn run_sweep(
    arguments: &SimulateArgs,
    setup: &Setup,
    values: &Sweep,
    stop: &AtomicBool,
) -> Result<(), Failure> {
    if arguments.traces.iter().any(|path| path.as_os_str() == "-") {
        return Err(Failure::Usage(anyhow!(
            "--sweep: standard input can be read once only (write the trace to a file)"
        )));
    }
    let begun = Header::begin();
    let of = arguments.sweep.sweep_of.as_deref();
    // All of them, before the first takes its time.
    let setups = values.values.iter().map(|&value| setup.with(of, values.setting, value));
    setups.collect::<anyhow::Result<Vec<_>>>()?;
    let progress = Progress::new();
    let one = |value| {
        let setup = setup.with(of, values.setting, value)?;
        let how = How { threads: 1, before: false, events: None, tell: &|_, _| () };
        let outcome = simulated(input(arguments)?, &setup, how, stop)?;
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        Ok(Some((Point::new(value, &outcome, of), outcome.partial)))
    };
    let count = values.values.len();
    let points = sweep(&values.values, threads(arguments), one, |done| progress.runs(done, count))?;
    drop(progress);
    let (points, partial): (Vec<_>, Vec<_>) = points.into_iter().unzip();
    let interrupted = stop.load(Ordering::Relaxed).then(|| "interrupted".to_owned());
    let partial = partial.into_iter().flatten().next().or(interrupted);
    let below_ns = arguments.sweep.p99.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    let swept = Swept::new(values, points, below_ns, partial);
    let text = if arguments.output.json { swept.json()? } else { swept.text() };
    let mut result = ResultFile::new(begun.end(None), findings::of_sweep(&swept));
    result.partial.clone_from(&swept.partial);
    print_and_keep(arguments, &text, &result)?;
    ended(swept.partial)
}

fn ended(partial: Option<String>) -> Result<(), Failure> {
    match partial {
        None => Ok(()),
        Some(why) => Err(Failure::Failed(anyhow!("{why}"))),
    }
}

fn threads(arguments: &SimulateArgs) -> usize {
    let all = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
    arguments.output.threads.map_or_else(all, NonZeroUsize::get)
}

/// How one simulation is made.
struct How<'a> {
    threads: usize,
    before: bool,
    events: Option<&'a mut Events>,
    tell: &'a (dyn Fn(u64, u64) + Sync),
}

/// Simulates what comes from there.
fn simulated(
    (mut source, disks, clients): Input,
    setup: &Setup,
    how: How<'_>,
    stop: &AtomicBool,
) -> anyhow::Result<Outcome> {
    simulate(Job {
        setup,
        source: &mut *source,
        clients: (&disks, &clients),
        threads: how.threads,
        before: how.before,
        events: how.events,
        stop,
        tell: how.tell,
    })
}

/// Where requests come from; disks by name, and the clients that use them.
type Input = (Box<dyn Source>, Vec<String>, Vec<ClientSpec>);

/// Where requests come from.
fn input(arguments: &SimulateArgs) -> anyhow::Result<Input> {
    Ok(match &arguments.input.workload {
        None => {
            let options = trace::Options {
                format: arguments.input.format,
                window: arguments.input.window as usize,
                absolute_time: arguments.input.absolute_time,
            };
            (Box::new(Merged::open(&arguments.traces, &options)?), Vec::new(), Vec::new())
        }
        Some(Workload::Sequential(sequential)) => {
            (Box::new(Silence), names(sequential.disks), sequential.clients())
        }
        Some(Workload::Open(open)) => {
            (Box::new(Generator::new(open, arguments.input.seed)), Vec::new(), Vec::new())
        }
        Some(Workload::Story(tale)) => unreachable!("{tale:?} is told and not simulated here"),
    })
}
