//! `x-weir-query-status`: everything that the daemon serves, in one reply.
//!
//! `weir status`, `weir top` and other commands read it; the types are those of `api`, and
//! `docs/reference/qmp.md` describes the reply.

use std::{collections::HashMap, path, rc::Rc, sync::Arc};

use ::settings::{LatencyConfig, LatencySetting, QuotaSetting};
use api::{
    BurstStatus, ClusterLimits, DaemonStatus, DefaultExport, DeviceCapacity, DeviceStatus, DiskMemory,
    DiskStatus, DiskTransfers, ErrorCounts, ExportStatus, GroupStatus, LimitBucketStatus, MemberSettings,
    MemoryStatus, RefusedClients, RemoteStatus, ReservationStatus, ServerStatus, ThrottleStatus,
    ThrottledTransfers, WaitPercentiles, WaitingRequests, WatermarkStatus,
};
use block::{
    disk::{Disk, Failures},
    layer::throttle::{GroupSettings, ThrottleGroup},
};
use export::nbd::RejectedClientCounts;
use image::Image;
use policy::{
    throttle::{
        AdmissionCounters, Enforcement, LimitKind, LimitLevel, LimitPart, LimitSetting, ThrottleStats,
    },
    watermark::{MeasuredCapacity, Watermark},
};
use reactor::memory::{BudgetUsage, MemoryBudget};
use serde_json::value::{RawValue, to_raw_value};

use crate::{
    devices::DeviceWithDisks,
    latency_targets,
    openers::DeviceOpeners,
    qmp::{
        arguments::QmpArguments, caches, command::QmpTextCommand, error::QmpError, errors, prefetch, settings,
    },
    registry::{Registry, RunningDisk, RunningEndpoint, RunningExport},
    running_server::RunningServer,
    schedules::schedule_status,
    snapshots::chain_files,
    unmet_reservation::UnmetReservationEntry,
};

#[derive(Debug)]
pub(super) struct QueryDaemonStatus {
    /// Include [`DaemonStatus::LISTS`], whose length is unbounded.
    lists: bool,
}

impl QmpTextCommand for QueryDaemonStatus {
    const NAME: &'static str = "x-weir-query-status";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self { lists: arguments.optional("lists")?.unwrap_or(true) })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Box<RawValue>, QmpError> {
        let mut status = DaemonStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ns: nanoseconds(registry.lifecycle.uptime()),
            makes_devices: Some(registry.makes_devices()),
            memory: Some(memory_status()),
            servers: registry.exports.servers().iter().map(|server| server_status(server)).collect(),
            jobs: registry.jobs.all().iter().map(|job| job.report(&registry.disks)).collect(),
            cluster: registry.cluster().map(|cluster| cluster.summary()),
            config: registry.config.as_ref().map(|path| path.display().to_string()),
            ..DaemonStatus::default()
        };
        if self.lists {
            add_lists(&registry, &mut status);
            return Ok(status.to_json());
        }
        let mut summary = serde_json::to_value(status).expect("all keys are strings");
        if let Some(members) = summary.as_object_mut() {
            members.retain(|key, _| !DaemonStatus::LISTS.contains(&key.as_str()));
        }
        Ok(to_raw_value(&summary).expect("all keys are strings"))
    }
}

fn add_lists(registry: &Rc<Registry>, status: &mut DaemonStatus) {
    // Members are collected once: a query per group would take quadratic time.
    let (exports, members) = (registry.exports.all(), registry.members());
    status.disks = registry.disks.all().iter().map(|running| disk_status(registry, running)).collect();
    status.groups =
        registry.groups.all().iter().map(|group| group_status(registry, group, &members)).collect();
    status.devices = registry.devices().into_iter().map(device_status).collect();
    status.exports = exports.iter().map(|export| export_status(export)).collect();
    status.unavailable = registry.unavailable_disks();
}

