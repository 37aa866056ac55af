//! Tables of `weir cgroup show`: cgroups with their devices, then tasks; and notes about unknown
//! values.

use console::{
    figures,
    figures::SettingValues,
    table::{ColumnAlignment, TextTable},
};
use policy::steering::IoMaxRates;

use super::{
    rates::{CgroupRate, CgroupRow, DeviceRow, RowOptions, TaskRow},
    reading,
    reading::DeviceAccount,
};
use crate::{
    kernel::io_max,
    limit::{configured::ConfiguredLimits, latency_target},
};

pub(super) const NOTHING: &str = "-";

const NOT_COUNTED: &str = "WAITED is not known: there is no io.pressure (cgroup v1, or psi=0), and \
                           kernel.task_delayacct is 0 (`sysctl kernel.task_delayacct=1` counts \
                           from then on)";
/// Note for cgroups with pressure whose tasks have no delay accounting.
const NOT_COUNTED_OF_TASKS: &str = "WAITED of tasks is not known: kernel.task_delayacct is 0 \
                                    (`sysctl kernel.task_delayacct=1` counts from then on)";

/// Renders the tables; `bold` is for terminals.
pub(super) fn render(rows: &[CgroupRow], options: RowOptions, bold: bool) -> String {
    let mut text = groups(rows).render(bold);
    if text.is_empty() {
        return "no cgroup has limits or has done I/O\n".to_owned();
    }
    let tasks = tasks(rows).render(bold);
    let has_tasks = !tasks.is_empty();
    if has_tasks {
        text = format!("{text}\n{tasks}");
    }
    let has_pressure = rows.iter().any(|row| row.pressure.is_some());
    let notice = match options.are_waits_counted {
        true => None,
        false if !has_pressure => Some(NOT_COUNTED),
        false => has_tasks.then_some(NOT_COUNTED_OF_TASKS),
    };
    if let Some(notice) = notice {
        text = format!("{text}\n{notice}\n");
    }
    text
}

fn groups(rows: &[CgroupRow]) -> TextTable {
    let mut table = TextTable::new([
        ("CGROUP", ColumnAlignment::Left),
        ("WAITED", ColumnAlignment::Right),
        ("PRESSURE", ColumnAlignment::Right),
        ("DEVICE", ColumnAlignment::Left),
        ("READ", ColumnAlignment::Right),
        ("WRITTEN", ColumnAlignment::Right),
        ("READ/s", ColumnAlignment::Right),
        ("WRITE/s", ColumnAlignment::Right),
        ("IOPS", ColumnAlignment::Right),
        ("LIMITS", ColumnAlignment::Left),
    ]);
    for row in rows {
        let pressure = row.pressure.map(|pressure| figures::share(pressure.some.avg10 / 100.0));
        let group = [row.name.display().to_string(), cell(row.waited.map(figures::share)), cell(pressure)];
        if row.devices.is_empty() {
            table.row(group.into_iter().chain(vec![NOTHING.to_owned(); 7]).collect());
            continue;
        }
        for (index, device) in row.devices.iter().enumerate() {
            // The cgroup's own cells appear in its first row only.
            let group = if index == 0 { group.clone() } else { [const { String::new() }; 3] };
            let usage = device.account.usage;
            let rate_cell = |figure: fn(&CgroupRate) -> String| cell(device.rate.as_ref().map(figure));
            let figures = [
                reading::node(device.number),
                figures::bytes(usage.read_bytes as f64),
                figures::bytes(usage.written_bytes as f64),
                rate_cell(|rate| figures::bytes(rate.read_bps)),
                rate_cell(|rate| figures::bytes(rate.write_bps)),
                rate_cell(|rate| figures::count(rate.iops())),
                limits(device),
            ];
            table.row(group.into_iter().chain(figures).collect());
        }
    }
    table
}

fn tasks(rows: &[CgroupRow]) -> TextTable {
    let mut table = TextTable::new([
        ("PID", ColumnAlignment::Right),
        ("TID", ColumnAlignment::Right),
        ("TASK", ColumnAlignment::Left),
        ("STATE", ColumnAlignment::Left),
        ("READ", ColumnAlignment::Right),
        ("WRITTEN", ColumnAlignment::Right),
        ("READ/s", ColumnAlignment::Right),
        ("WRITE/s", ColumnAlignment::Right),
        ("CALLS/s", ColumnAlignment::Right),
        ("WAITED", ColumnAlignment::Right),
        ("CGROUP", ColumnAlignment::Left),
    ]);
    for row in rows {
        for TaskRow { id, task, rate, waited } in &row.tasks {
            let rate_cell = |figure: fn(&CgroupRate) -> String| cell(rate.as_ref().map(figure));
            table.row(vec![
                id.pid.to_string(),
                id.tid.to_string(),
                task.name.clone(),
                task.state.to_string(),
                cell(task.io.map(|io| figures::bytes(io.read_bytes as f64))),
                cell(task.io.map(|io| figures::bytes(io.write_bytes as f64))),
                rate_cell(|rate| figures::bytes(rate.read_bps)),
                rate_cell(|rate| figures::bytes(rate.write_bps)),
                rate_cell(|rate| figures::count(rate.iops())),
                cell(waited.map(figures::share)),
                row.name.display().to_string(),
            ]);
        }
    }
    table
}

