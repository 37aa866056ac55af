//! Output of `weir cgroup limit`.

use block::device::Identity;
use policy::steering::Rates;
use reactor::plain::plain;
use serde::Serialize;

use super::asked::Asked;
use crate::control_group::ControlGroup;

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Outcome {
    cgroup: String,
    device: String,
    /// Limits in force in the kernel.
    #[serde(flatten)]
    rates: Told,
    /// `None` if weir has set no limit.
    #[serde(serialize_with = "as_json")]
    pub(super) asked: Option<Asked>,
    pub(crate) notices: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Told {
    bps_read: Option<u64>,
    bps_write: Option<u64>,
    iops_read: Option<u64>,
    iops_write: Option<u64>,
}

fn as_json<S: serde::Serializer>(asked: &Option<Asked>, serializer: S) -> Result<S::Ok, S::Error> {
    asked.as_ref().map(Asked::json).serialize(serializer)
}

impl Outcome {
    pub(super) fn new(
        group: &ControlGroup,
        device: &Identity,
        rates: Rates,
        asked: Option<Asked>,
        notices: Vec<String>,
    ) -> Self {
        let Rates { bps, iops } = rates;
        Self {
            cgroup: group.name.display().to_string(),
            device: device.node(),
            rates: Told { bps_read: bps[0], bps_write: bps[1], iops_read: iops[0], iops_write: iops[1] },
            asked,
            notices,
        }
    }

    pub(super) fn text(&self) -> String {
        let Told { bps_read, bps_write, iops_read, iops_write } = self.rates;
        let told: Vec<String> = [
            ("bps-read", bps_read.map(settings::exact_size)),
            ("bps-write", bps_write.map(settings::exact_size)),
            ("iops-read", iops_read.map(|rate| rate.to_string())),
            ("iops-write", iops_write.map(|rate| rate.to_string())),
        ]
        .into_iter()
        .filter_map(|(name, rate)| Some(format!("{name} {}", rate?)))
        .collect();
        let told = if told.is_empty() { "no limit".to_owned() } else { told.join(", ") };
        let notices: String = self.notices.iter().map(|notice| format!("note: {notice}\n")).collect();
        let asked =
            self.asked.as_ref().map_or_else(String::new, |asked| format!("asked for: {}\n", asked.text()));
        format!("{} on {}: {told}\n{asked}{notices}", plain(&self.cgroup), self.device)
    }
}
