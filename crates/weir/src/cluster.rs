//! `weir cluster`: the hosts that share limits, as reported by a daemon of one of them.

use anyhow::Context as _;
use api::{
    ClusterAgreement, ClusterGroup, ClusterHost, ClusterMember, ClusterReport, DemandValue, LocalQuota,
    ReservedRates, UnreadableGroup,
};
use clap::Subcommand;
use console::{
    CommandFailure, figures, print, print_json,
    table::{TextTable, columns},
};
use serde_json::json;

use crate::client::{ControlAddress, ControlClient};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir cluster status
      The leader, the hosts, and their demand and quota of each group's limits.
  weir cluster status --json | jq '.groups[].promised'
      Reservations of all hosts together.
  weir throttle gold --cluster --iops-total 10000
      Sets limits of the group gold for all hosts together.
  weir group remove gold --cluster
      Removes limits that no host needs any more.
  weir cluster forget host7
      Removes a host that will not return. Its fallback share becomes available to others.";

/// Subcommands of `weir cluster`.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Show the leader, the hosts, and their demand and quota leases
    #[command(after_help = "Examples:\n  weir cluster status --json | jq '.groups[].promised'")]
    Status {
        /// Print results as JSON
        #[arg(long)]
        json: bool,
        /// The daemon's control socket [default: the one that `weir serve` opens]
        #[arg(long, value_name = "unix:PATH")]
        qmp: Option<ControlAddress>,
    },
    /// Remove the state of a host that will not return
    #[command(after_help = "Examples:\n  weir cluster forget host7")]
    Forget {
        /// The host
        host: String,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// The daemon's control socket [default: the one that `weir serve` opens]
        #[arg(long, value_name = "unix:PATH")]
        qmp: Option<ControlAddress>,
    },
}

pub(crate) fn run(command: ClusterCommand) -> Result<(), CommandFailure> {
    match command {
        ClusterCommand::Status { json, qmp } => {
            let response = ControlClient::reach(qmp)?.query("x-weir-query-cluster")?;
            if json {
                return Ok(print_json(&response)?);
            }
            let report = serde_json::from_value(response).context("the daemon's response")?;
            Ok(print(&show(&report))?)
        }
        ClusterCommand::Forget { host, json, qmp } => {
            let done =
                ControlClient::reach(qmp)?.execute("x-weir-cluster-forget", json!({ "host": host }))?;
            Ok(if json { print_json(&done) } else { print(&format!("{host}: removed\n")) }?)
        }
    }
}

fn show(report: &ClusterReport) -> String {
    let ClusterReport { name, host, connected, leader, etcd, reason, .. } = report;
    let mut text = format!("cluster {name}, host {host}\n");
    if !connected {
        text += &format!("  not connected: {}\n", reason.as_deref().unwrap_or_default());
        if let Some(ClusterAgreement { leader, agreed_hosts }) = &report.agreement {
            text += &match agreed_hosts {
                0 => format!("  the leader {leader} is reached without etcd\n"),
                hosts => format!("  by agreement of {hosts} hosts, {leader} leads\n"),
            };
        }
        for (host, why) in &report.missing_hosts {
            text += &format!("  no agreement: {host} {why}\n");
        }
        for LocalQuota { name, leased } in &report.local_groups {
            let quota = match (leased, &report.agreement) {
                (true, Some(_)) => "leased",
                (true, None) => "leased, until the lease expires",
                (false, _) => "fallback share",
            };
            text += &format!("  group {name}: {quota}\n");
        }
        if report.groups.is_empty() {
            return text;
            // Without etcd, the last state that it returned is still shown, with its age.
        }
        let age = report.known_ms_ago.map(ago);
        text += &format!(
            "  last state from etcd, {}:\n",
            age.as_deref().unwrap_or("from before this daemon's start")
        );
    } else {
        let (etcd, leader) = (etcd.as_deref().unwrap_or_default(), leader.as_deref().unwrap_or("none"));
        text += &format!("  etcd {etcd}, leader {leader}\n");
        if !report.joined {
            text += "  another host has this host's name: the fallback share applies\n";
        }
    }
    let capacity_note = amounts(report.capacity).map_or_else(
        || "; the capacity of the devices is unknown (measure it with `weir probe`)".to_owned(),
        |capacity| format!(", of {capacity}"),
    );
    text += &format!(
        "  reserved {}{capacity_note}\n\n",
        amounts(report.reserved).unwrap_or("nothing".to_owned())
    );
    let mut table = TextTable::new(columns(&["HOST", "PRESENT", "LAST REPORT", "VERSION"], &[]));
    for ClusterHost { name, present, weir, last_report_ms_ago: heard_ms_ago, .. } in &report.hosts {
        let present = if *present { "yes" } else { "no" };
        let last_report = heard_ms_ago.map_or_else(|| "-".to_owned(), ago);
        let weir = weir.as_deref().unwrap_or("-");
        table.row(vec![name.clone(), present.to_owned(), last_report, weir.to_owned()]);
    }
    if !report.hosts.is_empty() {
        text += &table.render(false);
    }
    report.groups.iter().for_each(|group| text += &show_group(group));
    for UnreadableGroup { group, reason } in &report.unreadable_groups {
        text += &format!(
            "\n\
             group {group}: its state in etcd {reason}: hosts with this version of weir have their \
             fallback shares\n"
        );
    }
    text
}

