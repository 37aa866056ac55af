//! Options of `weir probe`.

use std::path::PathBuf;

use clap::Args;

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  weir probe /var/lib/images
      What the disk below that directory can do, on a file that is gone afterwards.
  weir probe /dev/nvme0n1
      The same of a device, reads alone.
  weir probe /dev/nvme0n1 --write
      Writes too, over what is on the device. Refused where it is in use, or holds something known.

Results are kept, and `weir serve` goes by them where a group has a watermark: root's in /var/lib/weir, those of other users in weir \
below $XDG_STATE_HOME, or else in .local/state/weir below $HOME. Where a user has neither variable it is /var/lib/weir too, unless \
--state names another place. Whether results can be kept there is looked at before anything is measured.
A load whose rate varies by more than 30 % is put on for longer, up to 7 times --seconds in all. If it still varies, because another \
program uses the device or because of the device itself, nothing is kept and the status is 1; --accept keeps the results anyway.
Exit status: 0 measured, 1 failed, 2 wrong use of the command line.";

/// Arguments of `weir probe`.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// A directory, where a file is made and measured, or a block device
    #[arg(value_name = "DIR|DEVICE")]
    pub(crate) path: PathBuf,
    /// How long each of the eight loads is put on, from 1 to 600 seconds; four times as long and
    /// more where the rate varies
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub(crate) seconds: u64,
    /// Bytes that are measured [default: 1G, or a quarter of what is free; of a device, all]
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    pub(crate) size: Option<u64>,
    /// Measure no writes; in a directory the file is written all the same
    #[arg(long, conflicts_with = "write")]
    pub(crate) read_only: bool,
    /// Measure writes to a device, which destroys what is on it
    #[arg(long)]
    pub(crate) write: bool,
    /// Write to a device though it holds a file system or something else that is known
    #[arg(long, requires = "write")]
    pub(crate) force: bool,
    /// Keep figures that the device reached in some moments and not in others, by more than 30 %
    #[arg(long)]
    pub(crate) accept: bool,
    /// Where results are kept [default: /var/lib/weir, or ~/.local/state/weir if not root]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
