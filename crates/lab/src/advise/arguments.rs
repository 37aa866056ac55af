//! Options of `weir advise`.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use storage::{delay::DelayOptions, rate::RateOptions};

use super::target::LatencyTarget;
use crate::{simulate::DeviceSpec, trace::ReadingArgs};

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  weir advise day.recording
      The smallest limits and bursts with which 99 of 100 requests of each disk wait at most 10 ms.
  weir advise day.recording --device /var/lib/images --for web --keep p99=5ms
      The disks share a device that `weir probe` has measured: limits of the other disks that keep web fast.
  weir advise day.recording --config /etc/weir.toml --write-config new.toml
      The same for the groups and disks of a daemon's config file; writes a config file with the limits.
  weir advise day.recording --config /etc/weir.toml --for vm1
      Weights or limits of the other disks in its group that keep vm1 fast, within the group's limits.
  weir advise day.csv.zst --rate iops=5000,shared=ssd
      On an emulated device, as in `weir serve`.
  weir advise day.csv.gz --pack --device read=200us,write=300us,parallel=8
      How many of these devices are needed for all disks, and the device of each disk.
  weir advise tenants.csv --columns time=1:us,disk=5,op=2,offset=3,length=4
      A limit for each value of the fifth column.

The target applies to waiting times for limits, or with a device to the whole latency. Capacity is
the amount admitted within --over, including a burst: of all limits that keep the target, those with
the least capacity are printed. They are confirmed by a simulation as in `weir simulate`, without
prefetching, because offsets are not stored. An interval contains the figure for 95 of 100 days
resampled from the same hours, or from tenths of a trace shorter than ten hours; other days differ by
more. Requests arrive at the times in the trace. Limits in force during the recording do not distort
them, except that clients that wait for replies would have sent more requests without limits.
Exit status: 0 the targets can be kept, 1 failed, not read to the end, or not all can be kept, 2 wrong
use of the command line.
";

/// Arguments of `weir advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// Traces, merged by time
    #[arg(value_name = "TRACE", required = true)]
    pub(super) traces: Vec<PathBuf>,
    /// Target: the time within which this percentage of requests must complete
    #[arg(long, value_name = "pPERCENT=TIME", default_value = "p99=10ms", value_parser = settings::parse::<LatencyTarget>)]
    pub(super) keep: LatencyTarget,
    /// Disk or group that must meet the target; all others may be throttled. For a disk in a
    /// group, only disks of that group are throttled [default: all]
    #[arg(long = "for", value_name = "DISK|GROUP")]
    pub(super) whom: Vec<String>,
    /// Period over which a burst is spread to compare it with a rate
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = settings::long_duration)]
    pub(super) over: Duration,
    /// Take disks, groups and devices from this file of `weir serve`: disks of a group are advised
    /// together, unless --for names one of them
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    #[command(flatten)]
    pub(super) devices: AdviseDeviceArgs,
    #[command(flatten)]
    pub(super) reading: ReadingArgs,
    #[command(flatten)]
    pub(super) output: AdviseOutputArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Devices")]
pub(super) struct AdviseDeviceArgs {
    /// Device shared by all disks: read=TIME,write=TIME,flush=TIME,parallel=N,read-bps=SIZE,… or
    /// a DIR or DEVICE measured by `weir probe`; --delay and --rate of `weir serve` describe a
    /// separate device for each disk [default: no latency]
    #[arg(long, value_name = "SPEC|DIR|DEVICE", value_parser = settings::parse::<DeviceSpec>)]
    pub(super) device: Vec<DeviceSpec>,
    /// Place the disks on as few devices as the target allows: those named with --device, or any
    /// number of one device
    #[arg(long, requires = "device", conflicts_with_all = ["config", "delay", "rate", "whom"])]
    pub(super) pack: bool,
    /// Each disk's device, as `weir serve` imitates it, such as read=5ms,write=1ms,parallel=4
    #[arg(long, value_name = "TIMES", value_parser = settings::parse::<DelayOptions>, hide = true, conflicts_with_all = ["config", "device"])]
    pub(super) delay: Option<DelayOptions>,
    /// Each disk's device, as `weir serve` imitates it, such as bytes=22M; with shared=NAME of all
    /// disks together
    #[arg(long, value_name = "RATES", value_parser = settings::parse::<RateOptions>, hide = true, conflicts_with_all = ["config", "device"])]
    pub(super) rate: Option<RateOptions>,
    /// Directory with results of `weir probe` [default: /var/lib/weir, or ~/.local/state/weir if
    /// not root]
    #[arg(long, value_name = "DIR", requires = "device")]
    pub(super) state: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct AdviseOutputArgs {
    /// Write a config file with the recommended settings; without --config, with null images
    #[arg(long, value_name = "FILE", conflicts_with = "pack")]
    pub(super) write_config: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    pub(super) json: bool,
}
