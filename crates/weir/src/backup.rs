//! `weir backup`: copies a disk of the running daemon to another image, as it is at the start,
//! while its clients use it.
//!
//! ```text
//!   new file, created here ─► descriptor ─► daemon: x-weir-backup ─► job
//!                                             progress ◄── poll ──────┘
//! ```
//!
//! This process creates the file, so that it belongs to the user and the daemon needs no permission
//! for its directory. It removes the file if the job fails or is cancelled. Never replaces a file.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, IsTerminal as _, stderr},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf, absolute},
    process,
    sync::mpsc::{self, RecvTimeoutError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use api::{JobReport, StartedJob};
use clap::Args;
use console::{
    CommandFailure, figures, on_reactor, print, print_json, print_notice, progress,
    signals::{BlockedSignals, SignalRequest},
};
use image::qcow2::create::{CreateOptions, create};
use serde_json::{Map, Value, json};
use settings::ImageLocation;
use storage::{ImageFormat, OpenOptions as StorageOptions, open_storage};

use crate::{
    client::{ControlAddress, ControlClient},
    jobs::{JobLimitArgs, find_job},
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

Changes that clients make during the backup first copy the old data into a buffer of 64 MiB. If the target is so slow \
that the buffer is full, the backup fails, and the clients continue. Ctrl-C cancels the backup. A file that is not \
complete is removed, except with --detach.
Exit status: 0 complete, 1 failed or cancelled, 2 wrong use of the command line.";

/// Name under which the descriptor is passed.
const NAME: &str = "weir-backup";
/// Interval at which the progress is read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of the lines of progress without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(60);
/// Size of a new qcow2 file before it has a header: storage rejects an empty file.
const MIN_FILE_BYTES: u64 = 512;

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

/// A target that exists, and its file if this process has opened it.
struct PreparedTarget {
    location: ImageLocation,
    format: ImageFormat,
    file: Option<File>,
    /// The path of a file that this process has created, until the backup is complete.
    created: Option<PathBuf>,
}

impl Drop for PreparedTarget {
    fn drop(&mut self) {
        if let Some(path) = &self.created {
            let _ = fs::remove_file(path);
        }
    }
}

pub(crate) fn run(arguments: BackupArgs) -> Result<(), CommandFailure> {
    let signals = BlockedSignals::block().context("cannot wait for signals")?;
    let mut client = ControlClient::reach(arguments.qmp)?.with_timeout(ControlClient::LONG)?;
    let report = client.status()?;
    let Some(disk) = report.disks.iter().find(|known| known.name == arguments.disk) else {
        return Err(anyhow!(report.unknown_disk_error(&arguments.disk)).into());
    };
    let mut target = PreparedTarget::new(arguments.to, arguments.format, disk.size)?;
    let mut parameters = Map::from_iter([
        ("name".to_owned(), Value::from(&*arguments.disk)),
        ("target".to_owned(), target.location.to_string().into()),
        ("format".to_owned(), target.format.name().into()),
        ("new".to_owned(), target.created.is_some().into()),
    ]);
    parameters.extend(arguments.id.map(|id| ("id".to_owned(), Value::from(id))));
    parameters.extend(arguments.limits.parameters());
    if let Some(file) = target.file.take() {
        client.pass_descriptor(NAME, &file)?;
        parameters.insert("fdname".to_owned(), NAME.into());
    }
    let StartedJob { id } = client.execute_typed("x-weir-backup", Value::Object(parameters))?;
    if arguments.detach {
        // The daemon has the file now.
        target.created = None;
        return match arguments.json {
            true => Ok(print_json(&find_job(&mut client, &id)?)?),
            false => Ok(print(&format!("{id}: started\n"))?),
        };
    }
    let (interrupt, interrupted) = mpsc::channel();
    let on_signal = move |request| match request {
        // A second Ctrl-C, if the daemon does not answer.
        SignalRequest::EndAtOnce(_) => process::exit(1),
        SignalRequest::End(_) => interrupt.send(()).is_ok(),
        SignalRequest::HangUp | SignalRequest::ReopenLog | SignalRequest::Meaningless(_) => true,
    };
    signals.forward(on_signal).context("cannot start a thread")?;
    let job = wait(&mut client, &id, &interrupted, arguments.json)?;
    // The result is read: the job need not be listed any more.
    client.execute("job-dismiss", json!({ "id": id }))?;
    finish(&job, target, arguments.json)
}

/// Reports the result, and keeps the target if it is complete.
fn finish(job: &JobReport, mut target: PreparedTarget, json: bool) -> Result<(), CommandFailure> {
    let is_complete = job.error.is_none() && !job.is_cancelled;
    let name = target.location.to_string();
    let rest = match (is_complete, &target.created) {
        (true, _) => "",
        (false, Some(_)) => " (the file was removed)",
        (false, None) => " (the target has a part of the data)",
    };
    if is_complete {
        target.created = None;
    }
    // Removes an incomplete file.
    drop(target);
    if json {
        print_json(job)?;
    }
    match &job.error {
        Some(error) => Err(anyhow!("{}: no backup to {name}: {error}{rest}", job.disk).into()),
        None if job.is_cancelled => {
            Err(anyhow!("{}: the backup to {name} was cancelled{rest}", job.disk).into())
        }
        None if json => Ok(()),
        None => {
            let (copied, time) = (figures::sized(job.copied_bytes), figures::time(job.running_ns));
            Ok(print(&format!("{}: {copied} copied to {name} in {time}\n", job.disk))?)
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

impl PreparedTarget {
    /// Opens a device or creates a file; a target at a server exists already.
    fn new(location: ImageLocation, format: Option<ImageFormat>, size_bytes: u64) -> anyhow::Result<Self> {
        let location = location.relative_to(&absolute(".")?);
        let Some(path) = location.path().map(Path::to_owned) else {
            let format = format.unwrap_or(ImageFormat::Raw);
            return Ok(Self { location, format, file: None, created: None });
        };
        let name = path.display();
        match fs::metadata(&path) {
            Ok(existing) if existing.file_type().is_block_device() => {
                let file = OpenOptions::new().read(true).write(true).open(&path);
                let file = file.with_context(|| format!("{name}: cannot be written"))?;
                let format = format.unwrap_or(ImageFormat::Raw);
                return Ok(Self { location, format, file: Some(file), created: None });
            }
            Ok(_) => bail!("{name}: exists already (remove it, or choose another file)"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => bail!("{name}: cannot be created: {error} (check the directory)"),
        }
        let is_named_qcow2 = path.extension().is_some_and(|extension| extension == "qcow2");
        let default = if is_named_qcow2 { ImageFormat::Qcow2 } else { ImageFormat::Raw };
        let format = format.unwrap_or(default);
        // It holds all data of the disk: only this user may read it.
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file =
            file.map_err(|error| anyhow!("{name}: cannot be created: {error} (check the directory)"))?;
        // From here on the file is removed after a failure.
        let target = Self { location, format, file: Some(file), created: Some(path.clone()) };
        target.format(&path, size_bytes).with_context(|| format!("{name}: cannot be created"))?;
        Ok(target)
    }

    /// Makes the new file an empty image of this size.
    fn format(&self, path: &Path, size_bytes: u64) -> anyhow::Result<()> {
        let file = self.file.as_ref().context("it is not open")?;
        if self.format == ImageFormat::Raw {
            return Ok(file.set_len(size_bytes)?);
        }
        file.set_len(MIN_FILE_BYTES)?;
        let spec = format!("file:{}", path.to_str().context("its name is not UTF-8")?);
        let created = on_reactor(async move {
            let storage = open_storage(&spec, StorageOptions::default()).map_err(anyhow::Error::from)?;
            let options = CreateOptions { size_bytes, ..CreateOptions::default() };
            create(&storage, None, &options).await.map_err(anyhow::Error::from)?;
            Ok(())
        });
        created.map_err(|failure| match failure {
            CommandFailure::Usage(error) | CommandFailure::Failed(error) => error,
            CommandFailure::Found(status) => anyhow!("status {status}"),
        })
    }
}
