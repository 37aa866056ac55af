//! Disks, groups and devices for the page and the API: JSON objects with the activity of the last
//! second.
//!
//! Their types are in `api` and described by `openapi.json`. Objects are stored as maps, so that
//! the event stream can send only changed members.

use std::{
    array,
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use api::{
    ActivityObject, BucketActivity, CacheActivity, ClusterLimits, DeviceActivity, DeviceCapacity,
    DiskActivity, DiskMemory, ErrorCounts, ExportActivity, GroupActivity, LatencyPercentiles, LimitValues,
    MemberActivity, PrefetchActivity, ThrottleCause, ThrottledTotals, TransferRates,
};
use block::{
    device::DeviceStatistics,
    disk::DiskTotals,
    measures::{CauseLevel, HistogramSnapshot, OperationClass},
};
use policy::{
    counter::{self, CounterGrowth},
    request::Direction,
    throttle::{
        AdmissionCounters, CauseKind, Enforcement, LimitKind, LimitLevel, LimitPart, LimitSetting, Limits,
        ThrottleStats,
    },
};
use serde::Serialize;
use serde_json::{Number, Value};
use settings::{LatencyConfig, LatencySetting, QuotaSetting};

use super::{
    main_thread::ObjectKind,
    recent_counters::RecentCounters,
    sample::{ActivitySample, Latencies, rounded},
    snapshot::{
        DaemonSnapshot, DeviceFigures, DiskFigures, ExportFigures, GroupFigures, LatencyFigures,
        ThrottleFigures,
    },
};

/// JSON object with the members of an activity.
fn object(activity: &impl Serialize) -> ActivityObject {
    match serde_json::to_value(activity) {
        Ok(Value::Object(members)) => members,
        _ => unreachable!("activities are structs whose keys are strings"),
    }
}

/// All objects at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct ActivityObjects {
    pub(super) time_ms: u64,
    pub(super) started_ms: u64,
    pub(super) disks: BTreeMap<Arc<str>, ActivityObject>,
    pub(super) groups: BTreeMap<Arc<str>, ActivityObject>,
    pub(super) devices: BTreeMap<Arc<str>, ActivityObject>,
    /// By id.
    pub(super) jobs: BTreeMap<Arc<str>, ActivityObject>,
}

/// Previous readings, from which the activity of the last second is computed.
#[derive(Debug, Default)]
pub(super) struct PreviousReadings {
    disks: HashMap<Arc<str>, DiskReadings>,
    groups: HashMap<Arc<str>, GroupReadings>,
    devices: HashMap<Arc<str>, RecentCounters<5>>,
}

#[derive(Debug, Default)]
struct DiskReadings {
    totals: RecentCounters<10>,
    last: SecondReadings,
}

#[derive(Debug, Default)]
struct GroupReadings {
    throttled_ns: RecentCounters<1>,
    latencies: SecondLatencies,
    wait_p99_ns: Option<u64>,
}

/// Values that are computed once a second, because each needs all buckets or counters of a disk:
/// latencies and throttle causes.
#[derive(Debug, Default)]
struct SecondReadings {
    /// Reads and writes by latency bucket, modulo 2³², which halves the memory.
    latency_counts: Vec<u32>,
    /// Requests by bucket of throttle wait.
    wait_counts: Vec<u32>,
    /// Throttled time by level, limit and direction.
    throttled_ns: Option<[u64; CAUSE_COUNT]>,
    latencies: SecondLatencies,
    wait_p99_ns: Option<u64>,
    longest_cause: Option<(CauseLevel, LimitKind)>,
}

/// Number of a disk's requests in the last second, by bucket of latency and of throttle wait.
#[derive(Clone, Debug, Default)]
struct LastSecondCounts {
    latency_counts: Vec<u64>,
    waited: Vec<u64>,
}

impl LastSecondCounts {
    fn add(&mut self, other: &Self) {
        for (sums, more) in
            [(&mut self.latency_counts, &other.latency_counts), (&mut self.waited, &other.waited)]
        {
            sums.resize(more.len(), 0);
            sums.iter_mut().zip(more).for_each(|(sum, more)| *sum = sum.saturating_add(*more));
        }
    }
}

