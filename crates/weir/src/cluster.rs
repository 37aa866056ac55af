//! `weir cluster`: the hosts whose groups share their limits, as any daemon of them tells it.

use clap::Subcommand;
use console::{
    Failure, figures, print, print_json,
    table::{Table, columns},
};
use serde_json::{Value, json};

use crate::client::{Client, Target};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir cluster status
      Who leads, which hosts there are, what each wants of a group's limits and may use now.
  weir cluster status --json | jq '.groups[].promised'
      What is promised on all hosts together.
  weir throttle gold --cluster --iops-total 10000
      Limits of the group gold on all hosts together.
  weir group remove gold --cluster
      Limits that no host needs any more.
  weir cluster forget host7
      A host that will not come back; its safe share is free for others.";

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Show hosts, demand, what each may use, who leads, and what that one has heard of others
    #[command(after_help = "Examples:\n  weir cluster status --json | jq '.groups[].promised'")]
    Status {
        /// Print results as JSON
        #[arg(long)]
        json: bool,
        /// The daemon's control socket [default: the one that `weir serve` opens]
        #[arg(long, value_name = "unix:PATH")]
        qmp: Option<Target>,
    },
    /// Take away what a host has left behind that will not come back
    #[command(after_help = "Examples:\n  weir cluster forget host7")]
    Forget {
        /// The host
        host: String,
        /// Print what was done as JSON
        #[arg(long)]
        json: bool,
        /// The daemon's control socket [default: the one that `weir serve` opens]
        #[arg(long, value_name = "unix:PATH")]
        qmp: Option<Target>,
    },
}

