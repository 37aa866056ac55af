//! What a simulation came to, as a result file keeps it: numbers to compare, tables, and charts of the first disks.

use console::figures;

use super::{
    drive::Outcome,
    engine::DRAWN,
    output::{Figures, Line, Percentiles, Summary},
    scenario::Story,
    sweep::Swept,
    tally::Tally,
};
use crate::result::{Axis, Better, Chart, Findings, Lines, Measure, SamplesAre, Series, Table, Unit};

/// Points of a line at most: more than a page has pixels for are none.
const MOST_POINTS: usize = 512;

/// Of one simulation.
pub(super) fn of_run(summary: &Summary, outcome: &Outcome) -> Findings {
    let mut measures = Vec::new();
    for (what, line) in summary.lines() {
        let mut measure = |name: &str, unit, better, value: f64| {
            measures.push(Measure {
                name: format!("{what} {}: {name}", line.name),
                unit,
                better,
                samples: vec![value],
                samples_are: SamplesAre::Exact,
            });
        };
        let Figures { latency_ns, iops, bps, .. } = &line.after;
        measure("requests a second", Unit::Iops, Better::Higher, *iops);
        measure("bytes a second", Unit::BytesPerSecond, Better::Higher, *bps);
        for (name, value) in [("p50", latency_ns.p50), ("p99", latency_ns.p99), ("p99.9", latency_ns.p99_9)] {
            measure(&format!("latency {name}"), Unit::Nanoseconds, Better::Lower, value as f64);
        }
        measure("time throttled", Unit::Share, Better::Lower, line.throttled);
    }
    Findings {
        summary: summary.lines().map(|(what, line)| sentence(what, line)).collect(),
        measures,
        tables: vec![table(summary)],
        charts: charts(outcome),
    }
}

/// Of a sweep.
pub(super) fn of_sweep(swept: &Swept) -> Findings {
    let line = |name: &str, value: fn(&Percentiles) -> u64| Series {
        name: name.to_owned(),
        points: swept
            .points
            .iter()
            .map(|point| (point.value as f64, value(&point.latency_ns) as f64))
            .collect(),
    };
    let unit = if swept.setting.is_some_and(policy::throttle::Setting::is_size) {
        Unit::BytesPerSecond
    } else {
        Unit::Iops
    };
    let x = Axis { label: swept.limit.to_owned(), unit, logarithmic: false };
    let latency = Lines {
        title: format!("What each {} would have done to latency", swept.limit),
        x: x.clone(),
        y: Axis { label: "latency".to_owned(), unit: Unit::Nanoseconds, logarithmic: false },
        series: vec![
            line("p50", |times| times.p50),
            line("p99", |times| times.p99),
            line("p99.9", |times| times.p99_9),
        ],
    };
    let throttled = Lines {
        title: "Share of the time in which somebody waited".to_owned(),
        x,
        y: Axis { label: "throttled".to_owned(), unit: Unit::Share, logarithmic: false },
        series: vec![Series {
            name: "throttled".to_owned(),
            points: swept.points.iter().map(|point| (point.value as f64, point.throttled)).collect(),
        }],
    };
    let row = |point: &super::sweep::Point| {
        let Percentiles { p50, p99, p99_9, .. } = point.latency_ns;
        let mut row = vec![swept.shown(point.value)];
        row.extend([p50, p99, p99_9].map(figures::time));
        row.extend([figures::count(point.iops), figures::bytes(point.bps), figures::share(point.throttled)]);
        row
    };
    let measure = |point: &super::sweep::Point| Measure {
        name: format!("{}={}: latency p99", swept.limit, swept.shown(point.value)),
        unit: Unit::Nanoseconds,
        better: Better::Lower,
        samples: vec![point.latency_ns.p99 as f64],
        samples_are: SamplesAre::Exact,
    };
    let columns = [swept.limit, "p50", "p99", "p99.9", "IOPS", "bytes/s", "throttled"];
    Findings {
        summary: swept.p99.iter().map(|bound| swept.sentence(bound)).collect(),
        measures: swept.points.iter().map(measure).collect(),
        tables: vec![Table {
            title: format!("What each {} would have done", swept.limit),
            columns: columns.map(str::to_owned).into(),
            rows: swept.points.iter().map(row).collect(),
            note: None,
        }],
        charts: vec![Chart::Lines(latency), Chart::Lines(throttled)],
    }
}

/// Of a story.
pub(super) fn of_story(story: &Story) -> Findings {
    let measure = |(name, value): &(String, f64)| Measure {
        name: name.clone(),
        unit: Unit::Count,
        better: Better::Higher,
        samples: vec![*value],
        samples_are: SamplesAre::Exact,
    };
    Findings {
        measures: story.measures.iter().map(measure).collect(),
        tables: vec![story.table()],
        ..Findings::default()
    }
}

