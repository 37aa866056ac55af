//! The options that say what disks are entitled to. With `--group` all but the weight are the
//! group's: a weight is what tells its members apart.

use clap::Args;

use super::limits::LimitArgs;
use crate::{Place, Said, SettingsDraft};

/// What was said of shares.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Shares")]
pub struct ShareArgs {
    /// Each disk's share of what its group has, beside that of the others there, from 1 to 10000
    /// [default: 100]
    #[arg(long, value_name = "N", value_parser = crate::count, conflicts_with = "config")]
    weight: Option<u64>,
    /// Operations per second that are promised, whatever others ask for; 0 is none
    #[arg(long, value_name = "N", value_parser = crate::count, conflicts_with = "config")]
    iops_reservation: Option<u64>,
    /// Bytes per second that are promised; where both are, the promise ends with what is used up
    /// first
    #[arg(long, value_name = "SIZE", value_parser = crate::size, conflicts_with = "config")]
    bps_reservation: Option<u64>,
    /// Percent of what the device can do below which limits are lifted; 0 never lifts them
    /// [default: 0]
    #[arg(long, value_name = "PERCENT", value_parser = crate::count, conflicts_with = "config")]
    watermark: Option<u64>,
}

impl ShareArgs {
    /// The settings of a group, or of each disk where there is none.
    pub fn settings(&self, limits: &LimitArgs) -> SettingsDraft {
        SettingsDraft {
            limits: limits.draft(),
            weight: None,
            iops_reservation: said("iops-reservation", self.iops_reservation),
            bps_reservation: said("bps-reservation", self.bps_reservation),
            watermark: said("watermark", self.watermark),
        }
    }

    /// The settings of each disk in a group.
    pub fn of_member(&self) -> SettingsDraft {
        SettingsDraft { weight: said("weight", self.weight), ..SettingsDraft::default() }
    }

    /// The settings of each disk without a group.
    pub fn of_loner(&self, limits: &LimitArgs) -> SettingsDraft {
        SettingsDraft { weight: said("weight", self.weight), ..self.settings(limits) }
    }
}

fn said(option: &str, value: Option<u64>) -> Option<Said<u64>> {
    value.map(|value| Said::new(value, Place::option(option, value)))
}
