//! JSON output of `weir cgroup show`. Unknown values are null, never 0.

use std::time::Duration;

use serde_json::{Value, json};

use super::{
    rates::{CgroupRate, CgroupRow, DeviceRow, RowOptions, TaskRow},
    reading, text,
};
use crate::{
    kernel::pressure::{IoPressure, PressureStall},
    limit::configured::ConfiguredLimits,
};

pub(super) fn json(rows: &[CgroupRow], interval: Option<Duration>, options: RowOptions) -> Value {
    json!({
        "interval-ns": interval.map(nanoseconds),
        "task-waits-counted": options.are_waits_counted,
        "cgroups": rows.iter().map(|row| group(row, options)).collect::<Vec<_>>(),
    })
}

fn group(row: &CgroupRow, options: RowOptions) -> Value {
    json!({
        "name": row.name.display().to_string(),
        "waited-share": row.waited,
        "pressure": row.pressure.map(|IoPressure { some, full }| json!({ "some": stall(some), "full": full.map(stall) })),
        "devices": row.devices.iter().map(device).collect::<Vec<_>>(),
        "tasks": row.tasks.iter().map(|row| task(row, options)).collect::<Vec<_>>(),
    })
}

fn stall(stall: PressureStall) -> Value {
    json!({
        "avg10-percent": stall.avg10,
        "avg60-percent": stall.avg60,
        "avg300-percent": stall.avg300,
        "total-ns": stall.total_us.saturating_mul(1000),
    })
}

fn device(row: &DeviceRow) -> Value {
    let usage = row.account.usage;
    json!({
        "name": reading::node(row.number),
        "number": row.number.to_string(),
        "reads": { "bytes": usage.read_bytes, "operations": usage.reads },
        "writes": { "bytes": usage.written_bytes, "operations": usage.writes },
        "discards": { "bytes": usage.discarded_bytes, "operations": usage.discards },
        "rate": row.rate.map(|rate| rate_json(&rate)),
        "limits": text::named(&row.account.limits),
        "asked": row.configured.as_ref().map(ConfiguredLimits::json),
    })
}

fn rate_json(rate: &CgroupRate) -> Value {
    json!({
        "reads": { "bps": rate.read_bps, "iops": rate.read_iops },
        "writes": { "bps": rate.write_bps, "iops": rate.write_iops },
    })
}

fn task(row: &TaskRow, options: RowOptions) -> Value {
    let TaskRow { id, task, rate, waited } = row;
    json!({
        "pid": id.pid,
        "tid": id.tid,
        "name": task.name,
        "state": task.state.to_string(),
        "reads": task.io.map(|io| json!({ "bytes": io.read_bytes, "calls": io.syscr, "bytes-asked": io.rchar })),
        "writes": task.io.map(|io| json!({ "bytes": io.write_bytes, "calls": io.syscw, "bytes-asked": io.wchar, "cancelled-bytes": io.cancelled_write_bytes })),
        "rate": rate.map(|rate| json!({
            "reads": { "bps": rate.read_bps, "calls": rate.read_iops },
            "writes": { "bps": rate.write_bps, "calls": rate.write_iops },
        })),
        "waited-ns": options.are_waits_counted.then(|| nanoseconds(task.waited)),
        "waited-share": waited,
    })
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::rates::tests::sample;

    #[test]
    fn numbers_have_units_and_unknown_values_are_null() {
        let (interval, rows) = sample();
        let options = RowOptions { device: None, are_waits_counted: true };
        let value = json(&rows, Some(interval), options);
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
        let uncounted = json(&rows, None, RowOptions { are_waits_counted: false, ..options });
        assert_eq!(uncounted["cgroups"][1]["tasks"][0]["waited-ns"], Value::Null);
        assert_eq!(uncounted["interval-ns"], Value::Null);
    }
}
