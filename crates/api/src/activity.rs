//! Activity of disks, groups and devices in the last second: responses of the HTTP API.
//!
//! JSON members have the same names as in [`DaemonStatus`](crate::DaemonStatus). All members of a
//! disk, a group and a device are always present, and null while they are unknown, so that a
//! change never removes a member.

use std::{borrow::Cow, collections::BTreeMap};

use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};

use crate::{
    ClusterLimits, DeviceCapacity, DiskMemory, ErrorCounts, ExportCounters, LatencyControlStatus,
    LimitValues, QuotaStatus, ScheduleStatus,
};

/// Objects of one daemon at one moment.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Overview<'a> {
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// The daemon.
    pub daemon: DaemonIdentity<'a>,
    /// `change` if a client with the daemon's token may change settings, else `read`.
    pub access: &'static str,
    /// [`DiskActivity`] of each disk.
    pub disks: Vec<&'a ActivityObject>,
    /// [`GroupActivity`] of each group.
    pub groups: Vec<&'a ActivityObject>,
    /// [`DeviceActivity`] of each device.
    pub devices: Vec<&'a ActivityObject>,
    /// [`JobReport`](crate::JobReport) of each job that is listed.
    pub jobs: Vec<&'a ActivityObject>,
}

/// Changes since the previous overview or delta.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Delta {
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// Changed members of disks, each with its name.
    pub disks: Vec<ActivityObject>,
    /// Changed members of groups, each with its name.
    pub groups: Vec<ActivityObject>,
    /// Changed members of devices, each with its name.
    pub devices: Vec<ActivityObject>,
    /// Changed jobs, each with all members.
    pub jobs: Vec<ActivityObject>,
    /// Names of removed objects.
    #[serde(rename = "removed")]
    pub removed: RemovedNames,
}

impl Delta {
    /// True if nothing changed.
    pub fn is_empty(&self) -> bool {
        // Destructured, so that a new field cannot be forgotten here.
        let Self { time_ms: _, disks, groups, devices, jobs, removed: gone } = self;
        [disks, groups, devices, jobs].iter().all(|changed| changed.is_empty())
            && *gone == RemovedNames::default()
    }
}

/// Names of the objects that were removed since the previous overview or delta.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RemovedNames {
    /// Disks.
    pub disks: Vec<String>,
    /// Groups.
    pub groups: Vec<String>,
    /// Devices.
    pub devices: Vec<String>,
    /// Ids of jobs.
    pub jobs: Vec<String>,
}

/// Members of one of the types below, by name.
pub type ActivityObject = serde_json::Map<String, Value>;

/// Identity of a daemon.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DaemonIdentity<'a> {
    /// Its version.
    pub version: &'static str,
    /// Start of the daemon, in milliseconds since 1970.
    pub started_ms: u64,
    /// Name of its host.
    pub name: &'a str,
}

/// Requests and bytes per second, rounded to four digits.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TransferRates {
    /// Reads per second.
    pub read_iops: Number,
    /// Writes, write-zeroes and discards per second.
    pub write_iops: Number,
    /// Bytes read per second.
    pub read_bps: Number,
    /// Bytes written per second.
    pub write_bps: Number,
}

/// Latencies of the requests that completed in the last second. Null without requests.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LatencyPercentiles {
    /// Median of the time from arrival to completion.
    pub latency_p50_ns: Option<u64>,
    /// 99th percentile of the same.
    pub latency_p99_ns: Option<u64>,
    /// 99th percentile of the time that requests waited for limits.
    pub wait_p99_ns: Option<u64>,
}

