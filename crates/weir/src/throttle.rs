//! `weir throttle`: shows or changes the limits of a disk or a group at run time. The daemon checks
//! the settings and applies all of a change or none.

mod arguments;

use api::{ClusterGroup, ClusterGroupChange, MemberSettings, QuotaStatus, QuotaUse};
pub(crate) use arguments::{EXAMPLES, ThrottleArgs};
use console::{CommandFailure, figures, print, print_json};
use serde_json::{Map, Value};

use crate::{
    client::{
        ControlClient,
        change::{SettingName, SettingsChange},
        report::{DaemonReport, StatusNode},
    },
    settings_command::{self, SettingsCommand, SettingsCommandArgs},
};

impl SettingsCommand for ThrottleArgs {
    const EXAMPLE: &'static str = "--iops-total 1000";

    fn common(&self) -> SettingsCommandArgs<'_> {
        SettingsCommandArgs { name: &self.name, json: self.json, qmp: &self.qmp, save: &self.save }
    }

    fn find<'a>(&self, report: &'a DaemonReport) -> Result<StatusNode<'a>, String> {
        report.find(&self.name).ok_or_else(|| report.unknown_name_error(&self.name))
    }

    fn change(&self, before: &MemberSettings) -> SettingsChange {
        self.change(before)
    }

    fn show(&self, report: &DaemonReport, node: StatusNode<'_>) -> String {
        show(report, &self.name, node)
    }

    fn to_json(&self, node: StatusNode<'_>) -> Value {
        serde_json::to_value(node).expect("all keys are strings")
    }
}

/// Shows or changes settings, on this host or for the whole cluster.
pub(crate) fn run(arguments: &ThrottleArgs) -> Result<(), CommandFailure> {
    if !arguments.cluster.cluster {
        return settings_command::run(arguments);
    }
    if arguments.save.save {
        let why = "limits of the cluster are kept in etcd and not in the config file (leave --save out)";
        return Err(anyhow::anyhow!("--save: {why}").into());
    }
    let mut client = ControlClient::reach(arguments.qmp.clone())?;
    // The limits in force first: virsh's names clear others of them, and the output shows both
    // values.
    let report = client.cluster()?;
    let before = report.groups.iter().find(|group| group.name == arguments.name);
    let limits = before.map(|group| group.limits.clone()).unwrap_or_default();
    let settings = MemberSettings { limits, ..MemberSettings::default() };
    let change = arguments.change(&settings);
    let mut parameters: Map<String, Value> = change.arguments();
    parameters.extend(arguments.cluster.hosts.map(|hosts| ("hosts".to_owned(), hosts.into())));
    if arguments.cluster.safe_share.is_some() {
        console::print_notice(
            "--safe-share is the old name of --fallback-share (the next release refuses the old name)",
        );
    }
    let safe_share = arguments.cluster.fallback_share.or(arguments.cluster.safe_share);
    parameters.extend(safe_share.map(|part| ("fallback-share-ppm".to_owned(), part.0.unwrap_or(0).into())));
    if parameters.is_empty() {
        // Limits written by a newer version are distinguished from missing ones.
        if let Some(entry) = report.unreadable_groups.iter().find(|entry| entry.group == arguments.name) {
            return Err(
                anyhow::anyhow!("group {}: its state in etcd {}", arguments.name, entry.reason).into()
            );
        }
        let Some(group) = before else {
            let why = report.reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
            let name = &arguments.name;
            return Err(anyhow::anyhow!(
                "group {name}: the cluster has no limits for it{why} (`weir throttle {name} \
                 --cluster --iops-total N` sets some)"
            )
            .into());
        };
        if let Some(why) = &report.reason {
            console::print_error(&anyhow::anyhow!(
                "showing the last known state, as etcd is unreachable: {why}"
            ));
        }
        return Ok(if arguments.json {
            print_json(group)
        } else {
            print(&format_cluster_limits(group, &settings))
        }?);
    }
    parameters.insert("group".to_owned(), arguments.name.clone().into());
    let response: ClusterGroupChange =
        client.execute_typed("x-weir-cluster-set", Value::Object(parameters))?;
    if arguments.json {
        return Ok(print_json(&response)?);
    }
    let lines = change.describe(&settings).into_iter();
    let text: String = lines.map(|line| format!("{}: {line}, on all hosts\n", arguments.name)).collect();
    let line = |label: &str, from: Option<String>, to: String| {
        let from = from.map(|from| format!("{from} → ")).unwrap_or_default();
        format!("{}: {label}: {from}{to}, on all hosts\n", arguments.name)
    };
    let hosts = arguments
        .cluster
        .hosts
        .map(|hosts| line("hosts", before.map(|group| group.max_hosts.to_string()), hosts.to_string()));
    let part_before = before.and_then(|group| group.fallback_share_ppm).map(percent);
    let safe = safe_share.map(|part| line("fallback-share", part_before, part.to_string()));
    print(&[Some(text), hosts, safe].into_iter().flatten().collect::<String>())?;
    if !response.used {
        // Not an error: the limits may be set before the first host has the group.
        console::print_error(&unused_group_warning(&arguments.name));
    }
    if let Some(why) = reserved_share_warning(&arguments.name, &response) {
        console::print_error(&why);
    }
    Ok(())
}

