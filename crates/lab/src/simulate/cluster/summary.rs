//! Results as figures: how fast quotas follow demand, the load on etcd, unused quota.

use console::{
    figures,
    table::{ColumnAlignment, TextTable, columns},
};
use policy::cluster::{ClusterGroupLimits, simulated::StoreTraffic};
use serde::Serialize;

use super::{
    run::{ClusterOutcome, ClusterSample},
    spec::ClusterSpec,
};

/// Shares of hosts near their ideal, for which the time is reported.
const PARTS: [(&str, f64); 3] =
    [("95 % of the hosts", 0.95), ("99 % of the hosts", 0.99), ("all hosts", 1.0)];

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::simulate) struct ClusterSummary {
    pub(super) hosts: usize,
    pub(super) disks: usize,
    pub(super) limits: figures::SettingValues,
    pub(super) tick_ns: u64,
    pub(super) lease_ns: u64,
    /// Fallback share of each host, in millionths of the limits.
    pub(super) safe_share_ppm: u64,
    pub(super) seconds: f64,
    pub(super) seed: u64,
    /// Ticks after a change until these shares of hosts were within 5 % of their ideal.
    pub(super) followed: Vec<FollowTime>,
    pub(super) changes: usize,
    /// Changes without a fault near them.
    #[serde(skip)]
    undisturbed: usize,
    /// Figures of steady periods: at least half an interval after the last change, two leases after
    /// the start, and without a fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) steady: Option<ClusterFigures>,
    pub(super) all: ClusterFigures,
    /// Maximum of the quotas in force at any instant, as a share of the limit.
    pub(super) most_in_force: f64,
    /// Set if more than the limit was in force, or more was admitted than the limit and a burst.
    pub(in crate::simulate) violation: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) faults: Vec<InjectedFault>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) remarks: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::simulate) partial: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct FollowTime {
    pub(super) of_hosts: f64,
    #[serde(skip)]
    pub(super) name: &'static str,
    /// Ticks; absent if it was not reached before the next change.
    pub(super) median: Option<u64>,
    pub(super) worst: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct InjectedFault {
    pub(super) seconds: f64,
    pub(super) what: String,
}

/// A row of a table: its name and its figure.
type FigureRow<T> = (&'static str, fn(&ClusterFigures) -> T);

/// Rates per second, and shares of the limit.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ClusterFigures {
    pub(super) seconds: f64,
    pub(super) reports: f64,
    pub(super) transactions: f64,
    pub(super) grants: f64,
    pub(super) leases_prolonged: f64,
    pub(super) reads_and_elections: f64,
    /// All requests to etcd.
    pub(super) requests: f64,
    pub(super) requests_per_100_hosts: f64,
    /// Watch events sent by etcd.
    pub(super) watched: f64,
    pub(super) written_bytes: f64,
    pub(super) sent_bytes: f64,
    /// Mean share of the limit that was unused while a host waited.
    pub(super) unused: Option<f64>,
    /// Mean share of the limit that is in force.
    pub(super) in_force: f64,
    /// Mean deviation of the hosts from their ideal shares, as a share of the limit.
    pub(super) off: f64,
    /// Mean share of hosts near their ideal.
    pub(super) near: f64,
}

impl ClusterFigures {
    /// Computes the figures of stretches of samples, each with the sample before its first.
    fn of(stretches: &[&[ClusterSample]], hosts: usize, max_requests: f64) -> Self {
        let mut sum = StoreTraffic::default();
        let (mut seconds, mut count) = (0.0, 0.0);
        let (mut in_force, mut off, mut near, mut unused, mut wanted) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for stretch in stretches {
            let (Some(first), Some(last)) = (stretch.first(), stretch.last()) else { continue };
            seconds += (last.at_ns - first.at_ns) as f64 / 1e9;
            // Traffic is cumulative, so a stretch needs its ends only.
            add(&mut sum, &last.traffic.since(&first.traffic));
            // The first sample only marks the start of the stretch.
            for sample in &stretch[1..] {
                count += 1.0;
                in_force += sample.in_force;
                off += sample.off;
                near += sample.near;
                if sample.is_wanted {
                    wanted += 1.0;
                    unused += 1.0 - sample.passed / max_requests;
                }
            }
        }
        let a_second = |count: u64| count as f64 / f64::max(seconds, 1e-9);
        let mean = |sum: f64| sum / f64::max(count, 1.0);
        Self {
            seconds,
            reports: a_second(sum.reports),
            transactions: a_second(sum.transactions),
            grants: a_second(sum.grants),
            leases_prolonged: a_second(sum.renewals),
            reads_and_elections: a_second(sum.reads + sum.campaigns),
            requests: a_second(sum.requests()),
            requests_per_100_hosts: a_second(sum.requests()) * 100.0 / hosts as f64,
            watched: a_second(sum.events),
            written_bytes: a_second(sum.written_bytes),
            sent_bytes: a_second(sum.sent_bytes),
            // A full bucket admits more than the limit at first.
            unused: (wanted > 0.0).then(|| (unused / wanted).max(0.0)),
            in_force: mean(in_force),
            off: mean(off),
            near: mean(near),
        }
    }
}

fn add(sum: &mut StoreTraffic, more: &StoreTraffic) {
    sum.reports += more.reports;
    sum.transactions += more.transactions;
    sum.grants += more.grants;
    sum.renewals += more.renewals;
    sum.campaigns += more.campaigns;
    sum.reads += more.reads;
    sum.events += more.events;
    sum.written_bytes += more.written_bytes;
    sum.sent_bytes += more.sent_bytes;
}

impl ClusterSummary {
    pub(super) fn new(
        spec: &ClusterSpec,
        limits: &ClusterGroupLimits,
        seed: u64,
        outcome: &ClusterOutcome,
        remarks: Vec<String>,
    ) -> Self {
        let samples = &outcome.samples;
        let figures =
            |stretches: &[&[ClusterSample]]| ClusterFigures::of(stretches, spec.hosts, outcome.max_requests);
        let tick = spec.timing.tick.as_nanos() as u64;
        let half = spec.every.as_nanos() as u64 / tick / 2;
        // For one lease after its election the first leader cannot determine all quotas that may be
        // in force.
        let settled_ns = 2 * spec.timing.lease.as_nanos() as u64;
        // Steady: long after a change of demand, and in a phase without faults.
        let calm = |sample: &ClusterSample| {
            sample.since >= half && sample.at_ns >= settled_ns && !outcome.disturbed.contains(&sample.phase)
        };
        let stretches: Vec<&[ClusterSample]> = samples
            // A stretch never spans a change, as rates over the change would mix two demands.
            .chunk_by(|one, other| one.phase == other.phase && calm(one) == calm(other))
            .filter(|stretch| stretch.len() > 1 && calm(&stretch[0]))
            .collect();
        let all = limits.limits();
        let set = policy::throttle::LimitSetting::ALL
            .into_iter()
            .filter(|setting| all.get(*setting) != policy::throttle::Limits::default().get(*setting));
        Self {
            hosts: spec.hosts,
            disks: spec.disks,
            limits: set.map(|setting| (setting.name().to_owned(), all.get(setting))).collect(),
            tick_ns: tick,
            lease_ns: spec.timing.lease.as_nanos() as u64,
            safe_share_ppm: u64::from(
                spec.safe_share_ppm
                    .unwrap_or_else(|| ClusterGroupLimits::default_fallback_ppm(spec.hosts as u32)),
            ),
            seconds: samples.last().map_or(0.0, |last| last.at_ns as f64 / 1e9),
            seed,
            followed: PARTS.map(|(name, part)| followed(name, part, outcome)).into(),
            changes: outcome.changes.len(),
            undisturbed: undisturbed(outcome).count(),
            steady: (!stretches.is_empty()).then(|| figures(&stretches)),
            all: figures(&[samples]),
            most_in_force: outcome.max_in_force,
            violation: outcome.violation.clone(),
            faults: outcome
                .faults
                .iter()
                .map(|(at, fault)| InjectedFault { seconds: *at as f64 / 1e9, what: fault.clone() })
                .collect(),
            remarks,
            partial: outcome.partial.clone(),
        }
    }

    pub(in crate::simulate) fn text(&self) -> String {
        let tables = [
            (self.changes > 0).then(|| self.follows().render(false)),
            Some(self.messages().render(false)),
            Some(self.limit_usage_table().render(false)),
        ];
        let mut text: Vec<String> = vec![format!("{}\n", self.title())];
        text.extend(tables.into_iter().flatten());
        text.extend(self.missing_reasons().map(|why| format!("- means that {why}.\n")));
        text.push(format!("{}\n", self.safety()));
        text.extend(self.faults.iter().map(|fault| format!("At {:.1} s: {}.\n", fault.seconds, fault.what)));
        text.extend(self.remarks.iter().map(|remark| format!("{remark}\n")));
        if let Some(why) = &self.partial {
            text.push(format!("Incomplete: {why}. The figures cover the part before.\n"));
        }
        text.join("\n")
    }

    /// Reasons for missing figures.
    fn missing_reasons(&self) -> impl Iterator<Item = &'static str> {
        let unknown = self.changes > 0 && self.followed.iter().any(|followed| followed.worst.is_none());
        let never_steady = self.steady.is_none();
        let mut figures = [self.steady.as_ref(), Some(&self.all)].into_iter().flatten();
        let no_host_waits = figures.any(|figures| figures.unused.is_none());
        // Only reasons for figures that are shown as `-`.
        let reasons = [
            (unknown && self.undisturbed == 0, "each change coincided with a fault"),
            (
                unknown && self.undisturbed > 0,
                "hosts did not reach their share before the next change or the end (every=, seconds=)",
            ),
            (
                never_steady,
                "demand was never steady, which needs half of `every` after a change or a fault, \
                 and two leases after the start (seconds=, every=)",
            ),
            (no_host_waits, "no host was busy, so none waited (busy=)"),
        ];
        reasons.into_iter().filter_map(|(applies, why)| applies.then_some(why))
    }

    pub(super) fn title(&self) -> String {
        let limits: Vec<_> = self.limits.iter().map(|(name, value)| format!("{name}={value}")).collect();
        format!(
            "{} with {} each share {}; tick {}, lease {}, {} s, seed {}",
            figures::counted(self.hosts as u64, "host"),
            figures::counted(self.disks as u64, "disk"),
            limits.join(" "),
            figures::time(self.tick_ns),
            figures::time(self.lease_ns),
            self.seconds,
            self.seed
        )
    }

    pub(in crate::simulate) fn safety(&self) -> String {
        let max_in_force = figures::share(self.most_in_force);
        match &self.violation {
            None => format!(
                "The quotas in force never exceeded the limit ({max_in_force} at most), nor did the \
                 requests exceed the limit and a burst."
            ),
            Some(why) => format!("MORE THAN THE LIMIT: {why}."),
        }
    }

    fn follows(&self) -> TextTable {
        let mut table = TextTable::new(columns(&["WITHIN 5 % OF THE IDEAL"], &["TICKS, MEDIAN", "WORST"]));
        for followed in &self.followed {
            let shown = |ticks: Option<u64>| ticks.map_or_else(|| "-".to_owned(), |ticks| ticks.to_string());
            table.row(vec![followed.name.to_owned(), shown(followed.median), shown(followed.worst)]);
        }
        table
    }

    fn messages(&self) -> TextTable {
        let numbers = ["STEADY", "PER 100 HOSTS", "WHOLE RUN", "PER 100 HOSTS"];
        let mut table = TextTable::new(columns(&["ETCD, PER SECOND"], &numbers));
        let rows: [FigureRow<f64>; 8] = [
            ("reports", |figures| figures.reports),
            ("transactions", |figures| figures.transactions),
            ("lease renewals", |figures| figures.leases_prolonged),
            ("reads, elections", |figures| figures.reads_and_elections),
            ("requests in total", |figures| figures.requests),
            ("sent by watches", |figures| figures.watched),
            ("bytes written", |figures| figures.written_bytes),
            ("bytes sent", |figures| figures.sent_bytes),
        ];
        for (name, value_of) in rows {
            let shown = |value: f64| {
                if name.starts_with("bytes") { figures::bytes(value) } else { figures::count(value) }
            };
            let both = |figures: Option<&ClusterFigures>| match figures {
                None => ["-".to_owned(), "-".to_owned()],
                Some(figures) => {
                    [shown(value_of(figures)), shown(value_of(figures) * 100.0 / self.hosts as f64)]
                }
            };
            let mut row = vec![name.to_owned()];
            row.extend(both(self.steady.as_ref()));
            row.extend(both(Some(&self.all)));
            table.row(row);
        }
        table
    }

    fn limit_usage_table(&self) -> TextTable {
        let mut table = TextTable::new([
            ("OF THE LIMIT", ColumnAlignment::Left),
            ("STEADY", ColumnAlignment::Right),
            ("WHOLE RUN", ColumnAlignment::Right),
        ]);
        let rows: [FigureRow<Option<f64>>; 4] = [
            ("unused while a host waits", |figures| figures.unused),
            ("in force", |figures| Some(figures.in_force)),
            ("deviation from the ideal", |figures| Some(figures.off)),
            ("hosts within 5 % of the ideal", |figures| Some(figures.near)),
        ];
        for (name, value_of) in rows {
            let shown = |figures: Option<&ClusterFigures>| {
                figures.and_then(value_of).map_or_else(|| "-".to_owned(), figures::share)
            };
            table.row(vec![name.to_owned(), shown(self.steady.as_ref()), shown(Some(&self.all))]);
        }
        table
    }
}

/// Numbers of the phases without a fault.
fn undisturbed(outcome: &ClusterOutcome) -> impl Iterator<Item = usize> {
    (1..=outcome.changes.len()).filter(|phase| !outcome.disturbed.contains(phase))
}

/// Ticks until this share of hosts followed, over all undisturbed changes.
fn followed(name: &'static str, part: f64, outcome: &ClusterOutcome) -> FollowTime {
    let ticks = |phase: usize| {
        let mut seen = outcome.samples.iter().filter(|sample| sample.phase == phase).peekable();
        seen.peek()?;
        // A phase without success sorts last, so that median and worst become unknown.
        Some(seen.find(|sample| sample.near >= part).map_or(u64::MAX, |sample| sample.since))
    };
    let mut ticks: Vec<u64> = undisturbed(outcome).filter_map(ticks).collect();
    ticks.sort_unstable();
    let known = |ticks: Option<&u64>| ticks.copied().filter(|ticks| *ticks < u64::MAX);
    FollowTime { of_hosts: part, name, median: known(ticks.get(ticks.len() / 2)), worst: known(ticks.last()) }
}
