//! The config of a group, and the table of its keys.

use std::sync::LazyLock;

use policy::{schedule::LimitSchedule, throttle::LimitSetting};

use crate::{
    ThrottleConfig,
    diagnostics::Diagnostics,
    key::{
        ConfigKey,
        KeyType::{Flag, Text},
        maybe, one, table,
    },
    origins::{ConfigWithOrigins, KeyTable},
    schedule, throttle,
};

/// Config of a group of disks and groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupConfig {
    /// Unique among groups and disks.
    pub name: String,
    /// Limits of all members together, and the group's own share and watermark.
    pub settings: ThrottleConfig,
    /// Limits that hold at times.
    pub schedule: LimitSchedule,
    /// Name of its parent group.
    pub group: Option<String>,
    /// True if its limits are cluster-wide.
    pub cluster: bool,
}

impl KeyTable for GroupConfig {
    const REMOVED: &'static [(&'static str, &'static str)] = &OF_DISKS;

    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<GroupConfig>>> = LazyLock::new(group_keys);
        &KEYS
    }

    fn check_rules(group: &ConfigWithOrigins<Self>, diagnostics: &Diagnostics) {
        throttle::check_limits(group, &group.settings, diagnostics);
        schedule::check(group, &group.schedule, &group.settings, true, diagnostics);
    }
}

/// Keys of disks, with the rule for a group.
const OF_DISKS: [(&str, &str); LimitSetting::OF_SIZE.len()] = {
    let mut keys = [("", "follows the size of a disk, and a group has none (set it for its disks)"); 18];
    let mut i = 0;
    while i < keys.len() {
        keys[i].0 = LimitSetting::OF_SIZE[i].name();
        i += 1;
    }
    keys
};

type Config = GroupConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check. `name` has no row: it is the table's name.
const _: fn(GroupConfig) = |GroupConfig { name: _, settings: _, schedule: _, group: _, cluster: _ }| ();

/// The table of keys, in the order of the help.
fn group_keys() -> Vec<ConfigKey<GroupConfig>> {
    let mut keys = table! {
        // name, value, placeholder, field, default, change, transfer, help
        "Group" {
            "group", Text, "GROUP", maybe!(group), "", Reject, Transferred,
                "Put the group into this one, whose limits apply to all its members too";
            "cluster", Flag, "", one!(cluster), "", Reject, Separate,
                "Use the cluster's limits, over all hosts";
        }
    };
    keys.extend(throttle::limit_keys(LimitSetting::ALL, settings, settings_mut));
    keys.extend(throttle::share_keys(settings, settings_mut));
    keys.extend(throttle::latency_keys(settings, settings_mut));
    keys.extend(throttle::quota_keys(settings, settings_mut));
    keys.extend(schedule::schedule_keys(|group: &GroupConfig| &group.schedule, |group| &mut group.schedule));
    keys
}

fn settings(group: &GroupConfig) -> &ThrottleConfig {
    &group.settings
}

fn settings_mut(group: &mut GroupConfig) -> &mut ThrottleConfig {
    &mut group.settings
}
