//! The printed advice: limits for each tenant, their effect, confidence intervals, and commands.

use console::{
    figures,
    table::{ColumnAlignment, TextTable, columns},
};
use policy::throttle::{NodeShare, RateLimit, ReservationUnit};
use serde::{Serialize, Serializer};

use super::{confidence::ConfidenceInterval, trial::TrialFigures};

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Advice {
    /// Percentile of the target, such as `p99`; its time follows.
    pub(super) keep: String,
    pub(super) keep_ns: u64,
    /// `latency` or `wait`.
    pub(super) judged: &'static str,
    pub(super) seconds: f64,
    /// True if the advice keeps all targets.
    pub(super) kept: bool,
    pub(super) tenants: Vec<TenantAdvice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) devices: Option<Vec<PackedDevice>>,
    pub(super) commands: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) config: Option<String>,
    /// Latency targets instead of limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) latency_target: Option<TargetPlan>,
    pub(super) remarks: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) partial: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct TenantAdvice {
    pub(super) kind: &'static str,
    pub(super) name: String,
    pub(super) requests: u64,
    /// True if the target applies to this tenant.
    pub(super) has_target: bool,
    /// True if the advice keeps its target; absent if it never moves data.
    pub(super) kept: Option<bool>,
    /// The smallest limits that keep its target while it is alone on its device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) smallest_iops: Option<SmallestLimit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) smallest_bps: Option<SmallestLimit>,
    /// Limits to set; absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) set: Option<figures::SettingValues>,
    /// Its share in a group that the advice creates; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) joins: Option<GroupMembership>,
    /// Confidence interval of a limit that is not the smallest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) set_between: Option<RateInterval>,
    /// Results at present: with the limits of the config file, or without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) before: Option<TrialFigures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) after: Option<TrialFigures>,
    /// Latency target of the tenant that the daemon's controller keeps instead of limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) latency_target_ns: Option<u64>,
    /// Results with these targets, and without limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) with_latency_target: Option<TrialFigures>,
}

