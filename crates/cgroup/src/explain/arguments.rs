//! The options of `weir cgroup explain`.

use std::path::PathBuf;

use clap::Args;

use crate::limit::arguments::LimitsFileArgs;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir cgroup explain nginx.service
      Which I/O of its processes the limits on it and on those above it cover, which escapes, why, and what to do.
  weir cgroup explain 4711
      The same of one process, in the cgroup that it is in.
  weir cgroup explain nginx.service --measure --directory /var/lib/nginx
      And the proof: files written and read there under the same limits, each way at what rate, charged to whom, held where.

A limit is kept for a kind of I/O (`covered`), for a part of it (`PARTLY`) or not at all (`ESCAPES`); `note` is for what is no failure.
Each comes with the files that show it. Files that are open, shared mappings and swap space count as use.
Exit status: 0 it was looked, whatever was seen (`--json` has `verdict`), 1 it could not be, 2 wrong use of the command line.";

/// Arguments of `weir cgroup explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A control group, the number of a process, or self
    #[arg(value_name = "CGROUP|PID")]
    pub(crate) cgroup: String,
    /// Write and read small files in a cgroup beside it, with the same limits, and tell what became
    /// of them
    #[arg(long)]
    pub(crate) measure: bool,
    /// Where those files are made; they have no names [default: where a file system on a limited
    /// disk is mounted]
    #[arg(long, value_name = "DIR", requires = "measure")]
    pub(crate) directory: Option<PathBuf>,
    /// Bytes that are written or read each way, at most
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = settings::size, requires = "measure")]
    pub(crate) size: u64,
    /// How long each way takes where the limit is kept, from 1 to 60 seconds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=60), requires = "measure")]
    pub(crate) seconds: u64,
    #[command(flatten)]
    pub(crate) kept: LimitsFileArgs,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of the hidden command that runs the load of `--measure`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Where its files are made
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}
