//! Result file of a simulation: measures to compare, tables, and charts of the first disks.

use console::figures;
use simulator::{engine::MAX_CHARTS, tally::RequestStatistics};

use super::{
    drive::SimulationOutcome,
    output::{SimulationFigures, SimulationSummary, SummaryLine},
    scenario_table::ScenarioTable,
    sweep_result::{JudgedDisks, SweepPoint, SweepResult},
};
use crate::{
    latencies::{self, Percentiles},
    limit_lines::{LimitRates, lines_of},
    result::{
        Better, Chart, ChartAxis, ChartSeries, Findings, Lines, Measure, MeasureUnit, ResultTable, SamplesAre,
    },
};

const MAX_POINTS: usize = 512;

fn exact(name: String, unit: MeasureUnit, better: Better, value: f64) -> Measure {
    Measure { samples_are: SamplesAre::Exact, ..Measure::new(name, unit, better, vec![value]) }
}

pub(super) fn of_run(summary: &SimulationSummary, outcome: &SimulationOutcome) -> Findings {
    let mut measures = Vec::new();
    for (kind, line) in summary.lines() {
        let mut measure = |name: &str, unit, better, value: f64| {
            measures.push(exact(format!("{kind} {}: {name}", line.name), unit, better, value));
        };
        let SimulationFigures { latency_ns, iops, bps, .. } = &line.after;
        measure("requests a second", MeasureUnit::Iops, Better::Higher, *iops);
        measure("bytes a second", MeasureUnit::BytesPerSecond, Better::Higher, *bps);
        for (name, value) in [("p50", latency_ns.p50), ("p99", latency_ns.p99), ("p99.9", latency_ns.p99_9)] {
            measure(&format!("latency {name}"), MeasureUnit::Nanoseconds, Better::Lower, value as f64);
        }
        measure("time throttled", MeasureUnit::Share, Better::Lower, line.throttled);
    }
    Findings {
        summary: summary.lines().map(|(kind, line)| sentence(kind, line, summary.compared())).collect(),
        measures,
        tables: vec![table(summary)],
        charts: charts(outcome, summary.compared()),
        ..Findings::default()
    }
}

pub(super) fn of_sweep(swept: &SweepResult) -> Findings {
    let line = |name: &str, value: fn(&SweepPoint) -> f64| ChartSeries {
        name: name.to_owned(),
        points: swept.points.iter().map(|point| (point.value as f64, value(point))).collect(),
    };
    // A separate line only where the judged disks are not the limited ones; else the lines
    // coincide.
    let are_others = swept.points.first().is_some_and(|point| point.judges != JudgedDisks::Limited);
    let judged = swept.p99.as_ref().and_then(|bound| bound.of.as_ref()).filter(|_| are_others);
    let judged = judged.map(|name| line(&format!("p99 of {name}"), |point| point.judged_p99_ns as f64));
    let is_size = swept.setting.is_some_and(policy::throttle::LimitSetting::is_size);
    let unit = if is_size { MeasureUnit::BytesPerSecond } else { MeasureUnit::Iops };
    let latency = Lines {
        title: format!("Effect of each {} on latency", swept.limit),
        x: ChartAxis::new(swept.limit, unit),
        y: ChartAxis::new("latency", MeasureUnit::Nanoseconds),
        steps: false,
        limits: Vec::new(),
        note: None,
        series: [
            line("p50", |point| point.latency_ns.p50 as f64),
            line("p99", |point| point.latency_ns.p99 as f64),
            line("p99.9", |point| point.latency_ns.p99_9 as f64),
        ]
        .into_iter()
        .chain(judged)
        .collect(),
    };
    let throttled = Lines {
        title: "Share of the time in which requests waited for limits".to_owned(),
        x: ChartAxis::new(swept.limit, unit),
        y: ChartAxis::new("throttled", MeasureUnit::Share),
        steps: false,
        limits: Vec::new(),
        note: None,
        series: vec![line("throttled", |point| point.throttled)],
    };
    let row = |point: &SweepPoint| {
        let Percentiles { p50, p99, p99_9, .. } = point.latency_ns;
        let mut row = vec![swept.shown(point.value)];
        row.extend([p50, p99, p99_9].map(figures::time));
        row.extend([figures::count(point.iops), figures::bytes(point.bps), figures::share(point.throttled)]);
        row.extend(swept.p99_of_disks(point));
        row
    };
    let measure = |point: &SweepPoint| {
        let name = format!("{}={}: latency p99", swept.limit, swept.shown(point.value));
        exact(name, MeasureUnit::Nanoseconds, Better::Lower, point.latency_ns.p99 as f64)
    };
    let disks: Vec<_> = swept.columns().iter().map(|name| format!("p99 {name}")).collect();
    let columns = [swept.limit, "p50", "p99", "p99.9", "IOPS", "bytes/s", "throttled"].into_iter();
    let columns = columns.chain(disks.iter().map(String::as_str));
    let title = format!("Effect of each {}", swept.limit);
    Findings {
        summary: swept.p99.iter().map(|bound| swept.sentence(bound)).collect(),
        measures: swept.points.iter().map(measure).collect(),
        tables: vec![ResultTable::new(&title, columns, swept.points.iter().map(row).collect())],
        charts: vec![Chart::Lines(latency), Chart::Lines(throttled)],
        ..Findings::default()
    }
}

