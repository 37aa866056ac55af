//! `weir jobs` and `weir job`: jobs of the running daemon, shown and controlled.

mod completion;
mod progress;

use std::io::{IsTerminal as _, stdout};

use anyhow::anyhow;
use api::{JobReport, ThrottleCause};
use clap::{Args, Subcommand};
use console::{
    CommandFailure, figures, print, print_json,
    table::{ColumnAlignment, TextTable},
};
use policy::throttle::NodeShare;
use serde_json::{Map, Value, json};

use crate::{
    client::{ClientError, ControlAddress, ControlClient},
    settings_command::SaveArgs,
};

pub(crate) use progress::{JobCourse, JobRun, dismiss};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir jobs
      State, progress, rate and remaining time of all jobs.
  weir job set backup-vm1 --bps-total 20M
      Limits a running job; 0 removes the limit.
  weir job set backup-vm1 --weight none
      Back to spare capacity only.
  weir job pause backup-vm1
      Until `weir job resume backup-vm1`.
  weir job resume backup-vm1
      The job continues.
  weir job complete mirror-vm1 --save
      Moves the disk to the target of the mirror, and writes that into the config file.
  weir job cancel backup-vm1
      Ends the job; the target of a backup is incomplete then.
  weir job dismiss backup-vm1
      Removes a job that has ended from the list.

A job that has ended is listed until `weir job dismiss`, or until 32 others have ended after it. `weir backup` and \
`weir stream` without --detach dismiss their jobs themselves. A paused backup still copies the old data of changes that clients make.";

/// Arguments of `weir jobs`.
#[derive(Debug, Args)]
pub(crate) struct JobsArgs {
    /// Print the jobs as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

/// Limits and weight of a job.
#[derive(Debug, Args)]
pub(crate) struct JobLimitArgs {
    /// Bytes per second that it copies at most; 0 is unlimited
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    bps_total: Option<u64>,
    /// Requests per second that it makes at most; 0 is unlimited
    #[arg(long, value_name = "COUNT", value_parser = settings::count)]
    iops_total: Option<u64>,
    /// Weight beside the members of the disk's group, 1 to 10000; none is spare capacity only
    /// [default: none]
    #[arg(long, value_name = "WEIGHT", value_parser = weight)]
    weight: Option<JobWeight>,
}

/// Weight of a job, or none.
#[derive(Clone, Copy, Debug)]
struct JobWeight(Option<u32>);

fn weight(text: &str) -> Result<JobWeight, String> {
    if text == "none" {
        return Ok(JobWeight(None));
    }
    let weight = text.parse().ok().filter(|weight| NodeShare::WEIGHTS.contains(weight));
    let (first, last) = (NodeShare::WEIGHTS.start(), NodeShare::WEIGHTS.end());
    weight
        .map(|weight| JobWeight(Some(weight)))
        .ok_or_else(|| format!("is not a weight (a whole number from {first} to {last}, or none)"))
}

impl JobLimitArgs {
    /// The arguments of the daemon's command.
    pub(crate) fn parameters(&self) -> Map<String, Value> {
        let number = |name: &str, value: Option<u64>| value.map(|value| (name.to_owned(), value.into()));
        let weight = self.weight.map(|JobWeight(weight)| ("weight".to_owned(), weight.into()));
        let limits = [number("bps-total", self.bps_total), number("iops-total", self.iops_total)];
        limits.into_iter().flatten().chain(weight).collect()
    }
}

/// Subcommands of `weir job`.
#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Pause a job
    Pause(JobArgs),
    /// Resume a paused job
    Resume(JobArgs),
    /// Cancel a job
    Cancel(JobArgs),
    /// Complete a mirror that is ready: its disk continues on the target
    Complete(JobCompleteArgs),
    /// Change the limits and the weight of a job
    Set(JobSetArgs),
    /// Remove a job that has ended from the list
    Dismiss(JobArgs),
}

/// A job of the daemon.
#[derive(Debug, Args)]
pub(crate) struct JobArgs {
    /// Id of the job
    #[arg(value_name = "JOB")]
    job: String,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

/// Arguments of `weir job set`.
#[derive(Debug, Args)]
pub(crate) struct JobSetArgs {
    #[command(flatten)]
    limits: JobLimitArgs,
    #[command(flatten)]
    job: JobArgs,
}

/// Arguments of `weir job complete`.
#[derive(Debug, Args)]
pub(crate) struct JobCompleteArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    save: SaveArgs,
}

/// All jobs of the daemon.
pub(crate) fn all(client: &mut ControlClient) -> Result<Vec<JobReport>, ClientError> {
    client.execute_typed("x-weir-query-jobs", Value::Null)
}

/// The job with this id.
pub(crate) fn find_job(client: &mut ControlClient, id: &str) -> anyhow::Result<JobReport> {
    let found = all(client)?.into_iter().find(|job| job.id == id);
    found.ok_or_else(|| anyhow!("job {id}: it is not listed any more (`weir jobs` lists all)"))
}