/// Latencies of a second's requests; `None` if unknown.
#[derive(Debug, Default, PartialEq, Eq)]
struct SecondLatencies {
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
    latencies: Option<Latencies>,
}

/// Maximum memory for each disk in bytes: the two histograms of 135 buckets are counted as 160
/// each.
#[cfg(test)]
pub(super) const MAX_BYTES_PER_DISK: usize =
    size_of::<DiskReadings>() + 16 * size_of::<(Instant, [u64; 10])>() + 2 * 4 * 160;

pub(super) fn milliseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl PreviousReadings {
    /// Computes the objects of a snapshot, which must be newer than all earlier ones.
    /// `is_new_second` is true for the first snapshot of a second.
    pub(super) fn objects(&mut self, snapshot: &DaemonSnapshot, is_new_second: bool) -> ActivityObjects {
        let mut exports: HashMap<&str, Vec<&ExportFigures>> = HashMap::new();
        for export in &snapshot.exports {
            exports.entry(&export.disk).or_default().push(export);
        }
        let groups: HashMap<&str, &GroupFigures> =
            snapshot.groups.iter().map(|group| (&*group.name, group)).collect();
        let mut objects = ActivityObjects {
            time_ms: milliseconds(SystemTime::now()),
            started_ms: u64::try_from(snapshot.started.as_millis()).unwrap_or(u64::MAX),
            jobs: snapshot.jobs.iter().map(|job| (job.id.as_str().into(), object(job))).collect(),
            ..ActivityObjects::default()
        };
        let mut group_totals: HashMap<&str, MemberTotals> = HashMap::new();
        for figures in &snapshot.disks {
            let previous = self.disks.entry(Arc::clone(&figures.name)).or_default();
            // Histograms are read once a second only: they are large.
            let grown = if is_new_second { previous.last.update(figures) } else { None };
            let exports = exports.get(&*figures.name).map(Vec::as_slice).unwrap_or_default();
            let (activity, passed) = disk(figures, exports, &groups, previous, snapshot.taken);
            objects.disks.insert(Arc::clone(&figures.name), object(&activity));
            let innermost = groups.get(&*figures.group).copied();
            // A disk counts for its group and for all groups above it.
            for group in
                std::iter::successors(innermost, |group| groups.get(group.parent.as_deref()?).copied())
            {
                group_totals.entry(&group.name).or_default().add(&passed, grown.as_ref());
            }
        }
        for figures in &snapshot.groups {
            let name: Arc<str> = figures.name.as_str().into();
            let before = self.groups.entry(Arc::clone(&name)).or_default();
            let MemberTotals { served: passed, last_second: grown } =
                group_totals.remove(&*figures.name).unwrap_or_default();
            if is_new_second {
                before.latencies = SecondLatencies::of(grown.as_ref().map(|grown| &*grown.latency_counts));
                before.wait_p99_ns = grown.as_ref().and_then(|grown| wait_p99_ns(&grown.waited));
            }
            objects.groups.insert(name, object(&group(figures, &passed, before, snapshot.taken)));
        }
        for figures in &snapshot.devices {
            let name: Arc<str> = figures.name.as_str().into();
            let before = self.devices.entry(Arc::clone(&name)).or_default();
            objects.devices.insert(name, object(&device(figures, before, snapshot.taken)));
        }
        // A disk that is removed and added again starts without history.
        self.disks.retain(|name, _| objects.disks.contains_key(name));
        self.groups.retain(|name, _| objects.groups.contains_key(name));
        self.devices.retain(|name, _| objects.devices.contains_key(name));
        objects
    }
}

/// Rounds to three decimals.
fn ratio(value: f64) -> Number {
    rounded((value * 1000.0).round() / 1000.0)
}

/// Requests that disks have served. A group's counters are sums over its disks, because requests
/// that no limit applies to bypass the throttle tree and its counters.
#[derive(Clone, Copy, Debug, Default)]
struct ServedRequests {
    totals: DiskTotals,
    per_second: [f64; 4],
    /// Share of the last second during which some request was throttled.
    wait_ratio: f64,
}

