//! Rates from the counters of two reports.
//!
//! Counters of two runs of the daemon are not comparable. A group's rate is the sum of its disks,
//! because the daemon's counters of a group omit the requests that no limit applies to.

use std::{collections::HashMap, time::Duration};

use api::{DiskStatus, DiskTransfers, GroupStatus};
use policy::{
    counter::{self, CounterGrowth},
    throttle::throttled_with_groups_ns,
};

use super::{
    latency::{RequestLatency, RequestTimes},
    report::{DaemonReport, StatusNode},
};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct NodeRate {
    pub(crate) read_iops: f64,
    pub(crate) write_iops: f64,
    pub(crate) read_bps: f64,
    pub(crate) write_bps: f64,
    /// Share of the interval, 0 to 1, in which its requests waited for its limits or a group's.
    pub(crate) limited: f64,
    /// Latency of the requests completed in the interval; `None` if no request completed, or a
    /// report lacks latencies.
    pub(crate) latency: Option<RequestLatency>,
    /// 99th percentile of these requests' waits for limits.
    pub(crate) wait_p99_ns: Option<u64>,
}

impl NodeRate {
    pub(crate) fn iops(&self) -> f64 {
        self.read_iops + self.write_iops
    }

    fn set_times(&mut self, times: &RequestTimes) {
        self.latency = RequestLatency::of(&times.latencies);
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
pub(crate) struct IntervalRates {
    /// Interval between the reports; 0 if they are not comparable.
    pub(crate) interval_ns: u64,
    by_name: HashMap<String, NodeRate>,
    /// Throttle causes in the interval, by disk or group.
    throttle_causes: HashMap<String, String>,
}

impl IntervalRates {
    pub(crate) fn between(earlier: &DaemonReport, later: &DaemonReport) -> Self {
        let Some(interval_ns @ 1..) = counter::growth(earlier.uptime_ns, later.uptime_ns) else {
            return Self::default();
        };
        let before = earlier.disks.iter().map(|disk| (disk.name.as_str(), disk)).collect();
        let comparison = ReportComparison { earlier, before, later, interval_ns };
        let mut rates: HashMap<String, NodeRate> = HashMap::new();
        // The wait of a request is counted at its disk, even if a limit of a group throttles it.
        // The waits of a group are the sum over the disks below it.
        let mut waited: HashMap<&str, u64> = HashMap::new();
        for disk in &later.disks {
            let Some(before) = comparison.before.get(disk.name.as_str()) else { continue };
            // A disk that was removed and added again has smaller counters: no growth is assumed.
            let wait_ns =
                counter::growth(before.throttle.waited_ns(), disk.throttle.waited_ns()).unwrap_or(0);
            for group in later.groups_above(&disk.settings) {
                let sum = waited.entry(&group.name).or_default();
                *sum = sum.saturating_add(wait_ns);
            }
        }
        for group in &later.groups {
            let waited = waited.get(group.name.as_str()).copied().unwrap_or(0);
            if let Some(rate) = comparison.group(group, waited) {
                rates.insert(group.name.clone(), rate);
            }
        }
        // Groups after disks: a percentile of a group needs the summed histograms of all its disks.
        let mut times: HashMap<&str, RequestTimes> = HashMap::new();
        for disk in &later.disks {
            let Some(mut rate) = comparison.disk(disk) else { continue };
            let completed = comparison.completed(disk);
            rate.set_times(&completed);
            for group in later.groups_above(&disk.settings) {
                // A disk counts in every group above it, at all levels.
                if let Some(sum) = rates.get_mut(&group.name) {
                    sum.add(&rate);
                }
                times.entry(&group.name).or_default().add(&completed);
            }
            rates.insert(disk.name.clone(), rate);
        }
        for (group, times) in times {
            if let Some(rate) = rates.get_mut(group) {
                rate.set_times(&times);
            }
        }
        let nodes = later.disks.iter().map(|disk| (&disk.name, StatusNode::Disk(disk)));
        let nodes = nodes.chain(later.groups.iter().map(|group| (&group.name, StatusNode::Group(group))));
        let throttled = nodes.filter(|(name, _)| rates.get(*name).is_some_and(|rate| rate.limited > 0.0));
        let throttle_causes = throttled.filter_map(|(name, node)| {
            // The daemon reports a throttle cause for one second; the interval may be longer.
            let before = || throttle_cause_of(earlier, earlier.find(name)?);
            Some((name.clone(), throttle_cause_of(later, node).or_else(before)?))
        });
        let throttle_causes = throttle_causes.collect();
        Self { interval_ns, by_name: rates, throttle_causes }
    }

    /// Throttle cause of a disk or group in the interval, or else the current one. A limit of its
    /// own precedes those of groups above, which are written `GROUP: LIMIT`.
    pub(crate) fn throttle_cause(
        &self,
        report: &DaemonReport,
        name: &str,
        node: StatusNode<'_>,
    ) -> Option<String> {
        let now = || (node.throttle().waiting.total() > 0).then(|| throttle_cause_of(report, node)).flatten();
        self.throttle_causes
            .get(name)
            .cloned()
            .or_else(now)
            .or_else(|| node.throttle().throttle_cause.clone())
    }

    pub(crate) fn of(&self, name: &str) -> Option<&NodeRate> {
        self.by_name.get(name)
    }
}

struct ReportComparison<'a> {
    earlier: &'a DaemonReport,
    /// Disks of the earlier report by name: a scan for each of thousands would be quadratic.
    before: HashMap<&'a str, &'a DiskStatus>,
    later: &'a DaemonReport,
    interval_ns: u64,
}

impl ReportComparison<'_> {
    fn disk(&self, disk: &DiskStatus) -> Option<NodeRate> {
        let before = *self.before.get(disk.name.as_str())?;
        let (read_iops, read_bps) = self.work(before.reads, disk.reads)?;
        let (write_iops, write_bps) = self.work(before.writes, disk.writes)?;
        let waited = counter::growth(before.throttle.waited_ns(), disk.throttle.waited_ns())?;
        let limited = self.limited(StatusNode::Disk(before), StatusNode::Disk(disk), waited)?;
        Some(NodeRate {
            read_iops,
            write_iops,
            read_bps,
            write_bps,
            limited,
            latency: None,
            wait_p99_ns: None,
        })
    }

