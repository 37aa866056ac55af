//! `weir disk` and `weir group`: what a running daemon serves, one more or one less.
//!
//! ```text
//!   the config file's new text is prepared ─► the daemon does it ─► the text is put in place
//!                                              └ refuses, or one of several steps: all is undone
//! ```

mod disk;
mod doors;
mod group;

use anyhow::Context as _;
use clap::Args;
use console::{CommandFailure, print, print_json};
pub(crate) use disk::{ADD_EXAMPLES as DISK_EXAMPLES, DiskCommand, run as disk};
pub(crate) use group::{EXAMPLES as GROUP_EXAMPLES, GroupCommand, run as group};
use serde_json::{Value, json};

use crate::{client::Target, saving::Saving};

/// Whom each of these commands asks, and how it tells.
#[derive(Debug, Args)]
struct Asked {
    /// Print what was done as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<Target>,
}

/// Puts the new config file in place, and tells what was done.
fn finish(what: (&str, &str, &str), saving: Option<Saving>, json: bool) -> Result<(), CommandFailure> {
    finish_with(what, saving, json, &Value::Null)
}

/// The same with what the daemon has answered, for JSON.
fn finish_with(
    what: (&str, &str, &str),
    saving: Option<Saving>,
    json: bool,
    more: &Value,
) -> Result<(), CommandFailure> {
    let (kind, name, change) = what;
    let has_changes = saving.as_ref().is_some_and(Saving::has_changes);
    let saved = saving.map(Saving::commit).transpose();
    let saved = saved.with_context(|| format!("{name}: {change}, but that is not saved"))?;
    if json {
        let mut told = json!({ "kind": kind, "name": name, "change": change });
        if let Some(file) = &saved {
            told[if has_changes { "saved" } else { "unchanged" }] = json!(file);
        }
        for (key, value) in more.as_object().into_iter().flatten() {
            told[key] = value.clone();
        }
        return Ok(print_json(&told)?);
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
