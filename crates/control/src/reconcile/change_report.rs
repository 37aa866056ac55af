//! Report of the changes of a reload, for its client; `docs/reference/qmp.md` documents it.

use api::{ReloadChange, SettingChange};
use block::layer::throttle::GroupSettings;
use policy::{schedule::LimitSchedule, throttle::Limits};
use serde_json::Value;
use settings::{ConfigKey, DiskConfig, GroupConfig, KeyTable, key::ChangePolicy};

use crate::{planned_export::PlannedExport, registry::Registry};

/// Report of a disk or group; `change` is `added`, `removed` or `unavailable`.
pub(crate) fn object_report(kind: &str, name: &str, change: &str) -> ReloadChange {
    ReloadChange {
        kind: kind.to_owned(),
        name: name.to_owned(),
        change: change.to_owned(),
        ..ReloadChange::default()
    }
}

/// Report of a disk of the config file that is on another host.
pub(crate) fn moved_disk_report(disk: &str, host: &str) -> ReloadChange {
    ReloadChange { host: Some(host.to_owned()), ..object_report("disk", disk, "on-other-host") }
}

/// Report of credentials that could not be read again.
pub(crate) fn credentials_report(why: &str) -> ReloadChange {
    ReloadChange { reason: Some(why.to_owned()), ..object_report("daemon", "", "not-read") }
}

/// Report of an export, with its address.
pub(crate) fn export_report(registry: &Registry, planned: &PlannedExport, change: &str) -> ReloadChange {
    let (disk, address) = (Some(planned.disk.clone()), Some(planned.address(registry)));
    ReloadChange { disk, address, ..object_report("export", planned.shown_name(), change) }
}

/// Name and value of a setting.
pub(crate) type NamedValue = (&'static str, Value);

/// The settings that differ, of equal lists of settings.
pub(crate) fn setting_changes(
    before: Vec<NamedValue>,
    after: Vec<NamedValue>,
) -> impl Iterator<Item = SettingChange> {
    let both = before.into_iter().zip(after).filter(|(before, after)| before != after);
    both.map(|((setting, before), (_, after))| SettingChange { setting: setting.to_owned(), before, after })
}

/// Reports the settings that differ.
pub(crate) fn setting_reports<'a>(
    kind: &'a str,
    name: &'a str,
    before: Vec<NamedValue>,
    after: Vec<NamedValue>,
) -> impl Iterator<Item = ReloadChange> + 'a {
    setting_changes(before, after)
        .map(move |setting| ReloadChange { setting: Some(setting), ..object_report(kind, name, "set") })
}

/// Values of the keys that the function selects, in the order of the table.
fn key_values<T: KeyTable>(config: &T, is_selected: impl Fn(&ConfigKey<T>) -> bool) -> Vec<NamedValue> {
    let value = |key: &'static ConfigKey<T>| match key.write(config) {
        Some(literal) => (key.name, Value::from(&literal)),
        // The empty name stands for no group.
        None if key.name == "group" => (key.name, "".into()),
        None => (key.name, Value::Null),
    };
    T::keys().iter().filter(|key| is_selected(key)).map(value).collect()
}

pub(crate) fn limit_values(limits: &Limits) -> Vec<NamedValue> {
    let settings = settings::ThrottleConfig { limits: *limits, ..settings::ThrottleConfig::default() };
    key_values(&GroupConfig { settings, ..GroupConfig::default() }, |key| key.heading == "Limits")
}

/// Limits, shares and group of a running disk. The name is empty if it is in no group.
pub(crate) fn disk_throttle_values(
    settings: &GroupSettings,
    schedule: &LimitSchedule,
    group: &str,
) -> Vec<NamedValue> {
    let settings = settings::ThrottleConfig::from_running(settings);
    let group = (!group.is_empty()).then(|| group.to_owned());
    let schedule = schedule.clone();
    key_values(&DiskConfig { settings, schedule, group, ..DiskConfig::default() }, is_throttle_key)
}

/// True for the settings that a disk has as a group has them, and for limits that follow its size:
/// they change together with those of other objects.
fn is_throttle_key(key: &ConfigKey<DiskConfig>) -> bool {
    key.heading == settings::SIZE_HEADING || GroupConfig::key(key.name).is_some()
}

/// Limits, shares and parent of a running group. The name is empty if it is in no group.
pub(crate) fn throttle_values(
    settings: &GroupSettings,
    schedule: &LimitSchedule,
    group: &str,
) -> Vec<NamedValue> {
    let settings = settings::ThrottleConfig::from_running(settings);
    let group = (!group.is_empty()).then(|| group.to_owned());
    let config = GroupConfig { settings, schedule: schedule.clone(), group, ..GroupConfig::default() };
    key_values(&config, |key| key.name != "cluster")
}

/// Settings of a disk that can change at run time.
pub(crate) fn disk_values(disk: &DiskConfig) -> Vec<NamedValue> {
    key_values(disk, |key| key.change == ChangePolicy::Apply)
}

/// As [`disk_values`], without those of [`disk_throttle_values`].
pub(crate) fn disk_only_values(disk: &DiskConfig) -> Vec<NamedValue> {
    key_values(disk, |key| key.change == ChangePolicy::Apply && !is_throttle_key(key))
}
