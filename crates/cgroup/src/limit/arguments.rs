//! Options of `weir cgroup limit`, and options about the same limits in other subcommands.

use std::path::{Path, PathBuf};

use clap::Args;
use settings::arguments::limits;

use super::kept::{self, LimitsChange};

pub(crate) const EXAMPLES: &str = concat!(
    "\
Examples:
  weir cgroup limit nginx.service --device /var/lib --bps-write 20M
      20 MiB per second written to the disk below that directory, from now on, until the machine ends.
  weir cgroup limit 3f1c9a7be4d0 --device /dev/vda --iops-total 500 \\
      --iops-total-max 2000 --iops-total-max-length 10
      A container; after idle time it may do 2000 operations a second, for 13 seconds. `weir cgroup watch` sees to that.
  weir cgroup limit /system.slice/db.service --device 254:0 --bps-write 50M --watermark 90
      Only while nine tenths of what the disk can do are in use.
  weir cgroup limit a.service --device /dev/vda --bps-total 100M --group tenant
  weir cgroup limit b.service --device /dev/vda --group tenant --weight 200
      100 MiB per second for both together, of which b has twice what a has where both want more.
  weir cgroup limit c.service --device /dev/vda --group gold --cluster
      Its part of what all hosts of the cluster may do together.
  weir cgroup limit nginx.service --device /var/lib
      What holds, and what was asked for.
  weir cgroup limit nginx.service --device /var/lib --remove
      No limit any more.

What is not named stays as it is, and without any setting nothing changes; a limit set to 0 is none, and its burst goes with it. All of a change is made, or nothing.
", settings::sizes!(), "
Exit status: 0 done, 1 failed, 2 wrong use of the command line."
);

/// Arguments of `weir cgroup limit`.
#[derive(Debug, Args)]
pub struct CgroupLimitArgs {
    /// Whose I/O is limited
    #[arg(value_name = "CGROUP")]
    pub(crate) cgroup: String,
    /// On which disk
    #[arg(long, value_name = "DEV")]
    pub(crate) device: String,
    #[command(flatten)]
    pub(crate) settings: SettingsArgs,
    /// Remove all limits that this control group has on this disk
    #[arg(long)]
    pub(crate) remove: bool,
    #[command(flatten)]
    pub(crate) kept: LimitsFileArgs,
    /// Print what holds now as JSON
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
    /// Percent of what the device can do below which the limits are lifted; 0 never lifts them
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    watermark: Option<u8>,
    /// Its share beside that of others, from 1 to 10000 [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    weight: Option<u32>,
    /// Share one set of limits with all control groups of this name; limits and watermark are then
    /// for all together
    #[arg(long, value_name = "GROUP", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    group: Option<String>,
    /// Leave the group, and its limits with it; name new ones in the same command
    #[arg(long, conflicts_with = "group")]
    no_group: bool,
    /// The group must be a cluster's, which the daemon names in `control-groups` of `[cluster]`
    #[arg(long, requires = "group")]
    cluster: bool,
}

/// Location of the limits file.
#[derive(Debug, Args)]
pub(crate) struct LimitsFileArgs {
    /// Where limits are kept, for `weir cgroup watch`
    #[arg(long = "limits", value_name = "FILE", default_value = kept::DEFAULT_PATH)]
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
        let ShareArgs { watermark, weight, group, no_group, cluster } = &self.shares;
        // An empty name means: leave the group.
        let group = if *no_group { Some(String::new()) } else { group.clone() };
        LimitsChange {
            limits: self.limits.given().to_vec(),
            watermark: *watermark,
            weight: *weight,
            group,
            cluster: *cluster,
        }
    }
}
