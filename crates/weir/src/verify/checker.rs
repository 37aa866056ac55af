//! Checks guarantees over a series of reports of the daemon.
//!
//! A limit is checked over all pairs of reports at once: let e(t) be the units admitted until
//! report t, less rate × time. The largest excess that ends at a report is e there less the least e
//! of all earlier reports, so one running minimum suffices. The counters of a report are from some
//! moment between request and response; the time between two reports is therefore taken from the
//! request for the first to the response of the second, which favours the daemon.

use std::collections::BTreeMap;

use api::{
    DiskStatus, LatencyControlStatus, MemberSettings, ThrottleStatus, ThrottledTransfers, WaitPercentiles,
};
use console::figures;
use policy::{
    counter,
    request::Direction,
    throttle::{LimitKind, LimitPart, LimitSetting},
};

use crate::client::report::{DaemonReport, StatusNode};

/// Fractions of a reservation and of a share that must be met, as in the alerts of
/// `packaging/prometheus`.
const RESERVATION_FRACTION: f64 = 0.95;
const SHARE_FRACTION: f64 = 0.9;
/// Shortest time with waiting requests, in seconds, that is enough for a verdict.
const MIN_LOAD_S: f64 = 3.0;
/// Largest I/O into which requests are merged, in bytes; few requests are larger.
const LARGEST_IO: f64 = 1_048_576.0;
/// Shares of time above which a limit counts as the effective one, and below which it is
/// negligible.
const EFFECTIVE: f64 = 0.9;
const NEGLIGIBLE: f64 = 0.1;

/// A report, with the times of its request and response in seconds since the first request.
pub(super) struct TimedReport {
    pub(super) report: DaemonReport,
    pub(super) requested_s: f64,
    pub(super) received_s: f64,
}

/// Verdict on a guarantee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GuaranteeVerdict {
    Held,
    Broken,
    /// There was no load for it, or not for long enough.
    NoLoad,
    /// It cannot be checked, for this reason.
    NotChecked(&'static str),
}

impl GuaranteeVerdict {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Broken => "broken",
            Self::NoLoad => "no load",
            Self::NotChecked(_) => "not checked",
        }
    }

    pub(super) fn of(holds: bool) -> Self {
        if holds { Self::Held } else { Self::Broken }
    }
}

/// One line of the result.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GuaranteeFinding {
    /// `disk` or `group`.
    pub(super) kind: &'static str,
    pub(super) name: String,
    pub(super) guarantee: String,
    pub(super) expected: String,
    pub(super) measured: String,
    /// Numbers of the expected and the measured values for programs: operations, bytes, seconds or
    /// nanoseconds.
    pub(super) figures: FindingFigures,
    pub(super) verdict: GuaranteeVerdict,
}

/// State accumulated from the reports so far.
pub(super) struct GuaranteeChecker {
    wait_p99_ns: Option<u64>,
    before: Option<TimedReport>,
    nodes: BTreeMap<(&'static str, String), CheckedNode>,
}

/// State of one disk or group.
struct CheckedNode {
    settings: MemberSettings,
    /// Reason why none of its guarantees can be checked.
    unclear: Option<&'static str>,
    /// Indexed by [`LimitKind::index`].
    limits: [LimitAdmissions; 6],
    /// Seconds in which its requests waited, and requests and bytes admitted in these.
    waiting_s: f64,
    waiting: [f64; 2],
    /// Seconds in which it competed for its group's limit, units admitted then, and its fair share
    /// of them.
    sharing_s: f64,
    shared: f64,
    share: f64,
    /// Seconds in which it competed but its fair share is unknown, and the reason.
    unshared_s: f64,
    unshared: Option<&'static str>,
    longest_wait_ns: u64,
    /// As of the last report.
    latency: LatencyControlStatus,
}

/// Admissions by a limit.
#[derive(Clone, Copy, Default)]
struct LimitAdmissions {
    units: f64,
    seconds: f64,
    /// Least value of (units less rate × time) at any report so far.
    lowest: Option<f64>,
    /// Largest excess over the rate between two reports.
    excess: f64,
    /// Largest number of units of one request, estimated.
    largest_request: f64,
}

const CHANGED: &str = "its settings changed meanwhile";
pub(super) const RESTARTED: &str = "the daemon restarted meanwhile";
const LIFTED: &str = "its watermark lifted or scaled its limits";
const BY_SIZE: &str = "iops-size counts large requests as several";
const WITH_GROUPS: &str = "its group contains groups, which take a share as well";
const HAS_RESERVATIONS: &str = "a disk of its group has a reservation, which comes before weights";

impl GuaranteeChecker {
    pub(super) fn new(wait_p99_ns: Option<u64>) -> Self {
        Self { wait_p99_ns, before: None, nodes: BTreeMap::new() }
    }