pub(super) fn named(rates: &IoMaxRates) -> SettingValues {
    let names = ["bps-read", "bps-write", "iops-read", "iops-write"];
    let named = names.into_iter().zip(io_max::in_order(*rates));
    named.into_iter().filter_map(|(name, rate)| Some((name.to_owned(), rate?))).collect()
}

/// Configured limits, followed by the kernel's where they differ, as in a burst.
pub(super) fn limits(device: &DeviceRow) -> String {
    let DeviceAccount { limits, latency_target_us, .. } = device.account;
    let target = (latency_target_us > 0).then(|| latency_target::part(latency_target_us));
    let rates = (limits != IoMaxRates::NONE).then(|| figures::limits(&named(&limits)));
    let parts: Vec<String> = rates.into_iter().chain(target).collect();
    let now = if parts.is_empty() { NOTHING.to_owned() } else { parts.join(", ") };
    match device.configured.as_ref().map(ConfiguredLimits::text) {
        None => now,
        Some(configured) if configured == now => now,
        Some(configured) => format!("{configured} (now {})", if now == NOTHING { "none" } else { &now }),
    }
}

pub(super) fn cell(figure: Option<String>) -> String {
    figure.unwrap_or_else(|| NOTHING.to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use policy::throttle::LimitKind;

    use super::*;
    use crate::show::rates::tests::sample;

    const COUNTED: RowOptions = RowOptions { device: None, are_waits_counted: true };

    #[test]
    fn cgroup_is_named_once_with_a_line_per_device() {
        let (_, rows) = sample();
        let expect = "\
CGROUP        WAITED  PRESSURE  DEVICE  READ  WRITTEN  READ/s  WRITE/s  IOPS  LIMITS
/idle              -         -  -          -        -       -        -     -  -
/system/a.db     75%       12%  4095:1     0    10.0M       0     2.0M   512  bps-w 4M, iops-w 100
                                4095:2  4.0K        0       -        -     -  -
";
        let without: Vec<CgroupRow> =
            rows.iter().cloned().map(|row| CgroupRow { tasks: Vec::new(), ..row }).collect();
        assert_eq!(render(&without, COUNTED, false), expect);
        assert_eq!(render(&[], COUNTED, false), "no cgroup has limits or has done I/O\n");
    }

    #[test]
    fn configured_limits_precede_kernel_limits() {
        let (_, mut rows) = sample();
        let device = &mut rows[1].devices[0];
        let mut configured = ConfiguredLimits::default();
        configured.limits.limit_mut(LimitKind::BpsWrite).rate = 4 << 20;
        configured.limits.limit_mut(LimitKind::IopsWrite).rate = 100;
        device.configured = Some(configured.clone());
        assert_eq!(limits(device), "bps-w 4M, iops-w 100", "once, where they are the same");
        device.configured = Some(ConfiguredLimits { watermark: 90, ..configured });
        device.account.limits = IoMaxRates::default();
        assert_eq!(limits(device), "bps-w 4M, iops-w 100, watermark 90% (now none)");
        device.configured = None;
        device.account.latency_target_us = 5000;
        assert_eq!(limits(device), "latency 5ms");
        device.configured =
            Some(ConfiguredLimits { latency_target_us: Some(7000), ..ConfiguredLimits::default() });
        assert_eq!(limits(device), "latency 7ms (now latency 5ms)");
    }

    #[test]
    fn tasks_follow_their_cgroup_and_unknown_values_are_marked() {
        let (interval, rows) = sample();
        assert_eq!(interval, Duration::from_secs(2));
        let text = render(&rows, COUNTED, false);
        let tasks = text.split_once("\n\n").expect("a second table").1;
        let expect = "\
PID  TID  TASK  STATE  READ  WRITTEN  READ/s  WRITE/s  CALLS/s  WAITED  CGROUP
  7    7  dd    D         0    10.0M       0     2.0M        2     40%  /system/a.db
  7    8  a?b   S         -        -       -        -        -       -  /system/a.db
  9    9  a?b   S         -        -       -        -        -       -  /system/a.db
";
        assert_eq!(tasks, expect);
        let not_counted = RowOptions { are_waits_counted: false, ..COUNTED };
        assert!(render(&rows, not_counted, false).ends_with(&format!("\n{NOT_COUNTED_OF_TASKS}\n")));
        let mut rows = rows;
        rows.iter_mut().for_each(|row| row.pressure = None);
        assert!(render(&rows, not_counted, false).ends_with(&format!("\n{NOT_COUNTED}\n")));
    }
}
