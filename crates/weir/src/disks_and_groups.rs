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
use clap::Args;
use console::{CommandFailure, print, print_json};
pub(crate) use disk::{ADD_EXAMPLES as DISK_EXAMPLES, DiskCommand, run as disk};
pub(crate) use group::{EXAMPLES as GROUP_EXAMPLES, GroupCommand, run as group};
use serde_json::{Value, json};

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

/// Renames the new config file into place and prints the change.
fn finish(
    outcome: (&str, &str, &str),
    saving: Option<PreparedConfigFile>,
    json: bool,
) -> Result<(), CommandFailure> {
    finish_with_response(outcome, saving, json, &Value::Null)
}

/// As [`finish`], with fields of the daemon's response for JSON.
fn finish_with_response(
    outcome: (&str, &str, &str),
    saving: Option<PreparedConfigFile>,
    json: bool,
    more: &Value,
) -> Result<(), CommandFailure> {
    let (kind, name, change) = outcome;
    let has_changes = saving.as_ref().is_some_and(PreparedConfigFile::has_changes);
    // The daemon has applied the change by now: an error here must not read as if it had failed.
    let saved = saving.map(PreparedConfigFile::commit).transpose();
    let saved = saved.with_context(|| format!("{name}: {change}, but the change is not saved"))?;
    if json {
        let mut report = json!({ "kind": kind, "name": name, "change": change });
        if let Some(file) = &saved {
            report[if has_changes { "saved" } else { "unchanged" }] = json!(file);
        }
        for (key, value) in more.as_object().into_iter().flatten() {
            report[key] = value.clone();
        }
        return Ok(print_json(&report)?);
    }
    let uris = more["uris"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let uris: Vec<_> = uris.collect();
    let at = if uris.is_empty() { String::new() } else { format!(", at {}", uris.join(", ")) };
    let mut text = format!("{kind} {name}: {change}{at}\n");
    if let Some(file) = saved {
        text += &match has_changes {
            true => format!("{name}: saved in {file}\n"),
            false => format!("{name}: nothing to change in {file}, which has no [{kind}.{name}]\n"),
        };
    }
    Ok(print(&text)?)
}