    pub(super) fn add_report(&mut self, current: TimedReport) {
        for node in nodes(&current.report) {
            let seen = self.nodes.entry(key(node)).or_insert_with(|| CheckedNode::new(node.settings()));
            seen.latency = node.latency_control().clone();
            seen.unclear = seen.unclear.or_else(|| {
                let is_enforced =
                    node.watermark_status().enforcement.as_deref().is_none_or(|state| state == "enforced");
                let changed = seen.settings != *node.settings();
                // A change between two reports applies to an unknown part of the interval.
                changed.then_some(CHANGED).or_else(|| (!is_enforced).then_some(LIFTED))
            });
        }
        if let Some(before) = self.before.take() {
            self.compare(&before, &current);
        }
        // After `compare`: a minimum that includes this report would hide an excess that ends at
        // it.
        for node in nodes(&current.report) {
            self.node(node).begin_limits(node, current.requested_s);
        }
        self.before = Some(current);
    }

    fn node(&mut self, node: StatusNode<'_>) -> &mut CheckedNode {
        self.nodes.get_mut(&key(node)).expect("each report's nodes are put there first")
    }

    fn compare(&mut self, before: &TimedReport, now: &TimedReport) {
        // Counters of different runs cannot be subtracted.
        if now.report.uptime_ns <= before.report.uptime_ns {
            self.nodes.values_mut().for_each(|seen| seen.unclear = Some(RESTARTED));
            return;
        }
        let seconds = (now.report.uptime_ns - before.report.uptime_ns) as f64 / 1e9;
        for node in nodes(&now.report) {
            let Some(earlier) = find(&before.report, node) else { continue };
            let Some(delta) = AdmissionDelta::between(earlier.throttle(), node.throttle()) else { continue };
            let seen = self.node(node);
            seen.limit(node, now.received_s, &delta, seconds);
            // Waiting at both ends is taken for waiting throughout: reports are a second apart.
            if waits(earlier) && waits(node) {
                seen.waiting_s += seconds;
                seen.waiting[0] += delta.requests;
                seen.waiting[1] += delta.bytes;
            }
            if let (StatusNode::Disk(_), Some(WaitPercentiles { p99, .. })) =
                (node, node.throttle().recent_wait_ns)
            {
                seen.longest_wait_ns = seen.longest_wait_ns.max(p99);
            }
        }
        for group in &now.report.groups {
            self.share(&before.report, &now.report, StatusNode::Group(group), seconds);
        }
    }

    /// Accounts the shares of a group's disks that all waited for this group's limits alone.
    fn share(&mut self, before: &DaemonReport, now: &DaemonReport, group: StatusNode<'_>, seconds: f64) {
        let Some(earlier) = find(before, group) else { return };
        let (Some(limited), Some(kind)) =
            (limited(earlier, group, seconds), group.throttle().throttle_cause.as_deref().and_then(kind))
        else {
            return;
        };
        if limited < EFFECTIVE {
            return;
        }
        let by_size = group.settings().limits.get("iops-size").is_some_and(|size| *size > 0);
        let of_this = |settings: &MemberSettings| settings.group.as_deref() == Some(name(group));
        let has_groups = now.groups.iter().any(|group| of_this(&group.settings));
        let by_size = (by_size && !kind.counts_bytes()).then_some(BY_SIZE);
        let mut unclear = by_size.or(has_groups.then_some(WITH_GROUPS));
        let mut members = Vec::new();
        for disk in now.disks.iter().filter(|disk| of_this(&disk.settings)) {
            let Some(earlier) = before.disks.iter().find(|earlier| earlier.name == disk.name) else { return };
            let (earlier, node) = (StatusNode::Disk(earlier), StatusNode::Disk(disk));
            let Some(step) = AdmissionDelta::between(earlier.throttle(), node.throttle()) else { return };
            // A disk that its own limit slows down, or that did not wait, does not compete for the
            // share.
            let disk_limited = self::limited(earlier, node, seconds).unwrap_or(1.0);
            if !(waits(earlier) && waits(node)) || disk_limited > NEGLIGIBLE {
                continue;
            }
            let reservations = [disk.settings.iops_reservation, disk.settings.bps_reservation];
            if reservations.into_iter().flatten().any(|rate| rate > 0) {
                unclear = unclear.or(Some(HAS_RESERVATIONS));
            }
            members.push((disk, step.of(kind)));
        }
        let weight = |disk: &DiskStatus| disk.settings.weight.unwrap_or(100) as f64;
        let all: f64 = members.iter().map(|(_, units)| units).sum();
        let weights: f64 = members.iter().map(|(disk, _)| weight(disk)).sum();
        if members.len() < 2 {
            return;
        }
        for (disk, units) in members {
            let seen = self.node(StatusNode::Disk(disk));
            if let Some(why) = unclear {
                (seen.unshared_s, seen.unshared) = (seen.unshared_s + seconds, Some(why));
                continue;
            }
            seen.sharing_s += seconds;
            seen.shared += units;
            // The sum of what all members were admitted is divided, and not the group's limit: an
            // unused part of the limit violates no share.
            seen.share += all * weight(disk) / weights;
        }
    }

