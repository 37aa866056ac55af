//! `weir resume`: what an error has stopped goes on.

use anyhow::anyhow;
use clap::Args;
use console::{CommandFailure, print};
use serde_json::{Value, json};

use crate::client::{Client, Target};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir resume
      Once a full device has room again, the disks that it stopped try again what failed.
  weir resume vm1
      That one alone.

With `--on-write-error enospc`, a disk whose device is full holds its requests instead of failing them: guests wait. \
Where what was held fails at once again, this is told, with exit status 1. QMP's `cont` does the same as this command \
without a DISK, and tells nothing.";

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

pub(crate) fn run(arguments: ResumeArgs) -> Result<(), CommandFailure> {
    let mut client = Client::reach(arguments.qmp)?;
    let report = client.status()?;
    let mut asked = json!({});
    if let Some(disk) = &arguments.disk {
        if !report.disks.iter().any(|known| known.name == *disk) {
            return Err(anyhow!(report.no_such_disk(disk)).into());
        }
        asked["name"] = json!(disk);
    }
    let answer: Value = client.execute("x-weir-resume", asked)?;
    let resumed = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    let (stopped, going): (Vec<_>, Vec<_>) = resumed.iter().partition(|disk| disk["stopped-by"].is_string());
    let name = |disk: &Value| disk["name"].as_str().unwrap_or_default().to_owned();
    if resumed.is_empty() {
        return Ok(print(&match arguments.disk {
            Some(disk) => format!("{disk} was not stopped\n"),
            None => "no disk was stopped\n".to_owned(),
        })?);
    }
    if !going.is_empty() {
        let names: Vec<_> = going.into_iter().map(name).collect();
        print(&format!("resumed: {}\n", names.join(" ")))?;
    }
    if stopped.is_empty() {
        return Ok(());
    }
    let tell = |disk: &Value| {
        format!("{} has stopped again: {}", name(disk), disk["stopped-by"].as_str().unwrap_or_default())
    };
    let told: Vec<_> = stopped.into_iter().map(tell).collect();
    Err(anyhow!("{} (mend that, and resume again)", told.join("; ")).into())
}
