//! `weir status`: what runs, what it does now, and what holds it back.
//!
//! Two reports some time apart become rates: a table, or the daemon's own words and the rates.

mod arguments;
mod tables;

use std::{
    io::{IsTerminal as _, stdout},
    thread,
    time::Duration,
};

pub(crate) use arguments::{EXAMPLES, StatusArgs};
use console::{Failure, print, print_json};
use serde_json::{Value, json};

use crate::client::{
    Client,
    latency::Latency,
    rates::{Rate, Rates},
    report::Report,
};

/// Time before the interval. A limit lets a tenth of a second's worth pass at once after idle time:
/// a load that begins together with this command would seem to exceed it.
const LEAD_IN: Duration = Duration::from_millis(250);

pub(crate) fn run(arguments: StatusArgs) -> Result<(), Failure> {
    let mut client = Client::reach(arguments.qmp)?;
    let mut earlier = None;
    if !arguments.interval.is_zero() {
        thread::sleep(LEAD_IN);
        earlier = Some(client.measured()?.1);
        // Not a wait for an event: the interval is what is measured over.
        thread::sleep(arguments.interval);
    }
    let (answer, report) = client.measured()?;
    let rates = earlier.map(|earlier| Rates::between(&earlier, &report)).unwrap_or_default();
    let shown = Shown::new(&report, &arguments.names).map_err(anyhow::Error::msg)?;
    if arguments.json {
        return Ok(print_json(&with_rates(shown.only(answer), &report, &rates))?);
    }
    let form = Form { all: arguments.all, wide: arguments.wide };
    Ok(print(&tables::render(&report, &rates, &shown, form, stdout().is_terminal()))?)
}

/// Which tables and columns are printed.
#[derive(Clone, Copy, Debug, Default)]
struct Form {
    /// Tables of all kinds, not only those of disks, groups and errors.
    all: bool,
    wide: bool,
}

struct Shown {
    names: Option<Vec<String>>,
}

impl Shown {
    /// Those with these names, and the disks that are in such a group; all if there is no name.
    fn new(report: &Report, asked: &[String]) -> Result<Self, String> {
        if asked.is_empty() {
            return Ok(Self { names: None });
        }
        let is_known = |name: &&String| report.find(name).is_some() || report.is_unopened(name);
        if let Some(unknown) = asked.iter().find(|name| !is_known(name)) {
            return Err(report.no_such(unknown));
        }
        let mut names = asked.to_vec();
        for disk in &report.disks {
            if report.groups_above(&disk.settings).iter().any(|group| asked.contains(&group.name)) {
                names.push(disk.name.clone());
            }
        }
        Ok(Self { names: Some(names) })
    }

    fn has(&self, name: &str) -> bool {
        self.names.as_ref().is_none_or(|names| names.iter().any(|known| known == name))
    }

    fn only(&self, mut answer: Value) -> Value {
        if self.names.is_none() {
            return answer;
        }
        let name_of = |entry: &Value, key: &str| entry[key].as_str().unwrap_or_default().to_owned();
        for (list, key) in [("disks", "name"), ("unopened", "name"), ("groups", "name"), ("exports", "disk")]
        {
            if let Some(entries) = answer[list].as_array_mut() {
                entries.retain(|entry| self.has(&name_of(entry, key)));
            }
        }
        if let Some(devices) = answer["devices"].as_array_mut() {
            let disks = |device: &Value| device["disks"].as_array().cloned().unwrap_or_default();
            devices.retain(|device| disks(device).iter().any(|disk| self.has(disk.as_str().unwrap_or(""))));
        }
        answer
    }
}

/// With how long requests took of late, and of disks also since that is counted.
fn with_rates(mut answer: Value, report: &Report, rates: &Rates) -> Value {
    for disk in answer["disks"].as_array_mut().into_iter().flatten() {
        let counted = disk["name"].as_str().and_then(|name| report.latencies.get(name));
        if let Some(latency) = counted.and_then(|counted| Latency::of(&counted.latencies)) {
            disk["latency-ns"] = latency_json(latency);
        }
    }
    for list in ["disks", "groups"] {
        for entry in answer[list].as_array_mut().into_iter().flatten() {
            let rate = entry["name"].as_str().and_then(|name| rates.of(name));
            if let (Some(rate), Some(entry)) = (rate, entry.as_object_mut()) {
                entry.insert("rate".to_owned(), rate_json(rate, rates.interval_ns));
            }
        }
    }
    answer
}

fn rate_json(rate: &Rate, interval_ns: u64) -> Value {
    let mut told = json!({
        "interval-ns": interval_ns,
        "reads": { "iops": rate.read_iops, "bps": rate.read_bps },
        "writes": { "iops": rate.write_iops, "bps": rate.write_bps },
        "limited": rate.limited,
    });
    if let Some(latency) = rate.latency {
        told["latency-ns"] = latency_json(latency);
    }
    if let Some(p99_ns) = rate.wait_p99_ns {
        told["wait-ns"] = json!({ "p99": p99_ns });
    }
    told
}

fn latency_json(Latency { p50_ns, p99_ns }: Latency) -> Value {
    json!({ "p50": p50_ns, "p99": p99_ns })
}

#[cfg(test)]
mod tests;