impl ServedRequests {
    fn add(&mut self, other: &Self) {
        let DiskTotals { reads, writes, read_bytes, written_bytes, merged_requests, .. } = &mut self.totals;
        for (sum, more) in [
            (reads, other.totals.reads),
            (writes, other.totals.writes),
            (read_bytes, other.totals.read_bytes),
            (written_bytes, other.totals.written_bytes),
            (merged_requests, other.totals.merged_requests),
        ] {
            *sum = sum.saturating_add(more);
        }
        self.per_second.iter_mut().zip(other.per_second).for_each(|(sum, more)| *sum += more);
        // A lower bound: whether two disks were throttled at the same time is unknown.
        self.wait_ratio = self.wait_ratio.max(other.wait_ratio);
    }
}

/// Requests of the disks in and below a group.
#[derive(Debug, Default)]
struct MemberTotals {
    served: ServedRequests,
    last_second: Option<LastSecondCounts>,
}

impl MemberTotals {
    fn add(&mut self, served: &ServedRequests, grown: Option<&LastSecondCounts>) {
        self.served.add(served);
        if let Some(grown) = grown {
            self.last_second.get_or_insert_default().add(grown);
        }
    }
}

/// Rates of the first four counters: reads, writes, read bytes, written bytes.
fn per_second<const N: usize>(growth: Option<&CounterGrowth<N>>) -> [f64; 4] {
    array::from_fn(|index| growth.map_or(0.0, |growth| growth.per_second(index)))
}

fn rates(per_second: [f64; 4]) -> TransferRates {
    let [read_iops, write_iops, read_bps, write_bps] = per_second.map(rounded);
    TransferRates { read_iops, write_iops, read_bps, write_bps }
}

fn disk(
    figures: &DiskFigures,
    exports: &[&ExportFigures],
    groups: &HashMap<&str, &GroupFigures>,
    before: &mut DiskReadings,
    now: Instant,
) -> (DiskActivity, ServedRequests) {
    let DiskFigures { totals, errors, throttle: ThrottleFigures { stats, .. }, .. } = figures;
    let prefetch = figures.prefetch.as_ref();
    // Partial hits and skipped reads count as misses: the client waited for the device.
    let hits = prefetch.map_or([0; 2], |stats| {
        [stats.hits, stats.misses.saturating_add(stats.partial_hits).saturating_add(stats.skipped)]
    });
    let l2 = figures.caches.as_ref().map(|(l2, _)| l2);
    let lookups = l2.map_or([0; 2], |l2| [l2.hits, l2.misses]);
    let counts = [
        totals.reads,
        totals.writes,
        totals.read_bytes,
        totals.written_bytes,
        figures.measures.waiting_ns(Direction::Read),
        figures.measures.waiting_ns(Direction::Write),
        hits[0],
        hits[1],
        lookups[0],
        lookups[1],
    ];
    let growth = before.totals.add_reading(now, counts);
    let waiting: usize = stats.waiting.iter().sum();
    // Reads and writes may be throttled at the same time, so the larger share counts.
    let waited = growth.map_or(0.0, |growth| growth.share_of_time(4).max(growth.share_of_time(5)));
    // A wait is counted when it ends. One that has not ended appears as waiting requests without
    // progress.
    let is_stuck = waiting > 0 && growth.is_some_and(|growth| growth.by[..2] == [0, 0]);
    let wait_ratio = if is_stuck { 1.0 } else { waited };
    let served = ServedRequests { totals: *totals, per_second: per_second(growth.as_ref()), wait_ratio };
    let latencies = LatencyPercentiles {
        latency_p50_ns: before.last.latencies.p50_ns,
        latency_p99_ns: before.last.latencies.p99_ns,
        wait_p99_ns: before.last.wait_p99_ns,
    };
    let cause = throttle_cause(figures, groups, before.last.longest_cause);
    let group = (!figures.group.is_empty()).then(|| figures.group.clone());
    let covered = |covered_bytes: u64| (covered_bytes as f64 / figures.size_bytes.max(1) as f64).min(1.0);
    let activity = DiskActivity {
        name: figures.name.to_string(),
        member: member_activity(group, latencies, cause, &served, &figures.throttle),
        format: figures.format,
        cache: figures.cache,
        size: figures.size_bytes,
        stopped: figures.is_stopped,
        backing_changed: figures.backing_changed,
        errors: ErrorCounts {
            reads: errors.reads,
            writes: errors.writes,
            flushes: errors.flushes,
            discards: errors.discards,
        },
        exports: exports.iter().map(|export| self::export(export)).collect(),
        read_ahead: prefetch.map(|stats| PrefetchActivity {
            hit_rate: growth.and_then(|growth| growth.ratio(6, 7)).map(ratio),
            memory: stats.memory_bytes,
            streams: stats.streams.into(),
            suspended: stats.is_gate_closed,
        }),
        l2_cache: l2.map(|l2| CacheActivity {
            hit_rate: growth.and_then(|growth| growth.ratio(8, 9)).map(ratio),
            covered_ratio: ratio(covered(l2.covered_bytes)),
        }),
        memory: DiskMemory { reserved: figures.reserved_bytes, requests: figures.requests_bytes },
    };
    (activity, served)
}

