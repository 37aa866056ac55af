//! Options of `weir cgroup watch`.

use std::path::PathBuf;

use clap::Args;
use settings::log;

use crate::limit::arguments::LimitsFileArgs;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir cgroup watch
      Bursts, watermarks and shared limits of all that `weir cgroup limit` has set and will set.
  weir cgroup watch --settle
      Set every limit as configured, without bursts, and end: for a service manager to call after a crash.

While it runs, io.max changes as the limits' bursts, watermarks and groups have it. When it ends or is killed, a second process, the guard, sees to it that each limit is what was configured, without bursts; the next watch goes on from there. `weir serve --cgroup-limits` does the same in the daemon.
Exit status: 0 ended as asked, 1 failed, 2 wrong use of the command line.";

/// Arguments of `weir cgroup watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    #[command(flatten)]
    pub(crate) kept: LimitsFileArgs,
    /// Set all limits as configured, without bursts, and end
    #[arg(long)]
    pub(crate) settle: bool,
    /// Where `weir probe` left what devices can do [default: /var/lib/weir, or ~/.local/state/weir
    /// if not root]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// off, error, warn, info, debug or trace, or for a part MODULE=LEVEL, separated by commas
    /// [default: info]
    #[arg(long, value_name = "FILTER", value_parser = log::filter)]
    pub(crate) log: Option<String>,
}

/// Arguments of the hidden command of the guard.
#[derive(Debug, Args)]
pub struct GuardArgs {
    #[command(flatten)]
    pub(crate) kept: LimitsFileArgs,
}
