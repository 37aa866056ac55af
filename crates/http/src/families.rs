//! All metric families: names, types and labels, from a snapshot.
//!
//! Names and units follow Prometheus's guidelines. `docs/metrics.md` has a line for each family,
//! checked by a test. Samples of a family are written together, as the formats require. A value
//! that does not apply (the cache of a raw image, an unset limit) has no sample.
//!
//! Label values are configured or few: never from a client.

use std::{fmt, sync::Arc, time::Duration};

use block::measures::{CauseLevel, HistogramSnapshot, OperationClass};
use policy::{
    prefetch,
    request::Direction,
    throttle::{AdmissionCounters, Enforcement, LimitKind},
    watermark::MeasuredCapacity,
};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

use super::{
    cgroup_metrics::CgroupMetrics,
    family_writer::{FamilyWriter, SampleLabels},
    job_metrics,
    labels::{direction_label, level_label, limit_label},
    process_metrics::ProcessMetrics,
    snapshot::{DaemonSnapshot, DiskFigures, ExportFigures, RecordingFigures, ThrottleFigures},
};

#[derive(Debug)]
pub(super) struct MetricFamilies {
    pub(super) snapshot: Arc<DaemonSnapshot>,
    pub(super) process: ProcessMetrics,
    pub(super) cgroups: CgroupMetrics,
}

impl Collector for MetricFamilies {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut writer = FamilyWriter::new(encoder);
        let DaemonSnapshot { disks, groups, .. } = &*self.snapshot;
        self.daemon(&mut writer)?;
        of_disks(&mut writer, disks)?;
        latencies(&mut writer, disks)?;
        let of_disks: Vec<_> = disks.iter().map(|disk| (&*disk.name, &disk.throttle)).collect();
        throttle_families(&mut writer, "disk", &of_disks)?;
        let of_groups: Vec<_> = groups.iter().map(|group| (&*group.name, &group.throttle)).collect();
        throttle_families(&mut writer, "group", &of_groups)?;
        prefetches(&mut writer, disks)?;
        caches(&mut writer, disks)?;
        self.devices(&mut writer)?;
        self.cluster(&mut writer)?;
        self.cgroups.write(&mut writer)
    }
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

impl MetricFamilies {
    fn daemon(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let Self { snapshot, process, .. } = self;
        to.infos("weir_build", "Version of the daemon.", [[("version", env!("CARGO_PKG_VERSION"))]])?;
        let started = [([], snapshot.started.as_secs_f64())];
        to.gauges(
            "process_start_time_seconds",
            "Start time of the daemon, in seconds since the Epoch.",
            started,
        )?;
        let cpu = process.cpu.map(|cpu| ([], cpu.as_secs_f64()));
        to.counters("process_cpu_seconds", "CPU time of the daemon, user and system.", cpu)?;
        let gauge = |value: Option<u64>| value.map(|value| ([], value));
        let help = "Resident memory.";
        to.gauges("process_resident_memory_bytes", help, gauge(process.resident_bytes))?;
        to.gauges("process_virtual_memory_bytes", "Virtual memory.", gauge(process.virtual_bytes))?;
        to.gauges("process_open_fds", "Open file descriptors.", gauge(process.open_descriptors))?;
        let unopened = [([], snapshot.unavailable_disks as u64)];
        to.gauges("weir_unavailable_disks", "Disks of the config whose images are not open yet.", unopened)?;
        let threads = process.threads.iter().map(|(name, cpu)| ([("thread", &**name)], cpu.as_secs_f64()));
        to.counters("weir_thread_cpu_seconds", "CPU time of a permanent thread.", threads)?;
        let rings = || snapshot.workers.iter().map(|(name, totals)| ([("thread", &**name)], totals));
        let help = "Iterations of a worker's event loop.";
        to.counters(
            "weir_worker_iterations",
            help,
            rings().map(|(labels, totals)| (labels, totals.iterations)),
        )?;
        let help = "Times that a worker went to sleep because it had no work.";
        to.counters("weir_worker_sleeps", help, rings().map(|(labels, totals)| (labels, totals.sleeps)))?;
        let help = "Operations of a worker's io_uring that the kernel accepted.";
        let submitted = rings().map(|(labels, totals)| (labels, totals.submitted));
        to.counters("weir_ring_submitted_operations", help, submitted)?;
        let help = "Operations of a worker's io_uring that the kernel completed.";
        let completed = rings().map(|(labels, totals)| (labels, totals.completed));
        to.counters("weir_ring_completed_operations", help, completed)?;
        self.memory(to)?;
        self.events(to)?;
        self.recordings(to)?;
        job_metrics::write(to, snapshot)?;
        self.connections(to)
    }

