//! `weir cgroup explain`: which I/O a limit covers, which escapes it, why, and what to do about it.
//!
//! ```text
//!   facts/       contents of the kernel's files    reads, never writes
//!      │
//!   findings/    conclusions                       pure: facts in, findings out
//!      │
//!   verdict.rs ─ text.rs, json.rs                  the verdict first, then disk by disk, then process by process
//!
//!   measure/     test of the limits (`--measure`)  in a temporary cgroup, removed afterwards
//! ```
//!
//! Each finding cites the file and the value that it follows from. Changes nothing and opens
//! no device; only `--measure` makes a cgroup and writes, to unlinked files.

/// Defines an enum whose variants have a JSON name and, where it differs, a display name.
macro_rules! named {
    (@words $name:literal) => { $name };
    (@words $name:literal $words:literal) => { $words };
    ($kind:ident { $($(#[$doc:meta])* $variant:ident = $name:literal $(/ $words:literal)?,)* }) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum $kind {
            $($(#[$doc])* $variant,)*
        }

        impl $kind {
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }

        impl std::fmt::Display for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $(Self::$variant => named!(@words $name $($words)?),)*
                })
            }
        }
    };
}

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

use console::{CommandFailure, print, print_json};
use facts::ExplainSubject;
use measure::MeasureOptions;
pub(crate) use measure::run_load;

use super::{
    hierarchy::{CgroupHierarchy, KernelRoots},
    target,
};
use crate::explain::arguments::ExplainArgs;

/// Succeeds if the cgroup could be examined, regardless of the findings: scripts read `verdict` of
/// `--json`.
pub(crate) fn run(arguments: &ExplainArgs) -> Result<(), CommandFailure> {
    let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
    let group = target::resolve(&hierarchy, &arguments.cgroup)?;
    let subject = ExplainSubject {
        group,
        pid: arguments.cgroup.parse().ok(),
        limits: arguments.limits_file.path().to_owned(),
    };
    let facts = facts::collect(&hierarchy, &subject)?;
    let findings = findings::find(&facts);
    let options = MeasureOptions {
        directory: arguments.directory.as_deref(),
        max_bytes: arguments.size,
        time: Duration::from_secs(arguments.seconds),
        quiet: arguments.json,
    };
    // A closure: the measurement takes seconds, and the text's verdict is printed before it starts.
    let measure = || measure::measure(&hierarchy, &subject.group, &facts, &options);
    if arguments.json {
        let mut report = json::report(&facts, &findings);
        if arguments.measure {
            report.measured = Some(measure::report(measure()?));
        }
        return Ok(print_json(&report)?);
    }
    print(&text::text(&facts, &findings))?;
    if arguments.measure {
        print(&measure::text(&measure()?))?;
    }
    Ok(())
}
