//! Settings of a disk or group, for reports of their changes.

use std::fmt;

use block::layer::throttle::ThrottleGroup;
use policy::throttle::Limits;
use serde_json::{Value, json};

use crate::{
    events::{Kind, NewEvent},
    reconcile::change_report::{self, NamedValue},
    running_disk::RunningDisk,
};

/// Settings by their names in the config file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MemberSettingValues(Vec<NamedValue>);

/// Changed setting.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SettingChange {
    setting: &'static str,
    before: Value,
    after: Value,
}

impl MemberSettingValues {
    pub(super) fn of_disk(running: &RunningDisk) -> Self {
        Self(change_report::disk_values(&running.current_config()))
    }

    pub(super) fn of_group(group: &ThrottleGroup) -> Self {
        Self(change_report::throttle_values(
            &group.settings(),
            group.parent().map_or("", |group| group.name()),
        ))
    }

    pub(crate) fn of_limits(limits: &Limits) -> Self {
        Self(change_report::limit_values(limits))
    }

    pub(crate) fn changes_since(&self, before: &Self) -> Vec<SettingChange> {
        let both = before.0.iter().zip(&self.0);
        let changed = both.filter(|((_, before), (_, after))| before != after);
        changed
            .map(|((setting, before), (_, after))| SettingChange {
                setting,
                before: before.clone(),
                after: after.clone(),
            })
            .collect()
    }
}

impl SettingChange {
    fn to_json(&self) -> Value {
        json!({ "setting": self.setting, "before": self.before, "after": self.after })
    }

    /// Event about changed settings; the message begins with the given text.
    pub(crate) fn changed_event(subject: &str, changes: &[Self]) -> NewEvent {
        let texts: Vec<_> = changes.iter().map(Self::to_string).collect();
        let objects: Vec<_> = changes.iter().map(Self::to_json).collect();
        NewEvent::new(Kind::ConfigChanged, format!("{subject}: {}", texts.join(", ")))
            .with("changes", objects)
    }
}

/// Form `iops-total 1000 (was 500)`.
impl fmt::Display for SettingChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Value| match value.as_str() {
            Some("") => "none".to_owned(),
            Some(text) => text.to_owned(),
            None => value.to_string(),
        };
        write!(f, "{} {} (was {})", self.setting, shown(&self.after), shown(&self.before))
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, LimitPart, LimitSetting};

    use block::layer::throttle::GroupSettings;

    use super::*;

    #[test]
    fn changes_have_both_values() {
        let mut settings = GroupSettings::default();
        let before = MemberSettingValues(change_report::throttle_values(&settings, ""));
        assert_eq!(before.changes_since(&before), []);
        settings.limits.set(LimitSetting::Limit(LimitKind::IopsTotal, LimitPart::Rate), 500).unwrap();
        let changes =
            MemberSettingValues(change_report::throttle_values(&settings, "")).changes_since(&before);
        let texts: Vec<_> = changes.iter().map(SettingChange::to_string).collect();
        assert_eq!(texts, ["iops-total 500 (was 0)"]);
        assert_eq!(changes[0].to_json(), json!({ "setting": "iops-total", "before": 0, "after": 500 }));
    }
}
