//! Arguments of `weir verify`.

use std::{path::PathBuf, time::Duration};

use clap::Args;

use crate::client::ControlAddress;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir verify --for 10m
      Polls the daemon each second for ten minutes, then prints which guarantees held.
  weir verify gold --for 1h --wait-p99 10ms
      The group gold and its disks; the 99th percentile of the waits of any disk may be 10 ms at most.
  weir verify db --for 10m --latency-p99 10ms
      99 of 100 requests of the disk db must complete within 10 ms of their arrival.
  weir verify --config /etc/weir.toml --for 30s --json
      Also compares the running disks and groups with the config file.

A limit holds if the work admitted between any two polls never exceeds its rate plus one burst and one I/O, since \
limits admit whole I/Os. A reservation must be met to 95 %, over the time in which requests of the disk waited; a \
share of a group to 90 %, among disks that waited at the same time for the group's limits alone. Compared with the \
config file are limits, weights, reservations, watermarks and groups; of disks also image, format, cache, read-only, \
prefetching and error policies; each difference is a line. Not compared are exports, [daemon] and other options of \
images, which `weir reload --dry-run` shows for the daemon's own file, and disks and groups that are not in the file. \
Latencies cover all requests that succeeded in that time. Guarantees without load, or that cannot be checked, are \
listed as such. If it is interrupted, or the daemon ends, it prints the results so far and fails.
Exit status: 0 all checked guarantees held, 1 one did not, or none could be checked, 2 wrong use of the command line.";

/// Arguments of `weir verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Disks and groups to check, a group with its disks [default: all]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Length of the check
    #[arg(long = "for", value_name = "TIME", value_parser = settings::long_duration, default_value = "1m")]
    pub(crate) length: Duration,
    /// Config file to compare with, as for `weir serve --config`
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Limit for the 99th percentile of the waits of requests that have to wait, of each disk
    #[arg(long, value_name = "TIME", value_parser = settings::duration)]
    pub(crate) wait_p99: Option<Duration>,
    /// Limit for the 99th percentile of the latencies of reads and writes of each disk, including
    /// waits; accurate to a tenth
    #[arg(long, value_name = "TIME", value_parser = settings::duration)]
    pub(crate) latency_p99: Option<Duration>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<ControlAddress>,
}