fn export(figures: &ExportFigures) -> ExportActivity {
    let ExportFigures { id, kind, connections, counters, .. } = figures;
    ExportActivity { id: id.clone(), kind, connections: *connections, counters: counters.clone() }
}

fn group(
    figures: &GroupFigures,
    served: &ServedRequests,
    before: &mut GroupReadings,
    now: Instant,
) -> GroupActivity {
    let growth = before.throttled_ns.add_reading(now, [figures.throttle.stats.throttled_ns]);
    let throttled = growth.map_or(0.0, |growth| growth.share_of_time(0));
    let served = ServedRequests { wait_ratio: served.wait_ratio.max(throttled), ..*served };
    let latencies = LatencyPercentiles {
        latency_p50_ns: before.latencies.p50_ns,
        latency_p99_ns: before.latencies.p99_ns,
        wait_p99_ns: before.wait_p99_ns,
    };
    // `throttle_cause` keeps the last cause, so it is shown only if throttled time was added since
    // the previous reading.
    let has_waited = growth.is_some_and(|growth| growth.by[0] > 0);
    let cause = figures.throttle.stats.throttle_cause.filter(|_| has_waited).map(|kind| ThrottleCause {
        level: "group".into(),
        name: figures.name.clone(),
        limit: kind.name().into(),
    });
    GroupActivity {
        name: figures.name.clone(),
        member: member_activity(figures.parent.clone(), latencies, cause, &served, &figures.throttle),
        cluster: figures.cluster_limits.as_ref().map(|(cluster_limits, is_leased)| ClusterLimits {
            limits: set_limits(cluster_limits),
            leased: *is_leased,
        }),
    }
}

fn device(figures: &DeviceFigures, before: &mut RecentCounters<5>, now: Instant) -> DeviceActivity {
    let growth = figures.statistics.as_ref().and_then(|statistics| {
        let DeviceStatistics { reads, writes, read_bytes, written_bytes, busy_ms, .. } = *statistics;
        before.add_reading(now, [reads, writes, read_bytes, written_bytes, busy_ms.saturating_mul(1_000_000)])
    });
    DeviceActivity {
        name: figures.name.clone(),
        disks: figures.disks.clone(),
        capacity: figures.capacity.map(|can| DeviceCapacity {
            read_iops: Some(can.read_iops),
            write_iops: Some(can.write_iops),
            read_bps: Some(can.read_bps),
            write_bps: Some(can.write_bps),
        }),
        busy_ratio: growth.map(|growth| ratio(growth.share_of_time(4))),
        rates: rates(per_second(growth.as_ref())),
    }
}

