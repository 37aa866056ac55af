//! Status of a daemon: the response of `x-weir-query-status`, which `weir status --json` prints.
//!
//! Counters start at zero when a disk is opened, and an upgrade of the daemon transfers them. Two
//! responses and the difference of their `uptime-ns` give rates.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer, ser::SerializeMap as _};

use crate::{ExportStatus, ServerStatus};

use crate::QuotaStatus;

use super::commands::JobReport;

/// Limits by the names of their options, in operations, bytes and seconds; those that are set.
pub type LimitValues = BTreeMap<String, u64>;

/// Status of one daemon.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DaemonStatus {
    /// Version of the daemon.
    pub version: String,
    /// Time since the daemon started, or since the first process of a chain of upgrades did.
    pub uptime_ns: u64,
    /// Path of the config file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// True if the daemon can create block devices on this host. Absent in responses of daemons
    /// that do not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub makes_devices: Option<bool>,
    /// The hosts that share limits with this one. Absent where `[cluster]` is not configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterStatus>,
    /// Memory of the daemon for data. Absent in responses of daemons that do not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryStatus>,
    /// Disks whose images are open.
    pub disks: Vec<DiskStatus>,
    /// Disks of the config whose storage has not answered yet.
    #[serde(rename = "unavailable", skip_serializing_if = "Vec::is_empty")]
    pub unavailable: Vec<UnavailableDisk>,
    /// Jobs on disks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobReport>,
    /// All groups, also those without disks.
    pub groups: Vec<GroupStatus>,
    /// Physical devices below the disks.
    pub devices: Vec<DeviceStatus>,
    /// Exports of all disks.
    pub exports: Vec<ExportStatus>,
    /// NBD servers of the daemon.
    pub servers: Vec<ServerStatus>,
}

impl DaemonStatus {
    /// Keys of the lists whose length grows with the number of disks. A client that needs none of
    /// them sends `lists: false`, and the response omits them.
    pub const LISTS: [&'static str; 4] = ["disks", "groups", "devices", "exports"];
}

/// A disk whose storage has not answered yet; the daemon retries.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct UnavailableDisk {
    /// Name of the disk.
    pub name: String,
    /// Its image, as configured.
    pub image: String,
    /// Time since the first attempt.
    pub age_ns: u64,
    /// Reason for the failure of the last attempt. Absent during the first attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Connection of this host to etcd.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ClusterStatus {
    /// Name of the cluster.
    pub name: String,
    /// Name of this host in it.
    pub host: String,
    /// True if etcd answers.
    pub connected: bool,
    /// The host that grants quota leases. Absent while there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// Reason if `connected` is false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How the host keeps its quotas while `connected` is false. Absent without that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agreement: Option<ClusterAgreement>,
}

/// A leader that a host reaches without etcd.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ClusterAgreement {
    /// The host that grants quota leases.
    pub leader: String,
    /// Number of hosts that have agreed on it; 0 if etcd elected it.
    pub agreed_hosts: u64,
}

/// One disk.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DiskStatus {
    /// Name of the disk.
    pub name: String,
    /// Its image, as configured.
    pub image: String,
    /// Absolute path of an image in a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Files of its backing chain, from the image to the base. Absent without a backing file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<String>,
    /// Size in bytes.
    pub size: u64,
    /// True if the image is open read-only.
    pub read_only: bool,
    /// Cache mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// Image format.
    pub format: String,
    /// L2 cache of a qcow2 image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub l2_cache: Option<CacheStatus>,
    /// Refcount cache of a qcow2 image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refcount_cache: Option<CacheStatus>,
    /// Connections of all its exports.
    pub connections: u64,
    /// Reads that completed.
    pub reads: DiskTransfers,
    /// Writes that completed.
    pub writes: DiskTransfers,
    /// Requests saved by merging: a merge of `n` requests saves `n - 1`.
    pub merged_requests: u64,
    /// Limits, group, weight and reservations.
    #[serde(flatten)]
    pub settings: MemberSettings,
    /// Enforcement of the limits at present.
    #[serde(flatten)]
    pub watermark_status: WatermarkStatus,
    /// Its latency target, and its cap for targets of others.
    #[serde(skip_serializing_if = "LatencyControlStatus::is_empty", serialize_with = "omit_nulls")]
    pub latency_control: LatencyControlStatus,
    /// Counters of the throttle layer.
    pub throttle: ThrottleStatus,
    /// Counters of prefetching.
    pub read_ahead: PrefetchStatus,
    /// Requests that failed in the storage.
    pub errors: ErrorCounts,
    /// Policy for failed reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_read_error: Option<String>,
    /// Policy for failed writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_write_error: Option<String>,
    /// `ok`, `nospace` or `failed`. Absent where no error can stop the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_status: Option<String>,
    /// Age in nanoseconds of the oldest request in flight at a remote storage; 0 for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_request: Option<u64>,
    /// Memory that the disk occupies.
    pub memory: DiskMemory,
    /// Connection to the NBD server that has the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<RemoteStatus>,
    /// Latencies since the daemon began to measure them. Only `weir status` adds them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<IntervalLatency>,
    /// Rates of an interval. Only `weir status` adds them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<RateStatus>,
}