/// Settings, throttling and totals that a disk and a group have in common.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MemberActivity {
    /// Group of the disk, or parent of the group. Null without one.
    pub group: Option<String>,
    /// Latencies of the last second.
    #[serde(flatten)]
    pub latencies: LatencyPercentiles,
    /// Share of the last second during which some request waited for a limit.
    pub wait_ratio: Number,
    /// The limit that requests waited for longest in the last second.
    pub throttle_cause: Option<ThrottleCause>,
    /// Reads since the start.
    pub reads: ThrottledTotals,
    /// Writes, write-zeroes and discards since the start.
    pub writes: ThrottledTotals,
    /// Rates of the last second.
    #[serde(flatten)]
    pub rates: TransferRates,
    /// Limits in force.
    pub limits: LimitValues,
    /// Limits as configured. Null where the same limits are in force.
    pub configured_limits: Option<LimitValues>,
    /// Schedule of the limits. Null without one.
    pub schedule: Option<ScheduleStatus>,
    /// Bytes of reads and writes in each period (`2T per month`). Null without a quota.
    pub quota: Option<String>,
    /// Bytes of writes in each period. Null without a quota.
    pub write_quota: Option<String>,
    /// Limit while a quota is used up, in bytes per second. Null without a quota.
    pub quota_rate: Option<u64>,
    /// State of the quotas. Null without one.
    pub quota_status: Option<QuotaStatus>,
    /// Weight among the members of its group.
    pub weight: u32,
    /// Operations per second that are reserved.
    pub iops_reservation: Option<u64>,
    /// Bytes per second that are reserved.
    pub bps_reservation: Option<u64>,
    /// Utilization of the device in percent below which limits are not enforced.
    pub watermark: Option<u8>,
    /// `enforced`, `lifted` or `scaled`. Null without a watermark.
    pub enforcement: Option<&'static str>,
    /// Factor of the limits while `scaled`.
    pub scale: Option<Number>,
    /// Latency target as a time (`5ms`). Null without one.
    pub latency_target: Option<String>,
    /// Percentage of the requests that the target covers. Null without a target.
    pub latency_percentile: Option<String>,
    /// Requests that the target covers: `all`, `reads` or `writes`. Null without a target.
    pub latency_of: Option<String>,
    /// Percentage of the device's throughput that remains beside targets of others. Null for the
    /// default.
    pub latency_floor: Option<String>,
    /// State of the target, and the cap for targets of others. Null without both.
    pub latency_control: Option<LatencyControlStatus>,
    /// Requests that wait for a limit now.
    pub waiting_requests: usize,
    /// Lowest balance of the bursts. Null without a burst.
    pub burst_balance_ratio: Option<Number>,
    /// Buckets of each limit, by the limit's name.
    pub buckets: BTreeMap<&'static str, BucketActivity>,
}

/// The limit that requests of a disk, a group or a job wait for.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ThrottleCause {
    /// `disk`, `group` for the group of the disk, `above` for a group around that, or `job`.
    pub level: Cow<'static, str>,
    /// Name of the disk or group that has the limit, or id of the job.
    pub name: String,
    /// The limit.
    pub limit: Cow<'static, str>,
}

/// Completed requests of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ThrottledTotals {
    /// Number of requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Number of requests that waited for a limit.
    pub throttled: u64,
}

/// Buckets of a limit, in operations or bytes, and the balance of its burst.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BucketActivity {
    /// Units that have not leaked yet.
    pub level: u64,
    /// Level above which requests wait.
    pub capacity: u64,
    /// Level of the second bucket, which limits the rate of a burst. Null without a burst longer
    /// than a second.
    pub burst_rate_level: Option<u64>,
    /// Capacity of the second bucket.
    pub burst_rate_capacity: Option<u64>,
    /// Duration of a full burst. Null if it is admitted at once or does not end.
    pub burst_duration_ns: Option<u64>,
    /// Free part of the capacity. Null without a burst rate.
    pub burst_balance_ratio: Option<Number>,
    /// Time until the balance is used up at the rate of the last seconds. Null while the balance
    /// does not decrease.
    pub burst_used_up_in_ns: Option<u64>,
    /// Time until the balance is full if nothing is admitted.
    pub burst_full_in_ns: Option<u64>,
}

/// One disk.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskActivity {
    /// Name of the disk.
    pub name: String,
    /// Settings, throttling and totals.
    #[serde(flatten)]
    pub member: MemberActivity,
    /// Image format.
    pub format: &'static str,
    /// Cache mode.
    pub cache: &'static str,
    /// Size in bytes.
    pub size: u64,
    /// True if an error of the image stopped the disk.
    pub stopped: bool,
    /// True if another program changed a file of the backing chain.
    pub backing_changed: bool,
    /// Requests that failed in the storage.
    pub errors: ErrorCounts,
    /// Exports of the disk.
    pub exports: Vec<ExportActivity>,
    /// Prefetching. Null while it is off.
    pub read_ahead: Option<PrefetchActivity>,
    /// L2 cache of a qcow2 image.
    pub l2_cache: Option<CacheActivity>,
    /// Memory that the disk occupies.
    pub memory: DiskMemory,
}

/// One export of a disk.
#[derive(Clone, Debug, Serialize)]
pub struct ExportActivity {
    /// Identifier in QMP.
    pub id: String,
    /// `nbd`, `vhost-user-blk`, `ublk`, `fuse` or `nbd-device`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Number of connections.
    pub connections: usize,
    /// Counters of its type.
    #[serde(flatten)]
    pub counters: ExportCounters,
}

