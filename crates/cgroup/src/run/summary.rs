//! Report on a command's I/O, as text and as JSON.
//!
//! Rates are averages over the whole run. Dirty data in the page cache at the end is in no total;
//! it is reported separately.

use std::{fmt::Write as _, path::PathBuf, time::Duration};

use block::device::DeviceNumber;
use console::{
    figures,
    figures::SettingValues,
    table::{ColumnAlignment, TextTable},
};
use policy::{
    request::Direction,
    throttle::{LimitKind, LimitPart, LimitSetting},
};
use serde::Serialize;

use super::command_cgroup::RemainingCgroup;
use crate::{
    kernel::io_stat::CgroupIoUsage,
    limit::configured::ConfiguredLimits,
    show::{json::IoTotals, rates::CgroupRate},
};

/// Time that the command waited for I/O, be it throttled or not: the kernel does not distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IoWait {
    /// Time in which at least one of its tasks waited: the growth of io.pressure.
    AnyTask(Duration),
    /// Time that its first task waited: io.pressure is absent or has counted less.
    FirstTask(Duration),
    /// Neither io.pressure nor delay accounting is available.
    NotCounted,
    Unknown,
}

impl IoWait {
    fn time(self) -> Option<Duration> {
        match self {
            Self::AnyTask(time) | Self::FirstTask(time) => Some(time),
            Self::NotCounted | Self::Unknown => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct CommandSummary {
    /// Path below the mount.
    pub(super) cgroup: PathBuf,
    /// Exit status; 128 plus the signal's number if a signal killed the command, as in shells.
    pub(super) status: u8,
    /// Time from the command's start to its end.
    pub(super) wall: Duration,
    pub(super) limited: Option<DeviceNumber>,
    pub(super) configured: ConfiguredLimits,
    /// The limited device, then others: number, node, usage. No usage if the kernel's counters
    /// fell, as in version 1 when a cgroup below is removed.
    pub(super) devices: Vec<(DeviceNumber, String, Option<CgroupIoUsage>)>,
    pub(super) waited: IoWait,
    /// Dirty bytes not yet on disk.
    pub(super) dirty_bytes: Option<u64>,
    /// Set if the cgroup remains.
    pub(super) remaining: Option<RemainingCgroup>,
}

impl CommandSummary {
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "weir: {} in {}{}\n",
            self.cgroup.display(),
            seconds(self.wall),
            if self.status == 0 { String::new() } else { format!(", status {}", self.status) }
        );
        text += &self.table();
        text += &self.waits();
        let other_settings = ConfiguredLimits { limits: Default::default(), ..self.configured.clone() };
        if other_settings != ConfiguredLimits::default() {
            let _ = writeln!(text, "limited with {}", other_settings.text());
        }
        if let Some(bytes @ 1..) = self.dirty_bytes {
            let _ = writeln!(
                text,
                "{} in the page cache are not written yet: the totals exclude them, and they may \
                 be written after the limits are removed",
                figures::bytes(bytes as f64)
            );
        }
        if let Some(RemainingCgroup { directory, processes }) =
            self.remaining.as_ref().filter(|remaining| !remaining.processes.is_empty())
        {
            let _ = writeln!(
                text,
                "the cgroup stays with its limits for {} that outlive the command: {} (rmdir {} \
                 when they are gone, or --kill)",
                if processes.len() == 1 { "a process" } else { "processes" },
                listed(processes),
                directory.display()
            );
        }
        text
    }

    fn table(&self) -> String {
        let mut table = TextTable::new([
            ("DEVICE", ColumnAlignment::Left),
            ("", ColumnAlignment::Left),
            ("BYTES", ColumnAlignment::Right),
            ("OPERATIONS", ColumnAlignment::Right),
            ("BYTES/s", ColumnAlignment::Right),
            ("IOPS", ColumnAlignment::Right),
            ("LIMITS", ColumnAlignment::Left),
        ]);
        for (number, node, usage) in &self.devices {
            // Mean rates over the whole run.
            let rate = usage.map(|usage| CgroupRate::of(&usage, self.wall));
            let limits = |direction| {
                if Some(*number) == self.limited { self.limits(direction) } else { "-".to_owned() }
            };
            // Limits are set per direction, so each device has two rows.
            let rows = [
                (
                    "read",
                    usage.map(|usage| [usage.read_bytes, usage.reads]),
                    rate.map(|rate| [rate.read_bps, rate.read_iops]),
                    Direction::Read,
                ),
                (
                    "write",
                    usage.map(|usage| [usage.written_bytes, usage.writes]),
                    rate.map(|rate| [rate.write_bps, rate.write_iops]),
                    Direction::Write,
                ),
            ];
            let known =
                |value: Option<f64>, show: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), show);
            for (name, totals, rates, direction) in rows {
                table.row(vec![
                    if name == "read" { node.clone() } else { String::new() },
                    name.to_owned(),
                    known(totals.map(|[bytes, _]| bytes as f64), figures::bytes),
                    known(totals.map(|[_, operations]| operations as f64), figures::count),
                    known(rates.map(|[bps, _]| bps), figures::bytes),
                    known(rates.map(|[_, iops]| iops), figures::count),
                    limits(direction),
                ]);
            }
        }
        table.render(false)
    }

    fn limits(&self, direction: Direction) -> String {
        let applying = LimitKind::applying_to(direction);
        let parts = [LimitPart::Rate, LimitPart::BurstRate, LimitPart::BurstLength];
        let settings =
            applying.into_iter().flat_map(|kind| parts.map(|part| LimitSetting::Limit(kind, part)));
        let limits: SettingValues = settings
            .chain([LimitSetting::BurstFor])
            .map(|setting| (setting.name().to_owned(), self.configured.limits.get(setting)))
            .collect();
        figures::limits(&limits)
    }

    fn waits(&self) -> String {
        let share = |time: Duration| {
            // A command that ends at once has no wall time.
            let share = time.as_secs_f64() / self.wall.as_secs_f64().max(f64::MIN_POSITIVE);
            format!("{} of {} ({})", seconds(time), seconds(self.wall), figures::share(share.min(1.0)))
        };
        match self.waited {
            IoWait::AnyTask(time) => format!("waited for I/O: {}\n", share(time)),
            IoWait::FirstTask(time) => format!("waited for I/O: {}, the command's first task\n", share(time)),
            IoWait::NotCounted => "waited for I/O: not known; there is no io.pressure (cgroup v1, \
                                   or psi=0), and kernel.task_delayacct is 0 (sysctl \
                                   kernel.task_delayacct=1)\n"
                .to_owned(),
            IoWait::Unknown => "waited for I/O: not known\n".to_owned(),
        }
    }

    /// One line, because the command may write to the same stream.
    pub(super) fn json(&self) -> String {
        let device = |(number, node, usage): &(DeviceNumber, String, Option<CgroupIoUsage>)| {
            let done = usage.map(|usage| (usage, CgroupRate::of(&usage, self.wall)));
            DeviceSummary {
                name: node.clone(),
                number: number.to_string(),
                limited: Some(*number) == self.limited,
                reads: done.map(|(usage, rate)| DirectionSummary {
                    bytes: usage.read_bytes,
                    operations: usage.reads,
                    bps: rate.read_bps,
                    iops: rate.read_iops,
                }),
                writes: done.map(|(usage, rate)| DirectionSummary {
                    bytes: usage.written_bytes,
                    operations: usage.writes,
                    bps: rate.write_bps,
                    iops: rate.write_iops,
                }),
                discards: usage
                    .map(|usage| IoTotals { bytes: usage.discarded_bytes, operations: usage.discards }),
            }
        };
        let waited = self.waited.time();
        let report = SummaryReport {
            cgroup: self.cgroup.display().to_string(),
            status: self.status,
            wall_ns: nanoseconds(self.wall),
            settings: self.non_default_settings(),
            devices: self.devices.iter().map(device).collect(),
            waited_ns: waited.map(nanoseconds),
            waited_share: waited.map(|time| (time.as_secs_f64() / self.wall.as_secs_f64()).min(1.0)),
            waited_by: match self.waited {
                IoWait::AnyTask(_) => Some("io.pressure"),
                IoWait::FirstTask(_) => Some("first task"),
                IoWait::NotCounted | IoWait::Unknown => None,
            },
            dirty_bytes: self.dirty_bytes,
            left: self.remaining.as_ref().map(|left| RemainingSummary {
                directory: left.directory.display().to_string(),
                processes: &left.processes,
            }),
        };
        serde_json::to_string(&report).expect("all keys are strings") + "\n"
    }

    fn non_default_settings(&self) -> NonDefaultSettings<'_> {
        let ConfiguredLimits { watermark, weight, group, .. } = &self.configured;
        NonDefaultSettings {
            limits: self.configured.set_limits(),
            watermark: (*watermark > 0).then_some(*watermark),
            weight: *weight,
            group: group.as_deref(),
        }
    }
}

