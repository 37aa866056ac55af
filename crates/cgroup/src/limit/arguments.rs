//! Options of `weir cgroup limit`, and options about the same limits in other subcommands.

use std::path::{Path, PathBuf};

use clap::Args;
use settings::arguments::limits;

use super::{
    latency_target,
    limits_file::{self, LimitsChange},
};

pub(crate) const EXAMPLES: &str = concat!(
    "\
Examples:
  weir cgroup limit nginx.service --device /var/lib --bps-write 20M
      20 MiB per second written to the disk below that directory, until the next reboot.
  weir cgroup limit 3f1c9a7be4d0 --device /dev/vda --iops-total 500 \\
      --iops-total-max 2000 --iops-total-max-length 10
      A container; after idle time it may do 2000 operations per second for 13 seconds, enforced by `weir cgroup watch`.
  weir cgroup limit /system.slice/db.service --device 254:0 --bps-write 50M --watermark 90
      Enforced only while the utilization of the disk exceeds 90 %.
  weir cgroup limit a.service --device /dev/vda --bps-total 100M --group tenant
  weir cgroup limit b.service --device /dev/vda --group tenant --weight 200
      100 MiB per second for both together, of which b has twice the share of a under contention.
  weir cgroup limit c.service --device /dev/vda --group gold --cluster
      A share of the limits that all hosts of the cluster have together.
  weir cgroup limit db.service --device /dev/vda --latency-target 5ms
      While its latency exceeds 5 ms, the kernel throttles the other children of system.slice on that disk (io.latency).
  weir cgroup limit nginx.service --device any --bps-write 20M
      On every disk that the machine has, used or not, and on disks that appear while `weir cgroup watch` runs.
      Left out: memory (ram, zram), devices without a size, disks below dm or md devices, which have the limit themselves.
  weir cgroup limit nginx.service --device /var/lib
      Shows the limits in force, and the configured ones.
  weir cgroup limit nginx.service --device /var/lib --remove
      Removes the limits.

Settings that are not given stay, and without any setting nothing changes; 0 removes a limit together with its burst. A change is atomic.

A latency target of a control group is the kernel's (io.latency, CONFIG_BLK_CGROUP_IOLATENCY). The kernel looks at windows of 100 ms or more: their mean latency on rotational disks, and whether a tenth of their requests are late on others. It throttles siblings without a target or with a higher one, by their queue depth; it throttles no cgroup of another parent, and keeps no percentile. weir keeps percentiles for the disks that it serves (`weir throttle DISK --latency-target`).
", settings::sizes!(), "
Exit status: 0 done, 1 failed, 2 wrong use of the command line."
);

/// Arguments of `weir cgroup limit`.
#[derive(Debug, Args)]
pub struct CgroupLimitArgs {
    /// Control group to limit
    #[arg(value_name = "CGROUP")]
    pub(crate) cgroup: String,
    /// Disk of the limits; `any` is every disk, each with this limit, and those that appear while
    /// `weir cgroup watch` runs
    #[arg(long, value_name = "DEV")]
    pub(crate) device: String,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
    /// Remove all limits of the control group on this disk
    #[arg(long)]
    pub(crate) remove: bool,
    #[command(flatten)]
    pub(crate) limits_file: LimitsFileArgs,
    /// Print the limits in force as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Limits and shares, as options of `limit` and `run`.
#[derive(Debug, Args)]
pub(crate) struct SettingsArgs {
    #[command(flatten)]
    limits: limits::ThrottleLimitArgs,
    #[command(flatten)]
    shares: ShareArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Shares")]
struct ShareArgs {
    /// Utilization of the device in percent below which limits are not enforced; 0 always
    /// enforces them
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    watermark: Option<u8>,
    /// Share relative to other control groups, from 1 to 10000 [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    weight: Option<u32>,
    /// Share one set of limits with all control groups in this group; limits and watermark then
    /// apply to all together
    #[arg(long, value_name = "GROUP", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    group: Option<String>,
    /// Leave the group and its limits; new limits can be set by the same command
    #[arg(long, conflicts_with = "group")]
    no_group: bool,
    /// Require that the group is a cluster's: listed in `control-groups` of the daemon's
    /// `[cluster]`
    #[arg(long, requires = "group")]
    cluster: bool,
    /// Latency above which the kernel throttles sibling control groups on this disk (io.latency),
    /// such as 5ms; see below for what counts. 0 is none
    #[arg(long, value_name = "TIME", value_parser = latency_target::parse)]
    latency_target: Option<u64>,
}

/// Location of the limits file.
#[derive(Debug, Args)]
pub(crate) struct LimitsFileArgs {
    /// Limits file, shared with `weir cgroup watch`
    #[arg(long = "limits", value_name = "FILE", default_value = limits_file::DEFAULT_PATH)]
    limits_file: PathBuf,
}

impl LimitsFileArgs {
    /// Path of the limits file.
    pub(crate) fn path(&self) -> &Path {
        &self.limits_file
    }
}

impl SettingsArgs {
    /// The change that the options describe.
    pub(crate) fn change(&self) -> LimitsChange {
        let ShareArgs { watermark, weight, group, no_group, cluster, latency_target } = &self.shares;
        // An empty name means: leave the group.
        let group = if *no_group { Some(String::new()) } else { group.clone() };
        LimitsChange {
            limits: self.limits.given().to_vec(),
            watermark: *watermark,
            weight: *weight,
            latency_target_us: *latency_target,
            group,
            cluster: *cluster,
        }
    }
}
