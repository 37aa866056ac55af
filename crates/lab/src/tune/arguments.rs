//! Options of `weir tune`.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use storage::ImageFormat;

use crate::{
    result::arguments::ResultArgs,
    tune::{Preset, TuneGoal},
};

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  weir tune /var/lib/images --report tune.html
      Recommends options for disks in that directory, measured with images that are removed afterwards.
  weir tune /var/lib/images --for latency --budget 30m --result tune.json
      For one goal and for longer; after Ctrl-C, --resume tune.json continues that run.
  weir tune /var/lib/images --preset cache-modes
      The table of a published measurement, and whether its conclusions hold here.
  weir tune vm1.qcow2 --format qcow2
      Cache mode, L2 cache and prefetch for an existing image, which is only read.

Measures cache mode, cluster size (64K to 2M), L2 cache (from 1/128 of the full size to the full size) and prefetch: first one change to the default at a time, then promising combinations, in rounds in random order. Recommends only changes that were shown to gain more than noise and 5 %.
Exit status: 0 measured, 1 failed or interrupted, 2 wrong use of the command line.";

/// Arguments of `weir tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// Directory, in which images are created and measured; block device; or image, which is only
    /// read
    #[arg(value_name = "DIR|DEVICE|IMAGE")]
    pub(crate) path: PathBuf,
    /// Goal of the recommendation [default: all goals]
    #[arg(long = "for", value_name = "GOAL")]
    pub(crate) goal: Option<TuneGoal>,
    /// Maximum total duration, such as 90s, 10m or 2h
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = budget)]
    pub(crate) budget: Duration,
    /// Bytes of each image, or of the device or image that are measured [default: by budget and
    /// free space, at most 1G; of a device or an image, all]
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    pub(crate) size: Option<u64>,
    /// Size of the disk that the printed options are for [default: 100G, or the size of the image
    /// or device]
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    pub(crate) disk: Option<u64>,
    /// Format of an existing image: raw or qcow2 [default: probed, where that is safe]
    #[arg(long, value_name = "FORMAT", value_parser = settings::parse::<ImageFormat>)]
    pub(crate) format: Option<ImageFormat>,
    /// Measure a published table instead of searching
    #[arg(long, value_name = "TABLE", conflicts_with_all = ["goal", "resume", "disk"])]
    pub(crate) preset: Option<Preset>,
    /// Write to a device, which destroys its data
    #[arg(long)]
    pub(crate) write: bool,
    /// Write to a device despite a file system or another known signature
    #[arg(long, requires = "write")]
    pub(crate) force: bool,
    /// Seed of the random order; the recommendation should not depend on it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Continue with the samples of an interrupted run with the same target and size
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
    fn budget_accepts_minutes_and_hours() {
        assert_eq!(budget("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(budget("2h"), Ok(Duration::from_secs(7200)));
        assert_eq!(budget("2500ms"), Ok(Duration::from_millis(2500)));
        for text in ["0", "500ms", "169h", "18446744073709551615h"] {
            assert!(budget(text).unwrap_err().contains("from 1s to 168h"), "{text}");
        }
        assert!(budget("soon").unwrap_err().ends_with("or minutes, 10m, or hours, 2h"));
    }
}
