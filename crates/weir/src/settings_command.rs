//! A change of settings: applied by the daemon, written into the config file, and printed.
//!
//! The file is read, edited and checked before the change is sent to the daemon, so that a change
//! cannot be in force and then fail to be saved for a foreseeable reason.

mod arguments;
mod config_file;
mod disk_images;
mod edit;

use std::collections::BTreeMap;

use anyhow::{Context as _, anyhow};
use api::MemberSettings;
pub(crate) use arguments::SaveArgs;
pub(crate) use config_file::PreparedConfigFile;
use console::{CommandFailure, print, print_json};
pub(crate) use disk_images::{NewImage, SavedImages};
pub(crate) use edit::{with_table, without_table};
use serde::Serialize;
use serde_json::Value;

use crate::client::{
    ClientError, ControlAddress, ControlClient,
    change::{SettingName, SettingValue, SettingsChange},
    report::{DaemonReport, StatusNode},
};

/// A command that shows or changes the settings of one disk or group.
pub(crate) trait SettingsCommand {
    const EXAMPLE: &'static str;

    fn common(&self) -> SettingsCommandArgs<'_>;

    /// The disk or group of the given name. Fails if it has no such settings.
    fn find<'a>(&self, report: &'a DaemonReport) -> Result<StatusNode<'a>, String>;

    /// The change, relative to the settings in force.
    fn change(&self, before: &MemberSettings) -> SettingsChange;

    fn show(&self, report: &DaemonReport, node: StatusNode<'_>) -> String;

    fn to_json(&self, node: StatusNode<'_>) -> Value;
}

pub(crate) struct SettingsCommandArgs<'a> {
    pub(crate) name: &'a str,
    pub(crate) json: bool,
    pub(crate) qmp: &'a Option<ControlAddress>,
    pub(crate) save: &'a SaveArgs,
}

/// Fails if the daemon rejects the change or does not respond, or the config file cannot be
/// written.
pub(crate) fn run<S: SettingsCommand>(setter: &S) -> Result<(), CommandFailure> {
    let SettingsCommandArgs { name, json, qmp, save } = setter.common();
    // The set of changed settings does not depend on those in force, so it can be checked offline.
    setter.change(&MemberSettings::default()).check().map_err(|wrong| CommandFailure::Usage(wrong.into()))?;
    let mut client = ControlClient::reach(qmp.clone())?;
    let report = client.status()?;
    let node = setter.find(&report).map_err(anyhow::Error::msg)?;
    let change = setter.change(node.settings());
    if !change.is_empty() {
        let saved = apply(&mut client, &report, name, node, save, &change)?;
        let (before, saved) = (node.settings(), saved.as_deref());
        return Ok(if json {
            print_json(&changed_settings(name, before, &change, saved))
        } else {
            print(&describe_change(name, before, &change, saved))
        }?);
    }
    if save.save {
        let example = S::EXAMPLE;
        let rule = format!("no setting to save is given (for example {example})");
        return Err(CommandFailure::Usage(anyhow!("--save: {rule}")));
    }
    Ok(if json { print_json(&setter.to_json(node)) } else { print(&setter.show(&report, node)) }?)
}

/// Applies a change, and saves it if requested. Returns the file's name then.
fn apply(
    client: &mut ControlClient,
    report: &DaemonReport,
    name: &str,
    node: StatusNode<'_>,
    arguments: &SaveArgs,
    change: &SettingsChange,
) -> anyhow::Result<Option<String>> {
    let saving = prepare(report, arguments, |text| edit::with_change(text, node.kind(), name, change))?;
    client.set(name, change.arguments()).map_err(|error| match error {
        // Some of the daemon's errors begin with the name already.
        ClientError::Rejected(message) if !message.starts_with(&format!("{name}:")) => {
            anyhow!("{name}: {message}")
        }
        error => error.into(),
    })?;
    let saved = saving.map(PreparedConfigFile::commit).transpose();
    saved.with_context(|| format!("{name}: the change is in force, but not saved"))
}

/// The edited config file, ready to be committed; `None` without `--save`.
pub(crate) fn prepare(
    report: &DaemonReport,
    arguments: &SaveArgs,
    edit: impl FnOnce(&str) -> Result<String, String>,
) -> anyhow::Result<Option<PreparedConfigFile>> {
    if !arguments.save {
        return Ok(None);
    }
    let named = arguments.config.clone();
    let known = named.or_else(|| report.config.as_ref().map(Into::into));
    let path = known
        .context("--save: the daemon was started without a config file (give one with --config FILE)")?;
    PreparedConfigFile::prepare(&path, edit).map(Some)
}

/// Result of a change with `--json`.
#[derive(Serialize)]
struct ChangedSettings<'a> {
    name: &'a str,
    /// By the name of the setting.
    changed: BTreeMap<&'static str, ChangedValue>,
    /// The config file that has the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    saved: Option<&'a str>,
}

#[derive(Serialize)]
struct ChangedValue {
    before: Value,
    after: Value,
}

fn changed_settings<'a>(
    name: &'a str,
    before: &MemberSettings,
    change: &SettingsChange,
    saved: Option<&'a str>,
) -> ChangedSettings<'a> {
    let value = |(setting, value): (SettingName, &SettingValue)| {
        let (before, after) = (setting.of(before).into(), value.clone().into());
        (setting.text(), ChangedValue { before, after })
    };
    ChangedSettings { name, changed: change.iter().map(value).collect(), saved }
}

fn describe_change(
    name: &str,
    before: &MemberSettings,
    change: &SettingsChange,
    saved: Option<&str>,
) -> String {
    let mut text: String =
        change.describe(before).into_iter().map(|line| format!("{name}: {line}\n")).collect();
    if let Some(path) = saved {
        text += &format!("{name}: saved in {path}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn change_is_described_with_old_values() {
        let settings = json!({ "group": "gold", "weight": 200, "limits": { "iops-total": 1000 } });
        let before = serde_json::from_value(settings).unwrap();
        let mut change = SettingsChange::default();
        change.set(SettingName::find("iops-total").unwrap(), SettingValue::Number(2000));
        change.set(SettingName::Weight, SettingValue::Number(200));
        change.set(SettingName::Group, SettingValue::Text(String::new()));
        let expect = "\
vm1: iops-total: 1000 → 2000
vm1: weight: 200 (unchanged)
vm1: group: gold → none
vm1: saved in /etc/weir.toml
";
        assert_eq!(describe_change("vm1", &before, &change, Some("/etc/weir.toml")), expect);
        let json = json!({
            "name": "vm1", "saved": "/etc/weir.toml",
            "changed": {
                "iops-total": { "before": 1000, "after": 2000 }, "weight": { "before": 200, "after": 200 },
                "group": { "before": "gold", "after": "" }
            }
        });
        let changed = changed_settings("vm1", &before, &change, Some("/etc/weir.toml"));
        assert_eq!(serde_json::to_value(changed).unwrap(), json);
    }
}
