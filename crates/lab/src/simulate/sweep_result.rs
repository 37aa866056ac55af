//! Result of a sweep: a simulation for each value, and the value that keeps latency below a bound:
//! the smallest for the requests that the limit throttles, the largest for those of their
//! neighbours. Traces are read again for each value.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use console::{
    figures,
    table::{TextTable, columns},
};
use policy::throttle::LimitSetting;
use serde::Serialize;
use simulator::tally::RequestStatistics;

use super::{drive::SimulationOutcome, sweep::SweepValues};
use crate::latencies::Percentiles;

/// Maximum number of disks with a separate column.
const MAX_COLUMNS: usize = 8;

/// Target whose limit varies, and target whose requests are judged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SweptNames<'a> {
    /// A disk or group; `None` is the only group, or all disks.
    pub(crate) limited: Option<&'a str>,
    /// A disk or group; `None` judges the limited target.
    pub(crate) judged: Option<&'a str>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct SweepPoint {
    pub(crate) value: u64,
    /// Latencies of the limited target, as are the figures below.
    pub(crate) latency_ns: Percentiles,
    pub(crate) iops: f64,
    pub(crate) bps: f64,
    /// Share of time in which requests were throttled, 0 to 1.
    pub(crate) throttled: f64,
    /// Each disk with requests, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) disks: Vec<DiskP99>,
    /// P99 of the judged target.
    #[serde(skip)]
    pub(crate) judged_p99_ns: u64,
    #[serde(skip)]
    pub(crate) judges: JudgedDisks,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct DiskP99 {
    pub(crate) name: String,
    pub(crate) p99_ns: u64,
}