    /// One finding for each guarantee of the wanted nodes.
    pub(super) fn findings(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<GuaranteeFinding> {
        let selected = self.nodes.iter().filter(|((_, name), _)| is_wanted(name));
        selected.flat_map(|((kind, name), seen)| seen.findings(kind, name, self.wait_p99_ns)).collect()
    }
}

impl CheckedNode {
    fn new(settings: &MemberSettings) -> Self {
        Self {
            settings: settings.clone(),
            unclear: None,
            limits: Default::default(),
            waiting_s: 0.0,
            waiting: [0.0; 2],
            sharing_s: 0.0,
            shared: 0.0,
            share: 0.0,
            unshared_s: 0.0,
            unshared: None,
            longest_wait_ns: 0,
            latency: LatencyControlStatus::default(),
        }
    }

    fn setting(&self, kind: LimitKind, part: LimitPart) -> f64 {
        self.settings.limits.get(LimitSetting::Limit(kind, part).name()).copied().unwrap_or(0) as f64
    }

    /// Burst capacity.
    fn burst(&self, kind: LimitKind) -> f64 {
        figures::rate_limit(&self.settings.limits, kind).capacity()
    }

    fn begin_limits(&mut self, node: StatusNode<'_>, requested_s: f64) {
        for kind in LimitKind::ALL {
            let lowest = total(node.throttle(), kind) - self.setting(kind, LimitPart::Rate) * requested_s;
            let admissions = &mut self.limits[kind.index()];
            admissions.lowest = Some(admissions.lowest.map_or(lowest, |before| before.min(lowest)));
        }
    }

    fn limit(&mut self, node: StatusNode<'_>, received_s: f64, step: &AdmissionDelta, seconds: f64) {
        for kind in LimitKind::ALL {
            let now = total(node.throttle(), kind) - self.setting(kind, LimitPart::Rate) * received_s;
            let admissions = &mut self.limits[kind.index()];
            admissions.units += step.of(kind);
            admissions.seconds += seconds;
            admissions.excess =
                admissions.lowest.map_or(admissions.excess, |lowest| admissions.excess.max(now - lowest));
            if step.requests > 0.0 {
                let length = step.bytes / step.requests;
                // A bucket admits while its level is at most its capacity, so the last I/O may
                // exceed it by its own size. Bytes: twice the mean size, as only the mean is known.
                // Operations: one merged I/O may consist of this many requests.
                let largest_request =
                    if kind.counts_bytes() { length * 2.0 } else { LARGEST_IO / length.max(4096.0) };
                admissions.largest_request = admissions.largest_request.max(largest_request);
            }
        }
    }

