//! `weir cgroup show` and `weir cgroup top`: I/O of cgroups and their tasks, and the time they
//! wait.
//!
//! ```text
//!   reading.rs  one cgroup ─┐
//!   tasks.rs    its tasks  ─┼─► survey.rs  a snapshot ─► rates.rs  rows from ─┬─► text.rs, json.rs   show
//!                           │              of all        two snapshots        └─► top/               top
//! ```
//!
//! `rates` and all modules after it are pure: tests construct snapshots. A cgroup that is removed,
//! or a task that ends, between two snapshots disappears without an error.

pub(crate) mod arguments;
pub(crate) mod json;
pub(crate) mod rates;
pub(crate) mod reading;
mod survey;
pub(crate) mod tasks;
mod text;
mod top;

use std::{
    io::{IsTerminal as _, stdout},
    thread,
};

use anyhow::anyhow;
use console::{CommandFailure, print, print_error, print_json, print_notice};
use rates::rows;
use survey::CgroupSurvey;
pub(crate) use top::top;

use super::hierarchy::{CgroupHierarchy, KernelRoots};
use crate::show::arguments::ShowArgs;

pub(crate) fn show(arguments: ShowArgs) -> Result<(), CommandFailure> {
    let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
    let survey = CgroupSurvey::new(
        hierarchy,
        arguments.limits_file.path(),
        &arguments.groups,
        arguments.device.as_deref(),
        arguments.all,
    )?;
    let earlier = if arguments.interval.is_zero() {
        None
    } else {
        let earlier = survey.snapshot(arguments.tasks)?;
        thread::sleep(arguments.interval);
        Some(earlier)
    };
    let later = survey.snapshot(arguments.tasks)?;
    let missing = if arguments.groups.is_empty() { survey.missing(&later.limits_file) } else { Vec::new() };
    for notice in survey.notices.iter().chain(&missing) {
        print_notice(notice);
    }
    for error in &later.errors {
        print_error(&anyhow!("{error}"));
    }
    let mut rows = rows(earlier.as_ref(), &later, survey.row_options());
    for row in &mut rows {
        row.tasks.retain(|task| arguments.tasks && (arguments.all || task.has_io()));
    }
    if arguments.json {
        let interval = earlier.map(|earlier| later.at.saturating_sub(earlier.at));
        return Ok(print_json(&json::report(&rows, interval, survey.row_options()))?);
    }
    let bold = stdout().is_terminal();
    Ok(print(&text::render(&rows, survey.row_options(), bold))?)
}