fn sentence(what: &str, line: &Line) -> String {
    let p99 = |figures: &Figures| figures::time(figures.latency_ns.p99);
    let before = line
        .before
        .as_ref()
        .map_or_else(String::new, |before| format!(" instead of {} without limits", p99(before)));
    let held = line.held_by.first().map_or_else(String::new, |held| format!(", mostly for {}", held.limit));
    format!(
        "{what} {}: 99 of 100 requests within {}{before}; somebody waited {} of the time{held}.",
        line.name,
        p99(&line.after),
        figures::share(line.throttled)
    )
}

fn table(summary: &Summary) -> Table {
    let columns = [
        "",
        "limits",
        "requests",
        "IOPS",
        "bytes/s",
        "p50",
        "p99",
        "p99.9",
        "max",
        "throttled",
        "longest queue",
    ];
    let mut rows = Vec::new();
    for (what, line) in summary.lines() {
        let both = line.before.iter().map(|before| (false, before)).chain([(true, &line.after)]);
        for (with, figures) in both {
            let Percentiles { p50, p99, p99_9, max, .. } = figures.latency_ns;
            let mut row =
                vec![format!("{what} {}", line.name), if with { "with" } else { "without" }.to_owned()];
            row.extend([
                figures.requests.to_string(),
                figures::count(figures.iops),
                figures::bytes(figures.bps),
            ]);
            row.extend([p50, p99, p99_9, max].map(figures::time));
            row.extend(match with {
                true => [figures::share(line.throttled), line.longest_queue.to_string()],
                false => ["-".to_owned(), "-".to_owned()],
            });
            rows.push(row);
        }
    }
    Table {
        title: "What the limits did".to_owned(),
        columns: columns.map(str::to_owned).into(),
        rows,
        note: Some(
            "Without limits: on the same device, as it is modelled. Times are right within a hundredth."
                .to_owned(),
        ),
    }
}

fn charts(outcome: &Outcome) -> Vec<Chart> {
    let seconds = || Axis { label: "time".to_owned(), unit: Unit::Seconds, logarithmic: false };
    let mut done = Vec::new();
    let mut waiting = Vec::new();
    let mut charts = Vec::new();
    for (disk, of) in outcome.world.disks.iter().zip(&outcome.disks).take(DRAWN) {
        let Some(drawn) = of.after.drawn.as_ref().filter(|_| of.after.requests > 0) else { continue };
        let (points, interval_s) = drawn.done.points(MOST_POINTS);
        let rates = points.into_iter().map(|(at, count)| (at, count as f64 / interval_s)).collect();
        done.push(Series { name: disk.name.clone(), points: rates });
        let (points, _) = drawn.waiting.points(MOST_POINTS);
        let depths = points.into_iter().map(|(at, depth)| (at, depth as f64)).collect();
        waiting.push(Series { name: disk.name.clone(), points: depths });
        charts.extend(distribution(&disk.name, &of.after, of.before.as_ref()));
    }
    let over_time = |title: &str, label: &str, unit, series: Vec<Series>| {
        let series: Vec<_> = series.into_iter().filter(|series| !series.points.is_empty()).collect();
        let y = Axis { label: label.to_owned(), unit, logarithmic: false };
        (!series.is_empty()).then(|| Chart::Lines(Lines { title: title.to_owned(), x: seconds(), y, series }))
    };
    let first = [
        over_time("Requests done a second, with the limits", "IOPS", Unit::Iops, done),
        over_time("Most requests that waited for limits", "waiting", Unit::Count, waiting),
    ];
    first.into_iter().flatten().chain(charts).collect()
}

/// Which share of requests took no longer, before and after.
fn distribution(name: &str, after: &Tally, before: Option<&Tally>) -> Option<Chart> {
    let line = |name: &str, tally: &Tally| {
        let mut points = tally.latency.distribution();
        // Evenly, and the last in any case.
        let step = points.len().div_ceil(MOST_POINTS).max(1);
        let last = points.last().copied();
        points = points.into_iter().step_by(step).collect();
        points.extend(last.filter(|last| points.last() != Some(last)));
        Series { name: name.to_owned(), points }
    };
    let series = before.map(|before| line("without", before)).into_iter().chain([line("with limits", after)]);
    let series: Vec<_> = series.filter(|series| !series.points.is_empty()).collect();
    (!series.is_empty()).then(|| {
        Chart::Lines(Lines {
            title: format!("{name}: share of requests that took no longer"),
            x: Axis { label: "latency".to_owned(), unit: Unit::Nanoseconds, logarithmic: true },
            y: Axis { label: "requests".to_owned(), unit: Unit::Share, logarithmic: false },
            series,
        })
    })
}
