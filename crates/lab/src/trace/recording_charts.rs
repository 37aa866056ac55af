//! Recordings as tables and charts: rates and latencies over time, and the limits that throttled
//! each disk.
//!
//! ```text
//!   recordings ─► MergedTraces ─► requests by arrival ─► RecordedDisk: sums over time ─► Findings ─► `weir report`
//!                      └──► limits over time ───────────────────────────────────────────────┘
//! ```
//!
//! The limits are those in force when the requests were recorded, or those of a config file.
//! Recordings of version 1 have the names of limits without their values. Memory is bounded: only
//! the busiest disks are drawn, while all have totals.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::anyhow;
use console::figures;
use recording::{
    MergedTraces, RecordSource as _, RequestOutcome, TraceOptions, TraceRecord, limit_history::LimitHistory,
    reader,
};
use simulator::over_time::{LatencySeries, TimeSeries};

use super::{
    held_by::{LimitNames, RequestsByLimit},
    info::is_since_1970,
    recorded_limits::recorded_limits,
};
use crate::{
    latencies::{ExactTimes, Percentiles},
    limit_lines::{LimitRates, lines_of},
    result::{Chart, ChartAxis, ChartSeries, Findings, Lines, MeasureUnit, ResultTable},
};

/// Disks with charts: those with the most requests.
const DRAWN: usize = 16;
/// Maximum number of disks with totals.
const MAX_DISKS: usize = 10_000;
const MAX_POINTS: usize = 256;
/// Largest number of limits of a disk that have a line each.
const MAX_LIMITS: usize = 8;

/// Recordings as tables and charts.
pub(crate) struct DrawnRecording {
    pub(crate) findings: Findings,
    /// Seconds since 1970; 0 if the recordings have another clock.
    pub(crate) began_s: u64,
    pub(crate) seconds: f64,
    pub(crate) partial: Option<String>,
}

/// The limits of each disk, with those of its groups.
pub(crate) type LimitsByDisk = HashMap<String, LimitRates>;

/// Origin of the limits in the charts.
enum ShownLimits<'a> {
    Recorded(&'a LimitHistory),
    OfConfig(&'a LimitsByDisk),
}

/// True if a regular file is a recording, as far as it can be read. Pipes are not read, because
/// their bytes would be lost for the next reader.
pub(crate) fn is_recording(path: &Path) -> bool {
    if !fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) {
        return false;
    }
    let read =
        reader::open(path).and_then(|mut lines| reader::is_recording(&mut lines, &TraceOptions::default()));
    read.unwrap_or(false)
}

/// Reads recordings as one. `limits` are drawn in the charts of rates, instead of the recorded
/// limits.
///
/// # Errors
/// Fails on a file whose beginning is unreadable, or on more than [`MAX_DISKS`].
pub(crate) fn draw(paths: &[PathBuf], limits: Option<&LimitsByDisk>) -> anyhow::Result<DrawnRecording> {
    let mut read = ReadRecording::of(paths, &|_, place| place < DRAWN)?;
    if read.disks.len() > DRAWN {
        // A second pass: the busiest disks are known only after the first.
        let busiest: HashSet<String> = read.disks.iter().take(DRAWN).map(|disk| disk.name.clone()).collect();
        read = ReadRecording::of(paths, &|name, _| busiest.contains(name))?;
    }
    let ReadRecording { disks, limits: recorded, clock_ns, last_ns, lost, partial } = read;
    let seconds = last_ns as f64 / 1e9;
    let limits = limits.map_or(ShownLimits::Recorded(&recorded), ShownLimits::OfConfig);
    Ok(DrawnRecording {
        findings: findings(&disks, &limits, seconds, lost),
        began_s: if is_since_1970(clock_ns) { clock_ns / 1_000_000_000 } else { 0 },
        seconds,
        partial,
    })
}

/// All displayed content of recordings.
struct ReadRecording {
    /// The busiest first; equally busy disks by name.
    disks: Vec<RecordedDisk>,
    limits: LimitHistory,
    clock_ns: u64,
    last_ns: u64,
    lost: u64,
    partial: Option<String>,
}

