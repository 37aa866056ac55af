//! The printed advice: limits for each tenant, their effect, confidence intervals, and commands.

use console::{
    figures,
    table::{Side, Table, columns},
};
use policy::throttle::{Limit, Share, Unit};
use serde::{Serialize, Serializer};

use super::{certainty::Interval, trial::Figures};

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
    pub(super) tenants: Vec<Line>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) devices: Option<Vec<OnDevice>>,
    pub(super) commands: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) config: Option<String>,
    pub(super) remarks: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) partial: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Line {
    pub(super) kind: &'static str,
    pub(super) name: String,
    pub(super) requests: u64,
    /// True if the target applies to this tenant.
    pub(super) asked: bool,
    /// True if the advice keeps its target; absent if it never moves data.
    pub(super) kept: Option<bool>,
    /// The smallest limits that keep its target while it is alone on its device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) smallest_iops: Option<Smallest>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) smallest_bps: Option<Smallest>,
    /// Limits to set; absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) set: Option<figures::Limits>,
    /// Its share in a group that the advice creates; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) joins: Option<Joins>,
    /// Confidence interval of a limit that is not the smallest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) set_between: Option<Between>,
    /// At present: with the config file, or without limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) before: Option<Figures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) after: Option<Figures>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Joins {
    pub(super) group: String,
    pub(super) weight: u32,
    /// Rate per second; 0 for no reservation.
    pub(super) iops_reservation: u64,
    pub(super) bps_reservation: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Smallest {
    #[serde(flatten, serialize_with = "limit")]
    pub(super) limit: Limit,
    /// Smallest rate that needs no burst.
    pub(super) rate_without_burst: u64,
    /// Confidence interval of the rate, over days made of similar hours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) between: Option<Between>,
    /// Reason why there is no interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) unsure: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Between {
    pub(super) low: u64,
    /// `None` if it exceeds four times the estimate.
    pub(super) high: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct OnDevice {
    pub(super) device: String,
    pub(super) disks: Vec<String>,
    /// Utilization in the busiest hour, or tenth of a short trace.
    pub(super) busiest: f64,
    /// Latency at the target's percentile; the worst of all tenants on the device.
    pub(super) latency_ns: u64,
}

fn limit<S: Serializer>(limit: &Limit, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct Shown {
        rate: u64,
        burst_rate: u64,
        burst_length_s: u64,
    }
    let Limit { rate, burst_rate, burst_length_s } = *limit;
    Shown { rate, burst_rate, burst_length_s }.serialize(serializer)
}

impl Between {
    pub(super) fn of(rate: u64, interval: Interval) -> Self {
        let times = |times: f64| (rate as f64 * times).ceil() as u64;
        // The largest scale tried was too small for some draws: there is no upper end.
        let high = (interval.high.is_finite()).then(|| times(interval.high));
        Self { low: times(interval.low), high }
    }

    pub(super) fn shown(self, unit: Unit) -> String {
        let number = |value: u64| count(value as f64, unit);
        match self.high {
            Some(high) => format!("{}…{}", number(self.low), number(high)),
            None => format!("{}…", number(self.low)),
        }
    }
}

impl Joins {
    pub(super) fn of(group: &str, share: Share) -> Self {
        Self {
            group: group.to_owned(),
            weight: share.weight(),
            iops_reservation: share.iops_reservation(),
            bps_reservation: share.bps_reservation(),
        }
    }

    fn shown(&self) -> String {
        let Self { group, weight, iops_reservation, bps_reservation } = self;
        let promised = match (iops_reservation, bps_reservation) {
            (0, 0) => String::new(),
            (0, bytes) => format!(", promised bps {}", settings::exact_size(*bytes)),
            (operations, _) => format!(", promised iops {operations}"),
        };
        format!("weight {weight} in {group}{promised}")
    }
}

pub(super) fn count(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Iops => figures::count(value),
        Unit::Bps => figures::bytes(value),
    }
}

impl Smallest {
    fn cells(&self, unit: Unit) -> [String; 4] {
        let number = |value: u64| match unit {
            Unit::Iops => value.to_string(),
            Unit::Bps => settings::exact_size(value),
        };
        let Limit { rate, burst_rate, burst_length_s } = self.limit;
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
        for table in [self.smallest(Unit::Iops), self.smallest(Unit::Bps), self.felt(), self.packed()] {
            text.push(table.render(false));
        }
        text.extend(self.remarks.iter().map(|remark| format!("{remark}\n")));
        if !self.commands.is_empty() {
            text.push(format!("To set it:\n\n{}\n", self.commands.join("\n")));
        }
        if let Some(config) = self.config.as_ref().filter(|_| with_config) {
            text.push(format!("In a config file:\n\n{config}"));
        }
        if let Some(why) = &self.partial {
            text.push(format!("Not complete: {why}. The advice is for what came before.\n"));
        }
        text.retain(|part| !part.is_empty());
        text.join("\n")
    }

    fn smallest(&self, unit: Unit) -> Table {
        let (name, of): (_, fn(&Line) -> &Option<Smallest>) = match unit {
            Unit::Iops => ("IOPS-TOTAL", |line| &line.smallest_iops),
            Unit::Bps => ("BPS-TOTAL", |line| &line.smallest_bps),
        };
        let mut table =
            Table::new(columns(&["SMALLEST FOR"], &["REQUESTS", name, "BETWEEN", "BURST", "WITHOUT BURST"]));
        for line in &self.tenants {
            if let Some(smallest) = of(line) {
                let mut row = vec![shown(line), line.requests.to_string()];
                row.extend(smallest.cells(unit));
                table.row(row);
            }
        }
        table
    }

    fn felt(&self) -> Table {
        let percentile = self.keep.to_uppercase();
        let wait = format!("WAIT {percentile}");
        let numbers = ["IOPS", "BYTES/S", "P50", &percentile, "WAIT P50", &wait, "WAITED"];
        let mut table =
            Table::new(columns(&["WHO", "WITH"], &numbers).into_iter().chain([("TARGET", Side::Left)]));
        for line in &self.tenants {
            let set = match (&line.joins, &line.set) {
                (Some(joins), _) => joins.shown(),
                (None, Some(limits)) => figures::limits(limits),
                (None, None) => "nothing set".to_owned(),
            };
            // The target is judged with the advice only; the first row is for comparison.
            let rows = [("as it is".to_owned(), line.before, None), (set, line.after, line.kept)];
            for (with, felt, kept) in rows {
                let Some(felt) = felt else { continue };
                let target = match kept {
                    None => "",
                    Some(_) if !line.asked => "not asked",
                    Some(true) => "kept",
                    Some(false) => "missed",
                };
                table.row(vec![
                    shown(line),
                    with,
                    figures::count(felt.iops),
                    figures::bytes(felt.bps),
                    figures::time(felt.latency_p50_ns),
                    figures::time(felt.latency_ns),
                    figures::time(felt.wait_p50_ns),
                    figures::time(felt.wait_ns),
                    figures::share(felt.held),
                    target.to_owned(),
                ]);
            }
        }
        table
    }

    fn packed(&self) -> Table {
        let mut table = Table::new([
            ("DEVICE", Side::Left),
            ("DISKS", Side::Right),
            ("BUSIEST", Side::Right),
            ("LATENCY", Side::Right),
            ("WHICH", Side::Left),
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

fn shown(line: &Line) -> String {
    if line.kind == "disk" { line.name.clone() } else { format!("group {}", line.name) }
}