    /// Latencies of the requests completed in the interval.
    fn completed(&self, disk: &DiskStatus) -> RequestTimes {
        let [before, now] = [self.earlier, self.later].map(|report| report.latencies.get(&disk.name));
        before.zip(now).and_then(|(before, now)| now.since(before)).unwrap_or_default()
    }

    fn group(&self, group: &GroupStatus, waited_ns: u64) -> Option<NodeRate> {
        let before = self.earlier.group(&group.name)?;
        let limited = self.limited(StatusNode::Group(before), StatusNode::Group(group), waited_ns)?;
        Some(NodeRate { limited, ..NodeRate::default() })
    }

    fn work(&self, before: DiskTransfers, now: DiskTransfers) -> Option<(f64, f64)> {
        let elapsed = Duration::from_nanos(self.interval_ns);
        let counters = |work: DiskTransfers| [work.requests, work.bytes];
        let growth = CounterGrowth::between(&counters(before), &counters(now), elapsed)?;
        Some((growth.per_second(0), growth.per_second(1)))
    }

    fn limited(&self, before: StatusNode<'_>, now: StatusNode<'_>, waited_ns: u64) -> Option<f64> {
        let own_ns = limited_ns(before, now)?;
        let above = self.later.groups_above(now.settings()).into_iter();
        let above = above.filter_map(|group| {
            limited_ns(StatusNode::Group(self.earlier.group(&group.name)?), StatusNode::Group(group))
        });
        // A group's limit may have throttled other members only, so its time counts at most as much
        // as the requests of this node waited.
        let limited_ns =
            throttled_with_groups_ns(own_ns, above, waited_ns, now.throttle().waiting.total() > 0);
        Some((limited_ns as f64 / self.interval_ns as f64).min(1.0))
    }
}

fn limited_ns(before: StatusNode<'_>, now: StatusNode<'_>) -> Option<u64> {
    counter::growth(before.throttle().limited_ns, now.throttle().limited_ns)
}

