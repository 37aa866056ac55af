//! What `weir verify` is told.

use std::{path::PathBuf, time::Duration};

use clap::Args;

use crate::client::Target;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir verify --for 10m
      Look at the daemon each second for ten minutes, and tell what held.
  weir verify gold --for 1h --wait-p99 10ms
      The group gold and the disks in it; no disk's requests may wait longer than that, 99 of 100.
  weir verify db --for 10m --latency-p99 10ms
      Of the disk db, 99 of 100 requests are to be answered within that, from their arrival on.
  weir verify --config /etc/weir.toml --for 30s --json
      Also whether what runs is what the file says of disks and groups.

A limit has held if never more passed than its rate and one burst let pass, between any two looks; one I/O more is \
let pass, since limits admit whole ones. A reservation is held to 95 % of it, over the time in which requests of the \
disk waited; and so are shares of a group, to 90 %, among disks that waited together for the group's limits alone. \
Of the file are compared limits, weights, reservations, watermarks and groups; of disks also image, format, cache, \
read-only, prefetch and what is done about errors; each difference is a line. Not compared are exports, what \
[daemon] says and what else an image was opened with, which `weir reload --dry-run` tells of the daemon's own file. \
What the file does not have, and runs, is no difference. Latencies are of all requests that succeeded in that time. \
What nobody asked for, and what cannot be judged, is told as such. Interrupted, or left by the daemon, it tells what \
it has seen until then, and fails.
Exit status: 0 everything held that could be judged, 1 something did not, or nothing could be judged, 2 wrong use \
of the command line.";

/// What `weir verify` is told.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Disks and groups to look at, a group with the disks in it [default: everything]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// How long to look
    #[arg(long = "for", value_name = "TIME", value_parser = settings::long_duration, default_value = "1m")]
    pub(crate) length: Duration,
    /// What is to run, as `weir serve --config` takes it
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// How long 99 of 100 requests that have to wait may wait at most, of any disk
    #[arg(long, value_name = "TIME", value_parser = settings::duration)]
    pub(crate) wait_p99: Option<Duration>,
    /// How long 99 of 100 reads and writes may take at most, of each disk: what they wait and what
    /// the device works, known to a tenth
    #[arg(long, value_name = "TIME", value_parser = settings::duration)]
    pub(crate) latency_p99: Option<Duration>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<Target>,
}
