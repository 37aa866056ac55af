//! Options of `weir cgroup watch`.

use std::path::PathBuf;

use clap::Args;
use settings::log;

use crate::limit::arguments::LimitsFileArgs;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir cgroup watch
      Enforces bursts, watermarks and shared limits that `weir cgroup limit` has set or will set.
  weir cgroup watch --settle
      Set every limit as configured, without bursts, and exit: for a service manager after a crash.

While it runs, it changes io.max as required by bursts, watermarks and groups. When it ends or is killed, a second process, the guard, restores each configured limit without bursts; a later `weir cgroup watch` resumes with the burst that remained. `weir serve --cgroup-limits` does the same in the daemon.
Exit status: 0 ended on request, 1 failed, 2 wrong use of the command line.";

/// Arguments of `weir cgroup watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    #[command(flatten)]
    pub(crate) limits_file: LimitsFileArgs,
    /// Set all limits as configured, without bursts, and exit
    #[arg(long)]
    pub(crate) settle: bool,
    /// Directory with results of `weir probe` [default: /var/lib/weir, or ~/.local/state/weir if
    /// not root]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Level of messages: off, error, warn, info, debug or trace, or MODULE=LEVEL for one module;
    /// several are separated by commas [default: info]
    #[arg(long, value_name = "FILTER", value_parser = log::filter)]
    pub(crate) log: Option<String>,
}

/// Arguments of the hidden command of the guard.
#[derive(Debug, Args)]
pub struct GuardArgs {
    #[command(flatten)]
    pub(crate) limits_file: LimitsFileArgs,
}
