//! Arguments of `weir status`.

use std::time::Duration;

use clap::Args;

use crate::client::ControlAddress;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir status
      All disks and groups with their limits, rates and throttle causes.
  weir status --all --wide
      All columns, and tables of caches, prefetching, devices, exports and memory.
  weir status gold --interval 5s
      The group gold and its disks, measured over five seconds.
  weir status --json | jq '.disks[] | {name, limited: .rate.limited}'
      The share of time in which each disk waited for limits.

The first line has the interval of all figures except WAIT. P99 is the 99th percentile of the latencies of reads and \
writes completed in it, from arrival to completion, accurate to a tenth; WAIT P99 is that of their waits for limits. The \
daemon counts both from the first query on. WAIT is the number of requests that wait now, HELD the share of the interval \
in which requests waited for limits, and HELD BY the limit that they wait or waited for: iops-total is a limit of the disk \
or group itself, gold: iops-total one of the group gold. --wide adds WEIGHT, P50, and WAIT P99 (START), the 99th \
percentile of the waits of all requests that had to wait since the daemon's start.

Groups of a cluster, unavailable disks, unmet reservations and I/O errors have tables of their own, if there are any. \
--all adds further tables. Of a VHOST-USER EXPORT, USED BY is the connected process, QUEUES the number of active \
virtqueues, IN FLIGHT the number of requests in flight, KICKS and CALLS the numbers of notifications from and to the \
guest, and COPIES the number of requests that needed a bounce buffer. Of prefetching, HIT RATE is the share of reads \
served from memory, and ACCURACY the share of prefetched data that was used. Of the memory for data, RESERVED is for \
metadata caches, prefetching and buffers, DISKS for disks in memory, REQUESTS for requests in flight and for replies that \
clients have not read yet, and WAIT is the number of requests that wait for memory. In JSON, the key memory has these in \
bytes, and most-requests is the limit of REQUESTS; rate has latency-ns and wait-ns of the interval, and latency-ns of a \
disk covers all requests since counting began.";

/// Arguments of `weir status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Disks and groups to show, a group with its disks [default: all]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Print the daemon's status and the rates as JSON
    #[arg(long, conflicts_with_all = ["wide", "all"])]
    pub(crate) json: bool,
    /// Print all columns of disks and groups
    #[arg(long)]
    pub(crate) wide: bool,
    /// Print all tables: also caches, prefetching, devices, exports, servers and memory
    #[arg(long)]
    pub(crate) all: bool,
    /// Interval over which rates are measured. It begins after a quarter of a second, to exclude
    /// the burst of an idle disk; 0 measures no rates
    #[arg(long, value_name = "TIME", value_parser = settings::duration, default_value = "1s")]
    pub(crate) interval: Duration,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<ControlAddress>,
}
