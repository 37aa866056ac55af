//! Logs which disks and groups were throttled by their limits, at level debug and target
//! `weir::limits`: every ten seconds, and only if there are any. Status and metrics report the
//! same values at any time, so lines at level info would only hide others.

use std::{collections::HashMap, sync::Arc};

use block::{disk::Disk, layer::throttle::ThrottleGroup};
use policy::{
    counter,
    throttle::{CauseKind, ThrottleStats, throttled_with_groups_ns},
    time::{Duration, Instant},
};

use super::registry::Registry;

const INTERVAL: Duration = Duration::from_secs(10);
const TARGET: &str = "weir::limits";

/// Counters at the last interval, and its time.
#[derive(Debug, Default)]
pub(super) struct ThrottleLog {
    last: ThrottleLogCounters,
    interval_began: Instant,
    limited_ns: u64,
}

impl ThrottleLog {
    /// Starts the first interval now; earlier throttling is not logged.
    pub(super) fn starting_now(registry: &Registry) -> Self {
        let last = ThrottleLogCounters::of(registry);
        let limited_ns = last.0.values().fold(0, |sum: u64, growth| sum.saturating_add(growth.limited_ns));
        Self { last, interval_began: reactor::now(), limited_ns }
    }

    /// Logs an interval when it is over. `limited_ns` is the total time for which disks and groups
    /// were limited so far.
    pub(super) fn log_if_due(&mut self, registry: &Registry, limited_ns: u64, now: Instant) {
        if now - self.interval_began < INTERVAL {
            return;
        }
        if !self.is_unchanged(limited_ns) && tracing::enabled!(target: TARGET, tracing::Level::DEBUG) {
            self.last.log_growth(registry, now - self.interval_began);
        }
        (self.interval_began, self.limited_ns) = (now, limited_ns);
    }

    /// True if nothing was throttled since the last interval.
    pub(super) fn is_unchanged(&self, limited_ns: u64) -> bool {
        limited_ns == self.limited_ns
    }
}

