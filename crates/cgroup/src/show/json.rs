//! JSON output of `weir cgroup show`. Unknown values are null, never 0.

use std::time::Duration;

use console::figures::SettingValues;
use serde::Serialize;

use super::{
    rates::{CgroupRate, CgroupRow, DeviceRow, RowOptions, TaskRow},
    reading, text,
};
use crate::{
    kernel::{pressure::IoPressure, proc_io::TaskIo},
    limit::configured::ConfiguredLimits,
};

/// Output of `weir cgroup show --json`.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ShowReport<'a> {
    interval_ns: Option<u64>,
    task_waits_counted: bool,
    cgroups: Vec<CgroupReport<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct CgroupReport<'a> {
    name: String,
    waited_share: Option<f64>,
    pressure: Option<IoPressure>,
    devices: Vec<DeviceReport<'a>>,
    tasks: Vec<TaskReport<'a>>,
}

#[derive(Serialize)]
struct DeviceReport<'a> {
    name: String,
    number: String,
    reads: IoTotals,
    writes: IoTotals,
    discards: IoTotals,
    rate: Option<DirectionRates<IoRates>>,
    /// Limits in force in the kernel.
    limits: SettingValues,
    /// Target of io.latency in force in the kernel.
    #[serde(rename = "latency-target-us")]
    latency_target_us: Option<u64>,
    asked: Option<&'a ConfiguredLimits>,
}

/// Bytes and operations that the kernel has counted.
#[derive(Serialize)]
pub(crate) struct IoTotals {
    pub(crate) bytes: u64,
    pub(crate) operations: u64,
}

#[derive(Serialize)]
struct DirectionRates<R> {
    reads: R,
    writes: R,
}

/// Bytes and operations per second.
#[derive(Serialize)]
struct IoRates {
    bps: f64,
    iops: f64,
}

/// Bytes and system calls per second.
#[derive(Serialize)]
struct CallRates {
    bps: f64,
    calls: f64,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct TaskReport<'a> {
    pid: i32,
    tid: i32,
    name: &'a str,
    state: char,
    reads: Option<TaskReads>,
    writes: Option<TaskWrites>,
    rate: Option<DirectionRates<CallRates>>,
    waited_ns: Option<u64>,
    waited_share: Option<f64>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct TaskReads {
    bytes: u64,
    calls: u64,
    bytes_asked: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct TaskWrites {
    bytes: u64,
    calls: u64,
    bytes_asked: u64,
    cancelled_bytes: u64,
}

pub(super) fn report(rows: &[CgroupRow], interval: Option<Duration>, options: RowOptions) -> ShowReport<'_> {
    ShowReport {
        interval_ns: interval.map(nanoseconds),
        task_waits_counted: options.are_waits_counted,
        cgroups: rows.iter().map(|row| group(row, options)).collect(),
    }
}

fn group(row: &CgroupRow, options: RowOptions) -> CgroupReport<'_> {
    CgroupReport {
        name: row.name.display().to_string(),
        waited_share: row.waited,
        pressure: row.pressure,
        devices: row.devices.iter().map(device).collect(),
        tasks: row.tasks.iter().map(|row| task(row, options)).collect(),
    }
}

fn device(row: &DeviceRow) -> DeviceReport<'_> {
    let usage = row.account.usage;
    DeviceReport {
        name: reading::node(row.number),
        number: row.number.to_string(),
        reads: IoTotals { bytes: usage.read_bytes, operations: usage.reads },
        writes: IoTotals { bytes: usage.written_bytes, operations: usage.writes },
        discards: IoTotals { bytes: usage.discarded_bytes, operations: usage.discards },
        rate: row.rate.map(|CgroupRate { read_bps, write_bps, read_iops, write_iops }| DirectionRates {
            reads: IoRates { bps: read_bps, iops: read_iops },
            writes: IoRates { bps: write_bps, iops: write_iops },
        }),
        limits: text::named(&row.account.limits),
        latency_target_us: Some(row.account.latency_target_us).filter(|target_us| *target_us > 0),
        asked: row.configured.as_ref(),
    }
}

fn task(row: &TaskRow, options: RowOptions) -> TaskReport<'_> {
    let TaskRow { id, task, rate, waited } = row;
    let reads = |io: TaskIo| TaskReads { bytes: io.read_bytes, calls: io.syscr, bytes_asked: io.rchar };
    let writes = |io: TaskIo| TaskWrites {
        bytes: io.write_bytes,
        calls: io.syscw,
        bytes_asked: io.wchar,
        cancelled_bytes: io.cancelled_write_bytes,
    };
    TaskReport {
        pid: id.pid,
        tid: id.tid,
        name: &task.name,
        state: task.state,
        reads: task.io.map(reads),
        writes: task.io.map(writes),
        rate: rate.map(|rate| DirectionRates {
            reads: CallRates { bps: rate.read_bps, calls: rate.read_iops },
            writes: CallRates { bps: rate.write_bps, calls: rate.write_iops },
        }),
        waited_ns: options.are_waits_counted.then(|| nanoseconds(task.waited)),
        waited_share: *waited,
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::show::rates::tests::sample;

    #[test]
    fn numbers_have_units_and_unknown_values_are_null() {
        let (interval, rows) = sample();
        let options = RowOptions { device: None, are_waits_counted: true };
        let value = serde_json::to_value(report(&rows, Some(interval), options)).unwrap();
        assert_eq!(value["interval-ns"], 2_000_000_000_u64);
        let group = &value["cgroups"][1];
        assert_eq!((&group["name"], &group["waited-share"]), (&json!("/system/a.db"), &json!(0.75)));
        assert_eq!(group["pressure"]["some"]["total-ns"], 2_500_000_000_u64);
        assert_eq!(group["pressure"]["full"], Value::Null);
        let device = &group["devices"][0];
        assert_eq!(device["writes"], json!({ "bytes": 10 << 20, "operations": 2560 }));
        assert_eq!(device["rate"]["writes"], json!({ "bps": 2_097_152.0, "iops": 512.0 }));
        assert_eq!(device["limits"], json!({ "bps-write": 4 << 20, "iops-write": 100 }));
        assert_eq!(group["devices"][1]["rate"], Value::Null);
        let task = &group["tasks"][0];
        assert_eq!((&task["name"], &task["waited-ns"]), (&json!("dd"), &json!(1_800_000_000_u64)));
        assert_eq!(task["rate"]["writes"], json!({ "bps": 2_097_152.0, "calls": 2.0 }));
        assert_eq!((&group["tasks"][1]["reads"], &group["tasks"][1]["rate"]), (&Value::Null, &Value::Null));
        let options = RowOptions { are_waits_counted: false, ..options };
        let uncounted = serde_json::to_value(report(&rows, None, options)).unwrap();
        assert_eq!(uncounted["cgroups"][1]["tasks"][0]["waited-ns"], Value::Null);
        assert_eq!(uncounted["interval-ns"], Value::Null);
    }
}
