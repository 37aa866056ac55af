//! Options of `weir probe`.

use std::path::PathBuf;

use clap::Args;

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  weir probe /var/lib/images
      Measures the disk below that directory, with a file that is removed afterwards.
  weir probe /dev/nvme0n1
      The same for a device, with reads only.
  weir probe /dev/nvme0n1 --write
      Also writes, which destroys the data on the device. Refused if it is in use or has a known signature.

Results are saved for watermarks of `weir serve`: root's in /var/lib/weir, those of other users in weir below $XDG_STATE_HOME, or else in \
.local/state/weir below $HOME. Without both variables it is /var/lib/weir as well, unless --state gives another directory. The directory is checked before \
the measurement.
A load whose rate varies by more than 30 % runs for longer, up to 7 times --seconds in all. If it still varies, because another \
program uses the device or because of the device itself, nothing is saved and the status is 1; --accept saves the results anyway.
Exit status: 0 measured, 1 failed, 2 wrong use of the command line.";

/// Arguments of `weir probe`.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// Directory, in which a file is created and measured, or block device
    #[arg(value_name = "DIR|DEVICE")]
    pub(crate) path: PathBuf,
    /// Duration of each of the eight loads in seconds, from 1 to 600; up to seven times as long
    /// in total if the rate varies
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub(crate) seconds: u64,
    /// Bytes to measure [default: 1G, at most a quarter of the free space; for a device, all]
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    pub(crate) size: Option<u64>,
    /// Do not measure writes; in a directory the file is still written
    #[arg(long, conflicts_with = "write")]
    pub(crate) read_only: bool,
    /// Measure writes to a device, which destroys its data
    #[arg(long)]
    pub(crate) write: bool,
    /// Write to a device despite a file system or another known signature
    #[arg(long, requires = "write")]
    pub(crate) force: bool,
    /// Save figures even if the rate varies by more than 30 %
    #[arg(long)]
    pub(crate) accept: bool,
    /// Directory of the results [default: /var/lib/weir, or ~/.local/state/weir if not root]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