/// The direction that helps the judged disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JudgedDisks {
    /// Disks that the limit throttles: a higher one never makes them slower.
    Limited,
    /// Neighbours of these disks: a lower limit leaves them more.
    Neighbours,
    /// Disks of both kinds.
    Both,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct SweepResult {
    pub(crate) limit: &'static str,
    pub(crate) points: Vec<SweepPoint>,
    /// The value that keeps the p99 below the bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p99: Option<P99Bound>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) partial: Option<String>,
    #[serde(skip)]
    pub(crate) setting: Option<LimitSetting>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct P99Bound {
    pub(crate) below_ns: u64,
    /// The judged disk or group, if one was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) of: Option<String>,
    #[serde(flatten)]
    pub(crate) kept: BestLimit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BestLimit {
    /// This and all larger values keep it.
    Smallest(Option<u64>),
    /// This and all smaller values keep it.
    Largest(Option<u64>),
}

impl SweepPoint {
    /// Evaluates a simulation.
    ///
    /// # Errors
    /// Fails if the judged target has no requests.
    pub(crate) fn new(
        value: u64,
        outcome: &SimulationOutcome,
        between: SweptNames<'_>,
    ) -> anyhow::Result<Self> {
        let world = &outcome.world;
        let is_of = |index: usize, name: Option<&str>| {
            let disk = &world.disks[index];
            let named = |name: &str| {
                disk.name == name || world.groups_above(disk).any(|group| world.groups[group].name == name)
            };
            name.is_none_or(named)
        };
        let used = || outcome.disks.iter().enumerate().filter(|(_, disk)| disk.after.requests > 0);
        let (mut all, mut judged) = (RequestStatistics::default(), RequestStatistics::default());
        let (mut throttled, mut of_limited, mut of_neighbours) = (0.0, false, false);
        for (index, disk) in used() {
            let is_limited = is_of(index, between.limited);
            if is_limited {
                all.add(&disk.after);
                // Of several disks the most throttled one counts; a group has its own figure,
                // below.
                throttled = f64::max(throttled, disk.after.share(disk.queue.throttled_ns));
            }
            if is_of(index, between.judged.or(between.limited)) {
                judged.add(&disk.after);
                of_limited |= is_limited;
                of_neighbours |= !is_limited;
            }
        }
        if let Some(name) = between.judged.filter(|_| judged.requests == 0) {
            anyhow::bail!(
                "--p99-of {name}: there are no requests of a disk or group of this name (weir \
                 trace info lists the disks)"
            );
        }
        let group = between.limited.and_then(|name| world.groups.iter().position(|group| group.name == name));
        let group = group.or((between.limited.is_none() && world.groups.len() == 1).then_some(0));
        if let Some(group) = group {
            throttled = all.share(outcome.groups[group].throttled_ns);
        }
        let disks = used().map(|(index, disk)| DiskP99 {
            name: world.disks[index].name.clone(),
            p99_ns: Percentiles::of(&disk.after.latency).p99,
        });
        let disks: Vec<_> = disks.collect();
        Ok(Self {
            value,
            latency_ns: Percentiles::of(&all.latency),
            iops: all.per_second(all.requests),
            bps: all.per_second(all.bytes),
            throttled,
            disks: if disks.len() > 1 { disks } else { Vec::new() },
            judged_p99_ns: Percentiles::of(&judged.latency).p99,
            judges: match (of_limited, of_neighbours) {
                (true, true) => JudgedDisks::Both,
                (false, true) => JudgedDisks::Neighbours,
                _ => JudgedDisks::Limited,
            },
        })
    }
}

/// Runs `simulate` for each value. Drops values after an interruption; returns the first error.
pub(crate) fn sweep<T: Send>(
    values: &[u64],
    threads: usize,
    simulate: impl Fn(u64) -> anyhow::Result<Option<T>> + Sync,
    report_progress: impl Fn(usize) + Sync,
) -> anyhow::Result<Vec<T>> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads.min(values.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&value) = values.get(index) else { return };
                    let result = simulate(value);
                    let is_last = matches!(result, Err(_) | Ok(None));
                    results.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
                    // No thread starts another value after an error or an interruption.
                    if is_last {
                        next.store(values.len(), Ordering::Relaxed);
                    }
                    report_progress(done.fetch_add(1, Ordering::Relaxed) + 1);
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    // Threads finish in any order; results are in order of values.
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().filter_map(|(_, result)| result.transpose()).collect()
}

impl SweepResult {
    /// With `below`, a bound and the name of the judged target, also finds the limit that keeps it.
    pub(crate) fn new(
        sweep: &SweepValues,
        points: Vec<SweepPoint>,
        below: Option<(u64, Option<&str>)>,
        partial: Option<String>,
    ) -> Self {
        let p99 = below.map(|(below_ns, judged)| {
            let is_below = |point: &&SweepPoint| point.judged_p99_ns < below_ns;
            let judges = points.first().map_or(JudgedDisks::Limited, |point| point.judges);
            // From the end that helps most: an isolated value below the bound does not count.
            let best = match judges {
                JudgedDisks::Limited | JudgedDisks::Both => {
                    let keep = points.iter().rev().take_while(is_below);
                    BestLimit::Smallest(keep.last().map(|point| point.value))
                }
                JudgedDisks::Neighbours => {
                    let keep = points.iter().take_while(is_below);
                    BestLimit::Largest(keep.last().map(|point| point.value))
                }
            };
            P99Bound { below_ns, of: judged.map(str::to_owned), kept: best }
        });
        Self { limit: sweep.setting.name(), points, p99, partial, setting: Some(sweep.setting) }
    }

    pub(crate) fn shown(&self, value: u64) -> String {
        match self.setting {
            Some(setting) if setting.is_size() => settings::exact_size(value),
            _ => value.to_string(),
        }
    }

    /// Names of the disks with a separate column.
    pub(crate) fn columns(&self) -> Vec<String> {
        let disks = self.points.first().map_or(&[][..], |point| &point.disks);
        disks.iter().take(MAX_COLUMNS).map(|disk| disk.name.clone()).collect()
    }

    pub(crate) fn text(&self) -> String {
        let disks: Vec<_> = self.columns().iter().map(|name| format!("P99 {name}")).collect();
        let numbers = [self.limit, "P50", "P99", "P99.9", "MAX", "IOPS", "BYTES/S", "THROTTLED"].into_iter();
        let numbers: Vec<_> = numbers.chain(disks.iter().map(String::as_str)).collect();
        let mut table = TextTable::new(columns(&[], &numbers));
        for point in &self.points {
            let Percentiles { p50, p99, p99_9, max, .. } = point.latency_ns;
            let mut row = vec![self.shown(point.value)];
            row.extend([p50, p99, p99_9, max].map(figures::time));
            row.extend([
                figures::count(point.iops),
                figures::bytes(point.bps),
                figures::share(point.throttled),
            ]);
            row.extend(self.p99_of_disks(point));
            table.row(row);
        }
        let mut text = table.render(false);
        if let Some(bound) = &self.p99 {
            text += &format!("\n{}\n", self.sentence(bound));
        }
        if let Some(why) = &self.partial {
            text += &format!("\nIncomplete: {why}.\n");
        }
        text
    }

    /// A cell for each of [`columns`](Self::columns).
    pub(crate) fn p99_of_disks(&self, point: &SweepPoint) -> impl Iterator<Item = String> {
        let p99_of = |name: String| point.disks.iter().find(|disk| disk.name == name).map(|disk| disk.p99_ns);
        let cells = self.columns().into_iter().map(p99_of);
        cells
            .map(|p99_ns| p99_ns.map_or_else(|| "-".to_owned(), figures::time))
            .collect::<Vec<_>>()
            .into_iter()
    }

    pub(crate) fn sentence(&self, bound: &P99Bound) -> String {
        let subject = bound.of.as_ref().map_or_else(String::new, |name| format!(" of {name}"));
        let keeps = format!("keeps 99 of 100 requests{subject} below {}", figures::time(bound.below_ns));
        let (which, value) = match bound.kept {
            BestLimit::Smallest(value) => ("smallest", value),
            BestLimit::Largest(value) => ("largest", value),
        };
        match value {
            Some(value) if self.is_indifferent() => {
                format!(
                    "Each of these {keeps}, {}={} as well: the limit makes no difference to it.",
                    self.limit,
                    self.shown(value)
                )
            }
            Some(value) => format!("The {which} that {keeps}: {}={}", self.limit, self.shown(value)),
            None => format!("None of these {keeps} ({}).", self.no_value_reason()),
        }
    }

    /// True if every value gives the judged disks the same p99, within the resolution of a
    /// histogram.
    fn is_indifferent(&self) -> bool {
        let p99s = || self.points.iter().map(|point| point.judged_p99_ns);
        let (min, max) = (p99s().min().unwrap_or(0), p99s().max().unwrap_or(0));
        self.points.len() > 1 && max - min <= min / 50
    }

    /// Reason why no value keeps the bound, with the change that helps, if any.
    fn no_value_reason(&self) -> &'static str {
        let last = self.points.last();
        match last.map(|point| point.judges) {
            Some(JudgedDisks::Neighbours) if self.is_indifferent() => {
                "this limit makes no difference to it: another limit, of a disk or a group, or its \
                 device causes the latency"
            }
            Some(JudgedDisks::Neighbours) => "try smaller ones",
            _ if last.is_some_and(|point| point.throttled == 0.0) => {
                "larger limits do not help: with the largest no request waits, so the device causes \
                 the latency"
            }
            _ => "try larger ones",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swept(judges: JudgedDisks, throttled: f64, p99s: [u64; 4]) -> SweepResult {
        let point = |(value, p99)| SweepPoint {
            value,
            latency_ns: Percentiles { mean: 0.0, p50: 0, p90: 0, p99, p99_9: 0, max: 0 },
            iops: 0.0,
            bps: 0.0,
            throttled,
            disks: Vec::new(),
            judged_p99_ns: p99,
            judges,
        };
        let sweep: SweepValues = "iops-total=1..4:1".parse().unwrap();
        let points = (1..).zip(p99s).map(point).collect();
        SweepResult::new(&sweep, points, Some((100, Some("db"))), None)
    }

    fn best_limit(judges: JudgedDisks, p99s: [u64; 4]) -> BestLimit {
        swept(judges, 0.5, p99s).p99.unwrap().kept
    }

    #[test]
    fn smallest_limit_starts_the_values_that_all_meet_the_bound() {
        let smallest = |p99s| best_limit(JudgedDisks::Limited, p99s);
        assert_eq!(smallest([400, 300, 90, 50]), BestLimit::Smallest(Some(3)));
        assert_eq!(smallest([90, 300, 90, 50]), BestLimit::Smallest(Some(3)));
        assert_eq!(smallest([400, 300, 200, 100]), BestLimit::Smallest(None));
        assert_eq!(smallest([10, 10, 10, 10]), BestLimit::Smallest(Some(1)));
    }

    #[test]
    fn neighbours_target_is_kept_up_to_the_reported_limit() {
        let largest = |p99s| best_limit(JudgedDisks::Neighbours, p99s);
        assert_eq!(largest([50, 90, 300, 400]), BestLimit::Largest(Some(2)));
        assert_eq!(largest([50, 90, 300, 90]), BestLimit::Largest(Some(2)));
        assert_eq!(largest([100, 200, 300, 400]), BestLimit::Largest(None));
    }

    #[test]
    fn advice_names_the_helpful_direction() {
        let sentence_of = |judges, throttled, p99s| {
            let swept = swept(judges, throttled, p99s);
            swept.sentence(swept.p99.as_ref().unwrap())
        };
        assert_eq!(
            sentence_of(JudgedDisks::Neighbours, 0.5, [50, 90, 300, 400]),
            "The largest that keeps 99 of 100 requests of db below 100ns: iops-total=2"
        );
        let none = "None of these keeps 99 of 100 requests of db below 100ns";
        for (judges, throttled, p99s, why) in [
            (JudgedDisks::Limited, 0.5, [400, 300, 200, 150], "try larger ones"),
            (JudgedDisks::Limited, 0.0, [400, 300, 200, 200], "larger limits do not help"),
            (JudgedDisks::Neighbours, 0.5, [200, 300, 400, 500], "try smaller ones"),
            (JudgedDisks::Neighbours, 0.5, [500, 500, 500, 500], "this limit makes no difference to it"),
        ] {
            let text = sentence_of(judges, throttled, p99s);
            assert!(text.starts_with(&format!("{none} ({why}")), "{text}");
        }
        let text = sentence_of(JudgedDisks::Neighbours, 0.5, [50, 50, 50, 50]);
        assert!(text.starts_with("Each of these keeps") && text.contains("no difference"), "{text}");
    }

    #[test]
    fn sweep_is_independent_of_the_number_of_threads() {
        let values: Vec<u64> = (0..100).collect();
        for threads in [1, 4] {
            assert_eq!(sweep(&values, threads, |value| Ok(Some(value * 2)), |_| ()).unwrap()[99], 198);
        }
        let failed = sweep(
            &values,
            2,
            |value| if value == 3 { anyhow::bail!("three") } else { Ok(Some(value)) },
            |_| (),
        );
        assert_eq!(failed.unwrap_err().to_string(), "three");
        let stopped = sweep(&values, 1, |value| Ok((value < 5).then_some(value)), |_| ()).unwrap();
        assert_eq!(stopped, [0, 1, 2, 3, 4]);
    }
}
