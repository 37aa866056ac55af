//! The result file of a run: measures to compare, and charts. A direction without completed
//! requests is omitted.

use console::figures;
use simulator::over_time::TimeSeries;

use crate::{
    latencies::{self, Counts, Latencies, percentile_names, percentiles},
    load::{LoadOutcome, SecondCounts},
    result::{
        Better, Chart, ChartAxis, ChartSeries, Findings, Lines, Measure, MeasureUnit, ResultTable, SamplesAre,
    },
};

/// Minimum number of complete seconds for one sample per second; with fewer, the whole run is one
/// sample.
const FEWEST_SECONDS: usize = 3;
/// Largest number of points of a line over time.
const MAX_POINTS: usize = 256;

struct DirectionFindings<'a> {
    name: &'static str,
    latencies: &'a Latencies,
    requests: fn(&SecondCounts) -> u64,
    latency_sum_ns: fn(&SecondCounts) -> u64,
    latency_counts: fn(&SecondCounts) -> &Counts,
    over_time: &'a TimeSeries,
}

pub(super) fn findings(outcome: &LoadOutcome, lines: Vec<String>) -> Findings {
    let measured = &outcome.measured;
    let both = [
        DirectionFindings {
            name: "read",
            latencies: &measured.reads,
            requests: |second| second.reads,
            latency_sum_ns: |second| second.reads_ns,
            latency_counts: |second| &second.read_latencies,
            over_time: &measured.reads_over_time,
        },
        DirectionFindings {
            name: "write",
            latencies: &measured.writes,
            requests: |second| second.writes,
            latency_sum_ns: |second| second.writes_ns,
            latency_counts: |second| &second.write_latencies,
            over_time: &measured.writes_over_time,
        },
    ];
    let directions: Vec<_> = both.into_iter().filter(|direction| !direction.latencies.is_empty()).collect();
    let mut charts = Vec::new();
    charts.extend(over_time(&directions));
    if !directions.is_empty() {
        charts.push(distribution(&directions));
    }
    Findings {
        summary: lines,
        measures: directions.iter().flat_map(|direction| measures(outcome, direction)).collect(),
        tables: vec![table(outcome, &directions)],
        charts,
        ..Findings::default()
    }
}

fn measures(outcome: &LoadOutcome, direction: &DirectionFindings<'_>) -> Vec<Measure> {
    let DirectionFindings { name, latencies, requests, latency_sum_ns, latency_counts, .. } = direction;
    let seconds = &outcome.measured.seconds;
    // With too few seconds for a confidence interval, the run is one sample, reported without an
    // interval.
    let are_few = seconds.len() < FEWEST_SECONDS;
    let rates = if are_few {
        vec![outcome.iops(latencies.len())]
    } else {
        seconds.iter().map(|second| requests(second) as f64).collect()
    };
    let means = seconds.iter().filter(|second| requests(second) > 0);
    let means: Vec<f64> =
        means.map(|second| latency_sum_ns(second) as f64 / requests(second) as f64).collect();
    let means = if are_few || means.is_empty() { vec![latencies.mean()] } else { means };
    let latency = |statistic: &str, samples| {
        Measure::new(format!("{name} latency, {statistic}"), MeasureUnit::Nanoseconds, Better::Lower, samples)
    };
    let rate = Measure::new(format!("{name} IOPS"), MeasureUnit::Iops, Better::Higher, rates);
    let mean = latency("mean", means);
    let each: Vec<Latencies> =
        seconds.iter().map(|second| latencies::from_counts(latency_counts(second))).collect();
    let percentile = |(quantile, value): (&str, u64)| {
        // A second has a sample only if it has enough requests for the percentile.
        let samples = latencies::percentile_of_each(each.iter(), quantile);
        latency(quantile, if samples.len() < FEWEST_SECONDS { vec![value as f64] } else { samples })
    };
    let all = [rate, mean].into_iter().chain(percentiles(latencies).map(percentile));
    all.map(|measure| Measure { samples_are: SamplesAre::Seconds, ..measure }).collect()
}

