//! Configured limits of a cgroup, including bursts, watermark and group, which the kernel lacks.

use std::path::Path;

use block::device::DeviceNumber;
use console::{figures, figures::SettingValues as Named};
use policy::throttle::{LimitSetting, Limits};
use serde::{Serialize, Serializer};

use super::{latency_target, limits_file::LimitsFile};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct ConfiguredLimits {
    /// The cgroup's own limits, or those of its group.
    #[serde(serialize_with = "serialize_set_limits")]
    pub(crate) limits: Limits,
    /// Utilization of the device in percent below which limits are not enforced; 0 enforces them
    /// always.
    pub(crate) watermark: u8,
    pub(crate) weight: Option<u32>,
    /// Target of io.latency in microseconds.
    pub(crate) latency_target_us: Option<u64>,
    /// Group that the limits belong to, if any.
    pub(crate) group: Option<String>,
}

impl ConfiguredLimits {
    pub(crate) fn of(limits_file: &LimitsFile, name: &Path, device: DeviceNumber) -> Option<Self> {
        let is_this = |number: anyhow::Result<DeviceNumber>| number.is_ok_and(|number| number == device);
        let entry =
            limits_file.limits.iter().find(|entry| entry.cgroup == name && is_this(entry.device()))?;
        let shared = limits_file.limits_of(entry);
        Some(Self {
            // `LimitsFile::load` validated the entries.
            limits: shared.limits().unwrap_or_default(),
            watermark: shared.watermark().map_or(0, policy::watermark::Watermark::percent),
            weight: entry.given_weight(),
            latency_target_us: entry.latency_target_us(),
            group: entry.group.clone(),
        })
    }

    pub(crate) fn set_limits(&self) -> Named {
        set_limits(&self.limits)
    }

    /// Formats the limits, such as `bps-w 4M↑20M×5s, watermark 90%, group tenant, weight 200`.
    pub(crate) fn text(&self) -> String {
        let mut parts = Vec::new();
        if !self.limits.is_unlimited() {
            parts.push(figures::limits(&self.set_limits()));
        }
        if self.watermark > 0 {
            parts.push(format!("watermark {}%", self.watermark));
        }
        parts.extend(self.group.as_ref().map(|group| format!("group {group}")));
        parts.extend(self.weight.map(|weight| format!("weight {weight}")));
        parts.extend(self.latency_target_us.map(latency_target::part));
        if parts.is_empty() { "-".to_owned() } else { parts.join(", ") }
    }
}

fn set_limits(limits: &Limits) -> Named {
    let is_set = |setting: &LimitSetting| match *setting {
        // A burst without a rate has no effect.
        LimitSetting::Limit(kind, _) => limits.limit(kind).rate > 0,
        LimitSetting::IopsSize | LimitSetting::BurstFor => limits.get(*setting) > 0,
    };
    let set = LimitSetting::ALL.into_iter().filter(is_set);
    set.map(|setting| (setting.name().to_owned(), limits.get(setting))).collect()
}

fn serialize_set_limits<S: Serializer>(limits: &Limits, serializer: S) -> Result<S::Ok, S::Error> {
    set_limits(limits).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control_group::{ControlGroup, Version},
        limit::limits_file::LimitsChange,
    };

    const DISK: DeviceNumber = DeviceNumber { major: 8, minor: 0 };

    #[test]
    fn configured_limits_as_short_text() {
        let group =
            ControlGroup { version: Version::V2, directory: "/sys/fs/cgroup/a".into(), name: "/a".into() };
        let mut limits_file = LimitsFile::default();
        let change = LimitsChange {
            watermark: Some(90),
            weight: Some(200),
            group: Some("tenant".to_owned()),
            ..LimitsChange::of(&[("bps-write", 4 << 20), ("bps-write-max", 20 << 20)])
        };
        limits_file.change(&group, (DISK, "serial x"), &change).unwrap();
        let configured = ConfiguredLimits::of(&limits_file, Path::new("/a"), DISK).expect("it is kept");
        assert_eq!(configured.text(), "bps-w 4M↑20M, watermark 90%, group tenant, weight 200");
        assert_eq!(configured.set_limits()["bps-write-max"], 20 << 20);
        assert_eq!(ConfiguredLimits::of(&limits_file, Path::new("/b"), DISK), None);
        assert_eq!(
            ConfiguredLimits::of(&limits_file, Path::new("/a"), DeviceNumber { minor: 16, ..DISK }),
            None
        );
        assert_eq!(ConfiguredLimits::default().text(), "-");
    }
}
