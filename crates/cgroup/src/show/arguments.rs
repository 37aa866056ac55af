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
      That cgroup with its descendants and their tasks, measured over five seconds.
  weir cgroup show --device /dev/vda --json | jq '.cgroups[] | {name, \"waited-share\"}'
      The share of time in which each cgroup waited for one disk.

READ and WRITTEN count from the creation of the cgroup, including its descendants. WAITED is the share of the interval in which at least one of its tasks \
waited for I/O, throttled or not; PRESSURE is the kernel's average of the same over the last ten seconds. LIMITS are the configured ones, \
followed by those in force if they differ, as in a burst. A task's bytes are those that it caused to be read and written, its calls those of read(2), write(2) and similar.";

pub(crate) const TOP_EXAMPLES: &str = "\
Examples:
  weir cgroup top
      Every cgroup that has limits or has read or written anything, live; s sorts, Enter shows tasks, q ends.
  weir cgroup top system.slice --interval 250ms
      The cgroups below that one, refreshed four times a second.

Needs a terminal of at least 80×24; otherwise use `weir cgroup show`.";

/// Arguments of `weir cgroup show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Cgroups to show, with their descendants [default: the root]
    #[arg(value_name = "CGROUP")]
    pub(crate) groups: Vec<String>,
    /// Show only this disk
    #[arg(long, value_name = "DEV")]
    pub(crate) device: Option<String>,
    /// Also show cgroups without limits and I/O, and tasks without I/O
    #[arg(long)]
    pub(crate) all: bool,
    /// Also show tasks
    #[arg(long)]
    pub(crate) tasks: bool,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Interval over which rates are measured; 0 measures none
    #[arg(long, value_name = "TIME", value_parser = settings::duration, default_value = "1s")]
    pub(crate) interval: Duration,
    #[command(flatten)]
    pub(crate) limits_file: LimitsFileArgs,
}

/// Arguments of `weir cgroup top`.
#[derive(Debug, Args)]
pub struct CgroupTopArgs {
    /// Cgroup to show, with its descendants [default: the root]
    #[arg(value_name = "CGROUP")]
    pub(crate) group: Option<String>,
    /// Show only this disk
    #[arg(long, value_name = "DEV")]
    pub(crate) device: Option<String>,
    /// Refresh interval, at least 100ms
    #[arg(long, value_name = "TIME", value_parser = keys::interval, default_value = "1s")]
    pub(crate) interval: Duration,
    #[command(flatten)]
    pub(crate) limits_file: LimitsFileArgs,
}
