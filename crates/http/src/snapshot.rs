//! State of the daemon as plain values of one moment, taken by the main thread on request.
//!
//! Histograms are shared instead of copied; the formatting thread reads them. Locks are held for
//! the figures of one disk at a time. Never formats anything.

use std::{
    collections::HashMap,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use api::{ExportCounters, JobReport, LatencyControlStatus, QuotaStatus, ScheduleStatus};
use block::{
    device::DeviceStatistics,
    disk::{DiskTotals, Errors},
    layer::throttle::{DiskSettings, GroupSettings},
    measures::Measures,
};
use control::{
    devices::DeviceWithDisks,
    events::Kind,
    latency_targets,
    recording::RunningRecording,
    registry::{Registry, RunningDisk, RunningEndpoint},
    running_server::RunningServer,
    schedules::schedule_status,
};
use export::nbd::RejectedClientCounts;
use image::{
    Image,
    qcow2::{CacheStatistics, RefcountStatistics},
};
use policy::{
    latency_target::LatencySettings,
    prefetch,
    throttle::{BurstBalance, Enforcement, LimitKind, Limits, NodeShare, ThrottleStats},
    volume_quota::VolumeQuota,
    watermark::MeasuredCapacity,
};
use reactor::{
    ReactorWorker, RingTotals,
    memory::{BudgetUsage, MemoryBudget},
    now,
};
use storage::nbd::NbdLinkStatus;

#[derive(Debug)]
pub(super) struct DaemonSnapshot {
    pub(super) taken: Instant,
    /// Time since the Epoch.
    pub(super) started: Duration,
    pub(super) memory: BudgetUsage,
    pub(super) disks: Vec<DiskFigures>,
    pub(super) groups: Vec<GroupFigures>,
    pub(super) devices: Vec<DeviceFigures>,
    pub(super) exports: Vec<ExportFigures>,
    pub(super) servers: Vec<ServerFigures>,
    pub(super) workers: Vec<(String, RingTotals)>,
    pub(super) events: Vec<(Kind, [u64; 2])>,
    /// Recordings by the daemon, not by clients.
    pub(super) recordings: Vec<RecordingFigures>,
    /// Delivered, failed and skipped events; `None` without `--on-event`.
    pub(super) deliveries: Option<[u64; 3]>,
    /// Number of disks whose images are not open yet.
    pub(super) unavailable_disks: usize,
    /// All jobs that are listed.
    pub(super) jobs: Vec<JobReport>,
    /// Names of kinds and results, with the number of jobs that have concluded so.
    pub(super) concluded_jobs: Vec<((&'static str, &'static str), u64)>,
    /// `None` without a cluster.
    pub(super) cluster: Option<ClusterFigures>,
}

/// Figures of the cluster membership.
#[derive(Debug)]
pub(super) struct ClusterFigures {
    pub(super) is_connected: bool,
    pub(super) is_leader: bool,
    pub(super) agreed_hosts: u64,
    /// Groups, each with true if its quota exceeds the fallback share.
    pub(super) leases: Vec<(String, bool)>,
    /// Number of hosts that stopped reporting; `None` unless this host is the leader.
    pub(super) unreachable_hosts: Option<usize>,
    /// Number of disks and groups with unmet reservations.
    pub(super) unmet_reservations: usize,
}

#[derive(Debug)]
pub(super) struct DiskFigures {
    pub(super) name: Arc<str>,
    pub(super) format: &'static str,
    pub(super) cache: &'static str,
    /// Empty without a group.
    pub(super) group: String,
    pub(super) size_bytes: u64,
    pub(super) totals: DiskTotals,
    pub(super) errors: Errors,
    pub(super) is_stopped: bool,
    pub(super) backing_changed: bool,
    /// Age of the oldest request at remote storage; zero if none waits, `None` for local storage.
    pub(super) oldest_request: Option<Duration>,
    /// State of the connection to an NBD server; `None` for other storage.
    pub(super) remote: Option<NbdLinkStatus>,
    pub(super) reserved_bytes: u64,
    pub(super) requests_bytes: u64,
    pub(super) throttle: ThrottleFigures,
    /// `None` if reading ahead is off.
    pub(super) prefetch: Option<prefetch::PrefetchStats>,
    pub(super) caches: Option<(CacheStatistics, RefcountStatistics)>,
    pub(super) measures: Arc<Measures>,
}

/// Throttle figures of a disk or a group.
#[derive(Debug)]
pub(super) struct ThrottleFigures {
    pub(super) stats: ThrottleStats,
    pub(super) limits: Limits,
    /// Equal to `limits` unless those follow from others.
    pub(super) configured_limits: Limits,
    pub(super) schedule: Option<ScheduleStatus>,
    pub(super) quota: VolumeQuota,
    pub(super) quota_status: Option<QuotaStatus>,
    pub(super) share: NodeShare,
    /// Percent; 0 is none.
    pub(super) watermark: u8,
    pub(super) enforcement: Enforcement,
    pub(super) latency: LatencyFigures,
}

/// Latency target of a disk or a group, and its cap for targets of others.
#[derive(Debug)]
pub(super) struct LatencyFigures {
    pub(super) settings: LatencySettings,
    pub(super) control: LatencyControlStatus,
}

impl LatencyFigures {
    fn new(registry: &Registry, name: &str, settings: LatencySettings, cap: Option<Limits>) -> Self {
        Self { settings, control: latency_targets::status(registry, name, cap) }
    }
}

impl ThrottleFigures {
    /// Balance of a limit's burst; `None` without a burst.
    pub(super) fn balance(&self, kind: LimitKind) -> Option<BurstBalance> {
        self.stats.levels[kind.index()]?.balance
    }
}

#[derive(Debug)]
pub(super) struct GroupFigures {
    pub(super) name: String,
    /// Parent group.
    pub(super) parent: Option<String>,
    /// Cluster-wide limits of the group, and true if this host holds a quota lease for it; `None`
    /// for a group that the cluster does not limit.
    pub(super) cluster_limits: Option<(Limits, bool)>,
    pub(super) throttle: ThrottleFigures,
}

#[derive(Debug)]
pub(super) struct DeviceFigures {
    pub(super) name: String,
    /// Disks on this device.
    pub(super) disks: Vec<String>,
    pub(super) capacity: Option<MeasuredCapacity>,
    /// `None` if the device was removed.
    pub(super) statistics: Option<DeviceStatistics>,
}

#[derive(Debug)]
pub(super) struct RecordingFigures {
    pub(super) directory: String,
    pub(super) requests: u64,
    pub(super) lost: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
pub(super) struct ExportFigures {
    pub(super) id: String,
    pub(super) kind: &'static str,
    pub(super) disk: Arc<str>,
    pub(super) connections: usize,
    pub(super) counters: ExportCounters,
}

#[derive(Debug)]
pub(super) struct ServerFigures {
    pub(super) address: String,
    pub(super) connections: usize,
    pub(super) rejected: RejectedClientCounts,
}

impl DaemonSnapshot {
    pub(super) fn take(registry: &Registry, workers: &[ReactorWorker]) -> Self {
        let servers = registry.exports.servers();
        // The start is derived from the uptime, so a step of the wall clock moves it as well.
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            taken: Instant::now(),
            started: since_epoch.saturating_sub(registry.lifecycle.uptime()),
            memory: MemoryBudget::process().usage(),
            disks: registry.disks.all().iter().map(|running| disk(registry, running)).collect(),
            groups: registry.groups.all().iter().map(|one| group(registry, one)).collect(),
            devices: registry.devices().into_iter().map(device).collect(),
            exports: exports(registry, &servers),
            servers: servers.iter().map(|one| server(one)).collect(),
            recordings: registry.recordings.running().iter().filter_map(|(_, one)| recording(one)).collect(),
            events: registry.events.counts(),
            deliveries: registry.deliveries.get().map(|counts| counts.counts()),
            unavailable_disks: registry.disks.unavailable.borrow().len(),
            jobs: registry.jobs.all().iter().map(|job| job.report(&registry.disks)).collect(),
            concluded_jobs: registry.jobs.concluded(),
            workers: workers.iter().map(|worker| (worker.name().to_owned(), worker.counters())).collect(),
            cluster: registry.cluster().map(|cluster| ClusterFigures {
                is_connected: cluster.is_connected(),
                is_leader: cluster.is_leader(),
                agreed_hosts: cluster.agreed_hosts(),
                leases: cluster
                    .group_states()
                    .into_iter()
                    .map(|state| (state.group, state.is_leased))
                    .collect(),
                unreachable_hosts: cluster.unreachable_hosts(),
                unmet_reservations: registry.groups.unmet.borrow().len(),
            }),
        }
    }
}

/// `None` for a recording by a client, which reads its own progress.
fn recording(running: &RunningRecording) -> Option<RecordingFigures> {
    let progress = &running.progress;
    Some(RecordingFigures {
        directory: running.directory.as_ref()?.display().to_string(),
        requests: progress.requests(),
        lost: progress.dropped(),
        bytes: progress.bytes(),
    })
}

fn disk(registry: &Registry, running: &RunningDisk) -> DiskFigures {
    let disk = &running.disk;
    let (member, image) = (disk.throttle(), disk.image());
    let storage = image.storage();
    let DiskSettings { limits: configured_limits, share, watermark, latency, quota } = member.settings();
    let caches = match &*image {
        Image::Qcow2(qcow2) => Some((qcow2.cache_statistics(), qcow2.refcount_statistics())),
        Image::Raw(_) => None,
    };
    // Without prefetching all its counters are 0.
    let reads_ahead = disk.prefetch().settings().mode != prefetch::PrefetchMode::Off;
    DiskFigures {
        name: Arc::clone(disk.name()),
        format: image.format().name(),
        cache: running.config().cache.name(),
        group: member.group().map(|group| group.name().to_owned()).unwrap_or_default(),
        size_bytes: disk.size_bytes(),
        totals: disk.totals(),
        errors: disk.failures().errors(),
        is_stopped: disk.failures().stopped_by().is_some(),
        backing_changed: image.has_changed_below(),
        // Reported for remote storage only.
        oldest_request: storage.is_remote().then(|| storage.oldest_request().unwrap_or_default()),
        remote: storage.remote_status(),
        reserved_bytes: disk.memory().reserved(),
        requests_bytes: disk.memory().used(),
        throttle: ThrottleFigures {
            stats: member.stats(),
            limits: member.limits(),
            configured_limits,
            schedule: schedule_status(&member.scheduled()),
            quota,
            quota_status: registry.quotas.status(disk.name(), &quota, &member.scheduled()),
            share,
            watermark: watermark.percent(),
            enforcement: member.enforcement(),
            latency: LatencyFigures::new(registry, disk.name(), latency, member.cap()),
        },
        prefetch: reads_ahead.then(|| disk.prefetch().stats()),
        caches,
        measures: Arc::clone(disk.measure()),
    }
}

fn group(registry: &Registry, group: &block::layer::throttle::ThrottleGroup) -> GroupFigures {
    let GroupSettings { limits: configured_limits, share, watermark, latency, quota } = group.settings();
    let limits = group.limits();
    GroupFigures {
        name: group.name().to_owned(),
        parent: group.parent().map(|parent| parent.name().to_owned()),
        // Limits that differ from the fallback share are leased.
        cluster_limits: group.quota_lease().map(|lease| (lease.cluster_limits, limits != lease.fallback)),
        throttle: ThrottleFigures {
            stats: group.stats(),
            limits,
            configured_limits,
            schedule: schedule_status(&group.scheduled()),
            quota,
            quota_status: registry.quotas.status(group.name(), &quota, &group.scheduled()),
            share,
            watermark: watermark.percent(),
            enforcement: group.enforcement(),
            latency: LatencyFigures::new(registry, group.name(), latency, group.cap()),
        },
    }
}

fn device(DeviceWithDisks { device, disks }: DeviceWithDisks) -> DeviceFigures {
    DeviceFigures {
        name: device.name().to_owned(),
        disks,
        capacity: device.capacity(),
        // Unreadable after the device was removed.
        statistics: device.statistics(now()).ok(),
    }
}

/// Reads each server once: it may have thousands of clients and exports.
fn exports(registry: &Registry, servers: &[Rc<RunningServer>]) -> Vec<ExportFigures> {
    // By pointer: a server has no other key, and several exports share one.
    let of_servers: HashMap<_, _> =
        servers.iter().map(|serving| (Rc::as_ptr(serving), serving.server.connections_by_export())).collect();
    let connections = |endpoint: &RunningEndpoint| match endpoint {
        RunningEndpoint::Nbd(serving, number) => of_servers
            .get(&Rc::as_ptr(serving))
            .and_then(|of_server| of_server.get(number))
            .copied()
            .unwrap_or_default(),
        RunningEndpoint::Separate(running) => running.server.connections(),
    };
    let export = |export: &control::registry::RunningExport| ExportFigures {
        id: export.id.clone(),
        kind: export.endpoint.kind(),
        disk: Arc::clone(export.disk.disk.name()),
        connections: connections(&export.endpoint),
        counters: match &export.endpoint {
            RunningEndpoint::Separate(running) => running.server.counters(),
            RunningEndpoint::Nbd(..) => ExportCounters::default(),
        },
    };
    registry.exports.all().iter().map(|one| export(one)).collect()
}

fn server(serving: &RunningServer) -> ServerFigures {
    ServerFigures {
        address: serving.address(),
        connections: serving.server.connections(),
        rejected: serving.server.rejected_counts(),
    }
}