    fn memory(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let memory = &self.snapshot.memory;
        // u64::MAX means unlimited.
        let total = (memory.total != u64::MAX).then_some(([], memory.total));
        to.gauges("weir_memory_limit_bytes", "Memory budget for data.", total)?;
        let owners = [
            ("reserved", memory.reserved),
            ("pages", memory.pages),
            ("connections", memory.connections),
            ("requests", memory.requests),
        ];
        let owners = owners.map(|(owner, bytes)| ([("owner", owner)], bytes));
        to.gauges(
            "weir_memory_used_bytes",
            "Memory used for data: reserved, disks in memory, NBD connections, requests.",
            owners,
        )?;
        let limit = [([], memory.max_requests)];
        to.gauges(
            "weir_memory_requests_limit_bytes",
            "Part of the memory budget that requests may use.",
            limit,
        )?;
        let waiting = [([], memory.waiting)];
        to.gauges("weir_memory_waiting_requests", "Requests that wait for memory.", waiting)
    }

    fn events(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let DaemonSnapshot { events, deliveries, .. } = &*self.snapshot;
        let counts =
            |index: usize| events.iter().map(move |(kind, counts)| ([("kind", kind.name())], counts[index]));
        to.counters("weir_events", "Events reported.", counts(0))?;
        let help = "Events not reported because there were too many of the kind.";
        to.counters("weir_events_suppressed", help, counts(1))?;
        let results = ["delivered", "failed", "skipped"];
        let rows = deliveries.iter().flat_map(|counts| results.into_iter().zip(*counts));
        let help = "Events for the command of `--on-event`.";
        to.counters("weir_event_deliveries", help, rows.map(|(result, count)| ([("result", result)], count)))
    }

    fn recordings(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let each = |get: fn(&RecordingFigures) -> u64| {
            let recordings = self.snapshot.recordings.iter();
            recordings.map(move |recording| ([("directory", &*recording.directory)], get(recording)))
        };
        let help = "Requests in the daemon's continuous recording.";
        to.counters("weir_record_requests", help, each(|recording| recording.requests))?;
        let help = "Requests that the daemon's continuous recording lost.";
        to.counters("weir_record_lost_requests", help, each(|recording| recording.lost))?;
        to.counters(
            "weir_record_written_bytes",
            "Bytes written to the files of the daemon's continuous recording.",
            each(|recording| recording.bytes),
        )
    }

    fn cluster(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let cluster = self.snapshot.cluster.as_ref();
        let gauge = |flag: Option<bool>| flag.map(|is| ([], u64::from(is)));
        to.gauges(
            "weir_cluster_connected",
            "1 while etcd answers and this host is registered in the cluster.",
            gauge(cluster.map(|cluster| cluster.is_connected)),
        )?;
        to.gauges(
            "weir_cluster_agreed_hosts",
            "Hosts that have agreed on a leader while etcd is unreachable; 0 without an agreement.",
            cluster.map(|cluster| ([], cluster.agreed_hosts)),
        )?;
        to.gauges(
            "weir_cluster_leader",
            "1 while this host leads the cluster and divides its limits.",
            gauge(cluster.map(|cluster| cluster.is_leader)),
        )?;
        to.gauges(
            "weir_cluster_unreachable_hosts",
            "Hosts whose reports are overdue; only on the leader.",
            cluster.and_then(|cluster| cluster.unreachable_hosts).map(|hosts| ([], hosts as u64)),
        )?;
        to.gauges(
            "weir_cluster_unmet_reservations",
            "Disks and groups that are served without their reservations.",
            cluster.map(|cluster| ([], cluster.unmet_reservations as u64)),
        )?;
        let leases = cluster.into_iter().flat_map(|cluster| &cluster.leases);
        let rows = leases.map(|(group, is_leased)| ([("group", &**group)], u64::from(*is_leased)));
        to.gauges(
            "weir_cluster_leased",
            "1 while a group has a quota lease, and so more than its fallback share.",
            rows,
        )?;
        for (bytes, unit) in [(false, "operations"), (true, "bytes")] {
            let leased_groups = self
                .snapshot
                .groups
                .iter()
                .filter_map(|group| Some((&*group.name, &group.cluster_limits.as_ref()?.0)));
            let rows = leased_groups.flat_map(|(group, limits)| {
                let kinds = LimitKind::ALL.into_iter().filter(|kind| kind.counts_bytes() == bytes);
                let set = kinds.map(|kind| (kind, limits.limit(kind).rate)).filter(|(_, rate)| *rate > 0);
                set.map(move |(kind, rate)| ([("group", group), ("limit", limit_label(kind))], rate))
            });
            let name = format!("weir_cluster_limit_{unit}_per_second");
            to.gauges(&name, "A limit of a group over all hosts.", rows)?;
        }
        Ok(())
    }

