//! Result file of a cluster simulation, with charts over time.

use super::{
    run::{ClusterOutcome, ClusterSample},
    summary::ClusterSummary,
};
use crate::result::{
    Better, Chart, ChartAxis, ChartSeries, Findings, Lines, Measure, MeasureUnit, SamplesAre,
};

const MAX_POINTS: usize = 512;

pub(super) fn of(summary: &ClusterSummary, outcome: &ClusterOutcome) -> Findings {
    let exact = |name: &str, unit, value: f64| Measure {
        samples_are: SamplesAre::Exact,
        ..Measure::new(name, unit, Better::Lower, vec![value])
    };
    let mut measures = vec![exact("most in force, of the limit", MeasureUnit::Share, summary.most_in_force)];
    for followed in &summary.followed {
        for (which, ticks) in [("median", followed.median), ("worst", followed.worst)] {
            let name = format!("ticks until {} have their share, {which}", followed.name);
            measures.extend(ticks.map(|ticks| exact(&name, MeasureUnit::Count, ticks as f64)));
        }
    }
    for (when, figures) in [("steady", summary.steady.as_ref()), ("all the time", Some(&summary.all))] {
        let Some(figures) = figures else { continue };
        let name = |figure: &str| format!("{when}: {figure}");
        measures.push(exact(
            &name("messages a second at etcd for 100 hosts"),
            MeasureUnit::Count,
            figures.requests_per_100_hosts,
        ));
        measures.push(exact(
            &name("bytes written to etcd"),
            MeasureUnit::BytesPerSecond,
            figures.written_bytes,
        ));
        measures.extend(
            figures
                .unused
                .map(|unused| exact(&name("unused while a host waits"), MeasureUnit::Share, unused)),
        );
    }
    Findings {
        summary: vec![format!("{}.", summary.title()), summary.safety()],
        measures,
        charts: charts(summary.hosts, outcome),
        ..Findings::default()
    }
}

fn charts(hosts: usize, outcome: &ClusterOutcome) -> Vec<Chart> {
    let step = outcome.samples.len().div_ceil(MAX_POINTS).max(1);
    // Each point is the average of several ticks.
    let line = |name: &str, value_of: &dyn Fn(&ClusterSample) -> f64| ChartSeries {
        name: name.to_owned(),
        points: outcome
            .samples
            .chunks(step)
            .map(|samples| {
                let sum: f64 = samples.iter().map(value_of).sum();
                (samples[0].at_ns as f64 / 1e9, sum / samples.len() as f64)
            })
            .collect(),
    };
    let over_time = |title: &str, label: &str, unit, series| {
        let (x, y) = (ChartAxis::new("time", MeasureUnit::Seconds), ChartAxis::new(label, unit));
        Chart::Lines(Lines {
            title: title.to_owned(),
            x,
            y,
            steps: false,
            series,
            limits: Vec::new(),
            note: None,
        })
    };
    let pairs = || outcome.samples.windows(2);
    let rate_of = |count_of: fn(&ClusterSample) -> u64| -> Vec<(f64, f64)> {
        let pairs: Vec<_> = pairs().collect();
        pairs
            .chunks(step)
            .map(|pairs| {
                let (first, last) = (&pairs[0][0], &pairs[pairs.len() - 1][1]);
                let seconds = (last.at_ns - first.at_ns) as f64 / 1e9;
                let count = (count_of(last) - count_of(first)) as f64 / seconds * 100.0 / hosts as f64;
                (last.at_ns as f64 / 1e9, count)
            })
            .collect()
    };
    let named = |name: &str, points| ChartSeries { name: name.to_owned(), points };
    vec![
        over_time(
            "Of the limit",
            "part of the limit",
            MeasureUnit::Share,
            vec![
                line("passed", &|sample| sample.passed / outcome.max_requests),
                line("in force", &|sample| sample.in_force),
            ],
        ),
        over_time(
            "How near shares are to the ideal",
            "part",
            MeasureUnit::Share,
            vec![
                line("hosts within 5 %", &|sample| sample.near),
                line("deviation, of the limit", &|sample| sample.off),
            ],
        ),
        over_time(
            "Messages a second at etcd for 100 hosts",
            "messages a second",
            MeasureUnit::Count,
            vec![
                named("requests", rate_of(|sample| sample.traffic.requests())),
                named("sent by watches", rate_of(|sample| sample.traffic.events)),
            ],
        ),
    ]
}