    fn findings(&self, kind: &'static str, name: &str, wait_p99_ns: Option<u64>) -> Vec<GuaranteeFinding> {
        let line = |promise: &str,
                    [asked, measured]: [String; 2],
                    figures: FindingFigures,
                    verdict: GuaranteeVerdict| GuaranteeFinding {
            kind,
            name: name.to_owned(),
            guarantee: promise.to_owned(),
            expected: asked,
            measured,
            figures,
            verdict: self.unclear.map_or(verdict, GuaranteeVerdict::NotChecked),
        };
        let mut findings = Vec::new();
        for kind in LimitKind::ALL.into_iter().filter(|&kind| self.setting(kind, LimitPart::Rate) > 0.0) {
            let LimitAdmissions { units, seconds, excess: beyond, largest_request: one, .. } =
                self.limits[kind.index()];
            let burst = self.burst(kind);
            let one = if kind.counts_bytes() { one.max(LARGEST_IO) } else { one };
            let verdict = match () {
                () if units == 0.0 => GuaranteeVerdict::NoLoad,
                () if !kind.counts_bytes()
                    && self.settings.limits.get("iops-size").is_some_and(|&n| n > 0) =>
                {
                    GuaranteeVerdict::NotChecked(BY_SIZE)
                }
                () => GuaranteeVerdict::of(beyond <= burst + one),
            };
            let show = |units: f64| format_units(kind.counts_bytes(), units);
            let (rate, admitted) = (self.setting(kind, LimitPart::Rate), per_second(units, seconds));
            let expected = format!("{}/s, burst {}", show(rate), show(burst));
            let measured = format!("{}/s, excess {}", show(admitted), show(beyond));
            let figures = vec![("rate", rate), ("burst", burst), ("passed", admitted), ("beyond", beyond)];
            let guarantee = LimitSetting::Limit(kind, LimitPart::Rate).name();
            findings.push(line(guarantee, [expected, measured], figures, verdict));
        }
        findings.extend(self.reservations(line));
        let weight = self.settings.weight.unwrap_or(100);
        if self.sharing_s > 0.0 {
            let (actual, should) = (self.shared / self.sharing_s, self.share / self.sharing_s);
            let is_met = self.shared >= SHARE_FRACTION * self.share;
            // Over a short time, a single large request can distort a share.
            let verdict = if self.sharing_s < MIN_LOAD_S {
                GuaranteeVerdict::NoLoad
            } else {
                GuaranteeVerdict::of(is_met)
            };
            let measured = format!("{:.0}% of its share", 100.0 * actual / should.max(1e-9));
            let figures = vec![("weight", weight as f64), ("share", should), ("passed", actual)];
            findings.push(line("share", [format!("weight {weight}"), measured], figures, verdict));
        } else if let Some(why) = self.unshared {
            let measured = format!("shared for {:.0}s", self.unshared_s);
            let figures = vec![("weight", weight as f64)];
            let verdict = GuaranteeVerdict::NotChecked(why);
            findings.push(line("share", [format!("weight {weight}"), measured], figures, verdict));
        }
        if let (Some(max_ns), "disk") = (wait_p99_ns, kind) {
            let longest = self.longest_wait_ns;
            let verdict =
                if longest == 0 { GuaranteeVerdict::NoLoad } else { GuaranteeVerdict::of(longest <= max_ns) };
            let figures = vec![("most-ns", max_ns as f64), ("wait-p99-ns", longest as f64)];
            let texts = [max_ns, longest].map(figures::time);
            findings.push(line("wait-p99", texts, figures, verdict));
        }
        findings.extend(self.latency_target(line));
        findings
    }

    /// Finding for the latency target, by the percentile that the daemon measured in the last 10 to
    /// 20 seconds.
    fn latency_target(
        &self,
        line: impl Fn(&str, [String; 2], FindingFigures, GuaranteeVerdict) -> GuaranteeFinding,
    ) -> Option<GuaranteeFinding> {
        let target_ns = self.latency.target_ns?;
        let percentile = self.settings.latency_percentile.as_deref().unwrap_or("99");
        let expected = format!("p{percentile} {}", figures::time(target_ns));
        let mut numbers = vec![("most-ns", target_ns as f64)];
        let Some(measured_ns) = self.latency.measured_ns else {
            let texts = [expected, "no requests".to_owned()];
            return Some(line("latency-target", texts, numbers, GuaranteeVerdict::NoLoad));
        };
        numbers.push(("latency-ns", measured_ns as f64));
        let mut measured = figures::time(measured_ns);
        if let Some(alone_ns) = self.latency.alone_ns {
            measured += &format!(", {} alone", figures::time(alone_ns));
            numbers.push(("alone-ns", alone_ns as f64));
        }
        let verdict = GuaranteeVerdict::of(measured_ns <= target_ns);
        Some(line("latency-target", [expected, measured], numbers, verdict))
    }

