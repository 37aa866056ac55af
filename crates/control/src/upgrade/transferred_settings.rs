//! Transferred settings of disks and groups. The new process uses the settings in its config, and
//! logs how those of the old process differed, for example by a change without `--save`.
//!
//! Only values other than the defaults are transferred. Never used for anything but log lines.

use block::layer::throttle::ThrottleGroup;
use policy::schedule::LimitSchedule;
use serde_json::Value;
use settings::{ConfigKey, GroupConfig, KeyTable, ThrottleConfig, key::ChangePolicy::Apply};

use super::messages::{ProcessState, SettingsState};
use crate::registry::{Registry, RunningDisk};

pub(super) fn disk_settings(running: &RunningDisk) -> SettingsState {
    non_default_settings(&running.current_config())
}

pub(super) fn group_settings(group: &ThrottleGroup) -> SettingsState {
    non_default_settings(&group_config(group))
}

/// One line for each group and disk with other settings here. Empty if the old process is older and
/// sends none.
pub(super) fn differing_settings(state: &ProcessState, registry: &Registry) -> Vec<String> {
    let config = match &registry.config {
        Some(file) => file.display().to_string(),
        None => "this command line".to_owned(),
    };
    let groups = state.groups.iter().filter_map(|transferred| {
        let here = registry.groups.get(&transferred.name).ok()?;
        let changes = changes(transferred.set.as_ref()?, &group_config(&here));
        changes.map(|changes| format!("group {}: {changes}", transferred.name))
    });
    let disks = state.disks.iter().filter_map(|transferred| {
        let here = registry.disks.get(&transferred.name).ok()?;
        let changes = changes(transferred.set.as_ref()?, &here.current_config());
        changes.map(|changes| format!("disk {}: {changes}", transferred.name))
    });
    let line = |changes| format!("{changes}, from {config} (use --save to keep a change)");
    groups.chain(disks).map(line).collect()
}

/// Config of a running group. Excludes limits granted by a cluster, which are in no config.
fn group_config(group: &ThrottleGroup) -> GroupConfig {
    let mut settings = ThrottleConfig::from_running(&group.settings());
    if group.quota_lease().is_some() {
        settings.limits = ThrottleConfig::default().limits;
    }
    let parent = group.parent().map(|parent| parent.name().to_owned());
    let schedule = LimitSchedule::clone(&group.scheduled().schedule);
    GroupConfig { settings, schedule, group: parent, ..GroupConfig::default() }
}

/// Keys that a client can change, and the group.
fn compared_keys<T: KeyTable>() -> impl Iterator<Item = &'static ConfigKey<T>> {
    T::keys().iter().filter(|key| key.change == Apply || key.name == "group")
}

fn value<T: KeyTable>(key: &ConfigKey<T>, config: &T) -> Option<Value> {
    key.write(config).as_ref().map(Value::from)
}

fn non_default_settings<T: KeyTable>(config: &T) -> SettingsState {
    let set = compared_keys::<T>().filter(|key| !key.is_default(config));
    set.filter_map(|key| Some((key.name.to_owned(), value(key, config)?))).collect()
}

/// Form `iops-total 500 → 2000, weight 50 → 100`.
fn changes<T: KeyTable>(transferred: &SettingsState, here: &T) -> Option<String> {
    let change = |key: &ConfigKey<T>| {
        // A missing key means its default, as only other values are transferred.
        let before = transferred.get(key.name).cloned().or_else(|| value(key, &T::default()));
        let here = value(key, here);
        (before != here)
            .then(|| format!("{} {} → {}", key.name, value_text(key, before), value_text(key, here)))
    };
    let all: Vec<_> = compared_keys().filter_map(change).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Value as users write it.
fn value_text<T: KeyTable>(key: &ConfigKey<T>, value: Option<Value>) -> String {
    match value {
        None => "none".to_owned(),
        Some(Value::String(text)) if text.is_empty() => "none".to_owned(),
        // The text of the peer process is not trusted.
        Some(Value::String(text)) => text.chars().filter(|char| !char.is_control()).take(256).collect(),
        Some(Value::Number(number)) => match number.as_u64() {
            Some(0) => "none".to_owned(),
            Some(size) if key.is_size() => settings::exact_size(size),
            _ => number.to_string(),
        },
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, LimitPart, LimitSetting};
    use serde_json::json;

    use super::*;

    #[test]
    fn differing_settings_are_reported_with_both_values() {
        let with = |iops: u64, bps: u64| {
            let mut config = GroupConfig::default();
            config
                .settings
                .limits
                .set(LimitSetting::Limit(LimitKind::IopsTotal, LimitPart::Rate), iops)
                .unwrap();
            config
                .settings
                .limits
                .set(LimitSetting::Limit(LimitKind::BpsTotal, LimitPart::Rate), bps)
                .unwrap();
            config
        };
        let transferred = non_default_settings(&with(500, 0));
        assert_eq!(Value::Object(transferred.clone()), json!({ "iops-total": 500 }));
        assert_eq!(changes(&transferred, &with(500, 0)), None);
        let text = changes(&transferred, &with(0, 10 << 20)).unwrap();
        assert!(text.contains("iops-total 500 → none") && text.contains("bps-total none → 10M"), "{text}");
        // Keys and values of another version are shown without interpretation.
        let strange = json!({ "iops-total": ["\n"], "zzz": 1 }).as_object().cloned().unwrap();
        assert_eq!(changes(&strange, &with(0, 0)).unwrap(), "iops-total [\"\\n\"] → none");
        assert_eq!(
            compared_keys::<settings::DiskConfig>().count(),
            compared_keys::<GroupConfig>().count() + LimitSetting::OF_SIZE.len() + 13
        );
    }
}