/// Rates of a disk or group over an interval between two responses of the daemon.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RateStatus {
    /// Length of the interval.
    pub interval_ns: u64,
    /// Reads that completed.
    pub reads: TransferRate,
    /// Writes that completed.
    pub writes: TransferRate,
    /// Share of the interval, 0 to 1, in which requests waited for a limit.
    pub limited: f64,
    /// Latencies of the requests that completed. Absent if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<IntervalLatency>,
    /// Waits for limits of the same requests. Absent if there were none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ns: Option<WaitRate>,
}

/// Requests and bytes per second.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct TransferRate {
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bps: f64,
}

/// Latency that 50 and 99 of 100 requests do not exceed, in nanoseconds, accurate to 10 %.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct IntervalLatency {
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
}

/// Wait for limits that 99 of 100 requests do not exceed, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct WaitRate {
    /// 99th percentile.
    pub p99: u64,
}

impl DiskStatus {
    /// Reason for which the disk is stopped: `nospace` or `failed`. `None` while it serves
    /// requests.
    pub fn stopped_by(&self) -> Option<&str> {
        // Unknown values of newer daemons count as stopped.
        self.io_status.as_deref().filter(|&status| status != "ok")
    }
}

/// Connection of a disk to an NBD server.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RemoteStatus {
    /// True if the server is connected.
    pub connected: bool,
    /// Number of times that the connection was reestablished.
    pub reconnections: u64,
    /// Bytes written since the last flush, which are written again after a reconnection.
    pub unflushed_bytes: u64,
}

/// Memory of the daemon for data, in bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MemoryStatus {
    /// The budget (`--memory`). Absent without a bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// Metadata caches, prefetch caches and buffers of all disks.
    pub reserved: u64,
    /// Content of `memory:` disks.
    pub disks_in_memory: u64,
    /// Buffers of connections.
    pub connections: u64,
    /// Requests in flight and unread replies.
    pub requests: u64,
    /// Upper bound of `requests`: see `weir_memory_requests_limit_bytes`.
    #[serde(rename = "max-requests")]
    pub max_requests: u64,
    /// Number of requests that wait for memory.
    pub waiting: u64,
}

/// Memory that a disk occupies, in bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DiskMemory {
    /// Metadata caches, prefetch cache and buffers.
    pub reserved: u64,
    /// Requests in flight and unread replies.
    pub requests: u64,
}

/// Requests that failed in the storage since the disk was opened.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ErrorCounts {
    /// Failed reads.
    pub reads: u64,
    /// Failed writes and write-zeroes.
    pub writes: u64,
    /// Failed flushes.
    pub flushes: u64,
    /// Failed discards.
    pub discards: u64,
}

/// Counters of prefetching since the disk was opened.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct PrefetchStatus {
    /// Reads that were answered from memory.
    pub hits: u64,
    /// Reads of which a part was in memory.
    pub partial_hits: u64,
    /// Reads that went to the image.
    pub misses: u64,
    /// Reads that were too large to be looked up.
    pub skipped: u64,
    /// Hits that waited for data in flight.
    pub waited: u64,
    /// Bytes that hits returned.
    pub hit_bytes: u64,
    /// Bytes that were read ahead.
    pub read_ahead_bytes: u64,
    /// Bytes that were read ahead and then read by a client.
    pub used_bytes: u64,
    /// Bytes that were read ahead and dropped unread.
    pub wasted_bytes: u64,
    /// Bytes in memory.
    pub memory: u64,
    /// Sequential streams with prefetched data that is not read yet.
    pub streams: u64,
    /// True if reading ahead is suspended, because little of the data was used.
    #[serde(rename = "suspended")]
    pub suspended: bool,
    /// Share of reads that were answered from memory, wholly or in part, 0 to 1. Absent before the
    /// first read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hit_rate: Option<f64>,
    /// Share of the bytes read ahead that were used, 0 to 1. Absent before any were read ahead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