    fn connections(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let DaemonSnapshot { servers, .. } = &*self.snapshot;
        self.exports(to)?;
        let rows = servers.iter().map(|server| ([("address", &*server.address)], server.connections as u64));
        to.gauges("weir_server_connections", "NBD clients at an address.", rows)?;
        let rows = servers.iter().flat_map(|server| {
            let refused = &server.rejected;
            let reasons = [
                ("network", refused.networks),
                ("connections", refused.connections),
                ("name", refused.names),
                ("export", refused.exports),
            ];
            reasons.map(|(reason, count)| ([("address", &*server.address), ("reason", reason)], count))
        });
        to.counters("weir_server_refused_clients", "NBD clients that were rejected.", rows)
    }

    fn exports(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let each = |get: fn(&ExportFigures) -> Option<u64>| {
            self.snapshot.exports.iter().filter_map(move |export| {
                let labels = [("export", &*export.id), ("disk", &*export.disk), ("type", export.kind)];
                Some((labels, get(export)?))
            })
        };
        let help = "Clients connected to an export.";
        to.gauges("weir_export_connections", help, each(|export| Some(export.connections as u64)))?;
        let help = "Virtqueues of a guest, or queues of a device, that are served now.";
        to.gauges("weir_export_queues", help, each(|export| export.counters.queue_count()))?;
        let help = "Requests from a guest or a device.";
        to.counters("weir_export_requests", help, each(|export| export.counters.requests))?;
        let help = "Requests from a guest or a device that are not completed yet.";
        to.gauges("weir_export_in_flight_requests", help, each(|export| export.counters.in_flight))?;
        let help = "Notifications from a guest that requests are available (kicks).";
        to.counters("weir_export_kicks", help, each(|export| export.counters.kicks))?;
        let help = "Notifications to a guest that requests are completed (calls).";
        to.counters("weir_export_calls", help, each(|export| export.counters.calls))?;
        let help = "Buffers copied because the disk could not use the guest's memory directly.";
        to.counters("weir_export_copies", help, each(|export| export.counters.copies))
    }

    fn devices(&self, to: &mut FamilyWriter<'_>) -> fmt::Result {
        let devices = &self.snapshot.devices;
        type Get = fn(&MeasuredCapacity) -> u64;
        let known = |read: Get, write: Get| {
            devices.iter().flat_map(move |device| {
                [("read", read), ("write", write)].into_iter().filter_map(move |(operation, get)| {
                    let value = device.capacity.as_ref().map(get).filter(|&value| value > 0)?;
                    Some(([("device", &*device.name), ("operation", operation)], value))
                })
            })
        };
        let rows = known(|capacity| capacity.read_iops, |can| can.write_iops);
        to.gauges("weir_device_capacity_operations_per_second", "Measured capacity of a device.", rows)?;
        let rows = known(|capacity| capacity.read_bps, |can| can.write_bps);
        to.gauges("weir_device_capacity_bytes_per_second", "Measured capacity of a device.", rows)?;
        let completed = || {
            devices
                .iter()
                .filter_map(|device| Some(([("device", &*device.name)], device.statistics.as_ref()?)))
        };
        let help = "Reads that a device completed since the host booted.";
        to.counters(
            "weir_device_reads",
            help,
            completed().map(|(labels, counters)| (labels, counters.reads)),
        )?;
        let help = "Writes that a device completed since the host booted.";
        to.counters(
            "weir_device_writes",
            help,
            completed().map(|(labels, counters)| (labels, counters.writes)),
        )?;
        let help = "Bytes of a device's reads.";
        to.counters(
            "weir_device_read_bytes",
            help,
            completed().map(|(labels, counters)| (labels, counters.read_bytes)),
        )?;
        let help = "Bytes of a device's writes.";
        let rows = completed().map(|(labels, counters)| (labels, counters.written_bytes));
        to.counters("weir_device_written_bytes", help, rows)?;
        let help = "Time during which a device was busy.";
        let rows = completed().map(|(labels, counters)| (labels, counters.busy_ms as f64 / 1000.0));
        to.counters("weir_device_busy_seconds", help, rows)?;
        let help = "Sum of the times that requests were in flight at a device.";
        let rows = completed().map(|(labels, counters)| (labels, counters.queued_ms as f64 / 1000.0));
        to.counters("weir_device_queue_seconds", help, rows)
    }
}