fn memory_status() -> MemoryStatus {
    let BudgetUsage { total, reserved, pages, connections, requests, max_requests: most_requests, waiting } =
        MemoryBudget::process().usage();
    MemoryStatus {
        total: (total != u64::MAX).then_some(total),
        reserved,
        disks_in_memory: pages,
        connections,
        requests,
        max_requests: most_requests,
        waiting,
    }
}

fn nanoseconds(duration: policy::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn disk_status(registry: &Registry, running: &Rc<RunningDisk>) -> DiskStatus {
    let disk = &running.disk;
    let image = disk.image();
    let storage = image.storage();
    let totals = disk.totals();
    let (l2_cache, refcount_cache) = match &*image {
        Image::Qcow2(qcow2) => Some(caches::status(qcow2)).unzip(),
        Image::Raw(_) => (None, None),
    };
    let failures = disk.failures();
    let exports = registry.exports.of_disk(disk.name());
    DiskStatus {
        name: disk.name().to_string(),
        image: running.config().image.to_string(),
        path: running
            .config()
            .image
            .path()
            .and_then(|path| path::absolute(path).ok())
            .map(|path| path.display().to_string()),
        chain: image.backing().map(|_| chain_files(&image)).unwrap_or_default(),
        size: disk.size_bytes(),
        read_only: image.is_read_only(),
        cache: Some(running.config().cache.name().to_owned()),
        format: image.format().name().to_owned(),
        l2_cache,
        refcount_cache,
        connections: exports.iter().map(|export| export.connections() as u64).sum(),
        reads: DiskTransfers { requests: totals.reads, bytes: totals.read_bytes },
        writes: DiskTransfers { requests: totals.writes, bytes: totals.written_bytes },
        merged_requests: totals.merged_requests,
        settings: disk_settings(registry, disk),
        watermark_status: watermark_status(
            disk.throttle().settings().watermark,
            disk.throttle().enforcement(),
        ),
        latency_control: latency_targets::status(registry, disk.name(), disk.throttle().cap()),
        throttle: throttle_status(&disk.throttle().stats()),
        read_ahead: prefetch::status(&disk.prefetch().stats()),
        errors: error_counts(failures),
        on_read_error: Some(failures.policies().read.name().to_owned()),
        on_write_error: Some(failures.policies().write.name().to_owned()),
        io_status: errors::io_status(failures).map(str::to_owned),
        oldest_request: storage.is_remote().then(|| storage.oldest_request().map_or(0, nanoseconds)),
        memory: DiskMemory { reserved: disk.memory().reserved(), requests: disk.memory().used() },
        latency_ns: None,
        rate: None,
        server: storage.remote_status().map(|remote| RemoteStatus {
            connected: remote.is_connected,
            reconnections: remote.reconnections,
            unflushed_bytes: remote.unflushed_bytes,
        }),
    }
}

fn error_counts(failures: &Failures) -> ErrorCounts {
    let errors = failures.errors();
    ErrorCounts {
        reads: errors.reads,
        writes: errors.writes,
        flushes: errors.flushes,
        discards: errors.discards,
    }
}

fn disk_settings(registry: &Registry, disk: &Disk) -> MemberSettings {
    let member = disk.throttle();
    let (settings, limits) = (GroupSettings::from(member.settings()), member.limits());
    let configured = settings.limits;
    MemberSettings {
        configured_limits: (configured != limits).then(|| settings::set_limits(&configured)),
        schedule: schedule_status(&member.scheduled()),
        quota_status: registry.quotas.status(disk.name(), &settings.quota, &member.scheduled()),
        group: member.group().map(|group| group.name().to_owned()),
        prefetch: Some(prefetch::settings(&disk.prefetch().settings())),
        ..member_settings(registry, disk.name(), &GroupSettings { limits, ..settings })
    }
}

fn group_status(
    registry: &Registry,
    group: &Arc<ThrottleGroup>,
    members: &HashMap<*const ThrottleGroup, Vec<String>>,
) -> GroupStatus {
    let (of_group, limits) = (group.settings(), group.limits());
    let GroupSettings { limits: configured, watermark, .. } = of_group;
    let shared = group.quota_lease().map(|lease| ClusterLimits {
        limits: settings::set_limits(&lease.cluster_limits),
        leased: limits != lease.fallback,
    });
    GroupStatus {
        name: group.name().to_owned(),
        disks: members.get(&Arc::as_ptr(group)).cloned().unwrap_or_default(),
        settings: MemberSettings {
            configured_limits: (configured != limits).then(|| settings::set_limits(&configured)),
            schedule: schedule_status(&group.scheduled()),
            quota_status: registry.quotas.status(group.name(), &of_group.quota, &group.scheduled()),
            group: group.parent().map(|parent| parent.name().to_owned()),
            ..member_settings(registry, group.name(), &GroupSettings { limits, ..of_group })
        },
        watermark_status: watermark_status(watermark, group.enforcement()),
        latency_control: latency_targets::status(registry, group.name(), group.cap()),
        throttle: throttle_status(&group.stats()),
        cluster: shared,
        rate: None,
    }
}

/// Settings that disks and groups have in common. Reservations and watermarks of zero are omitted.
fn member_settings(registry: &Registry, name: &str, of_member: &GroupSettings) -> MemberSettings {
    let GroupSettings { limits, share, watermark, latency, quota } = of_member;
    let set = |amount: u64| (amount > 0).then_some(amount);
    let latency = LatencyConfig::from_running(latency);
    let text = |setting| Some(latency.text(setting));
    let of_target = |setting| text(setting).filter(|_| latency.target_ns > 0);
    let quota_text = |setting: QuotaSetting| Some(setting.text(quota)).filter(|text| text != "0");
    MemberSettings {
        weight: Some(share.weight().into()),
        iops_reservation: set(share.iops_reservation()),
        bps_reservation: set(share.bps_reservation()),
        unmet_reservation: registry.groups.unmet.borrow().get(name).map(UnmetReservationEntry::to_status),
        watermark: set(watermark.percent().into()),
        latency_target: of_target(LatencySetting::Target),
        latency_percentile: of_target(LatencySetting::Percentile),
        latency_of: of_target(LatencySetting::Directions),
        latency_floor: text(LatencySetting::Floor).filter(|_| latency.floor_permyriad.is_some()),
        quota: quota_text(QuotaSetting::Total),
        write_quota: quota_text(QuotaSetting::Writes),
        quota_rate: set(quota.rate_bps),
        limits: settings::set_limits(limits),
        ..MemberSettings::default()
    }
}

fn watermark_status(watermark: Watermark, enforcement: Enforcement) -> WatermarkStatus {
    if watermark.percent() == 0 {
        return WatermarkStatus::default();
    }
    let (name, scale) = match enforcement {
        Enforcement::Enforced => ("enforced", None),
        Enforcement::Lifted => ("lifted", None),
        Enforcement::Scaled(scale) => ("scaled", Some(scale.thousandths() as f64 / 1000.0)),
    };
    WatermarkStatus { enforcement: Some(name.to_owned()), scale }
}

fn device_status(listed: DeviceWithDisks) -> DeviceStatus {
    let DeviceWithDisks { device, disks } = listed;
    let known = |figure: u64| (figure > 0).then_some(figure);
    let capacity =
        |MeasuredCapacity { read_iops, write_iops, read_bps, write_bps }: MeasuredCapacity| DeviceCapacity {
            read_iops: known(read_iops),
            write_iops: known(write_iops),
            read_bps: known(read_bps),
            write_bps: known(write_bps),
        };
    DeviceStatus {
        name: device.name().to_owned(),
        disks,
        capacity: device.capacity().map(capacity),
        capacity_source: Some(device.capacity_source().to_string()),
        utilization: device
            .utilization(reactor::now())
            .ok()
            .map(|thousandths| f64::from(thousandths) / 1000.0),
    }
}

fn export_status(export: &RunningExport) -> ExportStatus {
    let status = ExportStatus {
        kind: export.endpoint.kind().to_owned(),
        name: export.name.clone(),
        id: export.id.clone(),
        disk: export.disk.disk.name().to_string(),
        address: export.endpoint.address(),
        connections: export.connections() as u64,
        read_only: export.read_only || export.disk.disk.image().is_read_only(),
        ..ExportStatus::default()
    };
    let RunningEndpoint::Separate(endpoint) = &export.endpoint else { return status };
    let status = ExportStatus { counters: endpoint.server.counters(), ..status };
    let Some(device) = endpoint.device() else { return status };
    // Without processes: scanning /proc takes too long for a status.
    let DeviceOpeners { mounts, holders, .. } = DeviceOpeners::of_device(device);
    ExportStatus {
        device: Some(device.display().to_string()),
        mounts: Some(mounts.iter().map(|mount| mount.display().to_string()).collect()),
        holders: Some(holders),
        ..status
    }
}

fn server_status(serving: &RunningServer) -> ServerStatus {
    let RejectedClientCounts { networks, connections, names, exports } = serving.server.rejected_counts();
    ServerStatus {
        address: serving.address(),
        listen: serving.config_address(),
        default_export: serving.default_for_disks.get().map(|read_only| DefaultExport { read_only }),
        added: serving.added.get().is_some(),
        connections: serving.server.connections() as u64,
        refused: RefusedClients { networks, connections, names, exports },
    }
}

fn throttle_status(stats: &ThrottleStats) -> ThrottleStatus {
    let ThrottleStats {
        reads,
        writes,
        waits,
        recent_waits,
        throttled_ns: limited_ns,
        throttle_cause: binding,
        tokens,
        levels,
        waiting,
        reservation: kept,
    } = stats;
    let [reads_waiting, writes_waiting] = *waiting;
    let [wait_ns, recent_wait_ns] = [waits, recent_waits].map(|waits| {
        let percentiles = WaitPercentiles { p50: waits.p50_ns, p99: waits.p99_ns, max: waits.max_ns };
        (waits.max_ns > 0).then_some(percentiles)
    });
    ThrottleStatus {
        reads: transfers(reads),
        writes: transfers(writes),
        waiting: WaitingRequests { reads: reads_waiting as u64, writes: writes_waiting as u64 },
        wait_ns,
        recent_wait_ns,
        limited_ns: *limited_ns,
        throttle_cause: binding.map(|kind| kind.name().to_owned()),
        tokens: by_limit(tokens).collect(),
        buckets: by_limit(levels).map(|(name, level)| (name, limit_buckets(level))).collect(),
        reservation: kept.map(|times| ReservationStatus { met_ns: times.met_ns, missed_ns: times.missed_ns }),
    }
}

fn limit_buckets(LimitLevel { main, burst_rate, balance }: LimitLevel) -> LimitBucketStatus {
    LimitBucketStatus {
        level: main.units,
        capacity: main.capacity,
        burst_rate_level: burst_rate.map(|bucket| bucket.units),
        burst_rate_capacity: burst_rate.map(|bucket| bucket.capacity),
        burst: balance.map(|balance| BurstStatus {
            duration_ns: balance.full_burst.duration_ns(),
            balance_percent: (balance.ratio() * 100.0).round() as u8,
            used_up_in_ns: balance.used_up_in_ns,
            full_in_ns: balance.full_in_ns,
        }),
    }
}

fn transfers(counters: &AdmissionCounters) -> ThrottledTransfers {
    ThrottledTransfers {
        requests: counters.requests,
        bytes: counters.bytes,
        throttled: counters.throttled,
        waited_ns: counters.waited_ns,
    }
}

/// Values of the limits that are set, by name.
fn by_limit<V: Copy>(values: &[Option<V>; 6]) -> impl Iterator<Item = (String, V)> {
    LimitKind::ALL.into_iter().filter_map(|kind| Some((limit_name(kind).to_owned(), values[kind.index()]?)))
}

const fn limit_name(kind: LimitKind) -> &'static str {
    LimitSetting::Limit(kind, LimitPart::Rate).name()
}
