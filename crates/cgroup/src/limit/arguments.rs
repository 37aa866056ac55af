//! The options of `weir cgroup limit`.

use clap::Args;

use crate::arguments::{KeptArgs, SettingsArgs};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir cgroup limit nginx.service --device /var/lib --bps-write 20M
      20 MiB per second written to the disk below that directory, from now on, until the machine ends.
  weir cgroup limit 3f1c9a7be4d0 --device /dev/vda --iops-total 500 --iops-total-max 2000 --iops-total-max-length 10
      A container; after idle time it may do 2000 operations a second, for 13 seconds. `weir cgroup watch` sees to that.
  weir cgroup limit /system.slice/db.service --device 254:0 --bps-write 50M --watermark 90
      Only while nine tenths of what the disk can do are in use.
  weir cgroup limit a.service --device /dev/vda --bps-total 100M --group tenant
  weir cgroup limit b.service --device /dev/vda --group tenant --weight 200
      100 MiB per second for both together, of which b has twice what a has where both want more.
  weir cgroup limit nginx.service --device /var/lib
      What holds, and what was asked for.
  weir cgroup limit nginx.service --device /var/lib --remove
      No limit any more.

What is not named stays as it is, and without any setting nothing changes; a limit set to 0 is none, and its burst goes with it. All of a change is made, or nothing.
Sizes take K, M, G or T (powers of 1024).
Exit status: 0 done, 1 failed, 2 wrong use of the command line.";

/// What `weir cgroup limit` is told.
#[derive(Debug, Args)]
pub struct LimitArgs {
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
    pub(crate) kept: KeptArgs,
    /// Print what holds now as JSON
    #[arg(long)]
    pub(crate) json: bool,
}