fn of_disks(to: &mut FamilyWriter<'_>, disks: &[DiskFigures]) -> fmt::Result {
    let infos = disks.iter().map(|disk| {
        [("disk", &*disk.name), ("format", disk.format), ("cache", disk.cache), ("group", &*disk.group)]
    });
    to.infos("weir_disk", "A disk: its format, cache mode and group.", infos)?;
    let each =
        |get: fn(&DiskFigures) -> u64| disks.iter().map(move |disk| ([("disk", &*disk.name)], get(disk)));
    to.gauges("weir_disk_size_bytes", "Size of a disk.", each(|disk| disk.size_bytes))?;
    to.counters("weir_disk_reads", "Reads that succeeded.", each(|disk| disk.totals.reads))?;
    let help = "Writes, write-zeroes and discards that succeeded.";
    to.counters("weir_disk_writes", help, each(|disk| disk.totals.writes))?;
    let help = "Bytes of reads that succeeded.";
    to.counters("weir_disk_read_bytes", help, each(|disk| disk.totals.read_bytes))?;
    let help = "Bytes of writes, write-zeroes and discards that succeeded.";
    to.counters("weir_disk_written_bytes", help, each(|disk| disk.totals.written_bytes))?;
    let help = "Requests saved by merging.";
    to.counters("weir_disk_merged_requests", help, each(|disk| disk.totals.merged_requests))?;
    let errors = disks.iter().flat_map(|disk| {
        let errors = &disk.errors;
        let kinds = [
            ("read", errors.reads),
            ("write", errors.writes),
            ("flush", errors.flushes),
            ("discard", errors.discards),
        ];
        kinds.map(|(operation, count)| ([("disk", &*disk.name), ("operation", operation)], count))
    });
    to.counters(
        "weir_disk_errors",
        "Requests that failed with an error of the image or its device.",
        errors,
    )?;
    let help = "1 while a disk is stopped by an error and waits for `weir resume`.";
    to.gauges("weir_disk_stopped", help, each(|disk| disk.is_stopped.into()))?;
    let help = "1 if another program changed a file of the backing chain.";
    to.gauges("weir_disk_backing_changed", help, each(|disk| disk.backing_changed.into()))?;
    remote_storage(to, disks)?;
    let memory = disks.iter().flat_map(|disk| {
        [("reserved", disk.reserved_bytes), ("requests", disk.requests_bytes)]
            .map(|(owner, bytes)| ([("disk", &*disk.name), ("owner", owner)], bytes))
    });
    to.gauges("weir_disk_memory_bytes", "Part of the memory for data that a disk uses.", memory)
}

/// Families of disks in Ceph and at NBD servers.
fn remote_storage(to: &mut FamilyWriter<'_>, disks: &[DiskFigures]) -> fmt::Result {
    let waited =
        disks.iter().filter_map(|disk| Some(([("disk", &*disk.name)], disk.oldest_request?.as_secs_f64())));
    let help = "Age of the oldest request to remote storage; 0 if there is none.";
    to.gauges("weir_disk_oldest_request_seconds", help, waited)?;
    let servers = || disks.iter().filter_map(|disk| Some(([("disk", &*disk.name)], disk.remote?)));
    let help = "1 while the disk is connected to its NBD server.";
    let rows = servers().map(|(labels, server)| (labels, u64::from(server.is_connected)));
    to.gauges("weir_disk_server_connected", help, rows)?;
    let help = "Reconnections to the NBD server.";
    let rows = servers().map(|(labels, server)| (labels, server.reconnections));
    to.counters("weir_disk_server_reconnections", help, rows)?;
    let help = "Written data kept until the NBD server has flushed it.";
    let rows = servers().map(|(labels, server)| (labels, server.unflushed_bytes));
    to.gauges("weir_disk_unflushed_bytes", help, rows)
}

