//! `weir resume`: resumes disks that an I/O error has stopped.

use anyhow::anyhow;
use api::ResumedDisk;
use clap::Args;
use console::{CommandFailure, print, print_json};
use serde_json::{Value, json};

use crate::client::{ControlAddress, ControlClient};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir resume
      Once a full device has free space again: stopped disks retry their failed requests.
  weir resume vm1
      Only the disk vm1.

With `--on-write-error enospc`, a disk whose device is full holds its requests instead of failing them: guests wait. \
If a retried request fails at once again, this is reported, with exit status 1. QMP's `cont` resumes all disks as well, \
without reporting that.";

/// Arguments of `weir resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// Resume only this disk [default: all stopped disks]
    #[arg(value_name = "DISK")]
    disk: Option<String>,
    /// Print the resumed disks as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

pub(crate) fn run(arguments: ResumeArgs) -> Result<(), CommandFailure> {
    let mut client = ControlClient::reach(arguments.qmp)?;
    let report = client.status()?;
    if let Some(disk) = &arguments.disk
        && !report.disks.iter().any(|known| known.name == *disk)
    {
        return Err(anyhow!(report.unknown_disk_error(disk)).into());
    }
    let parameters = arguments.disk.as_ref().map_or(Value::Null, |disk| json!({ "name": disk }));
    // A disk stops again if a retried request failed at once.
    let resumed: Vec<ResumedDisk> = client.execute_typed("x-weir-resume", parameters)?;
    if arguments.json {
        print_json(&resumed)?;
    }
    let (stopped, running): (Vec<_>, Vec<_>) = resumed.iter().partition(|disk| disk.stopped_by.is_some());
    if resumed.is_empty() && arguments.json {
        return Ok(());
    }
    if resumed.is_empty() {
        return Ok(print(&match arguments.disk {
            Some(disk) => format!("{disk}: was not stopped\n"),
            None => "no disk was stopped\n".to_owned(),
        })?);
    }
    // Printed even if other disks stopped again: the exit status reports those.
    if !running.is_empty() && !arguments.json {
        let names: Vec<_> = running.into_iter().map(|disk| &*disk.name).collect();
        print(&format!("resumed: {}\n", names.join(" ")))?;
    }
    if stopped.is_empty() {
        return Ok(());
    }
    let describe = |disk: &ResumedDisk| {
        format!("{}: stopped again: {}", disk.name, disk.stopped_by.as_deref().unwrap_or_default())
    };
    let lines: Vec<_> = stopped.into_iter().map(describe).collect();
    Err(anyhow!("{} (remove the cause, and resume again)", lines.join("; ")).into())
}