/// Output of `weir cgroup run --json`.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct SummaryReport<'a> {
    cgroup: String,
    status: u8,
    wall_ns: u64,
    settings: NonDefaultSettings<'a>,
    devices: Vec<DeviceSummary>,
    waited_ns: Option<u64>,
    /// 0 to 1. Null also for a command that ended at once.
    waited_share: Option<f64>,
    waited_by: Option<&'static str>,
    dirty_bytes: Option<u64>,
    left: Option<RemainingSummary<'a>>,
}

/// Settings that differ from their defaults. Limits and other settings are keys of one object, as
/// in the file of `limit`.
#[derive(Serialize)]
struct NonDefaultSettings<'a> {
    #[serde(flatten)]
    limits: SettingValues,
    #[serde(skip_serializing_if = "Option::is_none")]
    watermark: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<&'a str>,
}

/// Usage of a device; null if the kernel's counters fell.
#[derive(Serialize)]
struct DeviceSummary {
    name: String,
    number: String,
    limited: bool,
    reads: Option<DirectionSummary>,
    writes: Option<DirectionSummary>,
    discards: Option<IoTotals>,
}

#[derive(Serialize)]
struct DirectionSummary {
    bytes: u64,
    operations: u64,
    bps: f64,
    iops: f64,
}

