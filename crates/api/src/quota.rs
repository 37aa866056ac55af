//! State of quotas by volume, in the daemon's status and the HTTP API. Rates that a cluster
//! leases are quotas of another kind: see `cluster`.

use serde::{Deserialize, Serialize};

/// State of the quotas by volume of a disk or group.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct QuotaStatus {
    /// True while a quota is used up: `quota-rate` is in force.
    pub used_up: bool,
    /// Of reads and writes together. Absent without this quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<QuotaUse>,
    /// Of writes. Absent without this quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writes: Option<QuotaUse>,
}

/// Bytes counted against a quota.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct QuotaUse {
    /// Bytes in the present period.
    pub used_bytes: u64,
    /// The quota in bytes.
    pub quota_bytes: u64,
    /// End of the period, on the clock of its time zone: `2026-12-01T00:00:00+01:00`. Absent if the
    /// zone cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period_end: Option<String>,
    /// End of the period in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub period_end_s: Option<u64>,
}
