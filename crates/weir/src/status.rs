//! `weir status`: disks and groups with their rates and throttle causes.
//!
//! Two reports at an interval yield rates: printed as tables, or as the daemon's status with rates.

mod arguments;
mod tables;

use std::{
    io::{IsTerminal as _, stdout},
    thread,
    time::Duration,
};

use api::{DaemonStatus, IntervalLatency, RateStatus, TransferRate, WaitRate};
pub(crate) use arguments::{EXAMPLES, StatusArgs};
use console::{CommandFailure, print};

use crate::client::{
    ControlClient,
    latency::RequestLatency,
    rates::{IntervalRates, NodeRate},
    report::DaemonReport,
};

/// Time before the interval. After idle time a limit admits a tenth of a second's worth at once: a
/// load that starts together with this command would seem to exceed it.
const LEAD_IN: Duration = Duration::from_millis(250);

pub(crate) fn run(arguments: StatusArgs) -> Result<(), CommandFailure> {
    let mut client = ControlClient::reach(arguments.qmp)?;
    let mut earlier = None;
    if !arguments.interval.is_zero() {
        thread::sleep(LEAD_IN);
        earlier = Some(client.status_with_latencies()?);
        // Not a wait for an event: rates are measured over this interval.
        thread::sleep(arguments.interval);
    }
    let report = client.status_with_latencies()?;
    let rates = earlier.map(|earlier| IntervalRates::between(&earlier, &report)).unwrap_or_default();
    let selection = StatusSelection::new(&report, &arguments.names).map_err(anyhow::Error::msg)?;
    if arguments.json {
        return Ok(print(&(selection.select(with_rates(report, &rates)).to_indented_json() + "\n"))?);
    }
    let form = StatusForm { all: arguments.all, wide: arguments.wide };
    Ok(print(&tables::render(&report, &rates, &selection, form, stdout().is_terminal()))?)
}

/// Tables and columns to print.
#[derive(Clone, Copy, Debug, Default)]
struct StatusForm {
    /// True for all tables, not only those of disks, groups and errors.
    all: bool,
    wide: bool,
}

struct StatusSelection {
    names: Option<Vec<String>>,
}

impl StatusSelection {
    /// Restricts the output to these names and the disks in such groups; no restriction without
    /// names.
    fn new(report: &DaemonReport, requested: &[String]) -> Result<Self, String> {
        if requested.is_empty() {
            return Ok(Self { names: None });
        }
        let is_known = |name: &&String| report.find(name).is_some() || report.is_unavailable(name);
        if let Some(unknown) = requested.iter().find(|name| !is_known(name)) {
            return Err(report.unknown_name_error(unknown));
        }
        let mut names = requested.to_vec();
        for disk in &report.disks {
            if report.groups_above(&disk.settings).iter().any(|group| requested.contains(&group.name)) {
                names.push(disk.name.clone());
            }
        }
        Ok(Self { names: Some(names) })
    }

    fn includes(&self, name: &str) -> bool {
        self.names.as_ref().is_none_or(|names| names.iter().any(|known| known == name))
    }

    fn select(&self, mut status: DaemonStatus) -> DaemonStatus {
        if self.names.is_some() {
            status.disks.retain(|disk| self.includes(&disk.name));
            status.unavailable.retain(|disk| self.includes(&disk.name));
            status.jobs.retain(|job| self.includes(&job.disk));
            status.groups.retain(|group| self.includes(&group.name));
            status.exports.retain(|export| self.includes(&export.disk));
            // A device is shown if one of its disks is.
            status.devices.retain(|device| device.disks.iter().any(|disk| self.includes(disk)));
        }
        status
    }
}

/// The status with the rates of the interval, and each disk's latencies since the daemon counts
/// them.
fn with_rates(report: DaemonReport, rates: &IntervalRates) -> DaemonStatus {
    let DaemonReport { mut status, latencies } = report;
    let rate = |name: &str| rates.of(name).map(|rate| rate_status(rate, rates.interval_ns));
    for disk in &mut status.disks {
        let counted = latencies.get(&disk.name);
        disk.latency_ns = counted.and_then(|counted| RequestLatency::of(&counted.latencies)).map(percentiles);
        disk.rate = rate(&disk.name);
    }
    for group in &mut status.groups {
        group.rate = rate(&group.name);
    }
    status
}

fn rate_status(rate: &NodeRate, interval_ns: u64) -> RateStatus {
    RateStatus {
        interval_ns,
        reads: TransferRate { iops: rate.read_iops, bps: rate.read_bps },
        writes: TransferRate { iops: rate.write_iops, bps: rate.write_bps },
        limited: rate.limited,
        latency_ns: rate.latency.map(percentiles),
        wait_ns: rate.wait_p99_ns.map(|p99| WaitRate { p99 }),
    }
}

fn percentiles(RequestLatency { p50_ns, p99_ns }: RequestLatency) -> IntervalLatency {
    IntervalLatency { p50: p50_ns, p99: p99_ns }
}

#[cfg(test)]
mod tests;
