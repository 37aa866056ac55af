//! `weir reload`: the daemon reloads its config file; prints the changes.

use api::{ReloadChange, SettingChange};
use clap::Args;
use console::{
    CommandFailure, print, print_json,
    table::{TextTable, columns},
};
use serde_json::{Value, json};

use crate::client::{ControlAddress, ControlClient, change::SettingName, change::SettingValue};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir reload
      Applies changed limits, groups, weights, disks and exports at once. Removes disks, groups and exports that \
are no longer in the file.
  weir check-config /etc/weir/weir.toml && weir reload
  weir reload --dry-run
      Prints the changes, or why they would be rejected. Changes nothing.

All changes are applied, or none. Mistakes are reported with their line; settings that cannot be changed at run \
time (options for opening an image, settings of the daemon, disks in use) with their name. Changes made by `weir \
throttle` without --save are reverted. SIGHUP does the same, with the result in the log.";

/// Arguments of `weir reload`.
#[derive(Debug, Args)]
pub(crate) struct ReloadArgs {
    /// Check new disks as `weir check-config` does, and print the changes without applying them
    #[arg(long)]
    dry_run: bool,
    /// Print the changes as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

pub(crate) fn run(arguments: ReloadArgs) -> Result<(), CommandFailure> {
    let mut client = ControlClient::reach(arguments.qmp)?.with_timeout(ControlClient::LONG)?;
    let ReloadArgs { dry_run, json, .. } = arguments;
    // A daemon of an older version accepts no arguments.
    let parameters = if dry_run { json!({ "dry-run": true }) } else { Value::Null };
    let changes: Vec<ReloadChange> = client.execute_typed("x-weir-reload", parameters)?;
    let unchanged = if dry_run { "nothing would change" } else { "nothing has changed" };
    Ok(if json { print_json(&changes) } else { print(&format_changes(&changes, unchanged)) }?)
}

/// A table of the changes, or the text for none.
fn format_changes(changes: &[ReloadChange], unchanged: &str) -> String {
    if changes.is_empty() {
        return format!("{unchanged}\n");
    }
    let mut table = TextTable::new(columns(&["TYPE", "NAME", "CHANGE"], &[]));
    for change in changes {
        let text = |member: &Option<String>| member.clone().unwrap_or_default();
        // Unknown kinds of changes are printed as they are: the daemon may be newer than this
        // command.
        let description = match (change.change.as_str(), &change.setting) {
            (_, Some(SettingChange { setting, before, after })) => {
                format!("{setting}: {} → {}", setpoint(setting, before), setpoint(setting, after))
            }
            ("not-read", _) => format!("not reloaded: {}", text(&change.reason)),
            ("unavailable", _) => "its image is not available yet".to_owned(),
            ("on-other-host", _) => format!("skipped: it was moved to host {}", text(&change.host)),
            (listed, _) if change.kind == "export" => format!("{listed} at {}", text(&change.address)),
            (listed, _) => listed.to_owned(),
        };
        table.row(vec![change.kind.clone(), change.name.clone(), description]);
    }
    table.render(false)
}

/// Formats a value for users.
fn setpoint(name: &str, value: &Value) -> String {
    match (SettingName::find(name), value) {
        (_, Value::Null) => "none".to_owned(),
        (Ok(name), Value::String(text)) => name.format(&SettingValue::Text(text.clone())),
        (Ok(name), Value::Number(number)) => {
            name.format(&SettingValue::Number(number.as_u64().unwrap_or_default()))
        }
        (_, Value::String(text)) => text.clone(),
        (_, other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_is_a_line() {
        let set = |name: &str, before: Value, after: Value| json!({ "kind": "disk", "name": "vm1", "change": "set", "setting": name, "before": before, "after": after });
        let changes = json!([
            { "kind": "group", "name": "gold", "change": "added" },
            set("bps-total", json!(0), json!(10 << 20)),
            set("group", json!(""), json!("gold")),
            set("l2-cache-size", Value::Null, json!("full")),
            { "kind": "export", "name": "vm1", "disk": "vm1", "address": "unix:/run/a", "change": "removed" },
            { "kind": "disk", "name": "vm2", "change": "on-other-host", "host": "host2" },
            { "kind": "disk", "name": "vm3", "change": "unavailable" },
        ]);
        let expect = "\
TYPE    NAME  CHANGE
group   gold  added
disk    vm1   bps-total: none → 10M
disk    vm1   group: none → gold
disk    vm1   l2-cache-size: none → full
export  vm1   removed at unix:/run/a
disk    vm2   skipped: it was moved to host host2
disk    vm3   its image is not available yet
";
        let changes: Vec<ReloadChange> = serde_json::from_value(changes).unwrap();
        assert_eq!(format_changes(&changes, ""), expect);
        assert_eq!(format_changes(&[], "nothing has changed"), "nothing has changed\n");
    }
}