/// Counters of a metadata cache since the image was opened or the cache was resized.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct CacheStatus {
    /// Lookups that found their entry.
    pub hits: u64,
    /// Lookups that read it from the image.
    pub misses: u64,
    /// Entries that were evicted. Absent for caches that do not count evictions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evictions: Option<u64>,
    /// Bytes in memory.
    pub bytes: u64,
    /// Largest number of bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Bytes of the disk that the limit covers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub covered: Option<u64>,
}

/// One group.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct GroupStatus {
    /// Name of the group.
    pub name: String,
    /// Disks that are its direct members.
    pub disks: Vec<String>,
    /// Limits, parent group, weight and reservations.
    #[serde(flatten)]
    pub settings: MemberSettings,
    /// Enforcement of the limits at present.
    #[serde(flatten)]
    pub watermark_status: WatermarkStatus,
    /// Its latency target, and its cap for targets of others.
    #[serde(skip_serializing_if = "LatencyControlStatus::is_empty", serialize_with = "omit_nulls")]
    pub latency_control: LatencyControlStatus,
    /// Counters of the throttle layer.
    pub throttle: ThrottleStatus,
    /// Limits of the cluster, if it limits this group; `settings` then has this host's quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterLimits>,
    /// Rates of an interval. Only `weir status` adds them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<RateStatus>,
}

/// Limits that several hosts share.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ClusterLimits {
    /// Limits of all hosts together.
    pub limits: LimitValues,
    /// True if this host holds a quota lease: its quota exceeds its fallback share.
    pub leased: bool,
}

/// Settings that a disk and a group have in common.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MemberSettings {
    /// Group of the disk, or parent of the group. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Weight among the members of its group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u64>,
    /// Operations per second that are reserved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_reservation: Option<u64>,
    /// Bytes per second that are reserved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_reservation: Option<u64>,
    /// Reservations that do not fit into the cluster and are not in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unmet_reservation: Option<UnmetReservation>,
    /// Utilization of the device in percent below which limits are not enforced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watermark: Option<u64>,
    /// Latency target as a time (`5ms`). Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_target: Option<String>,
    /// Percentage of the requests that the target covers. Absent without a target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_percentile: Option<String>,
    /// Requests that the target covers: `all`, `reads` or `writes`. Absent without a target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_of: Option<String>,
    /// Percentage of the device's throughput that remains beside targets of others. Absent for the
    /// default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_floor: Option<String>,
    /// Bytes of reads and writes in each period (`2T per month`). Absent without a quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    /// Bytes of writes in each period. Absent without a quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_quota: Option<String>,
    /// Limit while a quota is used up, in bytes per second. Absent without a quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota_rate: Option<u64>,
    /// State of the quotas. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota_status: Option<QuotaStatus>,
    /// Limits in force.
    pub limits: LimitValues,
    /// Limits as configured. Absent where the same limits are in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configured_limits: Option<LimitValues>,
    /// Schedule of the limits. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleStatus>,
    /// Settings of prefetching. Absent for groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<PrefetchSettings>,
}

/// A latency target at present, and the cap for targets of others. A status omits the keys that are
/// null here.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct LatencyControlStatus {
    /// `met` (no other disk is throttled), `controlling` (others are) or `cannot-be-met`. Null
    /// without a target.
    pub state: Option<String>,
    /// The target in nanoseconds. Null without one.
    pub target_ns: Option<u64>,
    /// The target's percentile of the last 10 to 20 seconds in nanoseconds, from admission to
    /// completion: waits for limits are excluded. Null without requests.
    pub measured_ns: Option<u64>,
    /// Its percentile in nanoseconds with all others at their minimum. Null unless the target
    /// cannot be met.
    pub alone_ns: Option<u64>,
    /// Rate to which targets of others throttle it: requests of at most 64 KiB, or that many bytes.
    /// Null while it is not throttled.
    pub cap_iops: Option<u64>,
}