pub(crate) fn run(command: ClusterCommand) -> Result<(), Failure> {
    match command {
        ClusterCommand::Status { json, qmp } => {
            let shown = Client::reach(qmp)?.execute("x-weir-query-cluster", json!({}))?;
            Ok(if json { print_json(&shown) } else { print(&show(&shown)) }?)
        }
        ClusterCommand::Forget { host, json, qmp } => {
            let done = Client::reach(qmp)?.execute("x-weir-cluster-forget", json!({ "host": host }))?;
            Ok(if json { print_json(&done) } else { print(&format!("{host}: forgotten\n")) }?)
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn show(shown: &Value) -> String {
    let mut said = format!("cluster {}, this is host {}\n", text(&shown["name"]), text(&shown["host"]));
    if shown["connected"] != true {
        said += &format!("  not connected: {}\n", text(&shown["reason"]));
        for group in shown["here"].as_array().into_iter().flatten() {
            let what = if group["leased"] == true { "a lease, until it runs out" } else { "its safe share" };
            said += &format!("  group {}: {what}\n", text(&group["name"]));
        }
        if shown["groups"].as_array().is_none_or(Vec::is_empty) {
            return said;
        }
        let age = shown["known-ms-ago"].as_u64().map(|age| format!("{:.1} s ago", age as f64 / 1000.0));
        said +=
            &format!("  as etcd said last, {}:\n", age.as_deref().unwrap_or("before this daemon's start"));
    } else {
        let leader = shown["leader"].as_str().unwrap_or("nobody");
        said += &format!("  etcd {}, led by {leader}\n", text(&shown["etcd"]));
        if shown["joined"] != true {
            said += "  this host's name is another's: its safe share holds\n";
        }
    }
    let of = amounts(&shown["capacity"]).map_or_else(
        || "; what devices can do is not known (`weir probe` measures)".to_owned(),
        |there| format!(", of {there}"),
    );
    said += &format!("  promised {}{of}\n\n", amounts(&shown["promised"]).unwrap_or("nothing".to_owned()));
    let hosts = shown["hosts"].as_array().map_or(&[][..], Vec::as_slice);
    let mut table = Table::new(columns(&["HOST", "PRESENT", "HEARD", "WEIR"], &[]));
    for host in hosts {
        let present = if host["present"] == true { "yes" } else { "no" };
        let heard = host["heard-ms-ago"]
            .as_u64()
            .map_or_else(|| "-".to_owned(), |age| format!("{:.1} s ago", age as f64 / 1000.0));
        let weir = host["weir"].as_str().unwrap_or("-");
        table.row(vec![text(&host["name"]).to_owned(), present.to_owned(), heard, weir.to_owned()]);
    }
    if !hosts.is_empty() {
        said += &table.render(false);
    }
    for group in shown["groups"].as_array().into_iter().flatten() {
        said += &of_group(group);
    }
    for one in shown["not-understood"].as_array().into_iter().flatten() {
        let (group, why) = (text(&one["group"]), text(&one["reason"]));
        said +=
            &format!("\ngroup {group}: what is in etcd {why}: each host of this weir has its safe share\n");
    }
    said
}

fn of_group(group: &Value) -> String {
    let limits = serde_json::from_value(group["limits"].clone()).unwrap_or_default();
    let by = group["promised-by"].as_object().into_iter().flatten();
    let by: Vec<_> = by.filter_map(|(host, sum)| Some(format!("{host} {}", amounts(sum)?))).collect();
    let by = if by.is_empty() { String::new() } else { format!(" ({})", by.join(", ")) };
    let promised = amounts(&group["promised"]).map(|sum| format!(", promised {sum}{by}")).unwrap_or_default();
    let said = format!(
        "\ngroup {} (change {}): {}{promised}\n",
        text(&group["name"]),
        group["change"],
        figures::limits(&limits)
    );
    let over = amounts(&group["overpromised"]).map(|over| {
        format!("  that is {over} more than there is (lower reservations, or set a higher limit)\n")
    });
    let said = said + &over.unwrap_or_default();
    let hosts = group["hosts"].as_array().map_or(&[][..], Vec::as_slice);
    if hosts.is_empty() {
        return said;
    }
    let mut table = Table::new(columns(&["HOST", "LIMIT"], &["DEMAND", "IN FORCE", "SAFE SHARE"]));
    for host in hosts {
        for (name, safe) in host["safe-share"].as_object().into_iter().flatten() {
            let number = |value: &Value| match value.as_u64() {
                Some(bytes) if name.starts_with("bps") => figures::bytes(bytes as f64),
                Some(operations) => operations.to_string(),
                None => "-".to_owned(),
            };
            let demand = match &host["demand"][name] {
                Value::String(all) => all.clone(),
                other => number(other),
            };
            let row = [
                text(&host["host"]).to_owned(),
                name.clone(),
                demand,
                number(&host["in-force"][name]),
                number(safe),
            ];
            table.row(row.to_vec());
        }
    }
    said + &table.render(false)
}

/// Operations and bytes per second, where there are any.
fn amounts(value: &Value) -> Option<String> {
    let iops = value["iops"].as_u64().map(|amount| format!("{amount} IOPS"));
    let bps = value["bps"].as_u64().map(|amount| format!("{} a second", figures::sized(amount)));
    let known: Vec<_> = [iops, bps].into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join(" and "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_parts_are_tables() {
        let shown = json!({
            "name": "lab", "host": "a", "connected": true, "joined": true, "etcd": "http://e:2379", "leader": "b",
            "promised": { "iops": 2000, "bps": 10 << 20 }, "capacity": {},
            "hosts": [{ "name": "a", "present": true, "heard-ms-ago": 1200, "weir": "1.2.3" }, { "name": "b", "present": false }],
            "not-understood": [{ "group": "new", "reason": "is of version 9" }],
            "groups": [{
                "name": "gold", "change": 3, "limits": { "iops-total": 10000 }, "promised": { "iops": 2000 },
                "promised-by": { "a": { "iops": 1500 }, "c": { "iops": 500 } }, "overpromised": { "iops": 500 },
                "hosts": [{
                    "host": "a", "demand": { "bps-total": 512, "iops-total": "all" },
                    "in-force": { "bps-total": 7_u64 << 30, "iops-total": 9812 },
                    "safe-share": { "bps-total": 1 << 20, "iops-total": 12 },
                }],
            }],
        });
        let said = show(&shown);
        for expect in [
            "led by b",
            "promised 2000 IOPS and 10.0M a second; what devices can do is not known",
            "1.2 s ago",
            "promised 2000 IOPS (a 1500 IOPS, c 500 IOPS)\n  that is 500 IOPS more than there is",
            "  512      7.0G        1.0M\n",
            "  all      9812          12\n",
            "change 3",
            "\ngroup new: what is in etcd is of version 9: each host of this weir has its safe share\n",
        ] {
            assert!(said.contains(expect), "{expect}: {said}");
        }
        let apart = json!({ "name": "lab", "host": "a", "connected": false, "reason": "etcd http://e: refused",
            "here": [{ "name": "gold", "leased": false }] });
        assert!(
            show(&apart).ends_with("not connected: etcd http://e: refused\n  group gold: its safe share\n")
        );
        let known = json!({ "name": "lab", "host": "a", "connected": false, "reason": "etcd http://e: refused",
            "known-ms-ago": 12_300, "promised": { "iops": 2000 }, "hosts": [],
            "groups": [{ "name": "gold", "change": 3, "limits": { "iops-total": 10000 }, "hosts": [] }] });
        let said = show(&known);
        for expect in
            ["refused\n  as etcd said last, 12.3 s ago:\n  promised 2000 IOPS", "gold (change 3): iops 10000"]
        {
            assert!(said.contains(expect), "{expect}: {said}");
        }
    }
}
