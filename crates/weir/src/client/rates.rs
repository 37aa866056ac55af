//! Rates from the counters of two reports.
//!
//! Counters of two runs of the daemon are not comparable. A group's rate is the sum of its disks:
//! at a group the daemon counts only requests that its limits had to decide.

use std::{collections::HashMap, time::Duration};

use api::{DiskStatus, DiskTransfers, GroupStatus};
use policy::{
    counter::{self, CounterGrowth},
    throttle::throttled_with_groups_ns,
};

use super::{
    latency::{Latency, RequestTimes},
    report::{Node, Report},
};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rate {
    pub(crate) read_iops: f64,
    pub(crate) write_iops: f64,
    pub(crate) read_bps: f64,
    pub(crate) write_bps: f64,
    /// Share of the interval, 0 to 1, in which its requests waited for its limits or a group's.
    pub(crate) limited: f64,
    /// Latency of the requests completed in the interval; `None` if there were none, or they were
    /// not counted.
    pub(crate) latency: Option<Latency>,
    /// 99th percentile of these requests' waits for limits.
    pub(crate) wait_p99_ns: Option<u64>,
}

impl Rate {
    pub(crate) fn iops(&self) -> f64 {
        self.read_iops + self.write_iops
    }

    fn took(&mut self, times: &RequestTimes) {
        self.latency = Latency::of(&times.latencies);
        self.wait_p99_ns = times.wait_p99_ns();
    }

    fn add(&mut self, other: &Self) {
        self.read_iops += other.read_iops;
        self.write_iops += other.write_iops;
        self.read_bps += other.read_bps;
        self.write_bps += other.write_bps;
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    /// Interval between the reports; 0 if they are not comparable.
    pub(crate) interval_ns: u64,
    of: HashMap<String, Rate>,
    /// Throttle causes in the interval, by disk or group.
    held_by: HashMap<String, String>,
}

impl Rates {
    pub(crate) fn between(earlier: &Report, later: &Report) -> Self {
        let Some(interval_ns @ 1..) = counter::growth(earlier.uptime_ns, later.uptime_ns) else {
            return Self::default();
        };
        let before = earlier.disks.iter().map(|disk| (disk.name.as_str(), disk)).collect();
        let comparison = Comparison { earlier, before, later, interval_ns };
        let mut of: HashMap<String, Rate> = HashMap::new();
        // Requests wait in a disk, even for limits of a group far above: sum the waits of all disks
        // below.
        let mut waited: HashMap<&str, u64> = HashMap::new();
        for disk in &later.disks {
            let Some(before) = comparison.before.get(disk.name.as_str()) else { continue };
            // A disk that was removed and added again has smaller counters: no growth is assumed.
            let own = counter::growth(before.throttle.waited_ns(), disk.throttle.waited_ns()).unwrap_or(0);
            for group in later.groups_above(&disk.settings) {
                let sum = waited.entry(&group.name).or_default();
                *sum = sum.saturating_add(own);
            }
        }
        for group in &later.groups {
            let waited = waited.get(group.name.as_str()).copied().unwrap_or(0);
            if let Some(rate) = comparison.group(group, waited) {
                of.insert(group.name.clone(), rate);
            }
        }
        // Groups after disks: a percentile of a group needs the summed histograms of all its disks.
        let mut took: HashMap<&str, RequestTimes> = HashMap::new();
        for disk in &later.disks {
            let Some(mut rate) = comparison.disk(disk) else { continue };
            let answered = comparison.answered(disk);
            rate.took(&answered);
            for group in later.groups_above(&disk.settings) {
                // A disk counts in every group above it, at all levels.
                if let Some(sum) = of.get_mut(&group.name) {
                    sum.add(&rate);
                }
                took.entry(&group.name).or_default().add(&answered);
            }
            of.insert(disk.name.clone(), rate);
        }
        for (group, took) in took {
            if let Some(rate) = of.get_mut(group) {
                rate.took(&took);
            }
        }
        let nodes = later.disks.iter().map(|disk| (&disk.name, Node::Disk(disk)));
        let nodes = nodes.chain(later.groups.iter().map(|group| (&group.name, Node::Group(group))));
        let throttled = nodes.filter(|(name, _)| of.get(*name).is_some_and(|rate| rate.limited > 0.0));
        let held_by = throttled.filter_map(|(name, node)| {
            // The daemon reports a throttle cause for one second; the interval may be longer.
            let before = || binding_of(earlier, earlier.find(name)?);
            Some((name.clone(), binding_of(later, node).or_else(before)?))
        });
        let held_by = held_by.collect();
        Self { interval_ns, of, held_by }
    }

    /// Throttle cause of a disk or group, now or in the interval of [`Rate::limited`]; `GROUP:
    /// LIMIT` if it is a limit of a group, the nearest one.
    pub(crate) fn held_by(&self, report: &Report, name: &str, node: Node<'_>) -> Option<String> {
        let now = || (node.throttle().waiting.total() > 0).then(|| binding_of(report, node)).flatten();
        self.held_by.get(name).cloned().or_else(now).or_else(|| node.throttle().binding.clone())
    }

