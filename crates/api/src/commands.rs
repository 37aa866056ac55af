//! Results that commands print with `--json`.

use serde::{Deserialize, Serialize};

/// A disk that `weir resume` resumed: an entry of the answer of `x-weir-resume`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ResumedDisk {
    /// Its name.
    pub name: String,
    /// The error that stopped it again at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by: Option<String>,
}

/// A recording that `weir record` has written.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct FinishedRecording {
    /// The file, as it was named.
    pub output: String,
    /// Requests in it.
    pub requests: u64,
    /// Requests that came faster than they could be kept.
    pub lost: u64,
    /// Size of the file.
    pub bytes: u64,
    /// Why the recording is not complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A device or name that `weir detach` was asked to detach.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DetachedDevice {
    /// The device or name.
    pub name: String,
    /// False if it stays attached.
    pub detached: bool,
    /// Why it stays attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A finding of `weir check-config`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Diagnostic {
    /// Effect on a start.
    pub severity: Severity,
    /// The config file.
    pub file: String,
    /// Line in the file, from 1. Absent if the finding belongs to no line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// Path of the key, such as `disk.vm1.image`. Absent if the finding belongs to no key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The finding and what to do about it, without the place.
    pub message: String,
}

/// Effect of a [`Diagnostic`] on a start.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// The daemon does not start, and a reload is refused.
    Error,
    /// The daemon starts.
    Warning,
}