impl ReadRecording {
    /// Reads recordings as one. `is_drawn` receives the name of each disk and its position in order
    /// of appearance.
    fn of(paths: &[PathBuf], is_drawn: &dyn Fn(&str, usize) -> bool) -> anyhow::Result<Self> {
        let options = TraceOptions { outcomes: true, ..TraceOptions::default() };
        let mut source = MergedTraces::open(paths, &options)?;
        let clock_ns = source.clock_ns();
        let (mut disks, mut partial, mut last_ns): (Vec<RecordedDisk>, _, u64) = (Vec::new(), None, 0);
        let mut indices: HashMap<usize, usize> = HashMap::new();
        let mut names = LimitNames::default();
        loop {
            let record = match source.next() {
                Ok(Some(record)) => record,
                Ok(None) => break,
                // Before the first request there is nothing to draw; after it, the result is
                // partial.
                Err(error) if disks.is_empty() => return Err(error.into()),
                Err(error) => {
                    partial = Some(error.to_string());
                    break;
                }
            };
            // Disks are listed in order of their first request.
            let place = match indices.get(&record.disk.index()) {
                Some(place) => *place,
                None if disks.len() == MAX_DISKS => {
                    return Err(anyhow!(
                        "there are more than {MAX_DISKS} disks (draw fewer recordings at a time)"
                    ));
                }
                None => {
                    let name = &source.disks()[record.disk.index()];
                    disks.push(RecordedDisk::new(name, is_drawn(name, disks.len())));
                    indices.insert(record.disk.index(), disks.len() - 1);
                    disks.len() - 1
                }
            };
            let numbered = source.outcome(&record);
            let outcome = numbered.and_then(|numbered| source.outcome_with_names(&record, numbered));
            let took_ns = outcome.map_or(0, |outcome| outcome.times.latency_ns());
            last_ns = last_ns.max(record.time_ns.saturating_add(took_ns));
            disks[place].add(&record, outcome.as_ref(), &mut names);
        }
        disks.sort_by(|one, other| other.requests.cmp(&one.requests).then_with(|| one.name.cmp(&other.name)));
        Ok(Self { disks, limits: source.take_limits(), clock_ns, last_ns, lost: source.lost(), partial })
    }
}

struct RecordedDisk {
    name: String,
    requests: u64,
    bytes: u64,
    failed: u64,
    latency: ExactTimes,
    waited: ExactTimes,
    held_by: RequestsByLimit,
    throttled_ns: u64,
    /// End of the period in which an earlier request is throttled.
    throttled_until_ns: u64,
    by_limit: Vec<(String, u64)>,
    over_time: Option<Box<DiskOverTime>>,
}

struct DiskOverTime {
    done: TimeSeries,
    done_bytes: TimeSeries,
    latency: LatencySeries,
    /// Nanoseconds, by the position of the limit in `by_limit`.
    throttled: Vec<TimeSeries>,
}

impl RecordedDisk {
    fn new(name: &str, is_drawn: bool) -> Self {
        let over_time = is_drawn.then(|| {
            let [done, done_bytes] = [(); 2].map(|()| TimeSeries::sums());
            Box::new(DiskOverTime {
                done,
                done_bytes,
                latency: LatencySeries::default(),
                throttled: Vec::new(),
            })
        });
        Self {
            name: name.to_owned(),
            requests: 0,
            bytes: 0,
            failed: 0,
            latency: ExactTimes::default(),
            waited: ExactTimes::default(),
            held_by: RequestsByLimit::default(),
            throttled_ns: 0,
            throttled_until_ns: 0,
            by_limit: Vec::new(),
            over_time,
        }
    }

    /// Adds a request; in order of arrival.
    fn add(&mut self, record: &TraceRecord, outcome: Option<&RequestOutcome<'_>>, names: &mut LimitNames) {
        self.requests += 1;
        self.bytes = self.bytes.saturating_add(record.length);
        let took_ns = outcome.map_or(0, |outcome| outcome.times.latency_ns());
        let done_ns = record.time_ns.saturating_add(took_ns);
        if let Some(over_time) = &mut self.over_time {
            over_time.done.note(done_ns, 1);
            over_time.done_bytes.note(done_ns, record.length);
        }
        let Some(outcome) = outcome else { return };
        self.failed += u64::from(outcome.has_failed);
        self.latency.note(took_ns);
        self.waited.note(outcome.times.wait_ns);
        if let Some(over_time) = &mut self.over_time {
            over_time.latency.note(done_ns, took_ns);
        }
        if let Some(limit) = outcome.limit {
            self.held_by.note(limit, names);
            self.throttle(limit, record.time_ns, record.time_ns.saturating_add(outcome.times.wait_ns));
        }
    }