impl LatencyControlStatus {
    /// True if there is neither a target nor a cap.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Writes an object without its null values.
fn omit_nulls<S: Serializer>(status: &LatencyControlStatus, serializer: S) -> Result<S::Ok, S::Error> {
    let LatencyControlStatus { state, target_ns, measured_ns, alone_ns, cap_iops } = status;
    let mut object = serializer.serialize_map(None)?;
    if let Some(state) = state {
        object.serialize_entry("state", state)?;
    }
    let numbers = [
        ("target-ns", target_ns),
        ("measured-ns", measured_ns),
        ("alone-ns", alone_ns),
        ("cap-iops", cap_iops),
    ];
    for (key, number) in numbers {
        if let Some(number) = number {
            object.serialize_entry(key, number)?;
        }
    }
    object.end()
}

/// State of a schedule of limits at present.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ScheduleStatus {
    /// Times of the entry that holds. Absent while the configured limits hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
    /// Time of the next change, on the clock of the schedule: `2026-11-30T22:00:00+01:00`. Absent
    /// if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
}

impl MemberSettings {
    /// Limits as configured.
    pub const fn configured_limits(&self) -> &LimitValues {
        match &self.configured_limits {
            Some(limits) => limits,
            None => &self.limits,
        }
    }
}

/// Enforcement of limits with a watermark at present.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct WatermarkStatus {
    /// `enforced`, `lifted` or `scaled`. Absent without a watermark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<String>,
    /// Factor of the limits while `scaled`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
}

/// Reservations that do not fit into the cluster and are not in force.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct UnmetReservation {
    /// Operations per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_reservation: Option<u64>,
    /// Bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_reservation: Option<u64>,
    /// Reason.
    #[serde(rename = "reason")]
    pub reason: String,
}

/// Settings of prefetching.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct PrefetchSettings {
    /// `off`, `on` or `auto`.
    pub mode: String,
    /// Numeric settings, by the names of their options without `prefetch-`.
    #[serde(flatten)]
    pub numbers: BTreeMap<String, u64>,
}

/// Requests of one direction that completed.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct DiskTransfers {
    /// Number of requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Requests of one direction that the throttle layer admitted.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ThrottledTransfers {
    /// Number of requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Number of requests that waited.
    pub throttled: u64,
    /// Sum of the time that they waited.
    pub waited_ns: u64,
}

/// Counters of the throttle layer of a disk or a group.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ThrottleStatus {
    /// Admitted reads.
    pub reads: ThrottledTransfers,
    /// Admitted writes, write-zeroes and discards.
    pub writes: ThrottledTransfers,
    /// Requests that wait now.
    pub waiting: WaitingRequests,
    /// Waits since the start. Absent while no request has waited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ns: Option<WaitPercentiles>,
    /// Waits of the last ten to twenty seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recent_wait_ns: Option<WaitPercentiles>,
    /// Time during which requests waited for these limits.
    pub limited_ns: u64,
    /// The limit that requests waited for last.
    #[serde(rename = "throttle-cause", skip_serializing_if = "Option::is_none")]
    pub throttle_cause: Option<String>,
    /// Tokens of each limit, by its name: operations or bytes that it admits without a wait.
    pub tokens: LimitValues,
    /// Buckets of each limit, by the limit's name.
    pub buckets: BTreeMap<String, LimitBucketStatus>,
    /// Time during which a reservation was met and missed. Absent without a reservation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reservation: Option<ReservationStatus>,
}

impl ThrottleStatus {
    /// Sum of the time that requests of both directions waited.
    pub fn waited_ns(&self) -> u64 {
        // Saturating: the response may come from any daemon.
        self.reads.waited_ns.saturating_add(self.writes.waited_ns)
    }
}

/// Time during which requests waited and their reservation was met or missed.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ReservationStatus {
    /// Time during which the disk or group received its reserved rate.
    pub met_ns: u64,
    /// Time during which the disk or group received less than that.
    pub missed_ns: u64,
}

/// Buckets of a limit, in operations or bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct LimitBucketStatus {
    /// Units that have not leaked yet.
    pub level: u64,
    /// Level above which requests wait.
    pub capacity: u64,
    /// Level of the second bucket, which limits the rate of a burst. Absent without a burst longer
    /// than a second, like its capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_rate_level: Option<u64>,
    /// Capacity of the second bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_rate_capacity: Option<u64>,
    /// The available part of the burst. Absent without a burst rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<BurstStatus>,
}

