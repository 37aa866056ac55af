//! What a reload has changed, for whoever asked for it: `docs/reference/qmp.md` describes it.

use block::layer::throttle::GroupSettings;
use policy::throttle::Limits;
use serde_json::{Value, json};
use settings::{DiskConfig, GroupConfig, ConfigKey, KeyTable, key::ChangePolicy};

/// That a disk, a group or an export has come or gone: `change` is `added` or `removed`.
pub(crate) fn listed(kind: &str, name: &str, change: &str) -> Value {
    json!({ "kind": kind, "name": name, "change": change })
}

/// That a disk of the config file is on another host.
pub(crate) fn left_out(disk: &str, host: &str) -> Value {
    json!({ "kind": "disk", "name": disk, "change": "left-out", "host": host })
}

/// That keys, certificates or passwords could not be read again.
pub(crate) fn not_read(why: &str) -> Value {
    json!({ "kind": "daemon", "name": "", "change": "not-read", "reason": why })
}

/// The same of an export, and where.
pub(crate) fn exported((name, address): (String, String), disk: &str, change: &str) -> Value {
    json!({ "kind": "export", "name": name, "disk": disk, "address": address, "change": change })
}

/// A setting, its name and its value.
pub(crate) type Named = (&'static str, Value);

/// Those that differ.
pub(crate) fn settings<'a>(
    kind: &'a str,
    name: &'a str,
    before: Vec<Named>,
    after: Vec<Named>,
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

/// The values of the keys that `which` selects, in the order of the table.
fn values<T: KeyTable>(config: &T, which: impl Fn(&ConfigKey<T>) -> bool) -> Vec<Named> {
    let value = |key: &'static ConfigKey<T>| match key.write(config) {
        Some(literal) => (key.name, Value::from(&literal)),
        // The empty name stands for no group.
        None if key.name == "group" => (key.name, json!("")),
        None => (key.name, Value::Null),
    };
    T::keys().iter().filter(|key| which(key)).map(value).collect()
}

pub(crate) fn of_limits(limits: &Limits) -> Vec<Named> {
    let settings = settings::ThrottleConfig { limits: *limits, ..settings::ThrottleConfig::default() };
    values(&GroupConfig { settings, ..GroupConfig::default() }, |key| key.heading == "Limits")
}

/// Limits, shares and the group of a running disk or group; the name is empty if it is in none.
pub(crate) fn of_throttle(settings: &GroupSettings, group: &str) -> Vec<Named> {
    let settings = settings::ThrottleConfig::from_running(settings);
    let group = (!group.is_empty()).then(|| group.to_owned());
    let config = GroupConfig { settings, group, ..GroupConfig::default() };
    values(&config, |key| key.name != "cluster")
}

/// All that can be changed of a disk while it is served.
pub(crate) fn of_disk(disk: &DiskConfig) -> Vec<Named> {
    values(disk, |key| key.change == ChangePolicy::Apply)
}

/// The same without limits, shares and the group, which are changed together with those of others.
pub(crate) fn of_disk_alone(disk: &DiskConfig) -> Vec<Named> {
    values(disk, |key| key.change == ChangePolicy::Apply && GroupConfig::key(key.name).is_none())
}