/// Histograms. Idle disks, and disks that never waited, have no samples: these would be most of a
/// response.
fn latencies(to: &mut FamilyWriter<'_>, disks: &[DiskFigures]) -> fmt::Result {
    let latencies = disks.iter().flat_map(|disk| {
        OperationClass::ALL.map(|class| {
            let operation = match class {
                OperationClass::Read => "read",
                OperationClass::Write => "write",
                OperationClass::Flush => "flush",
            };
            ([("disk", &*disk.name), ("operation", operation)], disk.measures.latency(class))
        })
    });
    // Histograms are by far the largest families.
    let is_used = |(_, spread): &(_, HistogramSnapshot)| spread.count() > 0;
    let help = "Latency of successful requests, from arrival to completion.";
    to.histograms("weir_disk_request_duration_seconds", help, latencies.filter(is_used))?;
    let waits = disks.iter().flat_map(|disk| {
        Direction::ALL.map(|direction| {
            (
                [("disk", &*disk.name), ("operation", direction_label(direction))],
                disk.measures.waits(direction),
            )
        })
    });
    let help = "Time for which a request was throttled by limits and shares.";
    let has_waited = |(_, spread): &(_, HistogramSnapshot)| spread.sum_ns > 0;
    to.histograms("weir_disk_wait_duration_seconds", help, waits.filter(has_waited))?;
    let waiting = disks.iter().flat_map(|disk| {
        Direction::ALL.map(|direction| {
            let labels = [("disk", &*disk.name), ("operation", direction_label(direction))];
            (labels, seconds(disk.measures.waiting_ns(direction)))
        })
    });
    let help = "Time during which at least one request was throttled.";
    to.counters("weir_disk_waiting_seconds", help, waiting)?;
    let throttled = disks.iter().flat_map(|disk| {
        CauseLevel::ALL.into_iter().flat_map(move |level| {
            LimitKind::ALL.into_iter().flat_map(move |kind| {
                // A write limit never throttles reads.
                let applies = move |direction: &Direction| LimitKind::applying_to(*direction).contains(&kind);
                Direction::ALL.into_iter().filter(applies).filter_map(move |direction| {
                    let ns = disk.measures.throttled_ns(level, kind, direction);
                    // A set limit has a sample from the start, so that `rate()` sees the first
                    // increase.
                    let is_set = level == CauseLevel::Disk && disk.throttle.limits.limit(kind).rate > 0;
                    let labels = [
                        ("disk", &*disk.name),
                        ("level", level_label(level)),
                        ("limit", limit_label(kind)),
                        ("operation", direction_label(direction)),
                    ];
                    (ns > 0 || is_set).then(|| (labels, seconds(ns)))
                })
            })
        })
    });
    let help = "Time during which at least one request was throttled, by the limit that throttled it.";
    to.counters("weir_disk_throttled_seconds", help, throttled)
}

/// Families that disks and groups share.
fn throttle_families(
    to: &mut FamilyWriter<'_>,
    key: &'static str,
    all: &[(&str, &ThrottleFigures)],
) -> fmt::Result {
    let name = |rest: &str| format!("weir_{key}_{rest}");
    let each = |get: fn(&ThrottleFigures) -> u64| {
        all.iter().map(move |&(name, throttle)| ([(key, name)], get(throttle)))
    };
    let by_direction = |get: fn(&AdmissionCounters) -> u64| {
        all.iter().flat_map(move |&(name, throttle)| {
            [("read", &throttle.stats.reads), ("write", &throttle.stats.writes)]
                .map(|(operation, counters)| ([(key, name), ("operation", operation)], get(counters)))
        })
    };
    let help = "Requests admitted by limits and shares.";
    to.counters(&name("admitted_requests"), help, by_direction(|counters| counters.requests))?;
    let help = "Bytes of the admitted requests.";
    to.counters(&name("admitted_bytes"), help, by_direction(|counters| counters.bytes))?;
    let help = "Admitted requests that were throttled before.";
    to.counters(&name("throttled_requests"), help, by_direction(|counters| counters.throttled))?;
    let help = "Time during which at least one request waited for a limit of this object.";
    let limited = all.iter().map(|&(name, throttle)| ([(key, name)], seconds(throttle.stats.throttled_ns)));
    to.counters(&name("limited_seconds"), help, limited)?;
    let waiting = all.iter().flat_map(|&(name, throttle)| {
        let [reads, writes] = throttle.stats.waiting;
        [("read", reads), ("write", writes)]
            .map(|(operation, count)| ([(key, name), ("operation", operation)], count as u64))
    });
    to.gauges(&name("waiting_requests"), "Requests that are throttled now.", waiting)?;
    limits(to, key, all)?;
    to.gauges(&name("weight"), "Weight among its siblings.", each(|one| one.share.weight().into()))?;
    let reserved = |get: fn(&ThrottleFigures) -> u64| each(get).filter(|&(_, promised)| promised > 0);
    let help = "Reserved operations per second.";
    let rows = reserved(|one| one.share.iops_reservation());
    to.gauges(&name("reservation_operations_per_second"), help, rows)?;
    let help = "Reserved bytes per second.";
    to.gauges(&name("reservation_bytes_per_second"), help, reserved(|one| one.share.bps_reservation()))?;
    // Only members with a reservation have these counters.
    let reservations = || all.iter().filter_map(|&(name, one)| Some(([(key, name)], one.stats.reservation?)));
    let help = "Time during which requests waited and the reservation was met.";
    let rows = reservations().map(|(labels, reservation)| (labels, seconds(reservation.met_ns)));
    to.counters(&name("reservation_met_seconds"), help, rows)?;
    let help = "Time during which requests waited and the reservation was missed.";
    let rows = reservations().map(|(labels, reservation)| (labels, seconds(reservation.missed_ns)));
    to.counters(&name("reservation_missed_seconds"), help, rows)?;
    // Without a watermark limits are always enforced.
    let watched = || all.iter().filter(|(_, throttle)| throttle.watermark > 0);
    let rows = watched().map(|&(name, one)| ([(key, name)], f64::from(one.watermark) / 100.0));
    to.gauges(&name("watermark_ratio"), "Device utilization above which limits are enforced.", rows)?;
    let rows =
        watched().map(|&(name, one)| ([(key, name)], u64::from(one.enforcement != Enforcement::Lifted)));
    to.gauges(&name("limits_enforced"), "1 while the watermark enforces limits.", rows)?;
    let rows = watched().filter_map(|&(name, one)| match one.enforcement {
        Enforcement::Scaled(scale) => Some(([(key, name)], scale.thousandths() as f64 / 1000.0)),
        Enforcement::Enforced => Some(([(key, name)], 1.0)),
        Enforcement::Lifted => None,
    });
    to.gauges(&name("limits_scale_ratio"), "Factor that the watermark applies to limits.", rows)?;
    quota_families(to, key, all)?;
    latency_target_families(to, key, all)
}

