//! `weir disk` and `weir group`: add, remove and move disks and groups of a running daemon.
//!
//! ```text
//!   prepare the config file's new text ─► the daemon applies the change ─► rename the text into place
//!                                          └ an error at any step: everything is undone
//! ```

mod disk;
mod exports;
mod group;

use anyhow::Context as _;
use api::{AddedDisk, MovedDisk};
use clap::Args;
use console::{CommandFailure, print, print_json};
pub(crate) use disk::{ADD_EXAMPLES as DISK_EXAMPLES, DiskCommand, run as disk};
pub(crate) use group::{EXAMPLES as GROUP_EXAMPLES, GroupCommand, run as group};
use serde::Serialize;

use crate::{client::ControlAddress, settings_command::PreparedConfigFile};

/// Control socket and output format of these commands.
#[derive(Debug, Args)]
struct ControlArgs {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

/// Result of a change, from the daemon.
#[derive(Serialize)]
#[serde(untagged)]
enum DaemonResult<'a> {
    Added(&'a AddedDisk),
    Moved(&'a MovedDisk),
}

/// Result of these commands with `--json`.
#[derive(Default, Serialize)]
struct ObjectChange<'a> {
    kind: &'a str,
    name: &'a str,
    change: &'a str,
    /// The config file that has the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    saved: Option<&'a str>,
    /// The config file that did not have the object to remove.
    #[serde(skip_serializing_if = "Option::is_none")]
    unchanged: Option<&'a str>,
    #[serde(flatten)]
    result: Option<DaemonResult<'a>>,
}

/// Renames the new config file into place and prints the change. `outcome` names no config file.
fn finish(
    outcome: ObjectChange<'_>,
    saving: Option<PreparedConfigFile>,
    json: bool,
) -> Result<(), CommandFailure> {
    let ObjectChange { kind, name, change, .. } = outcome;
    let has_changes = saving.as_ref().is_some_and(PreparedConfigFile::has_changes);
    // The daemon has applied the change by now: an error here must not read as if it had failed.
    let saved = saving.map(PreparedConfigFile::commit).transpose();
    let saved = saved.with_context(|| format!("{name}: {change}, but the change is not saved"))?;
    if json {
        let file = saved.as_deref();
        let (saved, unchanged) = if has_changes { (file, None) } else { (None, file) };
        return Ok(print_json(&ObjectChange { saved, unchanged, ..outcome })?);
    }
    let at = match outcome.result {
        Some(DaemonResult::Added(disk)) if !disk.uris.is_empty() => format!(", at {}", disk.uris.join(", ")),
        _ => String::new(),
    };
    let mut text = format!("{kind} {name}: {change}{at}\n");
    if let Some(file) = saved {
        text += &match has_changes {
            true => format!("{name}: saved in {file}\n"),
            false => format!("{name}: nothing to change in {file}, which has no [{kind}.{name}]\n"),
        };
    }
    Ok(print(&text)?)
}
