//! `weir stream`: copies the content of a disk's backing files into its image while clients use it,
//! so that the chain becomes shorter.
//!
//! Never opens, creates or removes an image: the daemon has them.

use std::path::{PathBuf, absolute};

use anyhow::{Context as _, anyhow};
use api::JobReport;
use clap::Args;
use console::{CommandFailure, figures, print, print_json, signals::BlockedSignals};
use serde_json::{Map, Value};

use crate::{
    client::{ControlAddress, ControlClient},
    jobs::{JobCourse, JobLimitArgs, JobRun, dismiss},
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir stream vm1
      The image of vm1 has all of its content, and no backing file any more. Uses spare capacity only.
  weir stream vm1 --up-to base.qcow2
      Removes the files between the image and base.qcow2 from the chain.
  weir stream vm1 --bps-total 50M --detach
      At most 50 MiB a second, in the background: `weir jobs` shows it.

The image must have space for what the removed files contain; zeroes need none. `weir status --json` shows the chain. \
The content of the disk is the same at any time: after Ctrl-C or a failure the chain is as before, and the next stream \
copies only the rest. The removed files are closed, and unchanged: delete them once no other image needs them.
Exit status: 0 complete, 1 failed or cancelled, 2 wrong use of the command line.";

/// Arguments of `weir stream`.
#[derive(Debug, Args)]
pub(crate) struct StreamArgs {
    /// Disk
    #[arg(value_name = "DISK")]
    disk: String,
    /// File of the chain that stays the backing file of the image [default: none stays]
    #[arg(long, value_name = "FILE")]
    up_to: Option<PathBuf>,
    #[command(flatten)]
    limits: JobLimitArgs,
    /// Id of the job [default: stream-DISK]
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

pub(crate) fn run(arguments: StreamArgs) -> Result<(), CommandFailure> {
    let signals = BlockedSignals::block().context("cannot wait for signals")?;
    let StreamArgs { disk, up_to, limits, id, detach, json, qmp } = arguments;
    let mut client = ControlClient::reach(qmp)?.with_timeout(ControlClient::LONG)?;
    let mut parameters = Map::from_iter([("name".to_owned(), Value::from(&*disk))]);
    if let Some(file) = up_to {
        // The daemon has another working directory.
        let path = absolute(&file).with_context(|| format!("{}", file.display()))?;
        let path = path.to_str().ok_or_else(|| anyhow!("{}: its name is not UTF-8", path.display()))?;
        parameters.insert("base".to_owned(), path.into());
    }
    parameters.extend(id.map(|id| ("id".to_owned(), Value::from(id))));
    parameters.extend(limits.parameters());
    let unknown = |why: &str| {
        let rest = "see `weir jobs`; the content of the disk is the same in any case";
        format!("{disk}: the state of the stream is unknown: {why} ({rest})")
    };
    let (command, is_reached) = ("x-weir-stream", &|_: &JobReport| false);
    let run = JobRun { command, parameters, detach, json, unknown: &unknown, is_reached };
    let job = match run.run(&mut client, signals)? {
        JobCourse::NotStarted(error) => return Err(error.into()),
        JobCourse::Detached => return Ok(()),
        JobCourse::Reached(job) => job,
    };
    let result = finish(&job, json);
    dismiss(&mut client, &job);
    result
}

/// Reports the result.
fn finish(job: &JobReport, json: bool) -> Result<(), CommandFailure> {
    let disk = &job.disk;
    if json {
        print_json(job)?;
    }
    let rest = "its chain of backing files is as before";
    match &job.error {
        Some(error) => Err(anyhow!("{disk}: the stream has failed: {error} ({rest})").into()),
        None if job.is_cancelled => Err(anyhow!("{disk}: the stream was cancelled ({rest})").into()),
        None if json => Ok(()),
        None => {
            let (copied, time) = (figures::sized(job.copied_bytes), figures::time(job.running_ns));
            Ok(print(&format!("{disk}: {copied} copied to {} in {time}\n", job.target))?)
        }
    }
}