/// Families of quotas by volume. Only members with a quota have them.
fn quota_families(
    to: &mut FamilyWriter<'_>,
    key: &'static str,
    all: &[(&str, &ThrottleFigures)],
) -> fmt::Result {
    let name = |rest: &str| format!("weir_{key}_{rest}");
    let quotas = || {
        all.iter().flat_map(|&(name, one)| {
            let status = one.quota_status.as_ref();
            let total = status.and_then(|status| status.total.as_ref());
            let writes = status.and_then(|status| status.writes.as_ref());
            let labeled = |kind, quota| ([(key, name), ("quota", kind)], quota);
            total
                .map(|total| labeled("total", total))
                .into_iter()
                .chain(writes.map(|one| labeled("writes", one)))
        })
    };
    let rows = quotas().map(|(labels, quota)| (labels, quota.used_bytes));
    to.gauges(&name("quota_used_bytes"), "Bytes counted against the quota in this period.", rows)?;
    let rows = quotas().map(|(labels, quota)| (labels, quota.quota_bytes));
    to.gauges(&name("quota_bytes"), "Quota by volume, for each period.", rows)?;
    let rows = quotas().filter_map(|(labels, quota)| Some((labels, quota.period_end_s?)));
    to.gauges(&name("quota_period_end_timestamp_seconds"), "End of the period of the quota.", rows)?;
    let rows = all
        .iter()
        .filter_map(|&(name, one)| Some(([(key, name)], u64::from(one.quota_status.as_ref()?.used_up))));
    to.gauges(&name("quota_used_up"), "1 while a quota is used up, and quota-rate is in force.", rows)
}

/// Families of latency targets, and of the caps that they cause. Only members with a target or a
/// cap have them.
fn latency_target_families(
    to: &mut FamilyWriter<'_>,
    key: &'static str,
    all: &[(&str, &ThrottleFigures)],
) -> fmt::Result {
    let name = |rest: &str| format!("weir_{key}_{rest}");
    let targets = || {
        all.iter().filter_map(|&(name, one)| {
            Some(([(key, name)], one.latency.settings.target?, &one.latency.control))
        })
    };
    let rows = targets().map(|(labels, target, _)| (labels, seconds(target.bound_ns())));
    to.gauges(&name("latency_target_seconds"), "Latency target.", rows)?;
    let rows = targets().map(|(labels, target, _)| (labels, f64::from(target.permyriad()) / 10_000.0));
    to.gauges(
        &name("latency_target_percentile_ratio"),
        "Part of the requests that the target covers.",
        rows,
    )?;
    let rows = targets().filter_map(|(labels, _, control)| Some((labels, seconds(control.measured_ns?))));
    let help = "Percentile of the latency target in the last 10 to 20 s, without waits for limits.";
    to.gauges(&name("latency_target_measured_seconds"), help, rows)?;
    let states = ["met", "controlling", "cannot-be-met"];
    let rows = targets().flat_map(|([owner], _, control)| {
        let is_state = |known: &str| u64::from(control.state.as_deref() == Some(known));
        states.map(|known| ([owner, ("state", known)], is_state(known)))
    });
    to.gauges(&name("latency_target_state"), "1 for the state of the latency target.", rows)?;
    let rows = all.iter().filter_map(|&(name, one)| Some(([(key, name)], one.latency.control.cap_iops?)));
    let help = "Rate to which latency targets of others throttle it: requests of at most 64 KiB.";
    to.gauges(&name("latency_cap_operations_per_second"), help, rows)
}

