//! Options of `weir tune`.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use storage::ImageFormat;

use crate::{
    result::arguments::ResultArgs,
    tune::{TuneGoal, Preset},
};

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  weir tune /var/lib/images --report tune.html
      What to choose for disks in that directory, on images that are gone afterwards.
  weir tune /var/lib/images --for latency --budget 30m --result tune.json
      For one goal and for longer; after Ctrl-C, --resume tune.json goes on where that ended.
  weir tune /var/lib/images --preset cache-modes
      The table of a published measurement, and whether its conclusions hold here.
  weir tune vm1.qcow2 --format qcow2
      Cache mode, L2 cache and prefetch for an image that is there, which is only read.

Measures cache mode, cluster size (64K to 2M), L2 cache (1/128 of what covers the disk, to all of it) and prefetch, one at a time around the default and then together where that promises something, in rounds in random order. Recommends nothing that was not shown to gain more than noise and 5 %.
Exit status: 0 measured, 1 failed or interrupted, 2 wrong use of the command line.";

/// Arguments of `weir tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// A directory, where images are made and measured; a block device; or an image, which is only
    /// read
    #[arg(value_name = "DIR|DEVICE|IMAGE")]
    pub(crate) path: PathBuf,
    /// What to tune for [default: each of them]
    #[arg(long = "for", value_name = "GOAL")]
    pub(crate) goal: Option<TuneGoal>,
    /// How long it may take in all, such as 90s, 10m or 2h
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = budget)]
    pub(crate) budget: Duration,
    /// Bytes of each image, or of the device or image that are measured [default: by budget and
    /// free space, at most 1G; of a device or an image, all]
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    pub(crate) size: Option<u64>,
    /// The disk that the printed options are for [default: 100G, or the size of the image or
    /// device]
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    pub(crate) disk: Option<u64>,
    /// The format of an image that is there: raw or qcow2 [default: found by probing, where that is
    /// safe]
    #[arg(long, value_name = "FORMAT", value_parser = settings::parse::<ImageFormat>)]
    pub(crate) format: Option<ImageFormat>,
    /// Measure a published table instead of searching
    #[arg(long, value_name = "TABLE", conflicts_with_all = ["goal", "resume", "disk"])]
    pub(crate) preset: Option<Preset>,
    /// Write to a device, which destroys what is on it
    #[arg(long)]
    pub(crate) write: bool,
    /// Write to a device though it holds a file system or something else that is known
    #[arg(long, requires = "write")]
    pub(crate) force: bool,
    /// Where the random order begins; the recommendation should not depend on it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Go on with the samples of an interrupted run of the same place and size
    #[arg(long, value_name = "FILE.json")]
    pub(crate) resume: Option<PathBuf>,
    /// Print the result file's JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) results: ResultArgs,
}

/// Shortest run with a useful result, and a bound against mistyped values.
const BUDGETS: std::ops::RangeInclusive<u64> = 1..=7 * 24 * 3600;

fn budget(text: &str) -> Result<Duration, String> {
    let time = settings::long_duration(text)?;
    if !BUDGETS.contains(&time.as_secs()) {
        return Err("is out of range; it may be from 1s to 168h".to_owned());
    }
    Ok(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_have_minutes_and_hours() {
        assert_eq!(budget("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(budget("2h"), Ok(Duration::from_secs(7200)));
        assert_eq!(budget("2500ms"), Ok(Duration::from_millis(2500)));
        for text in ["0", "500ms", "169h", "18446744073709551615h"] {
            assert!(budget(text).unwrap_err().contains("from 1s to 168h"), "{text}");
        }
        assert!(budget("soon").unwrap_err().ends_with("or minutes, 10m, or hours, 2h"));
    }
}
