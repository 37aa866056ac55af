//! `weir resume`: what an error has stopped goes on.

use anyhow::anyhow;
use clap::Args;
use console::{Failure, print};
use serde_json::{Value, json};

use crate::client::{Client, Target};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir resume
      Once a full device has room again, the disks that it stopped try again what failed.
  weir resume vm1
      That one alone.

With `--on-write-error enospc`, a disk whose device is full holds its requests instead of failing them: guests wait. \
QMP's `cont` does the same as this command without a DISK.";

/// What `weir resume` is told.
#[derive(Debug, Args)]
pub(crate) struct ResumeArgs {
    /// This disk alone [default: all that are stopped]
    #[arg(value_name = "DISK")]
    disk: Option<String>,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<Target>,
}

pub(crate) fn run(arguments: ResumeArgs) -> Result<(), Failure> {
    let mut client = Client::reach(arguments.qmp)?;
    let (_, report) = client.status()?;
    if let Some(disk) = arguments.disk {
        if !report.disks.iter().any(|known| known.name == disk) {
            return Err(anyhow!("{disk}: no disk has this name (`weir status` lists them)").into());
        }
        let answer: Value = client.execute("x-weir-resume", json!({ "name": disk }))?;
        return Ok(print(&match answer["was-stopped"] == true {
            true => format!("resumed: {disk}\n"),
            false => format!("{disk} was not stopped\n"),
        })?);
    }
    let stopped = report.disks.iter().filter(|disk| disk.stopped_by().is_some());
    let names: Vec<_> = stopped.map(|disk| disk.name.as_str()).collect();
    client.execute("cont", json!({}))?;
    Ok(print(&match names.is_empty() {
        true => "no disk was stopped\n".to_owned(),
        false => format!("resumed: {}\n", names.join(" ")),
    })?)
}