fn ago(ms: u64) -> String {
    format!("{:.1} s ago", ms as f64 / 1000.0)
}

fn show_group(group: &ClusterGroup) -> String {
    let by = group.reserved_by.iter();
    let by: Vec<_> = by.filter_map(|(host, sum)| Some(format!("{host} {}", amounts(*sum)?))).collect();
    let by = if by.is_empty() { String::new() } else { format!(" ({})", by.join(", ")) };
    let reserved = amounts(group.reserved).map(|sum| format!(", reserved {sum}{by}")).unwrap_or_default();
    let limits = figures::limits(&group.limits);
    let text = format!("\ngroup {} (change {}): {limits}{reserved}\n", group.name, group.change);
    let excess = amounts(group.overcommitted)
        .map(|excess| format!("  {excess} more than available (lower reservations, or raise the limit)\n"));
    let text = text + &excess.unwrap_or_default();
    if group.hosts.is_empty() {
        return text;
    }
    let mut table = TextTable::new(columns(&["HOST", "LIMIT"], &["DEMAND", "IN FORCE", "FALLBACK SHARE"]));
    for ClusterMember { host, demand, in_force, fallback_share: safe_share, .. } in &group.hosts {
        // Every limit of the group has a fallback share, so its keys are the rows; demand may lag
        // behind.
        for (name, safe) in safe_share {
            let number = |value: u64| match name.starts_with("bps") {
                true => figures::bytes(value as f64),
                false => value.to_string(),
            };
            let known = |value: Option<&u64>| value.map_or_else(|| "-".to_owned(), |value| number(*value));
            let demand = match demand.get(name) {
                Some(DemandValue::Unbounded(all)) => all.to_string(),
                Some(DemandValue::Rate(rate)) => number(*rate),
                None => "-".to_owned(),
            };
            table.row(vec![host.clone(), name.clone(), demand, known(in_force.get(name)), number(*safe)]);
        }
    }
    text + &table.render(false)
}

/// Operations and bytes per second; `None` if neither is set.
fn amounts(ReservedRates { iops, bps }: ReservedRates) -> Option<String> {
    let iops = iops.map(|amount| format!("{amount} IOPS"));
    let bps = bps.map(|amount| format!("{} a second", figures::sized(amount)));
    let known: Vec<_> = [iops, bps].into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join(" and "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(report: serde_json::Value) -> String {
        show(&serde_json::from_value(report).unwrap())
    }

    #[test]
    fn hosts_and_quotas_are_tables() {
        let report = json!({
            "name": "lab", "host": "a", "connected": true, "joined": true, "etcd": "http://e:2379", "leader": "b",
            "reserved": { "iops": 2000, "bps": 10 << 20 }, "capacity": {},
            "hosts": [{ "name": "a", "present": true, "last-report-ms-ago": 1200, "weir": "1.2.3" }, { "name": "b", "present": false }],
            "unreadable-groups": [{ "group": "new", "reason": "is of version 9" }],
            "groups": [{
                "name": "gold", "change": 3, "limits": { "iops-total": 10000 }, "reserved": { "iops": 2000 },
                "reserved-by": { "a": { "iops": 1500 }, "c": { "iops": 500 } }, "overcommitted": { "iops": 500 },
                "hosts": [{
                    "host": "a", "demand": { "bps-total": 512, "iops-total": "all" },
                    "in-force": { "bps-total": 7_u64 << 30, "iops-total": 9812 },
                    "fallback-share": { "bps-total": 1 << 20, "iops-total": 12 },
                }],
            }],
        });
        let text = shown(report);
        for expect in [
            "leader b",
            "reserved 2000 IOPS and 10.0M a second; the capacity of the devices is unknown",
            "1.2 s ago",
            "reserved 2000 IOPS (a 1500 IOPS, c 500 IOPS)\n  500 IOPS more than available",
            "  512      7.0G            1.0M\n",
            "  all      9812              12\n",
            "change 3",
            "\n\
             group new: its state in etcd is of version 9: hosts with this version of weir have \
             their fallback shares\n",
        ] {
            assert!(text.contains(expect), "{expect}: {text}");
        }
        let disconnected = json!({ "name": "lab", "host": "a", "connected": false, "reason": "etcd http://e: refused",
            "local-groups": [{ "name": "gold", "leased": false }] });
        assert!(
            shown(disconnected)
                .ends_with("not connected: etcd http://e: refused\n  group gold: fallback share\n")
        );
        let known = json!({ "name": "lab", "host": "a", "connected": false, "reason": "etcd http://e: refused",
            "known-ms-ago": 12_300, "reserved": { "iops": 2000 }, "hosts": [],
            "groups": [{ "name": "gold", "change": 3, "limits": { "iops-total": 10000 }, "hosts": [] }] });
        let text = shown(known);
        for expect in [
            "refused\n  last state from etcd, 12.3 s ago:\n  reserved 2000 IOPS",
            "gold (change 3): iops 10000",
        ] {
            assert!(text.contains(expect), "{expect}: {text}");
        }
    }
}