/// Last counters by name.
#[derive(Debug, Default)]
struct ThrottleLogCounters(HashMap<String, ThrottleGrowth>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ThrottleGrowth {
    throttled: u64,
    waited_ns: u64,
    limited_ns: u64,
}

impl ThrottleGrowth {
    fn of(stats: &ThrottleStats) -> Self {
        Self {
            throttled: stats.reads.throttled.saturating_add(stats.writes.throttled),
            waited_ns: stats.reads.waited_ns.saturating_add(stats.writes.waited_ns),
            limited_ns: stats.throttled_ns,
        }
    }

    /// Growth since `before`; zero if a counter fell, because the name belongs to another object.
    fn growth_since(self, before: Self) -> Self {
        let counters = |growth: Self| [growth.throttled, growth.waited_ns, growth.limited_ns];
        let [throttled, waited_ns, limited_ns] =
            counter::growths(&counters(before), &counters(self)).unwrap_or_default();
        Self { throttled, waited_ns, limited_ns }
    }
}

/// Current counters of a disk or group, with its ancestor groups, nearest first.
struct CurrentThrottleStats {
    name: String,
    stats: ThrottleStats,
    ancestors: Vec<Arc<ThrottleGroup>>,
}

impl CurrentThrottleStats {
    fn new(name: &str, stats: ThrottleStats, group: Option<Arc<ThrottleGroup>>) -> Self {
        let ancestors = std::iter::successors(group, |group| group.parent().cloned());
        Self { name: name.to_owned(), stats, ancestors: ancestors.collect() }
    }
}

impl ThrottleLogCounters {
    fn of(registry: &Registry) -> Self {
        let (disks, groups) = (registry.disks.all(), registry.groups.all());
        let disks =
            disks.iter().map(|running| (running.disk.name().to_string(), running.disk.throttle().stats()));
        let groups = groups.iter().map(|group| (group.name().to_owned(), group.stats()));
        Self(disks.chain(groups).map(|(name, stats)| (name, ThrottleGrowth::of(&stats))).collect())
    }

    fn log_growth(&mut self, registry: &Registry, elapsed: Duration) {
        let (disks, groups) = (registry.disks.all(), registry.groups.all());
        let of_disk = |disk: &Disk| {
            CurrentThrottleStats::new(disk.name(), disk.throttle().stats(), disk.throttle().group())
        };
        let of_group = |group: &Arc<ThrottleGroup>| {
            CurrentThrottleStats::new(group.name(), group.stats(), group.parent().cloned())
        };
        let disks = disks.iter().map(|running| of_disk(&running.disk));
        let now: HashMap<_, _> =
            disks.chain(groups.iter().map(of_group)).map(|now| (now.name.clone(), now)).collect();
        for current in now.values() {
            if let Some(growth) = throttle_growth(&current.stats, self.previous(&current.name)) {
                let ancestors = current.ancestors.iter().filter_map(|group| now.get(group.name()));
                let ancestors: Vec<_> = ancestors.map(|group| (&*group.name, &group.stats)).collect();
                let growth = self.limited_by(growth, current.stats.waiting != [0, 0], &ancestors);
                log_throttling(&current.name, &current.stats, growth, elapsed, &ancestors);
            }
        }
        self.0 = now.into_iter().map(|(name, now)| (name, ThrottleGrowth::of(&now.stats))).collect();
    }

    fn previous(&self, name: &str) -> ThrottleGrowth {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Growth with the limited time of the disk or of its ancestor groups, whichever is larger, by
    /// the same rule as `weir status`.
    fn limited_by(
        &self,
        growth: ThrottleGrowth,
        still_waits: bool,
        ancestors: &[(&str, &ThrottleStats)],
    ) -> ThrottleGrowth {
        let of_groups = ancestors
            .iter()
            .map(|(name, stats)| ThrottleGrowth::of(stats).growth_since(self.previous(name)).limited_ns);
        // A disk waits for its group's limit too, but the group alone counts that time.
        let limited_ns =
            throttled_with_groups_ns(growth.limited_ns, of_groups, growth.waited_ns, still_waits);
        ThrottleGrowth { limited_ns, ..growth }
    }
}

/// Growth since `before`; `None` if nothing was throttled and nothing waits.
fn throttle_growth(stats: &ThrottleStats, before: ThrottleGrowth) -> Option<ThrottleGrowth> {
    let growth = ThrottleGrowth::of(stats).growth_since(before);
    (growth != ThrottleGrowth::default() || stats.waiting != [0, 0]).then_some(growth)
}

/// The limit that requests wait for, its own or the nearest ancestor's: `tenant: iops-total`.
fn throttle_cause(stats: &ThrottleStats, ancestors: &[(&str, &ThrottleStats)]) -> Option<String> {
    let limit = |stats: &ThrottleStats| stats.throttle_cause.map(CauseKind::name);
    let of_group = || ancestors.iter().find_map(|(name, stats)| Some(format!("{name}: {}", limit(stats)?)));
    limit(stats).map(str::to_owned).or_else(of_group)
}

fn log_throttling(
    name: &str,
    stats: &ThrottleStats,
    growth: ThrottleGrowth,
    elapsed: Duration,
    ancestors: &[(&str, &ThrottleStats)],
) {
    let [waiting_reads, waiting_writes] = stats.waiting;
    tracing::debug!(
        target: TARGET,
        name,
        throttled = growth.throttled,
        waited_ms = milliseconds(growth.waited_ns),
        limited_percent = growth.limited_ns.saturating_mul(100) / elapsed.as_nanos() as u64,
        // Percentiles cover the last ten to twenty seconds.
        wait_p50_ms = milliseconds(stats.recent_waits.p50_ns),
        wait_p99_ms = milliseconds(stats.recent_waits.p99_ns),
        wait_max_ms = milliseconds(stats.recent_waits.max_ns),
        binding = throttle_cause(stats, ancestors),
        waiting_reads,
        waiting_writes,
        "throttled by limits"
    );
}

/// Rounded to a microsecond.
fn milliseconds(nanoseconds: u64) -> f64 {
    (nanoseconds as f64 / 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use policy::throttle::{AdmissionCounters, LimitKind, WaitSummary};

    use super::*;

    fn stats(throttled: u64, waiting: [usize; 2]) -> ThrottleStats {
        let reads =
            AdmissionCounters { throttled, waited_ns: 10 * throttled, ..AdmissionCounters::default() };
        ThrottleStats {
            reads,
            writes: AdmissionCounters::default(),
            waits: WaitSummary::default(),
            recent_waits: WaitSummary::default(),
            throttled_ns: 5 * throttled,
            throttle_cause: None,
            tokens: [None; 6],
            levels: [None; 6],
            waiting,
            reservation: None,
        }
    }

    #[test]
    fn only_growth_counts() {
        assert_eq!(throttle_growth(&stats(0, [0, 0]), ThrottleGrowth::default()), None);
        let before = ThrottleGrowth::of(&stats(3, [0, 0]));
        assert_eq!(throttle_growth(&stats(3, [0, 0]), before), None);
        let growth = ThrottleGrowth { throttled: 2, waited_ns: 20, limited_ns: 10 };
        assert_eq!(throttle_growth(&stats(5, [0, 0]), before), Some(growth));
    }

    #[test]
    fn waiting_request_counts_as_throttled() {
        assert_eq!(
            throttle_growth(&stats(3, [0, 1]), ThrottleGrowth::of(&stats(3, [0, 0]))),
            Some(ThrottleGrowth::default())
        );
    }

    #[test]
    fn disk_waiting_for_its_group_counts_the_groups_time() {
        let iops_total = CauseKind::Limit(LimitKind::IopsTotal);
        let group = ThrottleStats { throttled_ns: 7, throttle_cause: Some(iops_total), ..stats(0, [0, 1]) };
        let ancestors = [("tenant", &group)];
        // Unlimited itself, with a request that waits for the group's limit.
        let disk = ThrottleStats { throttled_ns: 0, ..stats(2, [0, 1]) };
        let growth = throttle_growth(&disk, ThrottleGrowth::default()).unwrap();
        let last = ThrottleLogCounters(HashMap::from([(
            "tenant".to_owned(),
            ThrottleGrowth { limited_ns: 3, ..ThrottleGrowth::default() },
        )]));
        assert_eq!(last.limited_by(growth, true, &ancestors).limited_ns, 4);
        assert_eq!(
            last.limited_by(ThrottleGrowth { waited_ns: 3, ..growth }, false, &ancestors).limited_ns,
            3
        );
        assert_eq!(throttle_cause(&disk, &ancestors).as_deref(), Some("tenant: iops-total"));
        assert_eq!(last.limited_by(growth, true, &[]).limited_ns, 0);
    }

    #[test]
    fn reused_name_restarts_counters() {
        assert_eq!(throttle_growth(&stats(1, [0, 0]), ThrottleGrowth::of(&stats(9, [0, 0]))), None);
    }
}