/// Prefetching of a disk.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PrefetchActivity {
    /// Share of the reads of the last second that were answered from memory.
    pub hit_rate: Option<Number>,
    /// Bytes in memory.
    pub memory: u64,
    /// Sequential streams with prefetched data that is not read yet.
    pub streams: u64,
    /// True if reading ahead is suspended, because little of the data was used.
    #[serde(rename = "suspended")]
    pub suspended: bool,
}

/// L2 cache of a qcow2 image.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CacheActivity {
    /// Share of the lookups of the last second that found their entry.
    pub hit_rate: Option<Number>,
    /// Share of the disk whose entries fit into the cache.
    pub covered_ratio: Number,
}

/// One group. Totals and rates are the sums of the disks in it and below it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct GroupActivity {
    /// Name of the group.
    pub name: String,
    /// Settings, throttling and totals.
    #[serde(flatten)]
    pub member: MemberActivity,
    /// Limits of the cluster, if it limits this group; `limits` is then this host's quota.
    pub cluster: Option<ClusterLimits>,
}

/// A physical device below one or more disks.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DeviceActivity {
    /// Name of the block device.
    pub name: String,
    /// Disks whose images are on it.
    pub disks: Vec<String>,
    /// Measured or configured capacity.
    pub capacity: Option<DeviceCapacity>,
    /// Share of the last second during which the device had requests in flight.
    pub busy_ratio: Option<Number>,
    /// Rates of the last second, of all users of the device.
    #[serde(flatten)]
    pub rates: TransferRates,
}

/// Activity of a disk or group under changed limits.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Preview {
    /// Length of the recording that was simulated, in seconds.
    pub seconds: Number,
    /// Length of the simulation that was measured, in seconds.
    pub simulated_seconds: Number,
    /// Requests of the disk or group in it.
    pub requests: u64,
    /// With the limits of the recording, as measured then. Null without requests.
    pub now: Option<PreviewFigures>,
    /// With the changed limits, as simulated. Null without requests.
    pub then: Option<PreviewFigures>,
    /// The other disks on the same device together, if a latency target is in force there after the
    /// change; else null.
    pub others: Option<PreviewOfOthers>,
}

/// Activity of disks that a latency target throttles or protects.
#[derive(Clone, Debug, Serialize)]
pub struct PreviewOfOthers {
    /// As measured. Null without requests.
    pub now: Option<PreviewFigures>,
    /// As simulated. Null without requests.
    pub then: Option<PreviewFigures>,
}

/// Rates and latencies of the requests of a preview.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PreviewFigures {
    /// Requests per second, from the first request to the last completion.
    pub iops: Number,
    /// Bytes per second over the same time.
    pub bps: Number,
    /// Median of the time from arrival to completion.
    pub latency_p50_ns: Option<u64>,
    /// 99th percentile of the same.
    pub latency_p99_ns: Option<u64>,
    /// Median of the time that requests waited for limits.
    pub wait_p50_ns: Option<u64>,
    /// 99th percentile of the same.
    pub wait_p99_ns: Option<u64>,
    /// Share of the requests that waited.
    pub waiting_ratio: Number,
}

/// Activity of a disk or group over time.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ActivityHistory {
    /// Length of a step.
    pub step_ms: u64,
    /// Start of the first step, in milliseconds since 1970.
    pub start_ms: u64,
    /// Values by the name of the figure, one for each step; null where a value is unknown.
    pub series: BTreeMap<&'static str, Vec<Option<Number>>>,
    /// Latencies over the same time.
    pub latency_heat: LatencyHeat,
    /// Limits that were in force.
    pub limits: Vec<LimitInterval>,
}

/// Distribution of latencies over time.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LatencyHeat {
    /// Length of a column.
    pub step_ms: u64,
    /// Start of the first column, in milliseconds since 1970.
    pub start_ms: u64,
    /// Upper bounds of the rows; one more row has the requests above the last.
    pub bounds_ns: Vec<u64>,
    /// For each column the share of its requests in each row; null without requests.
    pub rows: Vec<Option<Vec<Number>>>,
}

/// A limit and the time during which it was in force.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LimitInterval {
    /// Name of the limit.
    pub name: &'static str,
    /// Group above, if the limit is set there. Null for a limit of the disk or group itself.
    pub group: Option<String>,
    /// Operations or bytes per second.
    pub value: u64,
    /// Start, in milliseconds since 1970.
    pub start_ms: u64,
    /// End. Null while it is in force.
    pub end_ms: Option<u64>,
}
