//! What is set of disks and groups, as it is told: the newcomer sets them by its own config, and
//! its log has what that sets otherwise than what ran, such as a change without `--save`.
//!
//! Only what is not as it is by itself is told. What is made of it is a line in a log and no more.

use block::layer::throttle::{Group, GroupSettings};
use serde_json::Value;
use settings::{DiskConfig, KeySet as _, key::ValueKind};

use super::told::{State, Told};
use crate::{
    reconcile::applied::{self, Named, of_throttle},
    registry::{Registry, RunningDisk},
};

pub(super) fn of_disk(running: &RunningDisk) -> Told {
    unlike(disk_by_itself(), set_of_disk(running))
}

pub(super) fn of_group(group: &Group) -> Told {
    unlike(group_by_itself(), set_of_group(group))
}

/// A line for each group and disk that is set otherwise here. Where the other does not tell, being
/// older, nothing is said.
pub(super) fn set_otherwise(state: &State, registry: &Registry) -> Vec<String> {
    let config = match &registry.config {
        Some(file) => file.display().to_string(),
        None => "this command line".to_owned(),
    };
    let groups = state.groups.iter().filter_map(|told| {
        let here = registry.groups.get(&told.name).ok()?;
        let changes = changes(told.set.as_ref()?, group_by_itself(), set_of_group(&here));
        changes.map(|changes| format!("group {}: {changes}", told.name))
    });
    let disks = state.disks.iter().filter_map(|told| {
        let here = registry.disks.get(&told.name).ok()?;
        let changes = changes(told.set.as_ref()?, disk_by_itself(), set_of_disk(&here));
        changes.map(|changes| format!("disk {}: {changes}", told.name))
    });
    let line = |changes| format!("{changes}, as {config} has it (a change that is to stay needs --save)");
    groups.chain(disks).map(line).collect()
}

fn set_of_disk(running: &RunningDisk) -> Vec<Named> {
    applied::of_disk(&running.current_config())
}

fn disk_by_itself() -> Vec<Named> {
    applied::of_disk(&DiskConfig::default())
}

fn set_of_group(group: &Group) -> Vec<Named> {
    let mut settings = group.settings();
    if group.lent().is_some() {
        // The cluster's, and not for a config to say.
        settings.limits = GroupSettings::default().limits;
    }
    of_throttle(&settings, group.parent().map_or("", |group| group.name()))
}

fn group_by_itself() -> Vec<Named> {
    of_throttle(&GroupSettings::default(), "")
}

fn unlike(by_itself: Vec<Named>, set: Vec<Named>) -> Told {
    let set = set.into_iter().zip(by_itself).filter(|(set, by_itself)| set != by_itself);
    set.map(|((name, value), _)| (name.to_owned(), value)).collect()
}

/// `iops-total 500 → 2000, weight 50 → 100`.
fn changes(told: &Told, by_itself: Vec<Named>, here: Vec<Named>) -> Option<String> {
    let change = |((name, here), (_, by_itself)): (Named, Named)| {
        let before = told.get(name).cloned().unwrap_or(by_itself);
        (before != here).then(|| format!("{name} {} → {}", shown(name, &before), shown(name, &here)))
    };
    let all: Vec<_> = here.into_iter().zip(by_itself).filter_map(change).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// A value as users write it.
fn shown(name: &str, value: &Value) -> String {
    let is_size =
        name == "l2-cache-size" || DiskConfig::key(name).is_some_and(|key| key.value == ValueKind::Size);
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) if text.is_empty() => "none".to_owned(),
        // It may have come from anywhere.
        Value::String(text) => text.chars().filter(|char| !char.is_control()).take(256).collect(),
        Value::Number(number) => match number.as_u64() {
            Some(0) => "none".to_owned(),
            Some(size) if is_size => settings::exact_size(size),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, Part, Setting};
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_set_otherwise_is_told_with_both_values() {
        let with = |iops: u64, bps: u64| {
            let mut settings = GroupSettings::default();
            settings.limits.set(Setting::Limit(LimitKind::IopsTotal, Part::Rate), iops).unwrap();
            settings.limits.set(Setting::Limit(LimitKind::BpsTotal, Part::Rate), bps).unwrap();
            of_throttle(&settings, "")
        };
        let told = unlike(group_by_itself(), with(500, 0));
        assert_eq!(Value::Object(told.clone()), json!({ "iops-total": 500 }));
        assert_eq!(changes(&told, group_by_itself(), with(500, 0)), None);
        let said = changes(&told, group_by_itself(), with(0, 10 << 20)).unwrap();
        assert!(said.contains("iops-total 500 → none") && said.contains("bps-total none → 10M"), "{said}");
        // What nobody here knows says nothing.
        let strange = json!({ "iops-total": ["\n"], "zzz": 1 }).as_object().cloned().unwrap();
        assert_eq!(changes(&strange, group_by_itself(), with(0, 0)).unwrap(), "iops-total [\"\\n\"] → none");
        assert_eq!(disk_by_itself().len(), group_by_itself().len() + 13);
    }
}
