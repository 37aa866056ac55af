//! `weir cgroup explain`: which I/O a limit covers, which escapes it, why, and what to do about it.
//!
//! ```text
//!   facts/       what the kernel's files say       reads, never writes
//!      │
//!   findings/    what that means                   pure: facts in, findings out
//!      │
//!   verdict.rs ─ text.rs, json.rs                  the verdict first, then disk by disk, then process by process
//!
//!   measure/     the same, put to the proof        in a cgroup of its own, removed afterwards
//! ```
//!
//! The question is that of a limit on a container which a buffered `dd` ignored: somebody set it,
//! and does not know what it is kept for. Each finding comes with the file and the value that it
//! follows from, so that nobody has to believe it.
//!
//! Changes nothing, and opens no device. Only measuring, which has to be asked for, makes a cgroup
//! and writes, to files without names.

pub(crate) mod arguments;
mod facts;
mod findings;
mod json;
mod measure;
mod text;
mod verdict;

#[cfg(test)]
mod tests;

use std::time::Duration;

use console::{Failure, print, print_json};
use facts::Subject;
use measure::Wish;
pub(crate) use measure::run_load;

use super::{
    hierarchy::{Hierarchy, Roots},
    target,
};
use crate::explain::arguments::ExplainArgs;

/// Looks, and prints what was found; measures, if that was asked for, and prints that.
///
/// The exit status says whether it could look, not what it saw: a script asks `--json` for
/// `verdict`.
///
/// # Errors
/// If there is no such cgroup, or it cannot be read; or it cannot be measured.
pub(crate) fn run(arguments: &ExplainArgs) -> Result<(), Failure> {
    let hierarchy = Hierarchy::discover(Roots::default())?;
    let group = target::resolve(&hierarchy, &arguments.cgroup)?;
    // `target` has found the process by then, so the digits are a pid.
    let subject =
        Subject { group, only: arguments.cgroup.parse().ok(), limits: arguments.kept.path().to_owned() };
    let facts = facts::collect(&hierarchy, &subject)?;
    let findings = findings::find(&facts);
    let wish = Wish {
        directory: arguments.directory.as_deref(),
        most_bytes: arguments.size,
        time: Duration::from_secs(arguments.seconds),
        quiet: arguments.json,
    };
    let measure = || measure::measure(&hierarchy, &subject.group, &facts, &wish);
    if arguments.json {
        let mut answer = json::json(&facts, &findings);
        if arguments.measure {
            answer["measured"] = measure::json(&measure()?);
        }
        return Ok(print_json(&answer)?);
    }
    print(&text::text(&facts, &findings))?;
    if arguments.measure {
        print(&measure::text(&measure()?))?;
    }
    Ok(())
}