/// Members that disks and groups share.
fn member_activity(
    group: Option<String>,
    latencies: LatencyPercentiles,
    throttle_cause: Option<ThrottleCause>,
    served: &ServedRequests,
    figures: &ThrottleFigures,
) -> MemberActivity {
    let ThrottleFigures {
        stats,
        limits,
        configured_limits,
        schedule,
        quota,
        quota_status,
        share,
        watermark,
        enforcement,
        latency,
    } = figures;
    let LatencyFigures { settings, control } = latency;
    let latency = LatencyConfig::from_running(settings);
    let of_target = |setting| Some(latency.text(setting)).filter(|_| latency.target_ns > 0);
    let quota_text = |setting: QuotaSetting| Some(setting.text(quota)).filter(|text| text != "0");
    let (state, scale) = match enforcement {
        Enforcement::Enforced => ("enforced", None),
        Enforcement::Lifted => ("lifted", None),
        Enforcement::Scaled(scale) => ("scaled", Some(scale.thousandths() as f64 / 1000.0)),
    };
    let (has_watermark, totals) = (*watermark > 0, &served.totals);
    let reserved = |amount: u64| (amount > 0).then_some(amount);
    // Requests and bytes are those of the disks: requests that no limit applies to bypass the
    // tree's counters.
    let totals_of = |requests, bytes, counters: &AdmissionCounters| ThrottledTotals {
        requests,
        bytes,
        throttled: counters.throttled,
    };
    MemberActivity {
        group,
        latencies,
        wait_ratio: ratio(served.wait_ratio),
        throttle_cause,
        reads: totals_of(totals.reads, totals.read_bytes, &stats.reads),
        writes: totals_of(totals.writes, totals.written_bytes, &stats.writes),
        rates: rates(served.per_second),
        limits: set_limits(limits),
        configured_limits: (configured_limits != limits).then(|| set_limits(configured_limits)),
        schedule: schedule.clone(),
        quota: quota_text(QuotaSetting::Total),
        write_quota: quota_text(QuotaSetting::Writes),
        quota_rate: Some(quota.rate_bps).filter(|rate_bps| *rate_bps > 0),
        quota_status: quota_status.clone(),
        weight: share.weight(),
        iops_reservation: reserved(share.iops_reservation()),
        bps_reservation: reserved(share.bps_reservation()),
        watermark: has_watermark.then_some(*watermark),
        enforcement: has_watermark.then_some(state),
        scale: scale.filter(|_| has_watermark).map(ratio),
        latency_target: of_target(LatencySetting::Target),
        latency_percentile: of_target(LatencySetting::Percentile),
        latency_of: of_target(LatencySetting::Directions),
        latency_floor: latency.floor_permyriad.map(|_| latency.text(LatencySetting::Floor)),
        latency_control: (!control.is_empty()).then(|| control.clone()),
        waiting_requests: stats.waiting.iter().sum(),
        burst_balance_ratio: lowest_balance(stats).map(ratio),
        buckets: buckets(stats),
    }
}

/// Set limits, by name.
fn set_limits(limits: &Limits) -> LimitValues {
    let is_set = |setting: &&LimitSetting| match setting {
        LimitSetting::Limit(kind, LimitPart::BurstLength) => limits.limit(*kind).burst_length_s > 1,
        setting => limits.get(**setting) > 0,
    };
    let entry = |setting: &LimitSetting| (setting.name().to_owned(), limits.get(*setting));
    LimitSetting::of_disk().filter(|setting| is_set(&setting)).map(|setting| entry(&setting)).collect()
}

/// Lowest balance of the bursts; `None` without a burst.
fn lowest_balance(stats: &ThrottleStats) -> Option<f64> {
    let balances = stats.levels.iter().flatten().filter_map(|level| level.balance);
    balances.map(|balance| balance.ratio()).min_by(f64::total_cmp)
}

/// Buckets of each limit, by its name.
fn buckets(stats: &ThrottleStats) -> BTreeMap<&'static str, BucketActivity> {
    let buckets = |kind: LimitKind| Some((limit_name(kind), bucket(&stats.levels[kind.index()]?)));
    LimitKind::ALL.into_iter().filter_map(buckets).collect()
}

fn bucket(LimitLevel { main, burst_rate, balance }: &LimitLevel) -> BucketActivity {
    BucketActivity {
        level: main.units,
        capacity: main.capacity,
        burst_rate_level: burst_rate.map(|bucket| bucket.units),
        burst_rate_capacity: burst_rate.map(|bucket| bucket.capacity),
        burst_duration_ns: balance.and_then(|balance| balance.full_burst.duration_ns()),
        burst_balance_ratio: balance.map(|balance| ratio(balance.ratio())),
        burst_used_up_in_ns: balance.and_then(|balance| balance.used_up_in_ns),
        burst_full_in_ns: balance.map(|balance| balance.full_in_ns),
    }
}

