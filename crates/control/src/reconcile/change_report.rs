//! Report of the changes of a reload, for its client; `docs/reference/qmp.md` documents it.

use block::layer::throttle::GroupSettings;
use policy::throttle::Limits;
use serde_json::{Value, json};
use settings::{ConfigKey, DiskConfig, GroupConfig, KeyTable, key::ChangePolicy};

/// Report of a disk or group; `change` is `added` or `removed`.
pub(crate) fn object_report(kind: &str, name: &str, change: &str) -> Value {
    json!({ "kind": kind, "name": name, "change": change })
}

/// Report of a disk of the config file that is on another host.
pub(crate) fn moved_disk_report(disk: &str, host: &str) -> Value {
    json!({ "kind": "disk", "name": disk, "change": "on-other-host", "host": host })
}

/// Report of credentials that could not be read again.
pub(crate) fn credentials_report(why: &str) -> Value {
    json!({ "kind": "daemon", "name": "", "change": "not-read", "reason": why })
}

/// Report of an export, with its address.
pub(crate) fn export_report((name, address): (String, String), disk: &str, change: &str) -> Value {
    json!({ "kind": "export", "name": name, "disk": disk, "address": address, "change": change })
}

/// Name and value of a setting.
pub(crate) type NamedValue = (&'static str, Value);

/// Reports the settings that differ.
pub(crate) fn setting_reports<'a>(
    kind: &'a str,
    name: &'a str,
    before: Vec<NamedValue>,
    after: Vec<NamedValue>,
) -> impl Iterator<Item = Value> + 'a {
    before.into_iter().zip(after).filter(|(before, after)| before != after).map(
        move |((setting, before), (_, after))| {
            json!({
                "kind": kind, "name": name, "change": "set",
                "setting": setting, "before": before, "after": after,
            })
        },
    )
}

/// Values of the keys that the function selects, in the order of the table.
fn key_values<T: KeyTable>(config: &T, is_selected: impl Fn(&ConfigKey<T>) -> bool) -> Vec<NamedValue> {
    let value = |key: &'static ConfigKey<T>| match key.write(config) {
        Some(literal) => (key.name, Value::from(&literal)),
        // The empty name stands for no group.
        None if key.name == "group" => (key.name, json!("")),
        None => (key.name, Value::Null),
    };
    T::keys().iter().filter(|key| is_selected(key)).map(value).collect()
}

pub(crate) fn limit_values(limits: &Limits) -> Vec<NamedValue> {
    let settings = settings::ThrottleConfig { limits: *limits, ..settings::ThrottleConfig::default() };
    key_values(&GroupConfig { settings, ..GroupConfig::default() }, |key| key.heading == "Limits")
}

/// Limits, shares and group of a running disk or group. The name is empty if it is in no group.
pub(crate) fn throttle_values(settings: &GroupSettings, group: &str) -> Vec<NamedValue> {
    let settings = settings::ThrottleConfig::from_running(settings);
    let group = (!group.is_empty()).then(|| group.to_owned());
    let config = GroupConfig { settings, group, ..GroupConfig::default() };
    key_values(&config, |key| key.name != "cluster")
}

/// Settings of a disk that can change at run time.
pub(crate) fn disk_values(disk: &DiskConfig) -> Vec<NamedValue> {
    key_values(disk, |key| key.change == ChangePolicy::Apply)
}

/// As [`disk_values`], without limits, shares and group, which change together with those of other
/// objects.
pub(crate) fn disk_only_values(disk: &DiskConfig) -> Vec<NamedValue> {
    key_values(disk, |key| key.change == ChangePolicy::Apply && GroupConfig::key(key.name).is_none())
}
