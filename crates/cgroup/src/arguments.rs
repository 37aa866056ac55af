//! What a control group is held to, as options: the nineteen limits, watermark, weight, group, and the device.

use std::path::{Path, PathBuf};

use clap::Args;
use settings::arguments::limits::LimitArgs;

use crate::limit::{kept, kept::Change};

/// What `limit` and `run` are told of limits.
#[derive(Debug, Args)]
pub(crate) struct SettingsArgs {
    #[command(flatten)]
    limits: LimitArgs,
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
    /// Share one set of limits with all control groups of this name; limits and watermark are then for all together
    #[arg(long, value_name = "GROUP", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    group: Option<String>,
    /// Leave the group, and its limits with it; name new ones in the same command
    #[arg(long, conflicts_with = "group")]
    no_group: bool,
}

/// Where limits are kept for `weir cgroup watch`.
#[derive(Debug, Args)]
pub(crate) struct KeptArgs {
    /// Where limits are kept, for `weir cgroup watch`
    #[arg(long = "limits", value_name = "FILE", default_value = kept::USUAL)]
    limits_file: PathBuf,
}

impl KeptArgs {
    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.limits_file
    }
}

impl SettingsArgs {
    /// What is asked for.
    pub(crate) fn change(&self) -> Change {
        let ShareArgs { watermark, weight, group, no_group } = &self.shares;
        let group = if *no_group { Some(String::new()) } else { group.clone() };
        Change { limits: self.limits.given().to_vec(), watermark: *watermark, weight: *weight, group }
    }
}
