//! Commands that copy a disk of the daemon to a target: the request and the result.
//!
//! ```text
//!   new file, created here ─► descriptor ─► daemon: x-weir-backup, x-weir-mirror ─► job
//!                                             progress ◄── poll ────────────────────┘
//! ```
//!
//! Without a report of the daemon that the job has failed or was cancelled, its file may be
//! complete and stays. Never replaces a file.

mod target;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use api::JobReport;
use console::{CommandFailure, figures, print, print_json, signals::BlockedSignals};
use serde_json::{Map, Value};
use settings::ImageLocation;
use storage::ImageFormat;
use target::{PreparedTarget, RequestedTarget};

use crate::{
    client::{ControlAddress, ControlClient},
    jobs::{JobCourse, JobLimitArgs, JobRun, dismiss},
    new_image::{CreatedFile, UnusedFile},
};

/// Name under which the descriptor is passed.
const NAME: &str = "weir-copy";

/// A job that copies a disk to a target.
pub(crate) enum CopyKind {
    Backup(BackupMarks),
    /// The command waits until the job is ready.
    Mirror,
}

/// Marks that a backup copies, or that begin anew.
#[derive(Default)]
pub(crate) struct BackupMarks {
    pub(crate) bitmap: Option<String>,
    /// True if only what the bitmap marks is copied.
    pub(crate) is_incremental: bool,
    /// Last backup, below a new incremental one.
    pub(crate) backing: Option<PathBuf>,
}

/// A request for such a job.
pub(crate) struct CopyRequest {
    pub(crate) kind: CopyKind,
    pub(crate) disk: String,
    pub(crate) to: ImageLocation,
    pub(crate) format: Option<ImageFormat>,
    pub(crate) limits: JobLimitArgs,
    pub(crate) id: Option<String>,
    pub(crate) detach: bool,
    pub(crate) json: bool,
    pub(crate) qmp: Option<ControlAddress>,
}

impl CopyKind {
    fn name(&self) -> &'static str {
        match self {
            Self::Backup(_) => "backup",
            Self::Mirror => "mirror",
        }
    }

    fn command(&self) -> &'static str {
        match self {
            Self::Backup(_) => "x-weir-backup",
            Self::Mirror => "x-weir-mirror",
        }
    }

    /// True if the command waits no longer, although the job has not ended.
    fn is_reached(&self, job: &JobReport) -> bool {
        matches!(self, Self::Mirror) && job.state == "ready"
    }
}

