//! Configured limits of a cgroup, including bursts, watermark and group, which the kernel lacks.

use std::path::Path;

use block::device::Number;
use console::{figures, figures::Limits as Named};
use policy::throttle::{Limits, Setting};
use serde_json::{Value, json};

use super::kept::Kept;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// The cgroup's own limits, or those of its group.
    pub(crate) limits: Limits,
    /// Percent of the device below which limits are not enforced; 0 enforces them always.
    pub(crate) watermark: u8,
    pub(crate) weight: Option<u32>,
    /// Group that the limits belong to, if any.
    pub(crate) group: Option<String>,
}

impl Asked {
    pub(crate) fn of(kept: &Kept, name: &Path, device: Number) -> Option<Self> {
        let is_this = |number: anyhow::Result<Number>| number.is_ok_and(|number| number == device);
        let entry = kept.limits.iter().find(|entry| entry.cgroup == name && is_this(entry.device()))?;
        let shared = kept.shared(entry);
        Some(Self {
            // `Kept::load` validated the entries.
            limits: shared.limits().unwrap_or_default(),
            watermark: shared.watermark().map_or(0, policy::watermark::Watermark::percent),
            weight: entry.given_weight(),
            group: entry.group.clone(),
        })
    }

    pub(crate) fn named(&self) -> Named {
        let is_set = |setting: &Setting| match *setting {
            // A burst without a rate has no effect.
            Setting::Limit(kind, _) => self.limits.limit(kind).rate > 0,
            Setting::IopsSize => self.limits.iops_size > 0,
        };
        let set = Setting::ALL.into_iter().filter(is_set);
        set.map(|setting| (setting.name().to_owned(), self.limits.get(setting))).collect()
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "limits": self.named(),
            "watermark": self.watermark,
            "weight": self.weight,
            "group": self.group,
        })
    }

    /// Formats the limits, such as `bps-w 4M↑20M×5s, watermark 90%, group tenant, weight 200`.
    pub(crate) fn text(&self) -> String {
        let mut parts = Vec::new();
        if !self.limits.is_unlimited() {
            parts.push(figures::limits(&self.named()));
        }
        if self.watermark > 0 {
            parts.push(format!("watermark {}%", self.watermark));
        }
        parts.extend(self.group.as_ref().map(|group| format!("group {group}")));
        parts.extend(self.weight.map(|weight| format!("weight {weight}")));
        if parts.is_empty() { "-".to_owned() } else { parts.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control_group::{ControlGroup, Version},
        limit::kept::Change,
    };

    const DISK: Number = Number { major: 8, minor: 0 };

    #[test]
    fn what_was_asked_for_is_told_in_short() {
        let group =
            ControlGroup { version: Version::V2, directory: "/sys/fs/cgroup/a".into(), name: "/a".into() };
        let mut kept = Kept::default();
        let change = Change {
            watermark: Some(90),
            weight: Some(200),
            group: Some("tenant".to_owned()),
            ..Change::of(&[("bps-write", 4 << 20), ("bps-write-max", 20 << 20)])
        };
        kept.change(&group, (DISK, "serial x"), &change).unwrap();
        let asked = Asked::of(&kept, Path::new("/a"), DISK).expect("it is kept");
        assert_eq!(asked.text(), "bps-w 4M↑20M, watermark 90%, group tenant, weight 200");
        assert_eq!(asked.named()["bps-write-max"], 20 << 20);
        assert_eq!(Asked::of(&kept, Path::new("/b"), DISK), None);
        assert_eq!(Asked::of(&kept, Path::new("/a"), Number { minor: 16, ..DISK }), None);
        assert_eq!(Asked::default().text(), "-");
    }
}