/// Warning if the fallback shares reserve much of the limits, even for absent hosts.
fn reserved_share_warning(group: &str, response: &ClusterGroupChange) -> Option<anyhow::Error> {
    let (hosts, each) = (response.hosts, response.fallback_share_ppm?);
    let all = hosts.saturating_mul(each);
    (all > WARN_RESERVED_PPM).then(|| {
        let [all, each] = [all, each].map(percent);
        anyhow::anyhow!(
            "group {group}: fallback shares reserve {all} of its limits, {each} for each of \
             {hosts} hosts, whether they are present or not (set the number of hosts with --hosts)"
        )
    })
}

/// Sum of the fallback shares above which there is a warning.
const WARN_RESERVED_PPM: u32 = 100_000;

fn percent(ppm: u32) -> String {
    format!("{}%", f64::from(ppm) / 10_000.0)
}

/// Warning for limits of a group that no present host has.
fn unused_group_warning(group: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "group {group}: no host has it (is the name right? a host joins it by [group.{group}] with \
         cluster = true)"
    )
}

fn format_cluster_limits(group: &ClusterGroup, settings: &MemberSettings) -> String {
    let mut rows: Vec<(&str, String)> = Vec::new();
    let is_set = |name: &SettingName| name.of(settings) != name.default() && *name != SettingName::Weight;
    for name in SettingName::of_throttle().filter(is_set) {
        rows.push((name.text(), name.format(&name.of(settings))));
    }
    rows.push(("hosts", group.max_hosts.to_string()));
    if let Some(ppm) = group.fallback_share_ppm {
        rows.push(("fallback-share", percent(ppm)));
    }
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = format!("group {}, on all hosts\n", group.name);
    for (name, value) in rows {
        text += &format!("  {name:width$}  {value}\n");
    }
    text
}

/// State of each quota: what is used, and until when it counts.
fn quota_lines(status: &QuotaStatus) -> impl Iterator<Item = String> {
    let both = [("quota", &status.total), ("write-quota", &status.writes)];
    both.into_iter().filter_map(|(name, quota)| {
        let QuotaUse { used_bytes, quota_bytes, period_end, .. } = quota.as_ref()?;
        let (used, of) = (figures::sized(*used_bytes), figures::size(*quota_bytes));
        let until = period_end.as_deref().map(|end| format!(", until {end}")).unwrap_or_default();
        let state = if used_bytes >= quota_bytes { " (used up)" } else { "" };
        Some(format!("{name} used: {used} of {of}{until}{state}"))
    })
}

fn show(report: &DaemonReport, name: &str, node: StatusNode<'_>) -> String {
    let settings = node.settings();
    let mut text = format!("{} {name}\n", node.kind());
    // The weight matters even at its default, since shares are relative to it.
    let is_shown =
        |known: &SettingName| known.of(settings) != known.default() || *known == SettingName::Weight;
    let shown: Vec<_> = SettingName::of_throttle().filter(is_shown).collect();
    let width = shown.iter().map(|name| name.text().len()).max().unwrap_or(0);
    for name in shown {
        text += &format!("  {:width$}  {}\n", name.text(), name.format(&name.of(settings)));
    }
    if settings.configured_limits.is_some() {
        text += &format!("  in force: {}\n", figures::limits(&settings.limits));
    }
    if let Some(schedule) = &settings.schedule {
        let when = schedule.when.as_deref().unwrap_or("none of its times");
        let until = schedule.until.as_deref().map(|until| format!(" until {until}")).unwrap_or_default();
        text += &format!("  schedule: {when}{until}\n");
    }
    if let Some(status) = &settings.quota_status {
        for line in quota_lines(status) {
            text += &format!("  {line}\n");
        }
    }
    for line in figures::full_bursts(&settings.limits) {
        text += &format!("  {line}\n");
    }
    if settings.limits.values().all(|&value| value == 0) {
        text += "  no own limits\n";
    }
    for group in report.groups_above(settings) {
        let limits = figures::limits(&group.settings.limits);
        text += &format!("  limits of group {}: {limits}\n", group.name);
    }
    text
}

#[cfg(test)]
mod tests;
