//! Results of commands, as the daemon returns them or `--json` prints them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::ThrottleCause;

/// Event: an entry of the result of `x-weir-query-events`, and the data of `X_WEIR_EVENT`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct EventObject {
    /// Sequence number.
    pub id: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// Event type.
    pub kind: String,
    /// `info`, `warning` or `error`.
    #[serde(default)]
    pub severity: String,
    /// The disk that the event concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The group that the event concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Text for users.
    pub message: String,
    /// Values for programs.
    pub data: Map<String, Value>,
}

/// Histograms of a disk, of reads and writes together: an entry of the result of
/// `x-weir-query-latencies`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct DiskHistograms {
    /// Name of the disk.
    pub name: String,
    /// Times from arrival to completion of the successful requests.
    pub latencies: Vec<HistogramBucket>,
    /// Waits for limits. Requests that did not wait are in the first bucket. Empty if the daemon
    /// does not count waits.
    #[serde(default)]
    pub waits: Vec<HistogramBucket>,
}

/// Requests slower than `above_ns` and not slower than `at_most_ns`; unbounded if that is absent.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct HistogramBucket {
    /// Exclusive lower bound.
    pub above_ns: u64,
    /// Inclusive upper bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_most_ns: Option<u64>,
    /// Number of requests.
    pub requests: u64,
}

impl HistogramBucket {
    /// Value that stands for all requests of the bucket.
    pub fn midpoint_ns(&self) -> u64 {
        self.at_most_ns.map_or(self.above_ns, |upper| self.above_ns.midpoint(upper))
    }
}

/// Disk that `weir resume` resumed: an entry of the result of `x-weir-resume`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ResumedDisk {
    /// Its name.
    pub name: String,
    /// Error that stopped it again at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<String>,
}

/// Change of a reload: an entry of the result of `x-weir-reload`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct ReloadChange {
    /// `daemon`, `group`, `disk` or `export`.
    pub kind: String,
    /// Name of the object; empty for the daemon.
    pub name: String,
    /// `added`, `removed`, `set`, `unavailable`, `not-read` or `on-other-host`.
    pub change: String,
    /// The disk of an export.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Address of an export.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The host that has the disk, if that is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Reason for which credentials were not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The setting that is set.
    #[serde(flatten)]
    pub setting: Option<SettingChange>,
}

/// Old and new value of a setting: a number in the unit of the setting, a text, or null without a
/// value.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct SettingChange {
    /// Name of the setting in the config file.
    pub setting: String,
    /// Value before the change.
    pub before: Value,
    /// Value after the change.
    pub after: Value,
}

/// Disk that `x-weir-add-disk` has added.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct AddedDisk {
    /// Addresses of its exports.
    pub uris: Vec<String>,
}

/// Disk that `x-weir-move-disk` has moved.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MovedDisk {
    /// Its name.
    pub disk: String,
    /// The host that served it.
    pub from: String,
    /// The host that serves it.
    pub to: String,
    /// True if the config file of `from` has the disk. Absent if that is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listed_here: Option<bool>,
    /// True if the config file of `to` has the disk. Absent if that is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listed_there: Option<bool>,
}

/// Recording that has started: the result of `x-weir-record-start`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct StartedRecording {
    /// Its number.
    pub id: u64,
}

/// Recording of a daemon: the result of `x-weir-record-stop`, and an entry of that of
/// `x-weir-query-recordings`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct RecordingStatus {
    /// Its number.
    pub id: u64,
    /// Disks and groups that are recorded; empty for all disks.
    pub of: Vec<String>,
    /// Number of recorded requests.
    pub requests: u64,
    /// Number of requests that arrived faster than they could be recorded.
    pub lost: u64,
    /// Number of bytes that were written.
    pub bytes: u64,
    /// Directory of a recording that belongs to the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
    /// Reason for which the recording is incomplete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Job on a disk: an entry of the result of `x-weir-query-jobs`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct JobReport {
    /// Its id.
    pub id: String,
    /// Its kind, such as `backup`.
    pub kind: String,
    /// Name of the disk.
    pub disk: String,
    /// Group of the disk. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Target, as given; the image of the disk if the job writes to that.
    pub target: String,
    /// Format of the target: `raw` or `qcow2`.
    pub format: String,
    /// `created`, `running`, `paused`, `ready`, `aborting` or `concluded`.
    pub state: String,
    /// Bytes that are done.
    pub done_bytes: u64,
    /// Bytes of the disk.
    pub total_bytes: u64,
    /// Bytes that were copied as data, without zeroes.
    pub copied_bytes: u64,
    /// Bytes of old data that wait for the target. Absent unless the job keeps the content of an
    /// instant and has not concluded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub old_data_bytes: Option<u64>,
    /// Time for which it has been running, without pauses.
    pub running_ns: u64,
    /// Bytes copied per second of that time.
    pub rate_bps: u64,
    /// Seconds until its end at the rate so far. Absent unless it is running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_s: Option<u64>,
    /// Its limit in bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_total: Option<u64>,
    /// Its limit in requests per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_total: Option<u64>,
    /// Its weight. Absent if it uses spare capacity only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// The limit that it waits for, or has waited for in the last second. Without a weight, the
    /// limit that has no spare capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttle_cause: Option<ThrottleCause>,
    /// True if it was cancelled and has concluded.
    #[serde(rename = "cancelled", skip_serializing_if = "std::ops::Not::not")]
    pub is_cancelled: bool,
    /// Reason why it has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Condition that delays it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
    /// True if an operator has completed it, and it has not ended.
    #[serde(rename = "completing", skip_serializing_if = "std::ops::Not::not")]
    pub is_completing: bool,
    /// True if it has moved its disk to the target.
    #[serde(rename = "switched", skip_serializing_if = "std::ops::Not::not")]
    pub is_switched: bool,
    /// Time for which clients' changes have waited for that move, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_ns: Option<u64>,
}

/// Job that was started: the result of `x-weir-backup`, `x-weir-mirror` and `x-weir-stream`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct StartedJob {
    /// Its id.
    pub id: String,
}

/// Recording that `weir record` has written.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct FinishedRecording {
    /// Output file, as given to `--output`.
    pub output: String,
    /// Number of recorded requests.
    pub requests: u64,
    /// Number of requests that arrived faster than they could be recorded.
    pub lost: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Reason for which the recording is incomplete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Device or name that `weir detach` had to detach.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DetachedDevice {
    /// The device or name.
    pub name: String,
    /// False if it is still attached.
    pub detached: bool,
    /// Reason for which it is still attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Problem or warning of `weir check-config`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Diagnostic {
    /// Effect on a start.
    pub severity: Severity,
    /// The config file.
    pub file: String,
    /// Line in the file, from 1. Absent if the diagnostic concerns no line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// Path of the key, such as `disk.vm1.image`. Absent if the diagnostic concerns no key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Problem and remedy, without file, line and key.
    pub message: String,
}

/// Effect of a [`Diagnostic`] on a start.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The daemon does not start, and a reload is rejected.
    Error,
    /// The daemon starts.
    Warning,
}

/// Snapshots of one instant: the result of `x-weir-snapshot`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct TakenSnapshots {
    /// One for each disk, in the order of the request.
    pub snapshots: Vec<TakenSnapshot>,
    /// Time in nanoseconds for which changes of the disks have waited.
    pub pause_ns: u64,
}

/// Snapshot of one disk.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct TakenSnapshot {
    /// The disk.
    pub disk: String,
    /// Image of the disk from now on.
    pub image: String,
    /// Image with the content of the instant, of an external snapshot: it is read-only now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// Name of an internal snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal: Option<String>,
}
