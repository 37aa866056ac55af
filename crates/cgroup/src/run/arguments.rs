//! Options of `weir cgroup run`, and of the hidden `weir cgroup enter` that it starts.

use std::{ffi::OsString, path::PathBuf};

use clap::Args;

use crate::limit::arguments::SettingsArgs;

pub(crate) const EXAMPLES: &str = concat!(
    "\
Examples:
  weir cgroup run --bps-write 20M -- tar -xf backup.tar
      Unpacks with at most 20 MiB/s written to the disk below the current directory, and says at the end how it went.
  weir cgroup run --device /dev/nvme0n1 --iops-total 500 \\
      --iops-total-max 2000 --iops-total-max-length 10 -- fio job.fio
      500 operations per second on that disk, after 13 seconds of 2000: what ten would take, less what is allowed anyhow.
  weir cgroup run --json --output run.json -- make -j8
      No limits: only what the command reads and writes, as JSON in a file.

The command's standard streams are weir's own, and so is its exit status; killed by a signal, it is 128 and the signal's number. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to it. The summary comes last, on standard error. Bursts and watermarks are run without `weir cgroup watch`. ", settings::sizes!(), "
Exit status: the command's; of weir itself 1 (failed) or 2 (wrong use); 125, 126 or 127 as env(1) if the command cannot be run."
);

/// Arguments of `weir cgroup run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The disk that limits are for [default: below the current directory]
    #[arg(long, value_name = "DEV")]
    pub(crate) device: Option<String>,
    /// Where to make the command's cgroup; may hold no process itself [default: weir, below the
    /// root]
    #[arg(long, value_name = "CGROUP")]
    pub(crate) parent: Option<String>,
    /// What the cgroup is called [default: run-PID]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Kill what outlives the command; else the cgroup stays for it, with its limits
    #[arg(long)]
    pub(crate) kill: bool,
    /// Tell the summary as one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the summary to this file instead of standard error
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
    /// Where the limits of --group are kept, for `weir cgroup watch` [default:
    /// /run/weir/cgroups.json]
    #[arg(long, value_name = "FILE", requires = "group")]
    pub(crate) limits: Option<PathBuf>,
    /// Where `weir probe` left what devices can do [default: /var/lib/weir, or ~/.local/state/weir
    /// if not root]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// The command and what it is told
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

/// Arguments of `weir cgroup enter`.
#[derive(Debug, Args)]
pub struct EnterArgs {
    /// The cgroup's directory
    #[arg(long, value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// What to become
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}
