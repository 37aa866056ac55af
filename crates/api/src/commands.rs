//! Results that commands print with `--json`.

use serde::{Deserialize, Serialize};

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