const fn limit_name(kind: LimitKind) -> &'static str {
    LimitSetting::Limit(kind, LimitPart::Rate).name()
}

const CAUSE_COUNT: usize = CauseLevel::ALL.len() * LimitKind::ALL.len() * Direction::ALL.len();

/// Throttled time by level, limit and direction.
fn throttled_ns(figures: &DiskFigures) -> [u64; CAUSE_COUNT] {
    let mut all = [0; CAUSE_COUNT];
    let each = CauseLevel::ALL.into_iter().flat_map(|level| {
        LimitKind::ALL
            .into_iter()
            .flat_map(move |kind| Direction::ALL.into_iter().map(move |direction| (level, kind, direction)))
    });
    for (place, (level, kind, direction)) in all.iter_mut().zip(each) {
        *place = figures.measures.throttled_ns(level, kind, direction);
    }
    all
}

/// Limit that throttled the disk longest in the last second; if none did, the limit that its
/// requests wait for now.
fn throttle_cause(
    figures: &DiskFigures,
    groups: &HashMap<&str, &GroupFigures>,
    longest: Option<(CauseLevel, LimitKind)>,
) -> Option<ThrottleCause> {
    let group_of_level = |level: CauseLevel| {
        let group = groups.get(&*figures.group).copied();
        match level {
            CauseLevel::Disk => None,
            CauseLevel::Group => group,
            CauseLevel::Above => {
                let above =
                    std::iter::successors(group, |group| groups.get(group.parent.as_deref()?).copied());
                // The first group above that is throttled, else the nearest one.
                let mut above = above.skip(1);
                let first = above.clone().next();
                above.find(|group| group.throttle.stats.throttle_cause.is_some()).or(first)
            }
        }
    };
    let cause = |level: CauseLevel, kind: CauseKind| {
        let name = group_of_level(level).map_or(&*figures.name, |group| &*group.name);
        let owner = match level {
            CauseLevel::Disk => "disk",
            CauseLevel::Group => "group",
            CauseLevel::Above => "above",
        };
        ThrottleCause { level: owner.into(), name: name.to_owned(), limit: kind.name().into() }
    };
    if let Some((level, kind)) = longest {
        return Some(cause(level, CauseKind::Limit(kind)));
    }
    let waits =
        |stats: &ThrottleStats| stats.throttle_cause.filter(|_| stats.waiting.iter().sum::<usize>() > 0);
    if figures.throttle.stats.waiting == [0, 0] {
        return None;
    }
    if let Some(kind) = waits(&figures.throttle.stats) {
        return Some(cause(CauseLevel::Disk, kind));
    }
    for level in [CauseLevel::Group, CauseLevel::Above] {
        if let Some(kind) = group_of_level(level).and_then(|group| waits(&group.throttle.stats)) {
            return Some(cause(level, kind));
        }
    }
    None
}

impl SecondReadings {
    /// Updates the values of the last second; returns the growth since the previous call, `None` at
    /// the first.
    fn update(&mut self, figures: &DiskFigures) -> Option<LastSecondCounts> {
        let measures = &figures.measures;
        let latencies = growth_of_both(
            &mut self.latency_counts,
            [OperationClass::Read, OperationClass::Write].map(|class| measures.latency(class)),
        );
        let waited =
            growth_of_both(&mut self.wait_counts, Direction::ALL.map(|direction| measures.waits(direction)));
        self.latencies = SecondLatencies::of(latencies.as_deref());
        self.wait_p99_ns = waited.as_deref().and_then(wait_p99_ns);
        let now = throttled_ns(figures);
        self.longest_cause = self.throttled_ns.replace(now).and_then(|before| {
            let grown = counter::growths(&before, &now)?;
            let (place, ns) = grown.into_iter().enumerate().max_by_key(|(_, ns)| *ns)?;
            // The index varies fastest by direction, then by limit, then by owner.
            let place = (ns > 0).then_some(place / Direction::ALL.len())?;
            Some((
                CauseLevel::ALL[place / LimitKind::ALL.len()],
                LimitKind::ALL[place % LimitKind::ALL.len()],
            ))
        });
        Some(LastSecondCounts { latency_counts: latencies?, waited: waited? })
    }
}

