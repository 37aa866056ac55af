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
      The smallest limits and bursts with which 99 of 100 requests of each disk wait 10 ms at most.
  weir advise day.recording --device /var/lib/images --for web --keep p99=5ms
      The disks share a device that `weir probe` has measured: which limits of the others keep web fast there.
  weir advise day.recording --config /etc/weir.toml --write-config new.toml
      The same for the groups and disks of a daemon's file, and a file with the limits in it.
  weir advise day.recording --config /etc/weir.toml --for vm1
      Which weights or limits of the other disks of its group keep vm1 fast, with the group's own limits.
  weir advise day.csv.zst --rate iops=5000,shared=ssd
      On a device that is imitated, as `weir serve` does.
  weir advise day.csv.gz --pack --device read=200us,write=300us,parallel=8
      How many such devices all disks fit on, and which goes where.
  weir advise tenants.csv --columns time=1:us,disk=5,op=2,offset=3,length=4
      A limit for each value of the fifth column.

The target is for waits for limits; with a device, for the whole latency on it. Capacity is what may
pass within --over, a burst included: of all limits that keep the target, those with the least are
told. All is confirmed by a simulation, as `weir simulate` makes it of disks that read nothing
ahead: where requests were is not kept. An interval is where the figure lies in 95 of 100 days made
of the same hours, or tenths of a trace shorter than ten hours; other days differ by more.
Requests come when the trace says, so a limit that is in force while it is recorded does no harm to
the advice, but clients that wait for their answers would have asked for more without it.
Exit status: 0 the targets can be kept, 1 failed, not read to the end, or not all can be kept, 2 wrong
use of the command line.
";

/// Arguments of `weir advise`.
#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// Traces, read as one by their times
    #[arg(value_name = "TRACE", required = true)]
    pub(super) traces: Vec<PathBuf>,
    /// How long so many of 100 requests may take
    #[arg(long, value_name = "pPERCENT=TIME", default_value = "p99=10ms", value_parser = settings::parse::<LatencyTarget>)]
    pub(super) keep: LatencyTarget,
    /// Who the target is for; the others may be held back as it takes. A disk of a group: it is
    /// spared in the group as that is [default: all]
    #[arg(long = "for", value_name = "DISK|GROUP")]
    pub(super) whom: Vec<String>,
    /// The time that a burst is spread over to compare it with a rate
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
    /// What all disks lie on together: read=TIME,write=TIME,flush=TIME,parallel=N,read-bps=SIZE,…
    /// or what `weir probe` found of DIR or DEVICE; --delay and --rate of `weir serve` are a device
    /// for each disk [default: takes no time]
    #[arg(long, value_name = "SPEC|DIR|DEVICE", value_parser = settings::parse::<DeviceSpec>)]
    pub(super) device: Vec<DeviceSpec>,
    /// Put the disks onto as few devices as the target allows: those named with --device, or any
    /// number of one
    #[arg(long, requires = "device", conflicts_with_all = ["config", "delay", "rate", "whom"])]
    pub(super) pack: bool,
    /// Each disk's device, as `weir serve` imitates it, such as read=5ms,write=1ms,parallel=4
    #[arg(long, value_name = "TIMES", value_parser = settings::parse::<DelayOptions>, hide = true, conflicts_with_all = ["config", "device"])]
    pub(super) delay: Option<DelayOptions>,
    /// Each disk's device, as `weir serve` imitates it, such as bytes=22M; with shared=NAME of all
    /// disks together
    #[arg(long, value_name = "RATES", value_parser = settings::parse::<RateOptions>, hide = true, conflicts_with_all = ["config", "device"])]
    pub(super) rate: Option<RateOptions>,
    /// Where `weir probe` left what devices can do [default: /var/lib/weir, or ~/.local/state/weir
    /// if not root]
    #[arg(long, value_name = "DIR", requires = "device")]
    pub(super) state: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct AdviseOutputArgs {
    /// Write a config file with the settings here; without --config, with images that hold nothing
    #[arg(long, value_name = "FILE", conflicts_with = "pack")]
    pub(super) write_config: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    pub(super) json: bool,
}
