//! The list: selection and order of disks and groups.

use std::cmp::Ordering;

use crate::client::{
    rates::{IntervalRates, NodeRate},
    report::{DaemonReport, StatusNode},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeirTopColumn {
    Name,
    Group,
    Iops,
    Reads,
    Writes,
    LatencyP50,
    LatencyP99,
    Waiting,
    Limited,
}

impl WeirTopColumn {
    pub(super) const ALL: [Self; 9] = [
        Self::Name,
        Self::Group,
        Self::Iops,
        Self::Reads,
        Self::Writes,
        Self::LatencyP50,
        Self::LatencyP99,
        Self::Waiting,
        Self::Limited,
    ];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Name => "NAME",
            Self::Group => "GROUP",
            Self::Iops => "IOPS",
            Self::Reads => "READ/s",
            Self::Writes => "WRITE/s",
            Self::LatencyP50 => "P50",
            Self::LatencyP99 => "P99",
            Self::Waiting => "WAIT",
            Self::Limited => "HELD",
        }
    }

    /// True if the column sorts in descending order by default.
    fn is_number(self) -> bool {
        !matches!(self, Self::Name | Self::Group)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TopSortOrder {
    /// Primary sort column; ties are sorted by name.
    pub(super) column: WeirTopColumn,
    /// True for the opposite of the column's default order.
    pub(super) reversed: bool,
}

#[derive(Clone, Debug)]
pub(super) struct TopRow<'a> {
    pub(super) name: &'a str,
    pub(super) node: StatusNode<'a>,
    /// Rates of the last interval; `None` after a single report.
    pub(super) rate: Option<&'a NodeRate>,
    /// Throttle cause.
    pub(super) held_by: Option<String>,
}

/// Rows whose name or group contains `filter`, ignoring case.
pub(super) fn rows<'a>(
    report: &'a DaemonReport,
    rates: &'a IntervalRates,
    filter: &str,
    order: TopSortOrder,
) -> Vec<TopRow<'a>> {
    let groups = report.groups.iter().map(|group| (group.name.as_str(), StatusNode::Group(group)));
    let disks = report.disks.iter().map(|disk| (disk.name.as_str(), StatusNode::Disk(disk)));
    let filter = filter.to_lowercase();
    let mut rows: Vec<TopRow<'_>> = groups
        .chain(disks)
        .filter(|(name, node)| {
            let group = node.settings().group.as_deref().unwrap_or_default();
            [name, group].iter().any(|text| text.to_lowercase().contains(&filter))
        })
        .map(|(name, node)| TopRow {
            name,
            node,
            rate: rates.of(name),
            held_by: rates.throttle_cause(report, name, node),
        })
        .collect();
    rows.sort_by(|a, b| {
        let by_column = compare(a, b, order.column);
        let by_column =
            if order.column.is_number() != order.reversed { by_column.reverse() } else { by_column };
        // Equal values must not make rows swap places at each refresh.
        by_column.then_with(|| a.name.cmp(b.name))
    });
    rows
}

fn compare(a: &TopRow<'_>, b: &TopRow<'_>, column: WeirTopColumn) -> Ordering {
    let group = |row: &TopRow<'_>| row.node.settings().group.clone().unwrap_or_default();
    match column {
        WeirTopColumn::Name => a.name.cmp(b.name),
        WeirTopColumn::Group => group(a).cmp(&group(b)),
        _ => number(a, column).total_cmp(&number(b, column)),
    }
}

fn number(row: &TopRow<'_>, column: WeirTopColumn) -> f64 {
    let rate = row.rate.copied().unwrap_or_default();
    let throttle = row.node.throttle();
    match column {
        WeirTopColumn::Iops => rate.iops(),
        WeirTopColumn::Reads => rate.read_bps,
        WeirTopColumn::Writes => rate.write_bps,
        WeirTopColumn::LatencyP50 => rate.latency.map_or(0.0, |latency| latency.p50_ns as f64),
        WeirTopColumn::LatencyP99 => rate.latency.map_or(0.0, |latency| latency.p99_ns as f64),
        WeirTopColumn::Limited => rate.limited,
        WeirTopColumn::Waiting => throttle.waiting.total() as f64,
        WeirTopColumn::Name | WeirTopColumn::Group => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report() -> DaemonReport {
        let disk = |name: &str, group: Option<&str>, waiting: u64| json!({ "name": name, "group": group, "throttle": { "waiting": { "reads": waiting } } });
        let disks = [disk("vm2", Some("gold"), 5), disk("vm10", None, 9), disk("Vm1", None, 5)];
        DaemonReport::read(&json!({ "disks": disks, "groups": [{ "name": "gold" }] }).to_string()).unwrap()
    }

    #[track_caller]
    fn check(filter: &str, column: WeirTopColumn, reversed: bool, expect: &[&str]) {
        let (report, rates) = (report(), IntervalRates::default());
        let names: Vec<_> = rows(&report, &rates, filter, TopSortOrder { column, reversed })
            .iter()
            .map(|row| row.name)
            .collect();
        assert_eq!(names, expect);
    }

    #[test]
    fn names_ascend_and_numbers_descend_unless_reversed() {
        check("", WeirTopColumn::Name, false, &["Vm1", "gold", "vm10", "vm2"]);
        check("", WeirTopColumn::Name, true, &["vm2", "vm10", "gold", "Vm1"]);
        check("", WeirTopColumn::Waiting, false, &["vm10", "Vm1", "vm2", "gold"]);
        check("", WeirTopColumn::Waiting, true, &["gold", "Vm1", "vm2", "vm10"]);
        check("", WeirTopColumn::Group, false, &["Vm1", "gold", "vm10", "vm2"]);
    }

    #[test]
    fn a_filter_looks_at_names_and_groups() {
        check("VM1", WeirTopColumn::Name, false, &["Vm1", "vm10"]);
        check("gold", WeirTopColumn::Name, false, &["gold", "vm2"]);
        check("nothing", WeirTopColumn::Name, false, &[]);
    }
}