    pub(crate) fn of(&self, name: &str) -> Option<&Rate> {
        self.of.get(name)
    }
}

struct Comparison<'a> {
    earlier: &'a Report,
    /// Disks of the earlier report by name: a scan for each of thousands would be quadratic.
    before: HashMap<&'a str, &'a DiskStatus>,
    later: &'a Report,
    interval_ns: u64,
}

impl Comparison<'_> {
    fn disk(&self, disk: &DiskStatus) -> Option<Rate> {
        let before = *self.before.get(disk.name.as_str())?;
        let (read_iops, read_bps) = self.work(before.reads, disk.reads)?;
        let (write_iops, write_bps) = self.work(before.writes, disk.writes)?;
        let waited = counter::growth(before.throttle.waited_ns(), disk.throttle.waited_ns())?;
        let limited = self.limited(Node::Disk(before), Node::Disk(disk), waited)?;
        Some(Rate { read_iops, write_iops, read_bps, write_bps, limited, latency: None, wait_p99_ns: None })
    }

    /// Latencies of the requests completed in the interval.
    fn answered(&self, disk: &DiskStatus) -> RequestTimes {
        let [before, now] = [self.earlier, self.later].map(|report| report.latencies.get(&disk.name));
        before.zip(now).and_then(|(before, now)| now.since(before)).unwrap_or_default()
    }

    fn group(&self, group: &GroupStatus, waited_ns: u64) -> Option<Rate> {
        let before = self.earlier.group(&group.name)?;
        let limited = self.limited(Node::Group(before), Node::Group(group), waited_ns)?;
        Some(Rate { limited, ..Rate::default() })
    }

    fn work(&self, before: DiskTransfers, now: DiskTransfers) -> Option<(f64, f64)> {
        let elapsed = Duration::from_nanos(self.interval_ns);
        let counters = |work: DiskTransfers| [work.requests, work.bytes];
        let growth = CounterGrowth::between(&counters(before), &counters(now), elapsed)?;
        Some((growth.per_second(0), growth.per_second(1)))
    }

    fn limited(&self, before: Node<'_>, now: Node<'_>, waited_ns: u64) -> Option<f64> {
        let own = limited_ns(before, now)?;
        let above = self.later.groups_above(now.settings()).into_iter();
        let above = above.filter_map(|group| {
            limited_ns(Node::Group(self.earlier.group(&group.name)?), Node::Group(group))
        });
        // A node is limited no longer than its requests waited: a group's limit may have throttled
        // only other members.
        let limited_ns = throttled_with_groups_ns(own, above, waited_ns, now.throttle().waiting.total() > 0);
        Some((limited_ns as f64 / self.interval_ns as f64).min(1.0))
    }
}

fn limited_ns(before: Node<'_>, now: Node<'_>) -> Option<u64> {
    counter::growth(before.throttle().limited_ns, now.throttle().limited_ns)
}