impl CopyRequest {
    /// Starts the job, and waits for it unless it is detached.
    pub(crate) fn run(self) -> Result<(), CommandFailure> {
        let arguments = self;
        let signals = BlockedSignals::block().context("cannot wait for signals")?;
        let mut client = ControlClient::reach(arguments.qmp)?.with_timeout(ControlClient::LONG)?;
        let report = client.status()?;
        let Some(disk) = report.disks.iter().find(|known| known.name == arguments.disk) else {
            return Err(anyhow!(report.unknown_disk_error(&arguments.disk)).into());
        };
        let kind = arguments.kind;
        let (name, command) = (kind.name(), kind.command());
        let marks = match &kind {
            CopyKind::Backup(marks) => marks,
            CopyKind::Mirror => &BackupMarks::default(),
        };
        let request = RequestedTarget {
            location: arguments.to,
            format: arguments.format,
            size_bytes: disk.size,
            is_incremental: marks.is_incremental,
            backing: marks.backing.clone(),
            disk_image: Path::new(&disk.image),
        };
        let PreparedTarget { location, format, file, created } = request.prepare()?;
        let mut parameters = Map::from_iter([
            ("name".to_owned(), Value::from(&*arguments.disk)),
            ("target".to_owned(), location.to_string().into()),
            ("format".to_owned(), format.name().into()),
            ("new".to_owned(), created.is_some().into()),
        ]);
        if marks.is_incremental {
            parameters.insert("incremental".to_owned(), true.into());
            parameters.insert("overlay".to_owned(), created.is_some().into());
        }
        parameters.extend(marks.bitmap.as_deref().map(|bitmap| ("bitmap".to_owned(), bitmap.into())));
        parameters.extend(arguments.id.map(|id| ("id".to_owned(), Value::from(id))));
        parameters.extend(arguments.limits.parameters());
        if let Some(file) = file {
            client.pass_descriptor(NAME, &file)?;
            parameters.insert("fdname".to_owned(), NAME.into());
        }
        // From here on only a report of the daemon decides whether the file is removed.
        let outcome = CopyOutcome {
            kind: name,
            disk: arguments.disk,
            target: location.to_string(),
            created: created.and_then(UnusedFile::keep),
        };
        let unknown = |why: &str| outcome.unknown(&anyhow!("{why}")).to_string();
        let run = JobRun {
            command,
            parameters,
            detach: arguments.detach,
            json: arguments.json,
            unknown: &unknown,
            is_reached: &|job| kind.is_reached(job),
        };
        let job = match run.run(&mut client, signals)? {
            JobCourse::NotStarted(error) => {
                outcome.remove_file();
                return Err(error.into());
            }
            JobCourse::Detached => return Ok(()),
            JobCourse::Reached(job) => job,
        };
        if job.state != "concluded" {
            return outcome.report_ready(&job, arguments.json);
        }
        let result = outcome.finish(&job, arguments.json);
        dismiss(&mut client, &job);
        result
    }
}

/// Target of a job that was requested, for reports of the result.
struct CopyOutcome {
    /// Name of the job's kind.
    kind: &'static str,
    disk: String,
    /// Target as text.
    target: String,
    /// A file that this process has created.
    created: Option<CreatedFile>,
}

impl CopyOutcome {
    /// Error for a job without a report of its end. Its file may be complete, and is kept.
    fn unknown(&self, why: &anyhow::Error) -> anyhow::Error {
        let Self { kind, disk, target, created } = self;
        let kept = if created.is_some() { "; the file is kept, and may be incomplete" } else { "" };
        anyhow!("{disk}: the state of the {kind} to {target} is unknown: {why:#} (see `weir jobs`{kept})")
    }

    /// Removes a file without its data; returns the result as text.
    fn remove_file(&self) -> String {
        match self.created.as_ref().map(CreatedFile::remove) {
            None => "the target has a part of the data".to_owned(),
            Some(Ok(())) => "the file was removed".to_owned(),
            Some(Err(error)) => format!("the file cannot be removed: {error}"),
        }
    }

    /// Reports that a mirror can be completed. The job and its file stay.
    fn report_ready(&self, job: &JobReport, json: bool) -> Result<(), CommandFailure> {
        if json {
            return Ok(print_json(job)?);
        }
        let (disk, id, target) = (&job.disk, &job.id, &self.target);
        let text = format!("{disk}: {target} follows it; `weir job complete {id}` moves the disk there\n");
        Ok(print(&text)?)
    }

    /// Reports the result, and removes the file if the job has failed or was cancelled.
    fn finish(&self, job: &JobReport, json: bool) -> Result<(), CommandFailure> {
        let Self { target, kind, .. } = self;
        let is_complete = job.error.is_none() && !job.is_cancelled;
        let rest = if is_complete { String::new() } else { self.remove_file() };
        if json {
            print_json(job)?;
        }
        match &job.error {
            Some(error) => Err(anyhow!("{}: no {kind} to {target}: {error} ({rest})", job.disk).into()),
            None if job.is_cancelled => {
                Err(anyhow!("{}: the {kind} to {target} was cancelled ({rest})", job.disk).into())
            }
            None if json => Ok(()),
            None => {
                let (copied, time) = (figures::sized(job.copied_bytes), figures::time(job.running_ns));
                Ok(print(&format!("{}: {copied} copied to {target} in {time}\n", job.disk))?)
            }
        }
    }
}
