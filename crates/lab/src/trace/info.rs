//! `weir trace info`: summarizes traces without replaying them.
//!
//! For traces that contain results, the summary includes waiting times, service times and the
//! limits that throttled requests.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::PathBuf,
};

use clap::Args;
use console::{
    CommandFailure, figures, print, print_json, print_notice,
    table::{ColumnAlignment, TextTable, columns},
};
use recording::{
    RequestOp, RequestOutcome, TraceOptions,
    error::TraceError,
    file::{RecordedRequest, RecordingReader},
    lines::LineReader,
    merge,
    reader::{self, TraceReader},
};
use serde::Serialize;

use super::{
    ReadingArgs,
    held_by::{LimitNames, RequestsByLimit},
};
use crate::{duration::duration, latencies::ExactTimes};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir trace info day.recording
      Each disk's requests, their latencies, and the limits that throttled them.
  weir trace info /var/lib/weir/record/* --json
      All files that `record` in the config has written, as one recording.
  weir trace info web.spc.gz
      Any other trace: numbers and bytes of its requests.

Waiting times include requests that did not wait, and end when a request proceeds to the disk;
`weir status` counts throttled requests only, and until the limits admit them.
Exit status: 0 all was read, 1 failed, or a trace was not read to the end, 2 wrong use of the command line.";

/// Arguments of `weir trace info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// Traces; - is standard input
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reading: ReadingArgs,
}

/// Summary of all traces together.
#[derive(Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct TraceSummary {
    disks: BTreeMap<String, DiskSummary>,
    #[serde(skip)]
    limits: LimitNames,
    /// Requests lost while recording.
    lost: u64,
    /// Requests of length 0, which are not counted elsewhere.
    #[serde(skip_serializing_if = "is_zero")]
    empty: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    partial: Option<String>,
}

/// Requests of a disk. Rates are over the time from the first arrival at any disk to the last
/// completion, as far as the traces have completions.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct DiskSummary {
    requests: u64,
    reads: u64,
    writes: u64,
    discards: u64,
    write_zeroes: u64,
    flushes: u64,
    read_bytes: u64,
    written_bytes: u64,
    discarded_bytes: u64,
    zeroed_bytes: u64,
    /// Nanoseconds since 1970, if the traces have absolute times.
    first_ns: u64,
    last_ns: u64,
    /// End of the last request: its completion, or its arrival if its latency is unknown.
    last_completion_ns: u64,
    /// Set if a trace has results.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<Box<DiskLatencies>>,
    /// Requests of a recording without a latency.
    #[serde(skip_serializing_if = "is_zero")]
    unmeasured: u64,
}

#[derive(Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct DiskLatencies {
    failed: u64,
    #[serde(rename = "latency-ns", serialize_with = "percentiles")]
    latency: ExactTimes,
    #[serde(rename = "waited-ns", serialize_with = "percentiles")]
    waited: ExactTimes,
    #[serde(rename = "served-ns", serialize_with = "percentiles")]
    served: ExactTimes,
    held_by: RequestsByLimit,
}

/// The part of a request that every trace has.
struct CountedRequest {
    time_ns: u64,
    op: RequestOp,
    length: u64,
    /// 0 if the trace lacks it.
    latency_ns: u64,
}

pub(super) fn run(arguments: &InfoArgs) -> Result<(), CommandFailure> {
    let mut info = TraceSummary::default();
    for path in &arguments.traces {
        let read = reader::open(path).and_then(|lines| info.read(lines, &arguments.reading.options()));
        if let Err(error) = read {
            // A truncated file does not affect the remaining ones.
            let is_torn = matches!(error, TraceError::Torn { .. });
            if info.disks.is_empty() && !(is_torn && arguments.traces.len() > 1) {
                return Err(anyhow::Error::from(error).into());
            }
            info.partial.get_or_insert(error.to_string());
            if !is_torn {
                break;
            }
        }
    }
    if arguments.json {
        print_json(&info)?;
    } else {
        print(&info.text())?;
    }
    report_empty(info.empty);
    if info.lost > 0 {
        print_notice(&format!("lost while it was recorded: {}", figures::counted(info.lost, "request")));
    }
    match info.partial {
        Some(why) => Err(anyhow::anyhow!("not read to the end: {why}").into()),
        None => Ok(()),
    }
}

/// Reports requests of length 0, which were skipped.
pub(super) fn report_empty(count: u64) {
    if count > 0 {
        print_notice(&format!("skipped: {} of length 0", figures::counted(count, "request")));
    }
}

impl TraceSummary {
    fn read(&mut self, mut lines: LineReader, options: &TraceOptions) -> Result<(), TraceError> {
        if reader::is_recording(&mut lines, options)? {
            let (mut blocks, mut first_ns) = (RecordingReader::default(), None);
            let read = loop {
                match blocks.next(&mut lines, &mut |_| ()) {
                    Ok(Some(recorded)) => {
                        let RecordedRequest { entry, arrival_ns, disk, limit, .. } = recorded;
                        let time_ns = match options.absolute_time {
                            // Relative times start with the first request.
                            Some(false) => arrival_ns.saturating_sub(*first_ns.get_or_insert(arrival_ns)),
                            _ => arrival_ns,
                        };
                        let latency_ns = entry.times.map_or(0, recording::RecordedTimes::latency_ns);
                        let request =
                            CountedRequest { time_ns, op: entry.op, length: entry.length, latency_ns };
                        let has_failed = entry.has_failed;
                        let outcome = entry.times.map(|times| RequestOutcome { times, has_failed, limit });
                        let (summary, limits) = self.count(disk, &request);
                        summary.add_result(outcome, limits);
                    }
                    Ok(None) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            self.lost = self.lost.saturating_add(blocks.lost());
            return read;
        }
        let options = TraceOptions { outcomes: true, ..options.clone() };
        let mut reader = TraceReader::over(lines, &options)?;
        // Other formats have relative times; absolute ones need the clock at time 0.
        let zero_ns = match options.absolute_time {
            Some(true) => merge::share_clock(std::slice::from_mut(&mut reader))?,
            _ => 0,
        };
        let read = loop {
            let record = match reader.next() {
                Ok(Some(record)) => record,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            let outcome = reader.outcome(&record).and_then(|numbered| reader.named(numbered));
            let request = CountedRequest {
                time_ns: zero_ns + record.time_ns,
                op: record.op,
                length: record.length,
                latency_ns: outcome.as_ref().map_or(0, |outcome| outcome.times.latency_ns()),
            };
            let (summary, limits) = self.count(&reader.disks()[record.disk.index()], &request);
            // Without results in the format, a missing result is no loss.
            if reader.has_outcomes() {
                summary.add_result(outcome, limits);
            }
        };
        self.empty = self.empty.saturating_add(reader.empty());
        read
    }

    /// Counts a request; returns its disk, and the shared names of limits.
    fn count(&mut self, disk: &str, request: &CountedRequest) -> (&mut DiskSummary, &mut LimitNames) {
        // The name is copied for the first request only.
        if !self.disks.contains_key(disk)
            && let Entry::Vacant(place) = self.disks.entry(disk.to_owned())
        {
            place.insert(DiskSummary::beginning(request.time_ns));
        }
        let summary = self.disks.get_mut(disk).expect("it was put there");
        summary.count(request);
        (summary, &mut self.limits)
    }

    fn text(&self) -> String {
        let mut text = vec![self.amounts().render(false)];
        if let Some(first) = self.first_ns() {
            let lasts = duration(self.seconds());
            let lasts = format!("{lasts} from the first arrival to the last completion");
            match u32::try_from(first / 1_000_000_000) {
                Ok(seconds) if is_since_1970(first) => {
                    text.push(format!("From {} UTC, {lasts}.\n", figures::date(seconds)));
                }
                _ => text.push(format!("{lasts}.\n")),
            }
        }
        let measured = self.disks.values().any(|disk| disk.measured.is_some());
        if measured {
            text.extend([self.times().render(false), self.throttling_table().render(false)]);
        }
        let unmeasured: u64 = self.disks.values().map(|disk| disk.unmeasured).sum();
        if unmeasured > 0 {
            let requests = figures::counted(unmeasured, "request");
            text.push(format!("Waiting and service times of {requests} are unknown.\n"));
        }
        text.retain(|part| !part.is_empty());
        if text.is_empty() { "no requests\n".to_owned() } else { text.join("\n") }
    }

    fn first_ns(&self) -> Option<u64> {
        self.disks.values().map(|disk| disk.first_ns).min()
    }

    /// Seconds from the first arrival to the last completion.
    fn seconds(&self) -> f64 {
        let last = self.disks.values().map(|disk| disk.last_completion_ns).max();
        let ns = last.zip(self.first_ns()).map_or(0, |(last, first)| last - first);
        ns as f64 / 1e9
    }

    fn amounts(&self) -> TextTable {
        type Column = (&'static str, fn(&DiskSummary, f64) -> String);
        fn size(bytes: u64) -> String {
            figures::bytes(bytes as f64)
        }
        let all: [Column; 11] = [
            ("REQUESTS", |summary, _| summary.requests.to_string()),
            ("READS", |summary, _| summary.reads.to_string()),
            ("WRITES", |summary, _| summary.writes.to_string()),
            ("DISCARDS", |summary, _| summary.discards.to_string()),
            ("ZEROES", |summary, _| summary.write_zeroes.to_string()),
            ("READ", |summary, _| size(summary.read_bytes)),
            ("WRITTEN", |summary, _| size(summary.written_bytes)),
            ("DISCARDED", |summary, _| size(summary.discarded_bytes)),
            ("ZEROED", |summary, _| size(summary.zeroed_bytes)),
            ("IOPS", |summary, seconds| {
                a_second(summary.requests, seconds).map_or_else(|| "-".to_owned(), figures::count)
            }),
            ("BYTES/S", |summary, seconds| {
                a_second(summary.bytes(), seconds).map_or_else(|| "-".to_owned(), figures::bytes)
            }),
        ];
        // Most traces have none of these.
        let has = |count: fn(&DiskSummary) -> u64| self.disks.values().any(|summary| count(summary) > 0);
        let (discards, zeroes) = (has(|summary| summary.discards), has(|of| of.write_zeroes));
        let is_shown = |(name, _): &Column| match *name {
            "DISCARDS" | "DISCARDED" => discards,
            "ZEROES" | "ZEROED" => zeroes,
            _ => true,
        };
        let shown: Vec<Column> = all.into_iter().filter(is_shown).collect();
        let names: Vec<_> = shown.iter().map(|(name, _)| *name).collect();
        let mut table = TextTable::new(columns(&["DISK"], &names));
        // All disks share one period, so that their rates add up.
        let seconds = self.seconds();
        for (name, summary) in &self.disks {
            let cells = shown.iter().map(|(_, cell)| cell(summary, seconds));
            table.row(std::iter::once(name.clone()).chain(cells).collect());
        }
        table
    }

    fn measured(&self) -> impl Iterator<Item = (&String, &DiskLatencies)> {
        self.disks.iter().filter_map(|(name, disk)| Some((name, disk.measured.as_deref()?)))
    }

    fn times(&self) -> TextTable {
        let numbers = ["P50", "P90", "P99", "P99.9", "MAX", "MEAN"];
        let mut table = TextTable::new(columns(&["DISK", "TIME"], &numbers));
        for (name, measured) in self.measured() {
            let DiskLatencies { latency, waited, served, .. } = measured;
            for (part, times) in [("latency", latency), ("waited", waited), ("served", served)] {
                let percentiles = times.percentiles();
                let mut row = vec![name.clone(), part.to_owned()];
                row.extend(percentiles.shown());
                row.push(figures::time(percentiles.mean as u64));
                table.row(row);
            }
        }
        table
    }

    fn throttling_table(&self) -> TextTable {
        let heading = RequestsByLimit::HEADING.to_uppercase();
        let mut table = TextTable::new([
            ("DISK", ColumnAlignment::Left),
            ("WAITED", ColumnAlignment::Right),
            ("FAILED", ColumnAlignment::Right),
            (&heading, ColumnAlignment::Left),
        ]);
        for (name, measured) in self.measured() {
            let requests = measured.waited.count();
            table.row(vec![
                name.clone(),
                figures::share(measured.held_by.waited() as f64 / requests.max(1) as f64),
                measured.failed.to_string(),
                measured.held_by.shown(requests),
            ]);
        }
        table
    }
}

/// True if nanoseconds count from 1970; other clocks start with the trace or at boot.
pub(super) fn is_since_1970(ns: u64) -> bool {
    ns > YEAR_2000_S * 1_000_000_000
}

/// Seconds since 1970.
const YEAR_2000_S: u64 = 946_684_800;

impl DiskSummary {
    fn beginning(first_ns: u64) -> Self {
        Self {
            requests: 0,
            reads: 0,
            writes: 0,
            discards: 0,
            write_zeroes: 0,
            flushes: 0,
            read_bytes: 0,
            written_bytes: 0,
            discarded_bytes: 0,
            zeroed_bytes: 0,
            first_ns,
            last_ns: first_ns,
            last_completion_ns: first_ns,
            measured: None,
            unmeasured: 0,
        }
    }

    fn count(&mut self, request: &CountedRequest) {
        let CountedRequest { time_ns, op, length, latency_ns } = *request;
        self.requests += 1;
        let (count, bytes) = match op {
            RequestOp::Read => (&mut self.reads, &mut self.read_bytes),
            RequestOp::Write => (&mut self.writes, &mut self.written_bytes),
            RequestOp::Discard => (&mut self.discards, &mut self.discarded_bytes),
            RequestOp::WriteZeroes => (&mut self.write_zeroes, &mut self.zeroed_bytes),
            // A flush moves no data.
            RequestOp::Flush => (&mut self.flushes, &mut 0),
        };
        *count += 1;
        *bytes = bytes.saturating_add(length);
        self.first_ns = self.first_ns.min(time_ns);
        self.last_ns = self.last_ns.max(time_ns);
        self.last_completion_ns = self.last_completion_ns.max(time_ns.saturating_add(latency_ns));
    }

    /// Adds a result; `None` if it is unknown.
    fn add_result(&mut self, outcome: Option<RequestOutcome<'_>>, limits: &mut LimitNames) {
        match outcome {
            Some(outcome) => self.measured.get_or_insert_with(Box::default).add(&outcome, limits),
            None => self.unmeasured += 1,
        }
    }

    /// Total bytes, as limits count them.
    fn bytes(&self) -> u64 {
        let parts = [self.read_bytes, self.written_bytes, self.discarded_bytes, self.zeroed_bytes];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

impl DiskLatencies {
    fn add(&mut self, outcome: &RequestOutcome<'_>, limits: &mut LimitNames) {
        let RequestOutcome { times, has_failed, limit } = outcome;
        self.failed += u64::from(*has_failed);
        self.waited.note(times.wait_ns);
        self.served.note(times.service_ns);
        self.latency.note(times.latency_ns());
        if let Some(limit) = limit {
            self.held_by.note(limit, limits);
        }
    }
}

/// Rate per second; `None` if all requests are simultaneous.
fn a_second(count: u64, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| count as f64 / seconds)
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn percentiles<S: serde::Serializer>(times: &ExactTimes, serializer: S) -> Result<S::Ok, S::Error> {
    times.percentiles().serialize(serializer)
}