/// Latency targets, to set instead of the advised limits.
#[derive(Debug, Serialize)]
pub(super) struct TargetPlan {
    pub(super) commands: Vec<String>,
    pub(super) config: String,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct GroupMembership {
    pub(super) group: String,
    pub(super) weight: u32,
    /// Rate per second; 0 for no reservation.
    pub(super) iops_reservation: u64,
    pub(super) bps_reservation: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct SmallestLimit {
    #[serde(flatten, serialize_with = "limit")]
    pub(super) limit: RateLimit,
    /// Smallest rate that needs no burst.
    pub(super) rate_without_burst: u64,
    /// Confidence interval of the rate, over days made of similar hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) between: Option<RateInterval>,
    /// Reason why there is no interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unsure: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct RateInterval {
    pub(super) low: u64,
    /// `None` if it exceeds four times the estimate.
    pub(super) high: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct PackedDevice {
    pub(super) device: String,
    pub(super) disks: Vec<String>,
    /// Utilization in the busiest hour, or tenth of a short trace.
    pub(super) busiest: f64,
    /// Latency at the target's percentile; the worst of all tenants on the device.
    pub(super) latency_ns: u64,
}

fn limit<S: Serializer>(limit: &RateLimit, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct LimitJson {
        rate: u64,
        burst_rate: u64,
        burst_length_s: u64,
    }
    let RateLimit { rate, burst_rate, burst_length_s, .. } = *limit;
    LimitJson { rate, burst_rate, burst_length_s }.serialize(serializer)
}

impl RateInterval {
    pub(super) fn of(rate: u64, interval: ConfidenceInterval) -> Self {
        let scaled_rate = |times: f64| (rate as f64 * times).ceil() as u64;
        // The largest scale tried was too small for some draws: there is no upper end.
        let high = (interval.high.is_finite()).then(|| scaled_rate(interval.high));
        Self { low: scaled_rate(interval.low), high }
    }

    pub(super) fn shown(self, unit: ReservationUnit) -> String {
        let number = |value: u64| count(value as f64, unit);
        match self.high {
            Some(high) => format!("{}…{}", number(self.low), number(high)),
            None => format!("{}…", number(self.low)),
        }
    }
}

impl GroupMembership {
    pub(super) fn of(group: &str, share: NodeShare) -> Self {
        Self {
            group: group.to_owned(),
            weight: share.weight(),
            iops_reservation: share.iops_reservation(),
            bps_reservation: share.bps_reservation(),
        }
    }

    fn shown(&self) -> String {
        let Self { group, weight, iops_reservation, bps_reservation } = self;
        let reservation = match (iops_reservation, bps_reservation) {
            (0, 0) => String::new(),
            (0, bytes) => format!(", reservation bps {}", settings::exact_size(*bytes)),
            (operations, _) => format!(", reservation iops {operations}"),
        };
        format!("weight {weight} in {group}{reservation}")
    }
}

pub(super) fn count(value: f64, unit: ReservationUnit) -> String {
    match unit {
        ReservationUnit::Iops => figures::count(value),
        ReservationUnit::Bps => figures::bytes(value),
    }
}

impl SmallestLimit {
    fn cells(&self, unit: ReservationUnit) -> [String; 4] {
        let number = |value: u64| match unit {
            ReservationUnit::Iops => value.to_string(),
            ReservationUnit::Bps => settings::exact_size(value),
        };
        let RateLimit { rate, burst_rate, burst_length_s, .. } = self.limit;
        let burst = match (burst_rate, burst_length_s) {
            (0, _) => "-".to_owned(),
            (burst, 1) => number(burst),
            (burst, seconds) => format!("{}×{seconds}s", number(burst)),
        };
        let between = self.between.map_or_else(|| "?".to_owned(), |between| between.shown(unit));
        [number(rate), between, burst, number(self.rate_without_burst)]
    }
}

impl Advice {
    pub(super) fn text(&self, with_config: bool) -> String {
        let mut text = Vec::new();
        // Empty tables render to nothing, so every kind of advice uses the same sequence.
        for table in [
            self.smallest(ReservationUnit::Iops),
            self.smallest(ReservationUnit::Bps),
            self.results_table(),
            self.packed(),
        ] {
            text.push(table.render(false));
        }
        text.extend(self.remarks.iter().map(|remark| format!("{remark}\n")));
        if !self.commands.is_empty() {
            text.push(format!("To set it:\n\n{}\n", self.commands.join("\n")));
        }
        if let Some(config) = self.config.as_ref().filter(|_| with_config) {
            text.push(format!("In a config file:\n\n{config}"));
        }
        if let Some(TargetPlan { commands, config }) = &self.latency_target {
            text.push(format!("Or, instead of limits, a latency target:\n\n{}\n", commands.join("\n")));
            if with_config {
                text.push(format!("In a config file:\n\n{config}"));
            }
        }
        if let Some(why) = &self.partial {
            text.push(format!("Incomplete: {why}. The advice covers the part before.\n"));
        }
        text.retain(|part| !part.is_empty());
        text.join("\n")
    }

    fn smallest(&self, unit: ReservationUnit) -> TextTable {
        let (name, smallest_of): (_, fn(&TenantAdvice) -> &Option<SmallestLimit>) = match unit {
            ReservationUnit::Iops => ("IOPS-TOTAL", |line| &line.smallest_iops),
            ReservationUnit::Bps => ("BPS-TOTAL", |line| &line.smallest_bps),
        };
        let mut table = TextTable::new(columns(
            &["SMALLEST FOR"],
            &["REQUESTS", name, "BETWEEN", "BURST", "WITHOUT BURST"],
        ));
        for line in &self.tenants {
            if let Some(smallest) = smallest_of(line) {
                let mut row = vec![shown(line), line.requests.to_string()];
                row.extend(smallest.cells(unit));
                table.row(row);
            }
        }
        table
    }

    fn results_table(&self) -> TextTable {
        let percentile = self.keep.to_uppercase();
        let wait = format!("WAIT {percentile}");
        let numbers = ["IOPS", "BYTES/S", "P50", &percentile, "WAIT P50", &wait, "WAITED"];
        let mut table = TextTable::new(
            columns(&["TENANT", "LIMITS"], &numbers).into_iter().chain([("TARGET", ColumnAlignment::Left)]),
        );
        for line in &self.tenants {
            let set = match (&line.joins, &line.set) {
                (Some(joins), _) => joins.shown(),
                (None, Some(limits)) => figures::limits(limits),
                (None, None) => "nothing set".to_owned(),
            };
            // The target is judged with the advice only; the other rows are for comparison.
            let targeted = match line.latency_target_ns {
                Some(target_ns) => format!("latency-target {}", figures::time(target_ns)),
                None => "latency-target of others".to_owned(),
            };
            let rows = [
                ("as it is".to_owned(), line.before, None),
                (set, line.after, line.kept),
                (targeted, line.with_latency_target, None),
            ];
            for (with, figures, meets_target) in rows {
                let Some(figures) = figures else { continue };
                let target = match meets_target {
                    None => "",
                    Some(_) if !line.has_target => "no target",
                    Some(true) => "kept",
                    Some(false) => "missed",
                };
                table.row(vec![
                    shown(line),
                    with,
                    figures::count(figures.iops),
                    figures::bytes(figures.bps),
                    figures::time(figures.latency_p50_ns),
                    figures::time(figures.latency_ns),
                    figures::time(figures.wait_p50_ns),
                    figures::time(figures.wait_ns),
                    figures::share(figures.held),
                    target.to_owned(),
                ]);
            }
        }
        table
    }

    fn packed(&self) -> TextTable {
        let mut table = TextTable::new([
            ("DEVICE", ColumnAlignment::Left),
            ("DISKS", ColumnAlignment::Right),
            ("BUSIEST", ColumnAlignment::Right),
            ("LATENCY", ColumnAlignment::Right),
            ("WHICH", ColumnAlignment::Left),
        ]);
        for device in self.devices.iter().flatten() {
            table.row(vec![
                device.device.clone(),
                device.disks.len().to_string(),
                figures::share(device.busiest),
                figures::time(device.latency_ns),
                device.disks.join(" "),
            ]);
        }
        table
    }
}

fn shown(line: &TenantAdvice) -> String {
    if line.kind == "disk" { line.name.clone() } else { format!("group {}", line.name) }
}