fn table(outcome: &LoadOutcome, directions: &[DirectionFindings<'_>]) -> ResultTable {
    let flushes = &outcome.measured.flushes;
    let rows = directions.iter().map(|direction| (direction.name, direction.latencies));
    let flushes = (!flushes.is_empty()).then_some(("flush", flushes));
    let row = |(name, latencies): (&str, &Latencies)| {
        let iops = figures::count(outcome.iops(latencies.len()));
        let mut cells = vec![name.to_owned(), latencies.len().to_string(), iops];
        cells.push(figures::time(latencies.min()));
        cells.push(figures::time(latencies.mean() as u64));
        cells.extend(percentiles(latencies).map(|(_, value)| figures::time(value)));
        cells.push(figures::time(latencies.max()));
        cells
    };
    let columns = ["", "requests", "a second", "min", "mean"].into_iter();
    let columns = columns.chain(percentile_names()).chain(["max"]);
    ResultTable::new("Requests and their latencies", columns, rows.chain(flushes).map(row).collect())
}

fn over_time(directions: &[DirectionFindings<'_>]) -> Option<Chart> {
    let line = |direction: &DirectionFindings<'_>| {
        // Coarse enough for a legible chart, fine enough to show a drift.
        let points = direction.over_time.joined_for_rates(direction.over_time, MAX_POINTS).rates();
        ChartSeries { name: direction.name.to_owned(), points }
    };
    let series: Vec<_> = directions.iter().map(line).filter(|series| series.points.len() > 1).collect();
    (!series.is_empty()).then(|| {
        Chart::Lines(Lines {
            title: "Requests answered a second".to_owned(),
            x: ChartAxis::new("time", MeasureUnit::Seconds),
            y: ChartAxis::new("requests", MeasureUnit::Iops),
            steps: false,
            series,
            limits: Vec::new(),
            note: None,
        })
    })
}

fn distribution(directions: &[DirectionFindings<'_>]) -> Chart {
    let line = |direction: &DirectionFindings<'_>| {
        let (name, points) = (direction.name.to_owned(), latencies::distribution(direction.latencies));
        ChartSeries { name, points }
    };
    let series = directions.iter().map(line).collect();
    Chart::Lines(Lines::distribution("Cumulative share of requests by latency", series))
}

#[cfg(test)]
mod tests {
    use policy::time::Duration;

    use super::*;
    use crate::load::Measured;

    fn outcome(seconds: usize) -> LoadOutcome {
        let mut measured = Measured::default();
        (1..=1000).for_each(|number| measured.reads.record(number * 1000).unwrap());
        let read_latencies = (1..=200).map(|number| (number * 1000, 1)).collect();
        measured.seconds =
            vec![
                SecondCounts { reads: 200, reads_ns: 200_000, read_latencies, ..SecondCounts::default() };
                seconds
            ];
        (0..800).for_each(|number| measured.reads_over_time.note(number * 5_000_000, 1));
        LoadOutcome { elapsed: Duration::from_secs(4), measured, ..LoadOutcome::default() }
    }

    #[test]
    fn seconds_are_samples_unless_too_short_for_a_percentile() {
        let found = findings(&outcome(4), vec!["told".to_owned()]);
        let names: Vec<_> = found.measures.iter().map(|measure| measure.name.as_str()).collect();
        assert_eq!(names[..3], ["read IOPS", "read latency, mean", "read latency, p50"]);
        assert_eq!(found.measures[0].samples, [200.0; 4]);
        assert_eq!(found.measures[1].samples, [1000.0; 4]);
        let counts: Vec<_> = found.measures[2..].iter().map(|measure| measure.samples.len()).collect();
        assert_eq!(counts, [4, 4, 4, 1, 1], "p50, p90 and p99 of 200 requests; p99.9 needs 1000");
        assert!((found.measures[3].samples[0] / 180e3 - 1.0).abs() < 0.01, "{:?}", found.measures[3]);
        assert!(found.measures.iter().all(|measure| measure.samples_are == SamplesAre::Seconds));
        assert_eq!(findings(&outcome(2), vec![]).measures[0].samples, [250.0], "all of it");
        assert!(found.tables[0].rows.iter().all(|row| row.len() == found.tables[0].columns.len()));
    }

    #[test]
    fn distribution_is_monotonic_up_to_the_maximum() {
        let found = findings(&outcome(4), vec![]);
        assert_eq!(found.charts.len(), 2);
        for chart in &found.charts {
            let Chart::Lines(lines) = chart else { panic!("{chart:?}") };
            let points = &lines.series[0].points;
            assert!(points.windows(2).all(|pair| pair[0].0 <= pair[1].0), "{points:?}");
            assert!(points.iter().all(|point| point.0 > 0.0));
        }
        let Chart::Lines(lines) = &found.charts[1] else { panic!() };
        let (slowest, share) = *lines.series[0].points.last().unwrap();
        assert!((1e6..1.001e6).contains(&slowest) && share > 0.9999, "{slowest} {share}");
    }

    #[test]
    fn short_run_has_a_line_of_many_points() {
        let found = findings(&outcome(3), vec![]);
        let Chart::Lines(lines) = &found.charts[0] else { panic!() };
        let rates = &lines.series[0].points;
        assert!(rates.len() >= 20, "{rates:?}");
        assert!(rates.iter().all(|(_, rate)| (180.0..220.0).contains(rate)), "{rates:?}");
    }

    #[test]
    fn empty_run_has_no_findings() {
        let found = findings(&LoadOutcome::default(), vec![]);
        assert!(found.measures.is_empty() && found.charts.is_empty());
    }
}