type LimitFigure<V> = fn(&ThrottleFigures, LimitKind) -> Option<V>;

/// Samples of the limits that have this figure, of limits on bytes or operations only if `bytes`
/// says so.
fn limit_rows<'r, V: Copy>(
    all: &'r [(&str, &ThrottleFigures)],
    key: &'static str,
    bytes: Option<bool>,
    get: LimitFigure<V>,
) -> impl Iterator<Item = (SampleLabels<'r, 2>, V)> {
    all.iter().flat_map(move |&(name, throttle)| {
        let kinds = LimitKind::ALL.into_iter();
        let kinds = kinds.filter(move |kind| bytes.is_none_or(|bytes| kind.counts_bytes() == bytes));
        kinds
            .filter_map(move |kind| Some(([(key, name), ("limit", limit_label(kind))], get(throttle, kind)?)))
    })
}

/// Limits and their buckets, in the unit of the limit.
fn limits(to: &mut FamilyWriter<'_>, key: &'static str, all: &[(&str, &ThrottleFigures)]) -> fmt::Result {
    let rate: LimitFigure<u64> = |one, kind| Some(one.limits.limit(kind).rate).filter(|&rate| rate > 0);
    let burst: LimitFigure<u64> =
        |one, kind| Some(one.limits.limit(kind).burst_rate).filter(|&rate| rate > 0);
    let level: LimitFigure<u64> = |one, kind| Some(one.stats.levels[kind.index()]?.main.units);
    let capacity: LimitFigure<u64> = |one, kind| Some(one.stats.levels[kind.index()]?.main.capacity);
    let burst_level: LimitFigure<u64> = |one, kind| Some(one.stats.levels[kind.index()]?.burst_rate?.units);
    let burst_capacity: LimitFigure<u64> =
        |one, kind| Some(one.stats.levels[kind.index()]?.burst_rate?.capacity);
    for (bytes, unit) in [(false, "operations"), (true, "bytes")] {
        let families = [
            (
                format!("limit_{unit}_per_second"),
                "Limit; of a group of the cluster: the quota of this host.",
                rate,
            ),
            (format!("burst_limit_{unit}_per_second"), "Burst rate of a limit.", burst),
            (
                format!("bucket_level_{unit}"),
                "Level of a limit's bucket: admitted and not drained yet.",
                level,
            ),
            (
                format!("bucket_capacity_{unit}"),
                "Capacity of a limit's bucket: the units of its burst, or 0.1 s of the limit.",
                capacity,
            ),
            (
                format!("burst_rate_bucket_level_{unit}"),
                "Level of the bucket that limits the rate of a burst; full during a burst.",
                burst_level,
            ),
            (
                format!("burst_rate_bucket_capacity_{unit}"),
                "Capacity of the bucket that limits the rate of a burst: 0.1 s of the burst rate.",
                burst_capacity,
            ),
        ];
        for (family, help, get) in families {
            to.gauges(&format!("weir_{key}_{family}"), help, limit_rows(all, key, Some(bytes), get))?;
        }
    }
    bursts(to, key, all)
}

/// Balances of the limits that have a burst.
fn bursts(to: &mut FamilyWriter<'_>, key: &'static str, all: &[(&str, &ThrottleFigures)]) -> fmt::Result {
    let balance: LimitFigure<f64> = |one, kind| Some(one.balance(kind)?.ratio());
    let duration: LimitFigure<f64> = |one, kind| one.balance(kind)?.full_burst.duration_ns().map(seconds);
    let used_up: LimitFigure<f64> = |one, kind| one.balance(kind)?.used_up_in_ns.map(seconds);
    let full: LimitFigure<f64> = |one, kind| Some(seconds(one.balance(kind)?.full_in_ns));
    let families = [
        (
            "burst_balance_ratio",
            "Available part of a limit's burst: 1 after a long idle time, 0 if it is used up.",
            balance,
        ),
        ("burst_duration_seconds", "Duration of a full burst.", duration),
        (
            "burst_balance_used_up_seconds",
            "Time until a burst is used up at the rate of the last seconds; only while it decreases.",
            used_up,
        ),
        (
            "burst_balance_full_seconds",
            "Time until the whole burst is available again if nothing is admitted.",
            full,
        ),
    ];
    for (family, help, get) in families {
        to.gauges(&format!("weir_{key}_{family}"), help, limit_rows(all, key, None, get))?;
    }
    Ok(())
}

