//! Output of `weir cgroup limit`.

use block::device::DeviceIdentity;
use policy::steering::IoMaxRates;
use reactor::sanitize::sanitize;
use serde::Serialize;

use super::{configured::ConfiguredLimits, latency_target};
use crate::control_group::ControlGroup;

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct LimitReport {
    cgroup: String,
    device: String,
    /// Limits in force in the kernel.
    #[serde(flatten)]
    rates: ReportedRates,
    /// Target of io.latency in force in the kernel, in microseconds.
    latency_target_us: Option<u64>,
    /// `None` if weir has set no limit.
    pub(super) asked: Option<ConfiguredLimits>,
    pub(crate) notices: Vec<String>,
}

/// Limits in force in the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KernelLimits {
    pub(super) rates: IoMaxRates,
    /// Target of io.latency in microseconds.
    pub(super) latency_target_us: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct ReportedRates {
    bps_read: Option<u64>,
    bps_write: Option<u64>,
    iops_read: Option<u64>,
    iops_write: Option<u64>,
}

impl LimitReport {
    pub(super) fn new(
        group: &ControlGroup,
        device: &DeviceIdentity,
        kernel: KernelLimits,
        configured: Option<ConfiguredLimits>,
        notices: Vec<String>,
    ) -> Self {
        let KernelLimits { rates: IoMaxRates { bps, iops }, latency_target_us } = kernel;
        Self {
            cgroup: group.name.display().to_string(),
            device: device.node(),
            rates: ReportedRates {
                bps_read: bps[0],
                bps_write: bps[1],
                iops_read: iops[0],
                iops_write: iops[1],
            },
            latency_target_us,
            asked: configured,
            notices,
        }
    }

    pub(super) fn text(&self) -> String {
        let ReportedRates { bps_read, bps_write, iops_read, iops_write } = self.rates;
        let mut rates: Vec<String> = [
            ("bps-read", bps_read.map(settings::exact_size)),
            ("bps-write", bps_write.map(settings::exact_size)),
            ("iops-read", iops_read.map(|rate| rate.to_string())),
            ("iops-write", iops_write.map(|rate| rate.to_string())),
        ]
        .into_iter()
        .filter_map(|(name, rate)| Some(format!("{name} {}", rate?)))
        .collect();
        rates.extend(self.latency_target_us.map(latency_target::part));
        let rates_text = if rates.is_empty() { "no limit".to_owned() } else { rates.join(", ") };
        let notices: String = self.notices.iter().map(|notice| format!("note: {notice}\n")).collect();
        let configured =
            self.asked.as_ref().map_or_else(String::new, |limits| format!("configured: {}\n", limits.text()));
        format!("{} on {}: {rates_text}\n{configured}{notices}", sanitize(&self.cgroup), self.device)
    }
}