#[derive(Serialize)]
struct RemainingSummary<'a> {
    directory: String,
    processes: &'a [i32],
}

fn seconds(time: Duration) -> String {
    format!("{:.1}s", time.as_secs_f64())
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The first few pids; a command may leave thousands.
fn listed(processes: &[i32]) -> String {
    const MAX_SHOWN: usize = 5;
    let mut text = processes.iter().take(MAX_SHOWN).map(i32::to_string).collect::<Vec<_>>().join(", ");
    if processes.len() > MAX_SHOWN {
        let _ = write!(text, " and {} more", processes.len() - MAX_SHOWN);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const DISK: DeviceNumber = DeviceNumber { major: 254, minor: 0 };

    fn summary() -> CommandSummary {
        let mut configured = ConfiguredLimits { watermark: 90, ..ConfiguredLimits::default() };
        for (name, value) in [
            ("bps-write", 4 << 20),
            ("bps-write-max", 20 << 20),
            ("bps-write-max-length", 5),
            ("iops-total", 100),
        ] {
            configured.limits.set(LimitSetting::from_name(name).unwrap(), value).unwrap();
        }
        let usage = CgroupIoUsage {
            written_bytes: 40 << 20,
            writes: 640,
            discarded_bytes: 5,
            discards: 1,
            ..CgroupIoUsage::default()
        };
        CommandSummary {
            cgroup: "/weir/run-7".into(),
            status: 0,
            wall: Duration::from_secs(10),
            limited: Some(DISK),
            configured,
            devices: vec![(DISK, "/dev/vda".to_owned(), Some(usage))],
            waited: IoWait::AnyTask(Duration::from_millis(6500)),
            dirty_bytes: Some(0),
            remaining: None,
        }
    }

    #[test]
    fn text_has_limits_beside_usage() {
        let expect = "\
weir: /weir/run-7 in 10.0s
DEVICE           BYTES  OPERATIONS  BYTES/s  IOPS  LIMITS
/dev/vda  read       0           0        0     0  iops 100
          write  40.0M         640     4.0M    64  bps-w 4M↑20M×5s, iops 100
waited for I/O: 6.5s of 10.0s (65%)
limited with watermark 90%
";
        assert_eq!(summary().text(), expect);
    }

    #[test]
    fn text_reports_remaining_processes_and_dirty_bytes() {
        let left =
            RemainingCgroup { directory: "/sys/fs/cgroup/weir/run-7".into(), processes: (1..=7).collect() };
        let text = CommandSummary {
            status: 137,
            dirty_bytes: Some(12 << 20),
            remaining: Some(left),
            waited: IoWait::NotCounted,
            ..summary()
        }
        .text();
        for part in [
            "weir: /weir/run-7 in 10.0s, status 137\n",
            "\n12.0M in the page cache are not written yet",
            "for processes that outlive the command: 1, 2, 3, 4, 5 and 2 more (rmdir \
             /sys/fs/cgroup/weir/run-7 when",
            "not known; there is no io.pressure (cgroup v1, or psi=0), and kernel.task_delayacct \
             is 0 (sysctl",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = CommandSummary { waited: IoWait::FirstTask(Duration::from_secs(20)), ..summary() }.text();
        assert!(text.contains("20.0s of 10.0s (100%), the command's first task\n"), "{text}");
    }

    #[test]
    fn fallen_counters_are_unknown() {
        let mut summary = summary();
        summary.devices[0].2 = None;
        let text = summary.text();
        let expect = "/dev/vda  read       -           -        -     -  iops 100";
        assert!(text.contains(expect), "{text}");
        let value: Value = serde_json::from_str(&summary.json()).unwrap();
        assert_eq!(value["devices"][0]["writes"], Value::Null);
    }

    #[test]
    fn json_is_one_line_with_plain_numbers() {
        let other = (
            DeviceNumber { major: 8, minor: 16 },
            "/dev/sdb".to_owned(),
            Some(CgroupIoUsage { reads: 1, read_bytes: 4096, ..CgroupIoUsage::default() }),
        );
        let mut summary = summary();
        summary.devices.push(other);
        let text = summary.json();
        assert_eq!(text.lines().count(), 1);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["wall-ns"], 10_000_000_000_u64);
        assert_eq!(
            value["settings"],
            json!({ "bps-write": 4 << 20, "bps-write-max": 20 << 20, "bps-write-max-length": 5, "iops-total": 100, "iops-total-max": 0, "iops-total-max-length": 1, "watermark": 90 })
        );
        assert_eq!(
            value["devices"][0]["writes"],
            json!({ "bytes": 40 << 20, "operations": 640, "bps": 4_194_304.0, "iops": 64.0 })
        );
        assert_eq!(value["devices"][0]["discards"]["bytes"], 5);
        assert_eq!(
            (&value["devices"][1]["number"], &value["devices"][1]["limited"]),
            (&json!("8:16"), &json!(false))
        );
        assert_eq!(
            (&value["waited-ns"], &value["waited-share"], &value["left"]),
            (&json!(6_500_000_000_u64), &json!(0.65), &Value::Null)
        );
        let asked = ConfiguredLimits {
            group: Some("tenant".to_owned()),
            weight: Some(7),
            ..ConfiguredLimits::default()
        };
        let summary = CommandSummary { configured: asked, ..summary };
        let settings = serde_json::to_value(summary.non_default_settings()).unwrap();
        assert_eq!(settings, json!({ "group": "tenant", "weight": 7 }));
    }
}
