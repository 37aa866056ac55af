//! The options of `weir cgroup explain`.

use std::path::PathBuf;

use clap::Args;

use crate::limit::arguments::LimitsFileArgs;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir cgroup explain nginx.service
      Which I/O of its processes is covered by its limits and those of its ancestors, which escapes, why, and how to fix it.
  weir cgroup explain 4711
      The same for one process, in its cgroup.
  weir cgroup explain nginx.service --measure --directory /var/lib/nginx
      With a proof: writes and reads files there under the same limits; reports for each I/O path its rate, the charged share, and where it waited.

A limit is enforced for a kind of I/O (`covered`), for a part of it (`PARTLY`) or not at all (`ESCAPES`); a `note` is no failure.
Each finding cites the kernel's files that prove it. I/O is inferred from open files, shared mappings and swap space.
Exit status: 0 examined, whatever was found (`--json` has `verdict`), 1 failed, 2 wrong use of the command line.";

/// Arguments of `weir cgroup explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Control group, pid, or self
    #[arg(value_name = "CGROUP|PID")]
    pub(crate) cgroup: String,
    /// Write and read small files in a sibling cgroup with the same limits, and report how each
    /// I/O path was limited
    #[arg(long)]
    pub(crate) measure: bool,
    /// Directory of these files, which are unlinked at once [default: mount point of a file system
    /// on a limited disk]
    #[arg(long, value_name = "DIR", requires = "measure")]
    pub(crate) directory: Option<PathBuf>,
    /// Maximum number of bytes on each I/O path
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = settings::size, requires = "measure")]
    pub(crate) size: u64,
    /// Measure each I/O path with as many bytes as its limit admits in N seconds, from 1 to 60
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=60), requires = "measure")]
    pub(crate) seconds: u64,
    #[command(flatten)]
    pub(crate) limits_file: LimitsFileArgs,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of the hidden command that runs the load of `--measure`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Directory of the files
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}