pub(super) fn of_scenario(table: &ScenarioTable) -> Findings {
    let measure =
        |(name, value): &(String, f64)| exact(name.clone(), MeasureUnit::Count, Better::Higher, *value);
    Findings {
        measures: table.measures.iter().map(measure).collect(),
        tables: vec![table.table()],
        ..Findings::default()
    }
}

fn sentence(kind: &str, line: &SummaryLine, compared: &str) -> String {
    let p99 = |figures: &SimulationFigures| figures::time(figures.latency_ns.p99);
    let before = match &line.before {
        None => String::new(),
        Some(_) if line.after.latency_ns.max == 0 => String::new(),
        // Without a simulated device there is no latency to compare with.
        Some(before) if before.latency_ns.max == 0 => ", all of it for limits".to_owned(),
        Some(before) => format!(" instead of {} without {compared}", p99(before)),
    };
    let held = line.held_by.first().map_or_else(String::new, |held| format!(", mostly for {}", held.limit));
    format!(
        "{kind} {}: 99 of 100 requests within {}{before}; requests waited {} of the time{held}.",
        line.name,
        p99(&line.after),
        figures::share(line.throttled)
    )
}

fn table(summary: &SimulationSummary) -> ResultTable {
    let compared = summary.compared();
    let numbers = "requests|IOPS|bytes/s|p50|p99|p99.9|max|throttled|longest queue".split('|');
    let columns = ["", compared].into_iter().chain(numbers);
    let mut rows = Vec::new();
    let lines = summary
        .lines()
        .map(|(kind, line)| (format!("{kind} {}", line.name), line.before.as_ref(), &line.after, Some(line)));
    let all = summary.all.iter().map(|all| ("all disks".to_owned(), all.before.as_ref(), &all.after, None));
    for (name, before, after, line) in lines.chain(all) {
        let with = before.map_or("none", |_| "with");
        for (when, figures) in before.map(|before| ("without", before)).into_iter().chain([(with, after)]) {
            let Percentiles { p50, p99, p99_9, max, .. } = figures.latency_ns;
            let mut row = vec![name.clone(), when.to_owned()];
            row.extend([
                figures.requests.to_string(),
                figures::count(figures.iops),
                figures::bytes(figures.bps),
            ]);
            row.extend([p50, p99, p99_9, max].map(figures::time));
            // Waiting for limits is undefined without limits, and for all disks together.
            row.extend(match line.filter(|_| when != "without") {
                Some(line) => [figures::share(line.throttled), line.longest_queue.to_string()],
                None => ["-".to_owned(), "-".to_owned()],
            });
            rows.push(row);
        }
    }
    let note = format!("Without {compared}: on the same modelled device. Times are exact within 1 %.");
    ResultTable { note: Some(note), ..ResultTable::new(&format!("The effect of {compared}"), columns, rows) }
}

