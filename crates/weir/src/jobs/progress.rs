//! The course of a command that starts a job: the request, signals, and the wait with its progress.

use std::{
    io::{IsTerminal as _, stderr},
    process,
    sync::{
        Arc, OnceLock,
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use api::{JobReport, StartedJob};
use console::{
    figures, print, print_json, print_notice, progress,
    signals::{BlockedSignals, SignalRequest},
};
use serde_json::{Map, Value, json};

use super::find_job;
use crate::client::{ClientError, ControlClient};

/// Interval at which the progress is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of the lines of progress without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(60);

/// Request of a command that starts a job.
pub(crate) struct JobRun<'a> {
    /// QMP command whose result is the id of the job.
    pub(crate) command: &'static str,
    pub(crate) parameters: Map<String, Value>,
    /// True if the command does not wait.
    pub(crate) detach: bool,
    /// True if the job is printed as JSON.
    pub(crate) json: bool,
    /// Returns the report for an end whose result is unknown, with its reason.
    pub(crate) unknown: &'a dyn Fn(&str) -> String,
    /// True if the command waits no longer, although the job has not ended.
    pub(crate) is_reached: &'a dyn Fn(&JobReport) -> bool,
}

/// State in which a command leaves its job.
pub(crate) enum JobCourse {
    /// There is no job, for this reason.
    NotStarted(anyhow::Error),
    /// It runs, which is printed.
    Detached,
    /// It has ended, or reached what the command waits for.
    Reached(Box<JobReport>),
}

impl JobRun<'_> {
    /// Starts the job, and waits for it unless the command is detached. Signals cancel it.
    ///
    /// # Errors
    /// The state of the job is unknown.
    pub(crate) fn run(
        self,
        client: &mut ControlClient,
        signals: BlockedSignals,
    ) -> anyhow::Result<JobCourse> {
        let Self { command, parameters, detach, json, unknown, is_reached } = self;
        let started = Arc::new(OnceLock::new());
        let interrupted = match forward_signals(signals, Arc::clone(&started), unknown) {
            Ok(interrupted) => interrupted,
            Err(error) => return Ok(JobCourse::NotStarted(error)),
        };
        let id = match client.execute_typed(command, Value::Object(parameters)) {
            Ok(StartedJob { id }) => id,
            Err(error @ ClientError::Rejected(_)) => return Ok(JobCourse::NotStarted(error.into())),
            Err(error) => bail!(unknown(&error.to_string())),
        };
        let _ = started.set(id.clone());
        if detach {
            match json {
                true => print_json(&find_job(client, &id)?)?,
                false => print(&format!("{id}: started\n"))?,
            }
            return Ok(JobCourse::Detached);
        }
        let job = wait(client, &id, &interrupted, json, is_reached);
        let job = job.map_err(|error| anyhow!(unknown(&format!("{error:#}"))))?;
        Ok(JobCourse::Reached(Box::new(job)))
    }
}

/// Removes a job whose result was read from the list. Another client may have dismissed it.
pub(crate) fn dismiss(client: &mut ControlClient, job: &JobReport) {
    let _ = client.execute("job-dismiss", json!({ "id": job.id }));
}

/// Starts a thread that handles signals; returns the channel of interruptions of the job with the
/// id in `started`. Ends the process if the daemon has not answered yet, and at a second signal:
/// the daemon may not answer at all. `unknown` returns the report for these ends, with their
/// reason.
fn forward_signals(
    signals: BlockedSignals,
    started: Arc<OnceLock<String>>,
    unknown: impl Fn(&str) -> String,
) -> anyhow::Result<mpsc::Receiver<()>> {
    let (interrupt, interrupted) = mpsc::channel();
    let not_started = unknown("interrupted before the daemon has answered");
    let not_ended = unknown("interrupted before the daemon has cancelled the job");
    let on_signal = move |request| match (request, started.get()) {
        (SignalRequest::End(_), Some(_)) => interrupt.send(()).is_ok(),
        (SignalRequest::EndAtOnce(_), Some(id)) => {
            print_notice(&format!("{not_ended}; its id is {id}"));
            process::exit(1)
        }
        (SignalRequest::End(_) | SignalRequest::EndAtOnce(_), None) => {
            print_notice(&not_started);
            process::exit(1)
        }
        (SignalRequest::HangUp | SignalRequest::ReopenLog | SignalRequest::Meaningless(_), _) => true,
    };
    signals.forward(on_signal).context("cannot start a thread")?;
    Ok(interrupted)
}

/// Waits until the job has ended, or `is_reached` holds for it, and shows its progress. An
/// interruption cancels the job.
///
/// # Errors
/// The daemon does not answer, or does not know the job.
fn wait(
    client: &mut ControlClient,
    id: &str,
    interrupted: &mpsc::Receiver<()>,
    json: bool,
    is_reached: impl Fn(&JobReport) -> bool,
) -> anyhow::Result<JobReport> {
    let has_bar = !json && stderr().is_terminal();
    let template = "{msg} {wide_bar} {bytes}/{total_bytes}";
    let mut bar = None;
    let mut next_line = Instant::now() + LINE_INTERVAL;
    let mut is_interrupted = false;
    loop {
        let job = find_job(client, id)?;
        // A cancelled mirror may be ready for a moment.
        if job.state == "concluded" || is_reached(&job) && !is_interrupted {
            return Ok(job);
        }
        if has_bar {
            let bar = bar.get_or_insert_with(|| progress::bar(template, job.total_bytes));
            bar.set_position(job.done_bytes);
            bar.set_message(describe(&job));
        } else if !json && Instant::now() >= next_line {
            print_notice(&describe(&job));
            next_line += LINE_INTERVAL;
        }
        match interrupted.recv_timeout(POLL_INTERVAL) {
            Ok(()) => {
                is_interrupted = true;
                // It may have concluded in the meantime.
                let _ = client.execute("job-cancel", json!({ "id": id }));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("signals are not received any more"),
        }
    }
}

/// Progress as text: the share, the rate, and the time that remains.
fn describe(job: &JobReport) -> String {
    let percent = figures::share(job.done_bytes as f64 / job.total_bytes.max(1) as f64);
    let rate = figures::bytes(job.rate_bps as f64);
    match job.remaining_s {
        Some(seconds) => {
            let left = figures::time(seconds.saturating_mul(1_000_000_000));
            format!("{}: {percent} at {rate}/s, {left} left", job.disk)
        }
        None => format!("{}: {percent}, {}", job.disk, job.state),
    }
}
