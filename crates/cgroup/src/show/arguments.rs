//! Options of `weir cgroup show` and `weir cgroup top`.

use std::time::Duration;

use clap::Args;
use console::keys;

use crate::limit::arguments::LimitsFileArgs;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir cgroup show
      Every cgroup that has limits or has read or written anything, with rates over a second.
  weir cgroup show nginx.service --tasks --interval 5s
      That one and what is below it, and the tasks in them, over five seconds.
  weir cgroup show --device /dev/vda --json | jq '.cgroups[] | {name, \"waited-share\"}'
      On one disk, the share of the time in which each cgroup waited.

READ and WRITTEN are since the cgroup began, with what is below it. WAITED is the share of the interval in which at least one of its tasks \
waited for I/O, for a limit or for the device; PRESSURE the same over the last ten seconds, by the kernel's reckoning. LIMITS are those that were asked for, and where that is something else now, as in a burst, what the kernel holds. A task's bytes \
are those that it caused to be read and written, its calls those of read(2), write(2) and their like.";

pub(crate) const TOP_EXAMPLES: &str = "\
Examples:
  weir cgroup top
      Every cgroup that has limits or has read or written anything, live; s sorts, Enter shows tasks, q ends.
  weir cgroup top system.slice --interval 250ms
      Those below that one, four times a second.

Needs a terminal of 80×24 or more; where there is none, `weir cgroup show` says the same.";

/// Arguments of `weir cgroup show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Cgroups to show, with those below them [default: the root]
    #[arg(value_name = "CGROUP")]
    pub(crate) groups: Vec<String>,
    /// This disk alone
    #[arg(long, value_name = "DEV")]
    pub(crate) device: Option<String>,
    /// Show cgroups without limits, and tasks, that have read and written nothing too
    #[arg(long)]
    pub(crate) all: bool,
    /// Show tasks too
    #[arg(long)]
    pub(crate) tasks: bool,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// How long to measure rates over; 0 measures none
    #[arg(long, value_name = "TIME", value_parser = settings::duration, default_value = "1s")]
    pub(crate) interval: Duration,
    #[command(flatten)]
    pub(crate) kept: LimitsFileArgs,
}

/// Arguments of `weir cgroup top`.
#[derive(Debug, Args)]
pub struct CgroupTopArgs {
    /// A cgroup to show, with those below it [default: the root]
    #[arg(value_name = "CGROUP")]
    pub(crate) group: Option<String>,
    /// This disk alone
    #[arg(long, value_name = "DEV")]
    pub(crate) device: Option<String>,
    /// How often to look, from 100ms
    #[arg(long, value_name = "TIME", value_parser = keys::interval, default_value = "1s")]
    pub(crate) interval: Duration,
    #[command(flatten)]
    pub(crate) kept: LimitsFileArgs,
}