    /// Counts time with at least one throttled request once, for the limit of the first one.
    fn throttle(&mut self, limit: &str, from_ns: u64, until_ns: u64) {
        // Overlapping waits count once: only the part after the earlier ones is added.
        let from_ns = from_ns.max(self.throttled_until_ns);
        let Some(ns) = until_ns.checked_sub(from_ns).filter(|ns| *ns > 0) else { return };
        self.throttled_until_ns = until_ns;
        self.throttled_ns += ns;
        let place = self.by_limit.iter().position(|(known, _)| known == limit);
        let place = place.unwrap_or_else(|| {
            // Limits beyond the bound are counted with the last one.
            if self.by_limit.len() < MAX_LIMITS {
                self.by_limit.push((limit.to_owned(), 0));
            }
            self.by_limit.len() - 1
        });
        self.by_limit[place].1 += ns;
        if let Some(over_time) = &mut self.over_time {
            // The series of a limit is created with its first wait.
            over_time.throttled.resize_with(over_time.throttled.len().max(place + 1), TimeSeries::sums);
            over_time.throttled[place].add_span(from_ns, until_ns);
        }
    }

    /// The limit that throttled it longest.
    fn throttled_by(&self) -> Option<&str> {
        let longest = self.by_limit.iter().rev().max_by_key(|(_, ns)| *ns);
        longest.map(|(limit, _)| &**limit)
    }

    fn sentence(&self, seconds: f64) -> String {
        let Percentiles { p99, .. } = self.latency.percentiles();
        let requests = figures::counted(self.requests, "request");
        let latency = match self.latency.count() {
            0 => "latencies were not recorded".to_owned(),
            _ => format!("99 of 100 took at most {}", figures::time(p99)),
        };
        let throttled = match self.throttled_by() {
            None => "no limit throttled it".to_owned(),
            Some(limit) => format!(
                "throttled {} of the time ({}), mostly by {limit}",
                figures::share(share(self.throttled_ns, seconds)),
                figures::time(self.throttled_ns)
            ),
        };
        format!("disk {}: {requests}; {latency}; {throttled}.", self.name)
    }

    fn row(&self, seconds: f64) -> Vec<String> {
        let a_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let times = |times: &ExactTimes, percentile: fn(&Percentiles) -> u64| match times.count() {
            0 => "-".to_owned(),
            _ => figures::time(percentile(&times.percentiles())),
        };
        vec![
            self.name.clone(),
            self.requests.to_string(),
            figures::count(a_second(self.requests)),
            figures::bytes(a_second(self.bytes)),
            times(&self.latency, |times| times.p50),
            times(&self.latency, |times| times.p99),
            times(&self.latency, |times| times.max),
            times(&self.waited, |times| times.p99),
            self.failed.to_string(),
            figures::time(self.throttled_ns),
            self.held_by.shown(self.waited.count()),
        ]
    }

