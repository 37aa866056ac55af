//! Options of `weir cgroup run`, and of the hidden `weir cgroup enter` that it starts.

use std::{ffi::OsString, path::PathBuf};

use clap::Args;

use crate::limit::arguments::SettingsArgs;

pub(crate) const EXAMPLES: &str = concat!(
    "\
Examples:
  weir cgroup run --bps-write 20M -- tar -xf backup.tar
      Unpacks with at most 20 MiB/s written to the disk of the current directory, and prints a summary at the end.
  weir cgroup run --device /dev/nvme0n1 --iops-total 500 \\
      --iops-total-max 2000 --iops-total-max-length 10 -- fio job.fio
      500 operations per second on that disk, after a burst of 2000 for 13 seconds: the bucket for 10 s drains at 2000 - 500.
  weir cgroup run --json --output run.json -- make -j8
      No limits: measures the command's I/O and writes it to a file as JSON.

The command inherits the standard streams, and weir exits with its status, or 128 plus the number of the signal that killed it. SIGINT, SIGTERM, SIGHUP and SIGQUIT are forwarded to it. The summary is printed at the end, on standard error. Bursts and watermarks do not need `weir cgroup watch`. ", settings::sizes!(), "
Exit status: the command's; of weir itself 1 (failed) or 2 (wrong use); 125, 126 or 127 as env(1) if the command cannot be run."
);

/// Arguments of `weir cgroup run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Disk of the limits [default: the disk of the current directory]
    #[arg(long, value_name = "DEV")]
    pub(crate) device: Option<String>,
    /// Parent of the command's cgroup; must have no processes itself [default: weir, below the
    /// root]
    #[arg(long, value_name = "CGROUP")]
    pub(crate) parent: Option<String>,
    /// Name of the cgroup [default: run-PID]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Kill processes that outlive the command; else the cgroup stays with its limits
    #[arg(long)]
    pub(crate) kill: bool,
    /// Print the summary as one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the summary to this file instead of standard error
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
    /// Limits file of --group, for `weir cgroup watch` [default: /run/weir/cgroups.json]
    #[arg(long, value_name = "FILE", requires = "group")]
    pub(crate) limits: Option<PathBuf>,
    /// Directory with results of `weir probe` [default: /var/lib/weir, or ~/.local/state/weir if
    /// not root]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Command and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

/// Arguments of `weir cgroup enter`.
#[derive(Debug, Args)]
pub struct EnterArgs {
    /// Directory of the cgroup
    #[arg(long, value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// Command and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}