/// 99th percentile of the wait, from counts by bucket. 0 in the first bucket, which holds requests
/// that did not wait; `None` without requests.
fn wait_p99_ns(counts: &[u64]) -> Option<u64> {
    let (_, first_at_most_ns) = HistogramSnapshot::bounds_ns(0);
    let p99_ns = HistogramSnapshot::quantile_ns(counts, 0.99)?;
    Some(if Some(p99_ns) > first_at_most_ns { p99_ns } else { 0 })
}

/// Growth of reads and writes together since the previous counts, which are replaced. `None` at the
/// first call, and after a disk was replaced by another of the same name.
fn growth_of_both(before: &mut Vec<u32>, [reads, writes]: [HistogramSnapshot; 2]) -> Option<Vec<u64>> {
    let sums = reads.counts().iter().zip(writes.counts()).map(|(reads, writes)| reads.wrapping_add(*writes));
    let now: Vec<u32> = sums.map(|count| count as u32).collect();
    let before = std::mem::replace(before, now.clone());
    let both = before.iter().zip(&now);
    let grown = both.map(|(before, now)| counter::growth_of_32_bits((*before).into(), (*now).into()));
    // Empty at the first call.
    if before.is_empty() { None } else { grown.collect() }
}

impl SecondLatencies {
    /// Percentiles and distribution of these counts by bucket.
    fn of(grown: Option<&[u64]>) -> Self {
        let percentile = |part| grown.and_then(|grown| HistogramSnapshot::quantile_ns(grown, part));
        let latencies = grown.map(|grown| {
            let round = HistogramSnapshot::round_of(grown);
            let mut rows = Latencies::default();
            for (place, count) in round.into_iter().enumerate() {
                let row = &mut rows[place.min(Latencies::default().len() - 1)];
                *row = row.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
            }
            rows
        });
        Self { p50_ns: percentile(0.5), p99_ns: percentile(0.99), latencies }
    }
}

impl PreviousReadings {
    /// Latencies of a disk's or group's requests in the last second.
    pub(super) fn latencies(&self, kind: ObjectKind, name: &str) -> Option<&Latencies> {
        let latencies = match kind {
            ObjectKind::Disk => self.disks.get(name).map(|disk| &disk.last.latencies),
            ObjectKind::Group => self.groups.get(name).map(|group| &group.latencies),
        };
        latencies?.latencies.as_ref()
    }
}

/// Sample of a disk or group for the history.
pub(super) fn sample(object: &ActivityObject) -> ActivitySample {
    let number = |key: &str| object.get(key).and_then(Value::as_f64);
    let hit_rate_of = |key: &str| object.get(key)?.get("hit-rate")?.as_f64();
    ActivitySample {
        rates: [number("read-iops"), number("write-iops"), number("read-bps"), number("write-bps")],
        latency_ns: [number("latency-p50-ns"), number("latency-p99-ns")],
        waiting: number("waiting-requests"),
        ratios: [
            number("wait-ratio"),
            number("burst-balance-ratio"),
            hit_rate_of("read-ahead"),
            hit_rate_of("l2-cache"),
        ],
    }
}

#[cfg(test)]
mod tests {
    use block::measures::Measures;
    use policy::throttle::{BucketLevel, BurstBalance, FullBurst, WaitSummary};

    use super::*;

