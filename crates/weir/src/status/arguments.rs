//! What `weir status` is told.

use std::time::Duration;

use clap::Args;

use crate::client::Target;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir status
      Every disk and group: limits, rates, and which limit throttles it.
  weir status --all --wide
      The same with all columns, and caches, reading ahead, devices, exports and memory.
  weir status gold --interval 5s
      The group gold and the disks in it, with figures of five seconds.
  weir status --json | jq '.disks[] | {name, limited: .rate.limited}'
      The share of time during which each disk waited for limits.

The first line names the interval that all figures but WAIT belong to. P99 is how long 99 of 100 of the reads and \
writes that were answered in it took at most, from their arrival on, known to a tenth, and P99 WAIT how long 99 of 100 \
waited for limits; the daemon counts both from the first time that a client asks. WAIT is the number of requests that \
wait now, HELD the share of the interval during which requests waited for limits, and HELD BY the limit that they waited \
for in it, or wait for now: iops-total is the disk's or group's own, gold: iops-total that of the group gold. With \
--wide, WEIGHT is beside LIMITS and P50 beside P99, and WAIT SINCE START is the P99 of the requests that had to wait, \
since the daemon started.

A cluster's groups, disks that are not open, reservations that are not in force and errors of devices have further tables \
where there are any. With --all there are further tables. Of a MACHINE'S EXPORT, USED BY is the process that is connected, \
QUEUES the rings that are served now, IN FLIGHT the number of its REQUESTS in flight, as the guest sent them; KICKS how often \
the guest notified weir of requests, CALLS how often weir notified the guest of answers, and COPIES how often data could not \
go straight between its memory and the disk. Of what is read ahead, HIT RATE is the share of reads that were answered from \
memory, and ACCURACY the share that was used. Of the memory for data, OF is its limit, RESERVED is set aside for metadata \
caches, reading ahead and buffers, DISKS is the data of disks in memory, REQUESTS the data of requests in flight and of \
replies that clients have not read yet, and WAIT the number of requests that wait for memory. In JSON, the key memory has \
these in bytes, and most-requests, the most that REQUESTS may reach. There, rate has latency-ns and wait-ns of the interval, \
and latency-ns of a disk is of all requests since they are counted.";

/// What `weir status` is told.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Disks and groups to show, a group with the disks in it [default: everything]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Print the daemon's own answer, with the rates added
    #[arg(long, conflicts_with_all = ["wide", "all"])]
    pub(crate) json: bool,
    /// Print all columns of disks and groups
    #[arg(long)]
    pub(crate) wide: bool,
    /// Print all tables: also caches, reading ahead, devices, exports, servers and memory
    #[arg(long)]
    pub(crate) all: bool,
    /// Interval to measure rates over, which begins after a quarter of a second, so that it
    /// excludes the burst of an idle disk; 0 measures none
    #[arg(long, value_name = "TIME", value_parser = settings::duration, default_value = "1s")]
    pub(crate) interval: Duration,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<Target>,
}