    /// Findings for reservations. If both rates are reserved, one suffices: the size of the
    /// requests determines which.
    fn reservations(
        &self,
        line: impl Fn(&str, [String; 2], FindingFigures, GuaranteeVerdict) -> GuaranteeFinding,
    ) -> Vec<GuaranteeFinding> {
        let reserved = [
            ("iops-reservation", false, self.settings.iops_reservation, self.waiting[0]),
            ("bps-reservation", true, self.settings.bps_reservation, self.waiting[1]),
        ];
        let reserved = reserved.into_iter().filter_map(|(guarantee, is_bytes, rate, units)| {
            rate.filter(|rate| *rate > 0).map(|rate| (guarantee, is_bytes, rate as f64, units))
        });
        let reserved: Vec<_> = reserved.collect();
        let seconds = self.waiting_s;
        let is_met = |rate: f64, units: f64| units >= RESERVATION_FRACTION * rate * seconds;
        let any = reserved.iter().any(|&(_, _, rate, units)| is_met(rate, units));
        let lines = reserved.into_iter().map(|(guarantee, is_bytes, rate, units)| {
            let verdict =
                if seconds < MIN_LOAD_S { GuaranteeVerdict::NoLoad } else { GuaranteeVerdict::of(any) };
            let actual = per_second(units, seconds);
            let expected = format!("{}/s", format_units(is_bytes, rate));
            let measured = format!("{}/s in {seconds:.0}s of waiting", format_units(is_bytes, actual));
            let figures = vec![("rate", rate), ("passed", actual), ("waited-seconds", seconds)];
            line(guarantee, [expected, measured], figures, verdict)
        });
        lines.collect()
    }
}

type FindingFigures = Vec<(&'static str, f64)>;

/// Rate; 0 if no time passed.
fn per_second(units: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { units / seconds } else { 0.0 }
}

/// Admissions of a node between two reports.
struct AdmissionDelta {
    requests: f64,
    bytes: f64,
    reads: [f64; 2],
}

impl AdmissionDelta {
    fn between(before: &ThrottleStatus, now: &ThrottleStatus) -> Option<Self> {
        let less = |get: fn(&ThrottledTransfers) -> u64| {
            let of_direction = |before: &ThrottledTransfers, now: &ThrottledTransfers| {
                Some(counter::growth(get(before), get(now))? as f64)
            };
            Some([of_direction(&before.reads, &now.reads)?, of_direction(&before.writes, &now.writes)?])
        };
        let [read_requests, write_requests] = less(|work| work.requests)?;
        let [read_bytes, written_bytes] = less(|work| work.bytes)?;
        Some(Self {
            requests: read_requests + write_requests,
            bytes: read_bytes + written_bytes,
            reads: [read_requests, read_bytes],
        })
    }

    /// Admissions in the units of this limit.
    fn of(&self, kind: LimitKind) -> f64 {
        let (all, reads) =
            if kind.counts_bytes() { (self.bytes, self.reads[1]) } else { (self.requests, self.reads[0]) };
        match (applies(kind, Direction::Read), applies(kind, Direction::Write)) {
            (true, true) => all,
            (true, false) => reads,
            (false, _) => all - reads,
        }
    }
}

fn applies(kind: LimitKind, direction: Direction) -> bool {
    LimitKind::applying_to(direction).contains(&kind)
}

/// Units of a limit admitted since the daemon's start.
fn total(throttle: &ThrottleStatus, kind: LimitKind) -> f64 {
    AdmissionDelta::between(&ThrottleStatus::default(), throttle).map_or(0.0, |step| step.of(kind))
}

fn nodes(report: &DaemonReport) -> impl Iterator<Item = StatusNode<'_>> {
    report.disks.iter().map(StatusNode::Disk).chain(report.groups.iter().map(StatusNode::Group))
}

fn name(node: StatusNode<'_>) -> &str {
    match node {
        StatusNode::Disk(disk) => &disk.name,
        StatusNode::Group(group) => &group.name,
    }
}

fn key(node: StatusNode<'_>) -> (&'static str, String) {
    (node.kind(), name(node).to_owned())
}

/// This node in another report. Names are unique among disks and groups together.
fn find<'a>(report: &'a DaemonReport, node: StatusNode<'_>) -> Option<StatusNode<'a>> {
    report.find(name(node))
}

fn waits(node: StatusNode<'_>) -> bool {
    node.throttle().waiting.total() > 0
}

/// Share of the time in which its own limits throttled requests.
fn limited(before: StatusNode<'_>, now: StatusNode<'_>, seconds: f64) -> Option<f64> {
    let ns = counter::growth(before.throttle().limited_ns, now.throttle().limited_ns)?;
    Some(ns as f64 / 1e9 / seconds)
}

fn kind(name: &str) -> Option<LimitKind> {
    LimitKind::ALL.into_iter().find(|&kind| LimitSetting::Limit(kind, LimitPart::Rate).name() == name)
}

fn format_units(is_bytes: bool, units: f64) -> String {
    if is_bytes { figures::bytes(units) } else { figures::count(units) }
}