fn prefetches(to: &mut FamilyWriter<'_>, disks: &[DiskFigures]) -> fmt::Result {
    let all = || disks.iter().filter_map(|disk| Some(([("disk", &*disk.name)], disk.prefetch.as_ref()?)));
    let reads = disks.iter().filter_map(|disk| Some((&*disk.name, disk.prefetch.as_ref()?)));
    let reads = reads.flat_map(|(name, stats)| {
        let results = [
            ("hit", stats.hits),
            ("partial", stats.partial_hits),
            ("miss", stats.misses),
            ("skipped", stats.skipped),
        ];
        results.map(|(result, count)| ([("disk", name), ("result", result)], count))
    });
    to.counters("weir_disk_prefetch_reads", "Reads by the result of their prefetch lookup.", reads)?;
    let help = "Hits that waited for a prefetch in flight.";
    to.counters(
        "weir_disk_prefetch_waited_reads",
        help,
        all().map(|(labels, stats)| (labels, stats.waited)),
    )?;
    type Get = fn(&prefetch::PrefetchStats) -> u64;
    let bytes: [(&str, &str, Get); 4] = [
        ("hit", "Bytes of reads served from prefetched data.", |stats| stats.hit_bytes),
        ("read_ahead", "Bytes prefetched, or being prefetched.", |stats| stats.read_ahead_bytes),
        ("used", "Bytes prefetched and then read.", |stats| stats.used_bytes),
        ("wasted", "Bytes prefetched and dropped unread.", |stats| stats.wasted_bytes),
    ];
    for (category, help, get) in bytes {
        let rows = all().map(|(labels, stats)| (labels, get(stats)));
        to.counters(&format!("weir_disk_prefetch_{category}_bytes"), help, rows)?;
    }
    let rows = all().map(|(labels, stats)| (labels, stats.memory_bytes));
    to.gauges("weir_disk_prefetch_memory_bytes", "Memory of prefetched data.", rows)?;
    let rows = all().map(|(labels, stats)| (labels, u64::from(stats.streams)));
    to.gauges("weir_disk_prefetch_streams", "Streams with prefetched data that is not read yet.", rows)?;
    let rows = all().map(|(labels, stats)| (labels, u64::from(stats.is_gate_closed)));
    let help = "1 while prefetch is suspended because too little prefetched data is used.";
    to.gauges("weir_disk_prefetch_suspended", help, rows)
}

fn caches(to: &mut FamilyWriter<'_>, disks: &[DiskFigures]) -> fmt::Result {
    let l2 = || disks.iter().filter_map(|disk| Some(([("disk", &*disk.name)], &disk.caches.as_ref()?.0)));
    let help = "L2 cache lookups that hit.";
    to.counters("weir_disk_l2_cache_hits", help, l2().map(|(labels, cache)| (labels, cache.hits)))?;
    let help = "Slices of L2 tables read from the image.";
    to.counters("weir_disk_l2_cache_misses", help, l2().map(|(labels, cache)| (labels, cache.misses)))?;
    let help = "Slices of L2 tables evicted.";
    to.counters("weir_disk_l2_cache_evictions", help, l2().map(|(labels, cache)| (labels, cache.evictions)))?;
    let rows = l2().map(|(labels, cache)| (labels, cache.bytes));
    to.gauges("weir_disk_l2_cache_bytes", "Memory of the L2 cache.", rows)?;
    let rows = l2().map(|(labels, cache)| (labels, cache.limit_bytes));
    to.gauges("weir_disk_l2_cache_limit_bytes", "Size limit of the L2 cache.", rows)?;
    let help = "Bytes of the disk that a full L2 cache covers.";
    let rows = l2().map(|(labels, cache)| (labels, cache.covered_bytes));
    to.gauges("weir_disk_l2_cache_covered_bytes", help, rows)?;
    let counts = || disks.iter().filter_map(|disk| Some(([("disk", &*disk.name)], &disk.caches.as_ref()?.1)));
    let help = "Refcount cache lookups that hit.";
    to.counters("weir_disk_refcount_cache_hits", help, counts().map(|(labels, cache)| (labels, cache.hits)))?;
    let help = "Refcount blocks read from the image.";
    let rows = counts().map(|(labels, cache)| (labels, cache.misses));
    to.counters("weir_disk_refcount_cache_misses", help, rows)?;
    let rows = counts().map(|(labels, cache)| (labels, cache.bytes));
    to.gauges("weir_disk_refcount_cache_bytes", "Memory of the refcount cache.", rows)
}
