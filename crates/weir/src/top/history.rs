//! Rates of the last minutes of each disk and group, for the charts.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use crate::client::{rates::IntervalRates, report::DaemonReport};

pub(super) const WINDOW: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RatePoint {
    /// Seconds since the program's start.
    pub(super) at: f64,
    /// Operations per second.
    pub(super) read_iops: f32,
    /// Operations per second.
    pub(super) write_iops: f32,
    /// Bytes per second.
    pub(super) read_bps: f32,
    /// Bytes per second.
    pub(super) write_bps: f32,
    /// Share of the interval in which its requests waited, 0 to 1.
    pub(super) limited: f32,
}

/// Points of each disk and group, oldest first, none older than [`WINDOW`].
#[derive(Debug, Default)]
pub(super) struct RateHistory {
    points: HashMap<String, VecDeque<RatePoint>>,
}

impl RateHistory {
    /// Adds a report with its rates. Removes old points, and disks and groups that are gone.
    pub(super) fn add(&mut self, report: &DaemonReport, rates: &IntervalRates, at: Duration) {
        let now = at.as_secs_f64();
        let names: HashSet<&str> = report.names().collect();
        // Otherwise a daemon with many short-lived disks would let the history grow without bound.
        self.points.retain(|name, _| names.contains(name.as_str()));
        for name in names {
            let Some(rate) = rates.of(name) else { continue };
            let points = self.points.entry(name.to_owned()).or_default();
            points.push_back(RatePoint {
                at: now,
                read_iops: rate.read_iops as f32,
                write_iops: rate.write_iops as f32,
                read_bps: rate.read_bps as f32,
                write_bps: rate.write_bps as f32,
                limited: rate.limited as f32,
            });
            while points.front().is_some_and(|point| point.at < now - WINDOW.as_secs_f64()) {
                points.pop_front();
            }
        }
    }

    pub(super) fn of(&self, name: &str) -> impl DoubleEndedIterator<Item = &RatePoint> {
        self.points.get(name).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(names: &[&str], second: u64) -> DaemonReport {
        let disk = |name: &&str| json!({ "name": name, "reads": { "requests": second * 10, "bytes": 0 } });
        let disks: Vec<_> = names.iter().map(disk).collect();
        DaemonReport::read(&json!({ "uptime-ns": second * 1_000_000_000, "disks": disks }).to_string())
            .unwrap()
    }

    #[test]
    fn history_keeps_the_window_and_present_names() {
        let mut history = RateHistory::default();
        for second in 1..=200 {
            let (earlier, later) = (report(&["a", "b"], second - 1), report(&["a", "b"], second));
            history.add(&later, &IntervalRates::between(&earlier, &later), Duration::from_secs(second));
        }
        let points: Vec<_> = history.of("a").collect();
        assert_eq!((points[0].at, points.len()), (80.0, 121));
        assert_eq!(points[120].read_iops, 10.0);
        let (earlier, later) = (report(&["a"], 200), report(&["a"], 201));
        history.add(&later, &IntervalRates::between(&earlier, &later), Duration::from_secs(201));
        assert_eq!(history.of("b").count(), 0);
    }
}
