//! `weir verify`: checks limits, reservations, shares, waits and latencies against the daemon's own
//! counters, with an exit status for scripts.
//!
//! ```text
//!   daemon ─► a report each second ────────► checker ─┬─► findings ─► text, JSON, exit status
//!         └─► latencies, at both ends ─────► latency ─┤
//!   --config FILE ─────────────────────► configured ──┘
//! ```

mod arguments;
mod checker;
mod configured;
mod latency;

use std::{
    collections::BTreeMap,
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::anyhow;
pub(crate) use arguments::{EXAMPLES, VerifyArgs};
use checker::{GuaranteeChecker, GuaranteeFinding, GuaranteeVerdict, TimedReport};
use console::{
    CommandFailure, figures, print, print_json, print_notice,
    table::{TextTable, columns},
};
use lab::interruption::SignalInterruption;
use latency::LatencyCheck;
use serde::Serialize;

use crate::client::{ControlClient, report::DaemonReport};

const INTERVAL: Duration = Duration::from_secs(1);
/// Exit status if a guarantee was broken, or nothing could be checked.
const EXIT_BROKEN: u8 = 1;

pub(crate) fn run(arguments: VerifyArgs) -> Result<(), CommandFailure> {
    let intended = arguments.config.as_deref().map(configured::load).transpose()?;
    let (interrupted, stop) = mpsc::channel();
    // The receiver is gone once the measurement has ended.
    SignalInterruption::watch(move || _ = interrupted.send(()), || {})?;
    let mut client = ControlClient::reach(arguments.qmp)?;
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let started = Instant::now();
    // The daemon reads the counters at some moment between request and response: `checker` uses
    // both times as bounds.
    let query = |client: &mut ControlClient| -> Result<TimedReport, CommandFailure> {
        let asked_s = started.elapsed().as_secs_f64();
        let report = client.status()?;
        Ok(TimedReport { report, requested_s: asked_s, received_s: started.elapsed().as_secs_f64() })
    };
    let first = query(&mut client)?;
    if let Some(unknown) = arguments.names.iter().find(|name| first.report.find(name).is_none()) {
        return Err(anyhow::Error::msg(first.report.unknown_name_error(unknown)).into());
    }
    let selected = selected_names(&first.report, &arguments.names);
    let is_wanted =
        |name: &str| selected.as_ref().is_none_or(|names| names.iter().any(|known| known == name));
    let mut findings = intended.map(|intended| intended.compare(&first.report)).unwrap_or_default();
    findings.retain(|finding| is_wanted(&finding.name));
    let mut latencies = arguments.latency_p99.map(|max_p99| LatencyCheck::new(nanoseconds(max_p99)));
    let mut query_latencies = |client: &mut ControlClient| -> Result<(), CommandFailure> {
        let Some(latencies) = &mut latencies else { return Ok(()) };
        // The daemon counts latencies from the first such query, so the first answer starts the
        // count.
        latencies.add_histograms(client.latencies()?);
        Ok(())
    };
    query_latencies(&mut client)?;
    let mut checker = GuaranteeChecker::new(arguments.wait_p99.map(nanoseconds));
    checker.add_report(first);
    let mut cut = None;
    while let Some(left) = arguments.length.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) {
        if stop.recv_timeout(left.min(INTERVAL)).is_ok() {
            let after = figures::time(nanoseconds(started.elapsed()));
            cut = Some(CommandFailure::Failed(anyhow!("interrupted: the results are of the first {after}")));
            break;
        }
        match query(&mut client) {
            Ok(look) => checker.add_report(look),
            // The findings so far are still printed.
            Err(error) => {
                cut = Some(error);
                break;
            }
        }
    }
    match query_latencies(&mut client) {
        Err(error) if cut.is_none() => return Err(error),
        _ => {}
    }
    findings.extend(checker.findings(is_wanted));
    findings.extend(latencies.iter().flat_map(|latencies| latencies.findings(is_wanted)));
    let printed = print_findings(&findings, arguments.json);
    cut.map_or(printed, Err)
}

/// The given names, and the disks of the groups among them; `None` if no names are given.
fn selected_names(report: &DaemonReport, names: &[String]) -> Option<Vec<String>> {
    let is_in = |settings| report.groups_above(settings).iter().any(|group| names.contains(&group.name));
    let disks = report.disks.iter().filter(|disk| is_in(&disk.settings)).map(|disk| disk.name.clone());
    (!names.is_empty()).then(|| names.iter().cloned().chain(disks).collect())
}

/// Output of `weir verify --json`.
#[derive(Serialize)]
struct VerifyReport<'a> {
    guarantees: Vec<GuaranteeReport<'a>>,
}

#[derive(Serialize)]
struct GuaranteeReport<'a> {
    /// Name of the disk or group, by `disk` or `group`.
    #[serde(flatten)]
    subject: BTreeMap<&'static str, &'a str>,
    guarantee: &'a str,
    expected: &'a str,
    measured: &'a str,
    figures: BTreeMap<&'static str, f64>,
    verdict: &'static str,
    /// Reason why the guarantee was not checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

impl<'a> From<&'a GuaranteeFinding> for GuaranteeReport<'a> {
    fn from(finding: &'a GuaranteeFinding) -> Self {
        let GuaranteeFinding { kind, name, guarantee, expected, measured, figures, verdict } = finding;
        Self {
            subject: BTreeMap::from([(*kind, &**name)]),
            guarantee,
            expected,
            measured,
            figures: figures.iter().copied().collect(),
            verdict: verdict.name(),
            reason: match verdict {
                GuaranteeVerdict::NotChecked(why) => Some(why),
                _ => None,
            },
        }
    }
}

fn print_findings(findings: &[GuaranteeFinding], as_json: bool) -> Result<(), CommandFailure> {
    if as_json {
        print_json(&VerifyReport { guarantees: findings.iter().map(GuaranteeReport::from).collect() })?;
    } else {
        print(&text(findings))?;
    }
    let count =
        |wanted: &GuaranteeVerdict| findings.iter().filter(|finding| finding.verdict == *wanted).count();
    match (count(&GuaranteeVerdict::Broken), count(&GuaranteeVerdict::Held)) {
        // A script must not take the absence of load for success.
        (0, 0) => {
            print_notice(
                "nothing could be checked: no guarantees are configured, or there was no load (add \
                 load, or check longer with --for)",
            );
            Err(CommandFailure::Found(EXIT_BROKEN))
        }
        (0, _) => Ok(()),
        (broken, _) => {
            print_notice(&format!("{broken} of {} guarantees did not hold", findings.len()));
            Err(CommandFailure::Found(EXIT_BROKEN))
        }
    }
}

fn text(findings: &[GuaranteeFinding]) -> String {
    let headings = ["NAME", "GUARANTEE", "EXPECTED", "MEASURED", "VERDICT"];
    let mut table = TextTable::new(columns(&headings, &[]));
    for GuaranteeFinding { kind, name, guarantee, expected, measured, verdict, .. } in findings {
        let verdict = match verdict {
            GuaranteeVerdict::NotChecked(why) => format!("not checked: {why}"),
            verdict => verdict.name().to_owned(),
        };
        let subject = if *kind == "disk" { name.clone() } else { format!("{kind} {name}") };
        table.row(vec![subject, guarantee.clone(), expected.clone(), measured.clone(), verdict]);
    }
    table.render(false)
}

#[cfg(test)]
mod tests;
