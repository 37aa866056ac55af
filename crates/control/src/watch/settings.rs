//! Settings of a disk or group, for reports of their changes.

use api::SettingChange;
use block::layer::throttle::ThrottleGroup;
use policy::throttle::Limits;
use serde_json::Value;

use crate::{
    events::{Kind, NewEvent},
    reconcile::change_report::{self, NamedValue},
    running_disk::RunningDisk,
};

/// Settings by their names in the config file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MemberSettingValues(Vec<NamedValue>);

impl MemberSettingValues {
    pub(super) fn of_disk(running: &RunningDisk) -> Self {
        Self(change_report::disk_values(&running.current_config()))
    }

    pub(super) fn of_group(group: &ThrottleGroup) -> Self {
        Self(change_report::throttle_values(
            &group.settings(),
            &group.scheduled().schedule,
            group.parent().map_or("", |group| group.name()),
        ))
    }

    pub(crate) fn of_limits(limits: &Limits) -> Self {
        Self(change_report::limit_values(limits))
    }

    pub(crate) fn changes_since(&self, before: &Self) -> Vec<SettingChange> {
        change_report::setting_changes(before.0.clone(), self.0.clone()).collect()
    }
}

/// Event about changed settings; the message begins with the given text.
pub(crate) fn changed_event(subject: &str, changes: &[SettingChange]) -> NewEvent {
    let texts: Vec<_> = changes.iter().map(change_text).collect();
    let objects = serde_json::to_value(changes).expect("all keys are strings");
    NewEvent::new(Kind::ConfigChanged, format!("{subject}: {}", texts.join(", "))).with("changes", objects)
}

/// Text of the form `iops-total 1000 (was 500)`.
fn change_text(SettingChange { setting, before, after }: &SettingChange) -> String {
    let shown = |value: &Value| match value.as_str() {
        Some("") => "none".to_owned(),
        Some(text) => text.to_owned(),
        None => value.to_string(),
    };
    format!("{setting} {} (was {})", shown(after), shown(before))
}

#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, LimitPart, LimitSetting};

    use block::layer::throttle::GroupSettings;
    use policy::schedule::LimitSchedule;

    use super::*;

    #[test]
    fn changes_have_both_values() {
        let mut settings = GroupSettings::default();
        let before =
            MemberSettingValues(change_report::throttle_values(&settings, &LimitSchedule::default(), ""));
        assert_eq!(before.changes_since(&before), []);
        settings.limits.set(LimitSetting::Limit(LimitKind::IopsTotal, LimitPart::Rate), 500).unwrap();
        let changes =
            MemberSettingValues(change_report::throttle_values(&settings, &LimitSchedule::default(), ""))
                .changes_since(&before);
        let texts: Vec<_> = changes.iter().map(change_text).collect();
        assert_eq!(texts, ["iops-total 500 (was 0)"]);
        let object = serde_json::to_value(&changes[0]).unwrap();
        assert_eq!(object, serde_json::json!({ "setting": "iops-total", "before": 0, "after": 500 }));
    }
}