/// Balance of a burst.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct BurstStatus {
    /// Duration of a full burst. Absent if it is admitted at once or does not end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<u64>,
    /// Free part of the capacity in percent.
    pub balance_percent: u8,
    /// Time until the balance is used up at the rate of the last seconds. Absent while the balance
    /// does not decrease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_up_in_ns: Option<u64>,
    /// Time until the balance is full if nothing is admitted.
    pub full_in_ns: u64,
}

/// Requests that wait for a limit.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct WaitingRequests {
    /// Waiting reads.
    pub reads: u64,
    /// Waiting writes, write-zeroes and discards.
    pub writes: u64,
}

impl WaitingRequests {
    /// Both directions.
    pub fn total(self) -> u64 {
        self.reads.saturating_add(self.writes)
    }
}

/// Percentiles of the time that requests waited for a limit, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct WaitPercentiles {
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Longest wait.
    pub max: u64,
}

/// A physical device below one or more disks.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DeviceStatus {
    /// Name of the block device.
    pub name: String,
    /// Disks whose images are on it.
    pub disks: Vec<String>,
    /// Measured or configured capacity. Absent while it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<DeviceCapacity>,
    /// Source of the capacity: `probe`, `rate` or `busy-time`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity_source: Option<String>,
    /// Share of the capacity in use, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<f64>,
}

/// Operations and bytes per second that a device can do. A member is absent if it is unknown.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DeviceCapacity {
    /// Reads per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<u64>,
    /// Writes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<u64>,
    /// Bytes read per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bps: Option<u64>,
    /// Bytes written per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bps: Option<u64>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ExportCounters;

    #[test]
    fn status_of_another_version_is_read() {
        let response = json!({
            "version": "9.9", "a-new-key": { "x": 1 },
            "disks": [{ "name": "vm1", "weight": 100, "a-new-key": true }],
        });
        let status: DaemonStatus = serde_json::from_value(response).unwrap();
        assert_eq!((status.disks[0].name.as_str(), status.disks[0].settings.weight), ("vm1", Some(100)));
        assert_eq!((status.servers.len(), status.cluster), (0, None));
    }

    #[test]
    fn absent_members_are_not_written() {
        let group =
            serde_json::to_value(GroupStatus { name: "gold".into(), ..GroupStatus::default() }).unwrap();
        let keys: Vec<_> = group.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["disks", "limits", "name", "throttle"]);
        let latency_control =
            LatencyControlStatus { state: Some("met".into()), ..LatencyControlStatus::default() };
        let group = GroupStatus { latency_control, ..GroupStatus::default() };
        let written = serde_json::to_value(&group).unwrap();
        assert_eq!(written["latency-control"], json!({ "state": "met" }));
        assert_eq!(serde_json::from_value::<GroupStatus>(written).unwrap(), group);
    }

    #[test]
    fn latency_control_has_the_keys_of_its_type() {
        let latency_control = LatencyControlStatus {
            state: Some("met".into()),
            target_ns: Some(1),
            measured_ns: Some(2),
            alone_ns: Some(3),
            cap_iops: Some(4),
        };
        let expected = serde_json::to_string(&latency_control).unwrap();
        let written =
            serde_json::to_string(&DiskStatus { latency_control, ..DiskStatus::default() }).unwrap();
        assert!(written.contains(&format!("\"latency-control\":{expected}")), "{written}");
    }

    #[test]
    fn status_survives_serialization() {
        let counters = ExportCounters { queues: Some(2), kicks: Some(7), ..ExportCounters::default() };
        let export = ExportStatus { kind: "vhost-user-blk".into(), counters, ..ExportStatus::default() };
        let prefetch = PrefetchSettings { mode: "on".into(), numbers: [("memory".into(), 1 << 20)].into() };
        let settings = MemberSettings { prefetch: Some(prefetch), ..MemberSettings::default() };
        let status = DaemonStatus {
            exports: vec![export],
            disks: vec![DiskStatus { settings, ..DiskStatus::default() }],
            ..DaemonStatus::default()
        };
        let response = serde_json::to_value(&status).unwrap();
        assert_eq!(response["exports"][0]["kicks"], 7);
        assert_eq!(response["disks"][0]["prefetch"]["memory"], 1 << 20);
        assert_eq!(serde_json::from_value::<DaemonStatus>(response).unwrap(), status);
    }
}
