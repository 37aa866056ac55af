//! What `weir status` is told.

use std::time::Duration;

use clap::Args;

use crate::client::Target;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir status
      Every disk, group and device: limits, rates, and which limit holds back what.
  weir status gold --interval 5s
      The group gold and the disks in it, with rates over five seconds.
  weir status --json | jq '.disks[] | {name, limited: .rate.limited}'
      The share of time during which each disk waited for limits.

P50 and P99 are how long half of the reads and writes that were answered in the interval, and 99 of 100, took at \
most, from their arrival on, known to a tenth; the daemon counts that from the first time that somebody asks. HELD \
is the share of the interval during which requests waited for limits; BINDING the limit they wait for now; WAIT how \
many do; P99 WAIT how long 99 of 100 requests that had to wait have waited at most, in the last ten to twenty \
seconds, and P99 WAIT ALL since the daemon started. In JSON, latency-ns of rate has P50 and P99, and latency-ns of a \
disk the same of all requests since they are counted. A disk that its device failed has its errors below. Of a \
MACHINE'S EXPORT, USED BY is the process that is connected, QUEUES the rings that are served now, IN FLIGHT what is \
being carried out of its REQUESTS, as the guest sent them; KICKS how often the guest said that there are requests, \
CALLS how often it was told that there are answers, and COPIES how often data could not go straight between its \
memory and the disk. Of what is read ahead, HIT RATE is the share of reads that were answered from memory, and \
ACCURACY the share that was used. Of the memory for data, OF is how much there may be, RESERVED is set aside for \
metadata caches, reading ahead and buffers, DISKS is what was written to disks in memory, REQUESTS the data of \
requests in flight and of replies that clients have not read yet, and WAIT how many requests wait for memory. In \
JSON, the key memory has these in bytes, and most-requests, what REQUESTS may be at most.";

/// What `weir status` is told.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Disks and groups to show, a group with the disks in it [default: everything]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Print the daemon's own answer, with the rates added
    #[arg(long)]
    pub(crate) json: bool,
    /// How long to measure rates over, after a quarter of a second in which what limits allow at
    /// once to an idle disk passes; 0 measures none
    #[arg(long, value_name = "TIME", value_parser = settings::duration, default_value = "1s")]
    pub(crate) interval: Duration,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<Target>,
}