pub(crate) fn list(arguments: JobsArgs) -> Result<(), CommandFailure> {
    let mut client = ControlClient::reach(arguments.qmp)?;
    let jobs = all(&mut client)?;
    if arguments.json {
        return Ok(print_json(&jobs)?);
    }
    if jobs.is_empty() {
        return Ok(print("no jobs\n")?);
    }
    Ok(print(&table(&jobs).render(stdout().is_terminal()))?)
}

/// Table of jobs, for `weir jobs` and `weir status`.
pub(crate) fn table<'a>(jobs: impl IntoIterator<Item = &'a JobReport>) -> TextTable {
    let mut table = TextTable::new([
        ("JOB", ColumnAlignment::Left),
        ("KIND", ColumnAlignment::Left),
        ("DISK", ColumnAlignment::Left),
        ("GROUP", ColumnAlignment::Left),
        ("STATE", ColumnAlignment::Left),
        ("DONE", ColumnAlignment::Right),
        ("COPIED", ColumnAlignment::Right),
        ("RATE", ColumnAlignment::Right),
        ("LEFT", ColumnAlignment::Right),
        ("WEIGHT", ColumnAlignment::Right),
        ("HELD BY", ColumnAlignment::Left),
        ("TARGET", ColumnAlignment::Left),
    ]);
    for job in jobs {
        table.row(vec![
            job.id.clone(),
            job.kind.clone(),
            job.disk.clone(),
            job.group.clone().unwrap_or_else(dash),
            state(job),
            figures::share(done_ratio(job)),
            figures::bytes(job.copied_bytes as f64),
            rate(job),
            remaining_time(job),
            job.weight.map_or_else(|| "spare".to_owned(), |weight| weight.to_string()),
            held_by(job),
            job.target.clone(),
        ]);
    }
    table
}

fn dash() -> String {
    "-".to_owned()
}

/// State of a job; for a job that has failed, the reason.
pub(crate) fn state(job: &JobReport) -> String {
    match (&job.error, job.is_cancelled) {
        (Some(error), _) => format!("failed: {error}"),
        (None, true) => "cancelled".to_owned(),
        (None, false) => match &job.remark {
            Some(remark) => format!("{}: {remark}", job.state),
            None => job.state.clone(),
        },
    }
}

/// Part of a job that is done, 0 to 1.
pub(crate) fn done_ratio(job: &JobReport) -> f64 {
    (job.done_bytes as f64 / job.total_bytes.max(1) as f64).min(1.0)
}

/// Bytes per second that a job has copied.
pub(crate) fn rate(job: &JobReport) -> String {
    format!("{}/s", figures::bytes(job.rate_bps as f64))
}

/// Remaining time of a job.
pub(crate) fn remaining_time(job: &JobReport) -> String {
    job.remaining_s.map_or_else(dash, |seconds| figures::time(seconds.saturating_mul(1_000_000_000)))
}

/// The limit that a job waits for: of the job itself, or `NAME: LIMIT` of its disk or a group.
pub(crate) fn held_by(job: &JobReport) -> String {
    match &job.throttle_cause {
        Some(ThrottleCause { level, limit, .. }) if level == "job" => limit.to_string(),
        Some(ThrottleCause { name, limit, .. }) => format!("{name}: {limit}"),
        None => dash(),
    }
}

/// True for a job that is shown while figures are watched: one that has not concluded, or has
/// failed.
pub(crate) fn is_watched(job: &JobReport) -> bool {
    job.state != "concluded" || job.error.is_some()
}

pub(crate) fn run(command: JobCommand) -> Result<(), CommandFailure> {
    let (JobArgs { job, qmp }, name, done) = match command {
        JobCommand::Pause(job) => (job, "job-pause", "paused"),
        JobCommand::Resume(job) => (job, "job-resume", "resumed"),
        JobCommand::Cancel(job) => (job, "job-cancel", "is being cancelled"),
        JobCommand::Dismiss(job) => (job, "job-dismiss", "dismissed"),
        JobCommand::Complete(JobCompleteArgs { job, save }) => {
            return Ok(completion::complete(ControlClient::reach(job.qmp)?, &job.job, &save)?);
        }
        JobCommand::Set(JobSetArgs { limits, job }) => return set(&limits, job),
    };
    ControlClient::reach(qmp)?.execute(name, json!({ "id": job }))?;
    Ok(print(&format!("{job}: {done}\n"))?)
}

fn set(limits: &JobLimitArgs, JobArgs { job, qmp }: JobArgs) -> Result<(), CommandFailure> {
    let mut parameters = limits.parameters();
    if parameters.is_empty() {
        let message = "nothing to change (give --bps-total, --iops-total or --weight)";
        return Err(CommandFailure::Usage(anyhow!("{job}: {message}")));
    }
    parameters.insert("id".to_owned(), job.clone().into());
    ControlClient::reach(qmp)?.execute("x-weir-job-set", Value::Object(parameters))?;
    Ok(print(&format!("{job}: changed\n"))?)
}
