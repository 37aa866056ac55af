//! A sweep's result: a simulation for each value, and the smallest value that keeps latency below a
//! bound. Traces are read anew for each value.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use console::{
    figures,
    table::{Table, columns},
};
use policy::throttle::Setting;
use serde::Serialize;

use super::{drive::Outcome, sweep::Sweep, tally::Tally};
use crate::latencies::Percentiles;

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Point {
    pub(crate) value: u64,
    pub(crate) latency_ns: Percentiles,
    pub(crate) iops: f64,
    pub(crate) bps: f64,
    /// The share of time in which requests waited, 0 to 1.
    pub(crate) throttled: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Swept {
    pub(crate) limit: &'static str,
    pub(crate) points: Vec<Point>,
    /// The smallest value from which on the p99 stays below the bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p99: Option<Bound>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) partial: Option<String>,
    #[serde(skip)]
    pub(crate) setting: Option<Setting>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Bound {
    pub(crate) below_ns: u64,
    pub(crate) smallest: Option<u64>,
}

impl Point {
    /// For the named disk or group, or all disks together.
    pub(crate) fn new(value: u64, outcome: &Outcome, of: Option<&str>) -> Self {
        let world = &outcome.world;
        let is_meant = |index: usize| {
            let disk = &world.disks[index];
            let named = |name: &str| {
                disk.name == name || world.groups_above(disk).any(|group| world.groups[group].name == name)
            };
            of.is_none_or(named)
        };
        let mut all = Tally::default();
        let mut throttled = 0.0;
        for (_, disk) in outcome.disks.iter().enumerate().filter(|(index, _)| is_meant(*index)) {
            all.add(&disk.after);
            throttled = f64::max(throttled, disk.after.share(disk.queue.throttled_ns));
        }
        let group = of.and_then(|name| world.groups.iter().position(|group| group.name == name));
        let group = group.or((of.is_none() && world.groups.len() == 1).then_some(0));
        if let Some(group) = group {
            throttled = all.share(outcome.groups[group].throttled_ns);
        }
        Self {
            value,
            latency_ns: Percentiles::of(&all.latency),
            iops: all.a_second(all.requests),
            bps: all.a_second(all.bytes),
            throttled,
        }
    }
}

/// Runs `simulate` for each value. Drops values after an interruption; returns the first error.
pub(crate) fn sweep<T: Send>(
    values: &[u64],
    threads: usize,
    simulate: impl Fn(u64) -> anyhow::Result<Option<T>> + Sync,
    tell: impl Fn(usize) + Sync,
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
                    if is_last {
                        next.store(values.len(), Ordering::Relaxed);
                    }
                    tell(done.fetch_add(1, Ordering::Relaxed) + 1);
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().filter_map(|(_, result)| result.transpose()).collect()
}

impl Swept {
    /// `below` also finds the smallest sufficient limit.
    pub(crate) fn new(
        sweep: &Sweep,
        points: Vec<Point>,
        below_ns: Option<u64>,
        partial: Option<String>,
    ) -> Self {
        let p99 = below_ns.map(|below_ns| {
            // From the largest down: a value that is below only by chance does not count.
            let keep = points.iter().rev().take_while(|point| point.latency_ns.p99 < below_ns);
            Bound { below_ns, smallest: keep.last().map(|point| point.value) }
        });
        Self { limit: sweep.setting.name(), points, p99, partial, setting: Some(sweep.setting) }
    }

    pub(crate) fn shown(&self, value: u64) -> String {
        match self.setting {
            Some(setting) if setting.is_size() => settings::exact_size(value),
            _ => value.to_string(),
        }
    }

    pub(crate) fn text(&self) -> String {
        let numbers = [self.limit, "P50", "P99", "P99.9", "MAX", "IOPS", "BYTES/S", "THROTTLED"];
        let mut table = Table::new(columns(&[], &numbers));
        for point in &self.points {
            let Percentiles { p50, p99, p99_9, max, .. } = point.latency_ns;
            let mut row = vec![self.shown(point.value)];
            row.extend([p50, p99, p99_9, max].map(figures::time));
            row.extend([
                figures::count(point.iops),
                figures::bytes(point.bps),
                figures::share(point.throttled),
            ]);
            table.row(row);
        }
        let mut text = table.render(false);
        if let Some(bound) = &self.p99 {
            text += &format!("\n{}\n", self.sentence(bound));
        }
        if let Some(why) = &self.partial {
            text += &format!("\nNot complete: {why}.\n");
        }
        text
    }

    pub(crate) fn sentence(&self, bound: &Bound) -> String {
        let below = figures::time(bound.below_ns);
        match bound.smallest {
            Some(value) => {
                let value = self.shown(value);
                format!("The smallest that keeps 99 of 100 requests below {below}: {}={value}", self.limit)
            }
            None => format!("None of these keeps 99 of 100 requests below {below} (try larger ones)."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_is_that_from_which_on_all_keep_below() {
        let point = |(value, p99)| Point {
            value,
            latency_ns: Percentiles { mean: 0.0, p50: 0, p90: 0, p99, p99_9: 0, max: 0 },
            iops: 0.0,
            bps: 0.0,
            throttled: 0.0,
        };
        let sweep: Sweep = "iops-total=1..4:1".parse().unwrap();
        let smallest = |p99s: [u64; 4]| {
            let points = (1..).zip(p99s).map(point).collect();
            Swept::new(&sweep, points, Some(10), None).p99.unwrap().smallest
        };
        assert_eq!(smallest([40, 30, 9, 5]), Some(3));
        assert_eq!(smallest([9, 30, 9, 5]), Some(3));
        assert_eq!(smallest([40, 30, 20, 10]), None);
        assert_eq!(smallest([1, 1, 1, 1]), Some(1));
    }

    #[test]
    fn values_are_simulated_in_any_number_of_threads_alike() {
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