    #[test]
    fn balance_is_of_the_first_burst_bucket() {
        let mut stats = ThrottleStats {
            reads: AdmissionCounters::default(),
            writes: AdmissionCounters::default(),
            waits: WaitSummary::default(),
            recent_waits: WaitSummary::default(),
            throttled_ns: 0,
            throttle_cause: Some(CauseKind::Limit(LimitKind::IopsTotal)),
            tokens: [None; 6],
            levels: [None; 6],
            waiting: [8, 0],
            reservation: None,
        };
        assert_eq!((lowest_balance(&stats), buckets(&stats).len()), (None, 0));
        // 4 s of a burst of 400 for 30 s over 100: requests wait for the burst rate.
        stats.tokens[LimitKind::IopsTotal.index()] = Some(0);
        let balance = BurstBalance {
            full_burst: FullBurst::Lasts { ms: 40_000 },
            free_ppm: 896_250,
            used_up_in_ns: Some(35_850_000_000),
            full_in_ns: 12_450_000_000,
        };
        stats.levels[LimitKind::IopsTotal.index()] = Some(LimitLevel {
            main: BucketLevel { units: 1245, capacity: 12_000 },
            burst_rate: Some(BucketLevel { units: 40, capacity: 40 }),
            balance: Some(balance),
        });
        assert_eq!(lowest_balance(&stats).map(ratio), Number::from_f64(0.896));
        let bucket = BucketActivity {
            level: 1245,
            capacity: 12_000,
            burst_rate_level: Some(40),
            burst_rate_capacity: Some(40),
            burst_duration_ns: Some(40_000_000_000),
            burst_balance_ratio: Number::from_f64(0.896),
            burst_used_up_in_ns: Some(35_850_000_000),
            burst_full_in_ns: Some(12_450_000_000),
        };
        assert_eq!(buckets(&stats), BTreeMap::from([("iops-total", bucket)]));
        // A limit without a burst has no balance.
        let main = BucketLevel { units: 10, capacity: 10 };
        stats.levels = [Some(LimitLevel { main, burst_rate: None, balance: None }); 6];
        assert_eq!(lowest_balance(&stats), None);
    }

    #[test]
    fn waits_are_of_the_last_second() {
        let buckets = Measures::default().latency(OperationClass::Read).counts().len();
        let spread = |points: &[(usize, u64)]| {
            let mut counts = vec![0; buckets];
            points.iter().for_each(|&(place, count)| counts[place] = count);
            HistogramSnapshot::new(counts, 0)
        };
        let (short, long) = (40, 80);
        let mut before = Vec::new();
        assert_eq!(
            growth_of_both(&mut before, [spread(&[(long, 100)]), spread(&[])]),
            None,
            "the first call has no previous counts"
        );
        let last = growth_of_both(&mut before, [spread(&[(long, 100)]), spread(&[(short, 50)])]).unwrap();
        assert_eq!(wait_p99_ns(&last), HistogramSnapshot::quantile_ns(spread(&[(short, 1)]).counts(), 0.5));
        let last =
            growth_of_both(&mut before, [spread(&[(long, 100), (0, 900)]), spread(&[(short, 50)])]).unwrap();
        assert_eq!(wait_p99_ns(&last), Some(0), "none waited");
        assert_eq!(
            growth_of_both(&mut before, [spread(&[(short, 3)]), spread(&[])]),
            None,
            "the counters of a new disk are lower"
        );
        let last = growth_of_both(&mut before, [spread(&[(short, 3)]), spread(&[])]).unwrap();
        assert_eq!(wait_p99_ns(&last), None, "no request completed");
    }

    #[test]
    fn a_group_s_latencies_are_those_of_all_its_disks() {
        let buckets = Measures::default().latency(OperationClass::Read).counts().len();
        let counts = |place: usize, count| {
            let mut counts = vec![0; buckets];
            counts[place] = count;
            counts
        };
        let grown = |took| LastSecondCounts { latency_counts: took, waited: vec![0; buckets] };
        let mut of_disks = MemberTotals::default();
        // A new disk has no previous counts.
        of_disks.add(&ServedRequests::default(), None);
        assert!(of_disks.last_second.is_none());
        let (short, long) = (20, 60);
        of_disks.add(&ServedRequests::default(), Some(&grown(counts(short, 900))));
        of_disks.add(&ServedRequests::default(), Some(&grown(counts(long, 100))));
        let latencies = SecondLatencies::of(Some(&of_disks.last_second.unwrap().latency_counts));
        let alone = |place| HistogramSnapshot::quantile_ns(&counts(place, 1), 0.5);
        assert_eq!((latencies.p50_ns, latencies.p99_ns), (alone(short), alone(long)));
        assert_eq!(latencies.latencies.unwrap().iter().sum::<u32>(), 1000);
    }
}
