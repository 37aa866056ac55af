//! `weir backup`: copies a disk of the running daemon to another image, as it is at the start,
//! while its clients use it.
//!
//! ```text
//!   new file, created here ─► descriptor ─► daemon: x-weir-backup ─► job
//!                                             progress ◄── poll ──────┘
//! ```
//!
//! This process creates the file, so that it belongs to the user and the daemon needs no permission
//! for its directory. It removes the file if the daemon rejects the backup, or reports that the job
//! has failed or was cancelled. Without such a report the file may be a complete backup, and stays.
//! Never replaces a file.

mod target;

use std::{
    io::{IsTerminal as _, stderr},
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, OnceLock,
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use api::{JobReport, StartedJob};
use clap::Args;
use console::{
    CommandFailure, figures, print, print_json, print_notice, progress,
    signals::{BlockedSignals, SignalRequest},
};
use serde_json::{Map, Value, json};
use settings::ImageLocation;
use storage::ImageFormat;
use target::{PreparedTarget, RequestedTarget};

use crate::{
    client::{ClientError, ControlAddress, ControlClient},
    jobs::{JobLimitArgs, find_job},
    new_image::{CreatedFile, UnusedFile},
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir backup vm1 --to /backup/vm1.qcow2
      The disk as it is now, while its machine runs. Uses spare capacity only.
  weir backup vm1 --to /backup/vm1.raw --bps-total 50M
      At most 50 MiB a second.
  weir backup vm1 --to nbd://backup-host/vm1 --weight 50
      To an NBD server, with half of the share of a disk with the default weight 100.
  weir backup vm1 --to /backup/vm1.qcow2 --detach
      In the background: `weir jobs` shows it.
  weir backup vm1 --to monday.qcow2 --bitmap daily
      A full backup. From its instant on, the bitmap records what changes.
  weir backup vm1 --to tuesday.qcow2 --bitmap daily --incremental --backing monday.qcow2
      What has changed since, as an overlay of the last backup.

Changes that clients make during the backup first copy the old data into a buffer of 64 MiB. If the target is so slow \
that the buffer is full, the backup fails, and the clients continue. Ctrl-C cancels the backup. After a \
failure or Ctrl-C the new file is removed, except with --detach, or if the daemon does not report the end.
Exit status: 0 complete, 1 failed or cancelled, 2 wrong use of the command line.";

/// Name under which the descriptor is passed.
const NAME: &str = "weir-backup";
/// Interval at which the progress is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of the lines of progress without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(60);

/// Arguments of `weir backup`.
#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// Disk to copy
    #[arg(value_name = "DISK")]
    disk: String,
    /// Target: a new file, a block device, the URI of an NBD export, or rbd:POOL/IMAGE
    #[arg(long, value_name = "IMAGE", value_parser = settings::parse::<ImageLocation>)]
    to: ImageLocation,
    /// Format of the target: raw or qcow2 [default: qcow2 for a new file *.qcow2, else raw]
    #[arg(long, short, value_name = "FORMAT", value_parser = settings::parse::<ImageFormat>)]
    format: Option<ImageFormat>,
    /// Bitmap of the disk that begins anew at the instant of the backup; added if it does not exist
    #[arg(long, value_name = "BITMAP")]
    bitmap: Option<String>,
    /// Copy only what the bitmap marks
    #[arg(long, requires = "bitmap")]
    incremental: bool,
    /// Last backup, the backing file of a new incremental one: a qcow2 file if its name ends in
    /// .qcow2, else raw
    #[arg(long, value_name = "FILE", requires = "incremental")]
    backing: Option<PathBuf>,
    #[command(flatten)]
    limits: JobLimitArgs,
    /// Id of the job [default: backup-DISK]
    #[arg(long, value_name = "JOB")]
    id: Option<String>,
    /// Do not wait for the end
    #[arg(long)]
    detach: bool,
    /// Print the job as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

pub(crate) fn run(arguments: BackupArgs) -> Result<(), CommandFailure> {
    let signals = BlockedSignals::block().context("cannot wait for signals")?;
    let mut client = ControlClient::reach(arguments.qmp)?.with_timeout(ControlClient::LONG)?;
    let report = client.status()?;
    let Some(disk) = report.disks.iter().find(|known| known.name == arguments.disk) else {
        return Err(anyhow!(report.unknown_disk_error(&arguments.disk)).into());
    };
    let request = RequestedTarget {
        location: arguments.to,
        format: arguments.format,
        size_bytes: disk.size,
        is_incremental: arguments.incremental,
        backing: arguments.backing,
        disk_image: Path::new(&disk.image),
    };
    let PreparedTarget { location, format, file, created } = request.prepare()?;
    let mut parameters = Map::from_iter([
        ("name".to_owned(), Value::from(&*arguments.disk)),
        ("target".to_owned(), location.to_string().into()),
        ("format".to_owned(), format.name().into()),
        ("new".to_owned(), created.is_some().into()),
        ("incremental".to_owned(), arguments.incremental.into()),
        ("overlay".to_owned(), (arguments.incremental && created.is_some()).into()),
    ]);
    parameters.extend(arguments.bitmap.map(|bitmap| ("bitmap".to_owned(), Value::from(bitmap))));
    parameters.extend(arguments.id.map(|id| ("id".to_owned(), Value::from(id))));
    parameters.extend(arguments.limits.parameters());
    if let Some(file) = file {
        client.pass_descriptor(NAME, &file)?;
        parameters.insert("fdname".to_owned(), NAME.into());
    }
    // From here on only a report of the daemon decides whether the file is removed.
    let outcome = BackupOutcome {
        disk: arguments.disk,
        target: location.to_string(),
        created: created.and_then(UnusedFile::keep),
    };
    let started = Arc::new(OnceLock::new());
    let interrupted = outcome.forward_signals(signals, Arc::clone(&started)).inspect_err(|_| {
        outcome.remove_file();
    })?;
    let id = match client.execute_typed("x-weir-backup", Value::Object(parameters)) {
        Ok(StartedJob { id }) => id,
        Err(error @ ClientError::Rejected(_)) => {
            outcome.remove_file();
            return Err(error.into());
        }
        Err(error) => return Err(outcome.unknown(&error.into()).into()),
    };
    let _ = started.set(id.clone());
    if arguments.detach {
        return match arguments.json {
            true => Ok(print_json(&find_job(&mut client, &id)?)?),
            false => Ok(print(&format!("{id}: started\n"))?),
        };
    }
    let job =
        wait(&mut client, &id, &interrupted, arguments.json).map_err(|error| outcome.unknown(&error))?;
    let result = outcome.finish(&job, arguments.json);
    // The result is read, so the job need not be listed. Another client may have dismissed it.
    let _ = client.execute("job-dismiss", json!({ "id": id }));
    result
}

/// Target of a backup that was requested, for reports of the result.
struct BackupOutcome {
    disk: String,
    /// Target as text.
    target: String,
    /// A file that this process has created.
    created: Option<CreatedFile>,
}

impl BackupOutcome {
    /// Starts a thread that handles signals; returns the channel of interruptions of the job with
    /// the id in `started`. Ends the process if the daemon has not answered yet, and at a second
    /// signal: the daemon may not answer at all.
    fn forward_signals(
        &self,
        signals: BlockedSignals,
        started: Arc<OnceLock<String>>,
    ) -> anyhow::Result<mpsc::Receiver<()>> {
        let (interrupt, interrupted) = mpsc::channel();
        let unknown = |why: &str| self.unknown(&anyhow!("{why}")).to_string();
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

    /// Error for a backup without a report of its end. Its file may be complete, and is kept.
    fn unknown(&self, why: &anyhow::Error) -> anyhow::Error {
        let Self { disk, target, created } = self;
        let kept = if created.is_some() { "; the file is kept, and may be incomplete" } else { "" };
        anyhow!("{disk}: the state of the backup to {target} is unknown: {why:#} (see `weir jobs`{kept})")
    }

    /// Removes a file without a backup; returns the result as text.
    fn remove_file(&self) -> String {
        match self.created.as_ref().map(CreatedFile::remove) {
            None => "the target has a part of the data".to_owned(),
            Some(Ok(())) => "the file was removed".to_owned(),
            Some(Err(error)) => format!("the file cannot be removed: {error}"),
        }
    }

    /// Reports the result, and removes the file if the backup has failed or was cancelled.
    fn finish(&self, job: &JobReport, json: bool) -> Result<(), CommandFailure> {
        let Self { target, .. } = self;
        let is_complete = job.error.is_none() && !job.is_cancelled;
        let rest = if is_complete { String::new() } else { self.remove_file() };
        if json {
            print_json(job)?;
        }
        match &job.error {
            Some(error) => Err(anyhow!("{}: no backup to {target}: {error} ({rest})", job.disk).into()),
            None if job.is_cancelled => {
                Err(anyhow!("{}: the backup to {target} was cancelled ({rest})", job.disk).into())
            }
            None if json => Ok(()),
            None => {
                let (copied, time) = (figures::sized(job.copied_bytes), figures::time(job.running_ns));
                Ok(print(&format!("{}: {copied} copied to {target} in {time}\n", job.disk))?)
            }
        }
    }
}

/// Waits until the job has ended, and shows its progress. An interruption cancels the job.
fn wait(
    client: &mut ControlClient,
    id: &str,
    interrupted: &mpsc::Receiver<()>,
    json: bool,
) -> anyhow::Result<JobReport> {
    let has_bar = !json && stderr().is_terminal();
    let template = "{msg} {wide_bar} {bytes}/{total_bytes}";
    let mut bar = None;
    let mut next_line = Instant::now() + LINE_INTERVAL;
    loop {
        let job = find_job(client, id)?;
        if job.state == "concluded" {
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
                // It may have concluded in the meantime.
                let _ = client.execute("job-cancel", json!({ "id": id }));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("signals are not received any more"),
        }
    }
}

/// Progress as text: the share, the rate, and the time that remains.
pub(crate) fn describe(job: &JobReport) -> String {
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