/// Lines of limits, and a note on those that are not drawn.
type LimitsShown = (Vec<ChartSeries>, Option<String>);

/// Charts of the first disks. `compared` names the difference between the two runs.
fn charts(outcome: &SimulationOutcome, compared: &str) -> Vec<Chart> {
    let world = &outcome.world;
    let mut done = Vec::new();
    let mut moved = Vec::new();
    let mut waiting = Vec::new();
    let mut charts = Vec::new();
    let mut limits = LimitRates::default();
    for (disk, result) in world.disks.iter().zip(&outcome.disks).take(MAX_CHARTS) {
        let Some(drawn) = result.after.chart.as_ref().filter(|_| result.after.requests > 0) else { continue };
        let series = |points: Vec<_>| ChartSeries { name: disk.name.clone(), points };
        done.push(series(drawn.done.joined_for_rates(&drawn.done, MAX_POINTS).rates()));
        moved.push(series(drawn.done_bytes.joined_for_rates(&drawn.done, MAX_POINTS).rates()));
        let depths = drawn.waiting.with_at_most(MAX_POINTS);
        waiting.push(series(depths.points().map(|(at, depth)| (at, depth as f64)).collect()));
        limits.add(Some(&disk.name), &disk.settings.limits);
        for group in world.groups_above(disk).map(|group| &world.groups[group]) {
            limits.add(Some(&group.name), &group.settings.limits);
        }
        charts.extend(distribution(&disk.name, &result.after, result.before.as_ref(), compared));
    }
    let over_time = |title: &str, label: &str, unit, series: Vec<ChartSeries>, limits: LimitsShown| {
        let series: Vec<_> = series.into_iter().filter(|series| !series.points.is_empty()).collect();
        let (x, y) = (ChartAxis::new("time", MeasureUnit::Seconds), ChartAxis::new(label, unit));
        let (limits, note) = limits;
        let lines = Lines { title: title.to_owned(), x, y, steps: false, series, limits, note };
        (!lines.series.is_empty()).then_some(Chart::Lines(lines))
    };
    let [of_iops, of_bps] =
        [(&limits.iops, &done), (&limits.bps, &moved)].map(|(rates, drawn)| lines_of(rates, drawn));
    // Bytes have a chart only if a limit on bytes exists.
    let moved = if limits.bps.is_empty() { Vec::new() } else { moved };
    // Charts over time precede the distributions of single disks.
    let first = [
        over_time("Requests done a second, with the limits", "IOPS", MeasureUnit::Iops, done, of_iops),
        over_time(
            "Bytes done a second, with the limits",
            "bytes/s",
            MeasureUnit::BytesPerSecond,
            moved,
            of_bps,
        ),
        over_time(
            "Most requests that waited for limits",
            "waiting",
            MeasureUnit::Count,
            waiting,
            LimitsShown::default(),
        ),
    ];
    first.into_iter().flatten().chain(charts).collect()
}

fn distribution(
    name: &str,
    after: &RequestStatistics,
    before: Option<&RequestStatistics>,
    compared: &str,
) -> Option<Chart> {
    let line = |name: &str, statistics: &RequestStatistics| {
        let points = latencies::distribution(&statistics.latency);
        ChartSeries { name: name.to_owned(), points }
    };
    let with = line(&format!("with {compared}"), after);
    let series = before.map(|before| line("without", before)).into_iter().chain([with]);
    let series: Vec<_> = series.filter(|series| !series.points.is_empty()).collect();
    let title = format!("{name}: cumulative share of requests by latency");
    (!series.is_empty()).then(|| Chart::Lines(Lines::distribution(&title, series)))
}