/// Throttle cause within the last second, of the node or else of the nearest group above that has
/// one.
fn throttle_cause_of(report: &DaemonReport, node: StatusNode<'_>) -> Option<String> {
    let cause = &node.throttle().throttle_cause;
    if cause.is_some() {
        return cause.clone();
    }
    let above = report.groups_above(node.settings()).into_iter();
    let named =
        |group: &GroupStatus| Some(format!("{}: {}", group.name, group.throttle.throttle_cause.as_ref()?));
    above.filter_map(named).next()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::client::{latency, report::DaemonReport};

    fn report(uptime_ns: u64, requests: u64, limited_ns: u64, waiting: u64) -> DaemonReport {
        let work = json!({ "requests": requests, "bytes": requests * 4096 });
        let disk = |name: &str, group: &str| {
            json!({
                "name": name, "group": group, "reads": work, "writes": {"requests": 0, "bytes": 0},
                "throttle": { "limited-ns": 0, "waiting": { "reads": waiting, "writes": 0 } }
            })
        };
        let throttle = json!({ "limited-ns": limited_ns, "throttle-cause": "iops-total" });
        let status = json!({
            "uptime-ns": uptime_ns,
            "disks": [disk("a", "inner"), disk("b", "outer")],
            "groups": [{ "name": "inner", "group": "outer" }, { "name": "outer", "throttle": throttle }]
        });
        DaemonReport::read(&status.to_string()).unwrap()
    }

    #[test]
    fn rates_use_the_daemons_uptime() {
        let rates = IntervalRates::between(&report(0, 100, 0, 0), &report(500_000_000, 150, 250_000_000, 1));
        let a = rates.of("a").unwrap();
        assert_eq!((a.read_iops, a.read_bps, a.write_iops), (100.0, 409_600.0, 0.0));
        assert_eq!(rates.of("inner").unwrap().iops(), 100.0);
        assert_eq!(rates.of("outer").unwrap().iops(), 200.0, "disks of nested groups count");
    }

    #[test]
    fn disk_waiting_for_its_group_is_limited() {
        let (earlier, later) = (report(0, 100, 0, 0), report(500_000_000, 150, 250_000_000, 1));
        let limited_and_cause = |later: &DaemonReport| {
            let rates = IntervalRates::between(&earlier, later);
            (rates.of("a").unwrap().limited, rates.throttle_cause(later, "a", later.find("a").unwrap()))
        };
        let outer = Some("outer: iops-total".to_owned());
        assert_eq!(limited_and_cause(&later), (0.5, outer.clone()));
        let mut idle = report(500_000_000, 150, 250_000_000, 0);
        assert_eq!(limited_and_cause(&idle), (0.0, None));
        // The request has completed; the interval's share remains.
        idle.status.disks[0].throttle.reads.waited_ns = 5_000_000;
        assert_eq!(limited_and_cause(&idle), (0.01, outer.clone()), "its waits, no more");
        // Only the earlier report has the throttle cause.
        idle.status.groups[1].throttle.throttle_cause = None;
        assert_eq!(limited_and_cause(&idle), (0.01, outer));
        let unknown = IntervalRates::default().throttle_cause(&later, "a", later.find("a").unwrap());
        assert_eq!(unknown.as_deref(), Some("outer: iops-total"));
    }

    #[test]
    fn group_waiting_for_a_parent_is_limited() {
        let (earlier, mut later) = (report(0, 100, 0, 0), report(500_000_000, 150, 250_000_000, 0));
        assert_eq!(
            IntervalRates::between(&earlier, &later).of("inner").unwrap().limited,
            0.0,
            "no request waits in it"
        );
        later.status.disks[1].throttle.reads.waited_ns = 300_000_000;
        assert_eq!(
            IntervalRates::between(&earlier, &later).of("inner").unwrap().limited,
            0.0,
            "another does"
        );
        later.status.disks[0].throttle.reads.waited_ns = 300_000_000;
        assert_eq!(IntervalRates::between(&earlier, &later).of("inner").unwrap().limited, 0.5);
    }

    #[test]
    fn latencies_cover_the_interval_and_all_disks_of_a_group() {
        let counted = |a: u64, b: u64| {
            let disk = |name: &str, above_ns: u64, requests: u64| {
                let bucket =
                    json!({ "above-ns": above_ns, "at-most-ns": above_ns + 2, "requests": requests });
                json!({ "name": name, "latencies": [bucket] })
            };
            latency::read(json!([disk("a", 10, a), disk("b", 20, b)])).unwrap()
        };
        let (mut earlier, mut later) = (report(0, 100, 0, 0), report(500_000_000, 150, 0, 0));
        (earlier.latencies, later.latencies) = (counted(900, 7), counted(910, 107));
        let latency = |name: &str, earlier: &DaemonReport| {
            IntervalRates::between(earlier, &later).of(name).unwrap().latency
        };
        let both = |p50_ns, p99_ns| Some(RequestLatency { p50_ns, p99_ns });
        assert_eq!(latency("a", &earlier), both(11, 11));
        assert_eq!(latency("inner", &earlier), both(11, 11));
        assert_eq!(latency("outer", &earlier), both(21, 21), "ten of a, a hundred of b");
        earlier.latencies = counted(0, 107);
        assert_eq!(latency("b", &earlier), None, "no request completed");
        assert_eq!(latency("outer", &earlier), both(11, 11));
        earlier.latencies.clear();
        assert_eq!(latency("a", &earlier), None, "it was not counted");
    }

    #[test]
    fn waits_and_latencies_cover_the_same_interval() {
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
        let rates = IntervalRates::between(&earlier, &later);
        for name in ["a", "outer"] {
            let rate = rates.of(name).unwrap();
            let p99_ns = rate.latency.unwrap().p99_ns;
            assert_eq!((p99_ns, rate.wait_p99_ns), (17_000_000, Some(9_000_000)), "{name}");
        }
    }

    #[test]
    fn incomparable_reports_have_no_rate() {
        let now = report(500_000_000, 150, 0, 0);
        assert_eq!(
            IntervalRates::between(&report(9_000_000_000, 1, 0, 0), &now),
            IntervalRates::default(),
            "restarted"
        );
        assert_eq!(IntervalRates::between(&report(0, 900, 0, 0), &now).of("a"), None, "counted anew");
        assert_eq!(IntervalRates::between(&DaemonReport::default(), &now).of("a"), None, "not there before");
    }

    #[test]
    fn cyclic_groups_terminate() {
        let ring = json!({ "groups": [{ "name": "a", "group": "b" }, { "name": "b", "group": "a" }] });
        let ring = DaemonReport::read(&ring.to_string()).unwrap();
        assert_eq!(ring.groups_above(&ring.groups[0].settings).len(), 2);
    }
}