/// Throttle cause within the last second, of the node or the nearest group above.
fn binding_of(report: &Report, node: Node<'_>) -> Option<String> {
    let own = &node.throttle().binding;
    if own.is_some() {
        return own.clone();
    }
    let above = report.groups_above(node.settings()).into_iter();
    let named = |group: &GroupStatus| Some(format!("{}: {}", group.name, group.throttle.binding.as_ref()?));
    above.filter_map(named).next()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::client::{latency, report::Report};

    fn report(uptime_ns: u64, requests: u64, limited_ns: u64, waiting: u64) -> Report {
        let work = json!({ "requests": requests, "bytes": requests * 4096 });
        let disk = |name: &str, group: &str| {
            json!({
                "name": name, "group": group, "reads": work, "writes": {"requests": 0, "bytes": 0},
                "throttle": { "limited-ns": 0, "waiting": { "reads": waiting, "writes": 0 } }
            })
        };
        let held = json!({ "limited-ns": limited_ns, "throttle-cause": "iops-total" });
        let status = json!({
            "uptime-ns": uptime_ns,
            "disks": [disk("a", "inner"), disk("b", "outer")],
            "groups": [{ "name": "inner", "group": "outer" }, { "name": "outer", "throttle": held }]
        });
        Report::read(&status.to_string()).unwrap()
    }

    #[test]
    fn rates_are_differences_over_the_daemon_s_own_time() {
        let rates = Rates::between(&report(0, 100, 0, 0), &report(500_000_000, 150, 250_000_000, 1));
        let a = rates.of("a").unwrap();
        assert_eq!((a.read_iops, a.read_bps, a.write_iops), (100.0, 409_600.0, 0.0));
        assert_eq!(rates.of("inner").unwrap().iops(), 100.0);
        assert_eq!(rates.of("outer").unwrap().iops(), 200.0, "what is in a group's groups counts");
    }

    #[test]
    fn a_disk_that_waits_for_its_group_is_limited_as_the_group_is() {
        let (earlier, later) = (report(0, 100, 0, 0), report(500_000_000, 150, 250_000_000, 1));
        let held = |later: &Report| {
            let rates = Rates::between(&earlier, later);
            (rates.of("a").unwrap().limited, rates.held_by(later, "a", later.find("a").unwrap()))
        };
        let outer = Some("outer: iops-total".to_owned());
        assert_eq!(held(&later), (0.5, outer.clone()));
        let mut idle = report(500_000_000, 150, 250_000_000, 0);
        assert_eq!(held(&idle), (0.0, None));
        // The request has completed; the interval's share remains.
        idle.status.disks[0].throttle.reads.waited_ns = 5_000_000;
        assert_eq!(held(&idle), (0.01, outer.clone()), "its waits, no more");
        // Only the earlier report has the throttle cause.
        idle.status.groups[1].throttle.binding = None;
        assert_eq!(held(&idle), (0.01, outer));
        let unknown = Rates::default().held_by(&later, "a", later.find("a").unwrap());
        assert_eq!(unknown.as_deref(), Some("outer: iops-total"));
    }

    #[test]
    fn a_group_whose_disks_wait_for_a_group_above_is_limited_as_that_is() {
        let (earlier, mut later) = (report(0, 100, 0, 0), report(500_000_000, 150, 250_000_000, 0));
        assert_eq!(Rates::between(&earlier, &later).of("inner").unwrap().limited, 0.0, "nobody waits in it");
        later.status.disks[1].throttle.reads.waited_ns = 300_000_000;
        assert_eq!(Rates::between(&earlier, &later).of("inner").unwrap().limited, 0.0, "another does");
        later.status.disks[0].throttle.reads.waited_ns = 300_000_000;
        assert_eq!(Rates::between(&earlier, &later).of("inner").unwrap().limited, 0.5);
    }

    #[test]
    fn latencies_are_of_what_was_answered_meanwhile_and_a_group_s_of_all_in_it() {
        let counted = |a: u64, b: u64| {
            let of = |name: &str, above_ns: u64, requests: u64| {
                let bucket =
                    json!({ "above-ns": above_ns, "at-most-ns": above_ns + 2, "requests": requests });
                json!({ "name": name, "latencies": [bucket] })
            };
            latency::read(json!([of("a", 10, a), of("b", 20, b)])).unwrap()
        };
        let (mut earlier, mut later) = (report(0, 100, 0, 0), report(500_000_000, 150, 0, 0));
        (earlier.latencies, later.latencies) = (counted(900, 7), counted(910, 107));
        let latency =
            |name: &str, earlier: &Report| Rates::between(earlier, &later).of(name).unwrap().latency;
        let both = |p50_ns, p99_ns| Some(Latency { p50_ns, p99_ns });
        assert_eq!(latency("a", &earlier), both(11, 11));
        assert_eq!(latency("inner", &earlier), both(11, 11));
        assert_eq!(latency("outer", &earlier), both(21, 21), "ten of a, a hundred of b");
        earlier.latencies = counted(0, 107);
        assert_eq!(latency("b", &earlier), None, "none was answered");
        assert_eq!(latency("outer", &earlier), both(11, 11));
        earlier.latencies.clear();
        assert_eq!(latency("a", &earlier), None, "it was not counted");
    }

    #[test]
    fn waits_are_of_the_same_time_as_latencies() {
        // 100 requests with waits of 172 ms in the past, and 100 of 17 ms with waits of 9 ms now.
        let counted = |quick: u64| {
            let bucket = |ms: u64, requests: u64| json!({ "above-ns": ms * 1_000_000, "at-most-ns": ms * 1_000_000, "requests": requests });
            let (latencies, waits) =
                ([bucket(17, quick), bucket(180, 100)], [bucket(9, quick), bucket(172, 100)]);
            let disk = |name: &str| json!({ "name": name, "latencies": latencies, "waits": waits });
            latency::read(json!([disk("a"), disk("b")])).unwrap()
        };
        let (mut earlier, mut later) = (report(0, 100, 0, 0), report(500_000_000, 150, 0, 0));
        (earlier.latencies, later.latencies) = (counted(0), counted(100));
        let rates = Rates::between(&earlier, &later);
        for name in ["a", "outer"] {
            let rate = rates.of(name).unwrap();
            let p99_ns = rate.latency.unwrap().p99_ns;
            assert_eq!((p99_ns, rate.wait_p99_ns), (17_000_000, Some(9_000_000)), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_compared_has_no_rate() {
        let now = report(500_000_000, 150, 0, 0);
        assert_eq!(Rates::between(&report(9_000_000_000, 1, 0, 0), &now), Rates::default(), "restarted");
        assert_eq!(Rates::between(&report(0, 900, 0, 0), &now).of("a"), None, "counted anew");
        assert_eq!(Rates::between(&Report::default(), &now).of("a"), None, "not there before");
    }

    #[test]
    fn groups_that_hold_each_other_end_nothing() {
        let ring = json!({ "groups": [{ "name": "a", "group": "b" }, { "name": "b", "group": "a" }] });
        let ring = Report::read(&ring.to_string()).unwrap();
        assert_eq!(ring.groups_above(&ring.groups[0].settings).len(), 2);
    }
}