    fn charts(&self, limits: &ShownLimits<'_>, seconds: f64) -> Vec<Chart> {
        let Some(over_time) = &self.over_time else { return Vec::new() };
        let DiskOverTime { done, done_bytes, latency, throttled } = &**over_time;
        // Declared outside the match, so that the reference outlives it.
        let recorded;
        let none = LimitRates::default();
        let limits = match limits {
            ShownLimits::Recorded(history) => {
                recorded = recorded_limits(history, &self.name);
                &recorded
            }
            ShownLimits::OfConfig(by_disk) => by_disk.get(&self.name).unwrap_or(&none),
        };
        let mut charts = Vec::new();
        for (label, unit, series, limits) in [
            ("requests a second", MeasureUnit::Iops, done, &limits.iops),
            ("bytes a second", MeasureUnit::BytesPerSecond, done_bytes, &limits.bps),
        ] {
            let rates = vec![ChartSeries {
                name: "done".to_owned(),
                points: series.joined_for_rates(done, MAX_POINTS).rates(),
            }];
            let (limits, note) = lines_of(limits, &rates);
            let chart = over_time_chart(&self.name, label, ChartAxis::new(label, unit), rates);
            charts.push(Chart::Lines(Lines { limits, note, ..chart }));
        }
        let points = latency.points();
        let line = |name: &str, value_of: fn(&(f64, u64, u64)) -> u64| {
            // A logarithmic scale cannot show zero.
            let points = points.iter().filter(|point| value_of(point) > 0);
            let points = points.map(|point| (point.0, value_of(point) as f64)).collect();
            ChartSeries { name: name.to_owned(), points }
        };
        if !points.is_empty() {
            let axis = ChartAxis::new("latency", MeasureUnit::Nanoseconds).logarithmic();
            let series = vec![line("p50", |point| point.1), line("p99", |point| point.2)];
            charts.push(Chart::Lines(over_time_chart(&self.name, "latency", axis, series)));
        }
        let line = |((limit, _), series): (&(String, u64), &TimeSeries)| {
            let mut series = series.with_at_most(MAX_POINTS);
            // Intervals without a wait up to the end are zero, not missing.
            series.extend_to((seconds * 1e9) as u64);
            let share = |(at, ns): (f64, u64)| (at, (ns as f64 / 1e9 / series.interval_s()).min(1.0));
            ChartSeries { name: limit.clone(), points: series.points().map(share).collect() }
        };
        let series: Vec<_> = self.by_limit.iter().zip(throttled).map(line).collect();
        if !series.is_empty() {
            let label = "share of the time throttled, by limit";
            let axis = ChartAxis::new("throttled", MeasureUnit::Share);
            charts.push(Chart::Lines(over_time_chart(&self.name, label, axis, series)));
        }
        charts
    }
}

fn share(ns: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { (ns as f64 / 1e9 / seconds).min(1.0) } else { 0.0 }
}

/// A chart without lines of limits.
fn over_time_chart(disk: &str, label: &str, y: ChartAxis, series: Vec<ChartSeries>) -> Lines {
    let (title, x) = (format!("{disk}: {label}"), ChartAxis::new("time", MeasureUnit::Seconds));
    Lines { title, x, y, steps: false, series, limits: Vec::new(), note: None }
}

fn findings(disks: &[RecordedDisk], limits: &ShownLimits<'_>, seconds: f64, lost: u64) -> Findings {
    let columns = "disk|requests|IOPS|bytes/s|p50|p99|max|waited p99|failed|throttled".split('|');
    let columns = columns.chain([RequestsByLimit::HEADING]);
    let rows = disks.iter().map(|disk| disk.row(seconds)).collect();
    let note = "The busiest disks come first. Rates are over the time from the first arrival to \
                the last completion. A disk is throttled while at least one request waits for a \
                limit; the last column is a share of the requests.";
    let table = ResultTable { note: Some(note.to_owned()), ..ResultTable::new("Each disk", columns, rows) };
    let mut summary: Vec<_> = disks.iter().take(DRAWN).map(|disk| disk.sentence(seconds)).collect();
    if disks.len() > DRAWN {
        summary.push(format!("Of {} disks the {DRAWN} with the most requests are drawn.", disks.len()));
    }
    let was_throttled = disks.iter().any(|disk| disk.throttled_ns > 0);
    match limits {
        ShownLimits::Recorded(history) if history.is_empty() && was_throttled => summary.push(
            "This recording has the names of limits and not their values: --config FILE draws \
             those of a config file."
                .to_owned(),
        ),
        ShownLimits::Recorded(history) if history.dropped() > 0 => summary.push(format!(
            "Not drawn, because there are more than can be stored: {} of limits.",
            figures::counted(history.dropped(), "change")
        )),
        _ => {}
    }
    if lost > 0 {
        summary.push(format!("Lost while it was recorded: {}.", figures::counted(lost, "request")));
    }
    if disks.is_empty() {
        summary.push("The recording has no requests.".to_owned());
    }
    Findings {
        summary,
        opening: if disks.is_empty() { Vec::new() } else { vec![table] },
        charts: disks.iter().flat_map(|disk| disk.charts(limits, seconds)).collect(),
        ..Findings::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_recording_is_reported() {
        let history = LimitHistory::default();
        let found = findings(&[], &ShownLimits::Recorded(&history), 0.0, 0);
        assert_eq!(found.summary, ["The recording has no requests."]);
        assert!(found.opening.is_empty() && found.charts.is_empty(), "tables without rows");
    }
}
