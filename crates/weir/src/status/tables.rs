//! The tables of `weir status`. A table without rows is omitted.

use api::{
    CacheStatus, DeviceCapacity, DeviceStatus, DiskMemory, DiskStatus, ErrorCounts, ExportCounters,
    ExportStatus, GroupStatus, MemberSettings, PrefetchStatus, RefusedClients, ServerStatus, ThrottleStatus,
    UnavailableDisk, UnmetReservation, WaitPercentiles,
};
use console::{
    figures,
    table::{ColumnAlignment, TextTable},
};

use super::{StatusForm, StatusSelection};
use crate::{
    client::{
        latency::RequestLatency,
        rates::{IntervalRates, NodeRate},
        report::{
            DaemonReport, StatusNode, device_users, is_vhost_user, prefetch_memory, prefetch_state,
            prefetches,
        },
    },
    jobs,
};

/// All tables with rows, separated by empty lines. `bold` is for terminals.
pub(super) fn render(
    report: &DaemonReport,
    rates: &IntervalRates,
    selection: &StatusSelection,
    form: StatusForm,
    bold: bool,
) -> String {
    let mut tables = vec![
        disks(report, rates, selection, form),
        groups(report, rates, selection, form),
        bursts(report, selection),
        latency_targets(report, selection),
        configured_limits(report, selection),
        quotas(report, selection),
        cluster_groups(report, selection),
        unavailable_disks(report, selection),
        unmet_reservations(report, selection),
        jobs::table(report.jobs.iter().filter(|job| selection.includes(&job.disk))),
        errors(report, selection),
    ];
    if form.all {
        tables.extend([
            caches(report, selection),
            read_ahead(report, selection),
            devices(report, selection),
            vhost_user_exports(report, selection),
            host_devices(report, selection),
            ceph_disks(report, selection),
            nbd_disks(report, selection),
            rejected_clients(report),
            memory(report, selection),
        ]);
    }
    let texts = tables.iter().map(|table| table.render(bold)).filter(|text| !text.is_empty());
    let text = texts.collect::<Vec<_>>().join("\n");
    if text.is_empty() {
        return "no disks and no groups\n".to_owned();
    }
    if rates.interval_ns == 0 { text } else { format!("last {}\n{text}", figures::time(rates.interval_ns)) }
}

const WEIGHT: (&str, ColumnAlignment) = ("WEIGHT", ColumnAlignment::Right);

fn weight(settings: &MemberSettings) -> String {
    settings.weight.map_or_else(dash, |weight| weight.to_string())
}

fn disks(
    report: &DaemonReport,
    rates: &IntervalRates,
    selection: &StatusSelection,
    form: StatusForm,
) -> TextTable {
    let mut columns = vec![
        ("DISK", ColumnAlignment::Left),
        ("GROUP", ColumnAlignment::Left),
        ("LIMITS", ColumnAlignment::Left),
    ];
    columns.extend(form.wide.then_some(WEIGHT));
    let measured_columns = measured_columns(form, rates);
    columns.extend(measured_columns.iter().map(|(name, side)| (name.as_str(), *side)));
    let mut table = TextTable::new(columns);
    for disk in report.disks.iter().filter(|disk| selection.includes(&disk.name)) {
        let DiskStatus { name, settings, .. } = disk;
        let group = settings.group.clone().unwrap_or_else(dash);
        let mut row = vec![name.clone(), group, figures::limits(&settings.limits)];
        row.extend(form.wide.then(|| weight(settings)));
        row.extend(measured(report, name, StatusNode::Disk(disk), rates, form));
        table.row(row);
    }
    table
}

/// Disks whose storage does not answer yet.
fn unavailable_disks(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("UNAVAILABLE", ColumnAlignment::Left),
        ("IMAGE", ColumnAlignment::Left),
        ("FOR", ColumnAlignment::Right),
        ("REASON", ColumnAlignment::Left),
    ]);
    for UnavailableDisk { name, image, age_ns, reason } in &report.unavailable {
        if selection.includes(name) {
            let why = reason.clone().unwrap_or_else(|| "no response yet".to_owned());
            table.row(vec![name.clone(), image.clone(), figures::time(*age_ns), why]);
        }
    }
    table
}

/// Counters of vhost-user exports since they were added.
fn vhost_user_exports(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("VHOST-USER EXPORT", ColumnAlignment::Left),
        ("DISK", ColumnAlignment::Left),
        ("USED BY", ColumnAlignment::Left),
        ("QUEUES", ColumnAlignment::Right),
        ("IN FLIGHT", ColumnAlignment::Right),
        ("REQUESTS", ColumnAlignment::Right),
        ("KICKS", ColumnAlignment::Right),
        ("CALLS", ColumnAlignment::Right),
        ("COPIES", ColumnAlignment::Right),
    ]);
    for export in
        report.exports.iter().filter(|export| is_vhost_user(export) && selection.includes(&export.disk))
    {
        let ExportStatus { id, disk, counters, .. } = export;
        let ExportCounters { queues, requests, in_flight, kicks, calls, copies, .. } = *counters;
        let mut row = vec![
            id.clone(),
            disk.clone(),
            counters.front_end.as_ref().map_or_else(dash, ToString::to_string),
        ];
        let counts = [queues, in_flight, requests, kicks, calls, copies];
        row.extend(counts.map(|count| figures::count(count.unwrap_or(0) as f64)));
        table.row(row);
    }
    table
}

/// NBD servers that have rejected clients.
fn rejected_clients(report: &DaemonReport) -> TextTable {
    let mut table = TextTable::new([
        ("REJECTED AT", ColumnAlignment::Left),
        ("CONNECTED", ColumnAlignment::Right),
        ("BY NETWORK", ColumnAlignment::Right),
        ("TOO MANY", ColumnAlignment::Right),
        ("BY NAME", ColumnAlignment::Right),
        ("BY EXPORT", ColumnAlignment::Right),
    ]);
    for ServerStatus { address, connections, refused, .. } in &report.servers {
        let RefusedClients { networks, connections: too_many, names, exports } = *refused;
        // Servers without rejections would only repeat the list of exports.
        if *refused != RefusedClients::default() {
            let counts = [*connections, networks, too_many, names, exports];
            let mut row = vec![address.clone()];
            row.extend(counts.map(|count| figures::count(count as f64)));
            table.row(row);
        }
    }
    table
}

/// Block devices and files of this host, with their mounts and stacked devices.
fn host_devices(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("HOST DEVICE", ColumnAlignment::Left),
        ("TYPE", ColumnAlignment::Left),
        ("DISK", ColumnAlignment::Left),
        ("USED BY", ColumnAlignment::Left),
    ]);
    for export in report.exports.iter().filter(|export| selection.includes(&export.disk)) {
        let Some(device) = &export.device else { continue };
        let users = device_users(export).unwrap_or_else(dash);
        table.row(vec![device.clone(), export.kind.clone(), export.disk.clone(), users]);
    }
    table
}

/// Images in Ceph. A cluster that does not respond shows as a request that grows old.
fn ceph_disks(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("DISK", ColumnAlignment::Left),
        ("CEPH IMAGE", ColumnAlignment::Left),
        ("OLDEST REQUEST", ColumnAlignment::Right),
    ]);
    for disk in report.disks.iter().filter(|disk| selection.includes(&disk.name)) {
        // Disks at NBD servers report the oldest request too, and have their own table.
        if let (Some(oldest), None) = (disk.oldest_request, &disk.server) {
            table.row(vec![disk.name.clone(), disk.image.clone(), age(oldest)]);
        }
    }
    table
}

/// Age of the oldest request in nanoseconds; 0 if there is none.
fn age(oldest_ns: u64) -> String {
    if oldest_ns == 0 { dash() } else { figures::time(oldest_ns) }
}

/// Disks at other NBD servers. A server that does not respond shows as a request that grows old.
fn nbd_disks(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("DISK", ColumnAlignment::Left),
        ("NBD SERVER", ColumnAlignment::Left),
        ("STATE", ColumnAlignment::Left),
        ("RECONNECTIONS", ColumnAlignment::Right),
        ("OLDEST REQUEST", ColumnAlignment::Right),
        ("UNFLUSHED", ColumnAlignment::Right),
    ]);
    for disk in report.disks.iter().filter(|disk| selection.includes(&disk.name)) {
        let Some(server) = &disk.server else { continue };
        table.row(vec![
            disk.name.clone(),
            disk.image.clone(),
            if server.connected { "connected" } else { "disconnected" }.to_owned(),
            figures::count(server.reconnections as f64),
            age(disk.oldest_request.unwrap_or(0)),
            figures::bytes(server.unflushed_bytes as f64),
        ]);
    }
    table
}

/// I/O errors since the disks were opened, and disks that are stopped by one.
fn errors(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("DISK", ColumnAlignment::Left),
        ("STATE", ColumnAlignment::Left),
        ("READ ERRORS", ColumnAlignment::Right),
        ("WRITE ERRORS", ColumnAlignment::Right),
        ("FLUSH ERRORS", ColumnAlignment::Right),
        ("DISCARD ERRORS", ColumnAlignment::Right),
    ]);
    for disk in report.disks.iter().filter(|disk| selection.includes(&disk.name)) {
        let stopped_by = disk.stopped_by();
        if stopped_by.is_none() && disk.errors == ErrorCounts::default() {
            continue;
        }
        let ErrorCounts { reads, writes, flushes, discards } = disk.errors;
        let mut row = vec![
            disk.name.clone(),
            stopped_by.map_or_else(|| "running".to_owned(), |status| format!("stopped: {status}")),
        ];
        row.extend([reads, writes, flushes, discards].map(|count| figures::count(count as f64)));
        table.row(row);
    }
    table
}

/// Metadata caches of qcow2 images, with counters since they were opened.
fn caches(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("DISK", ColumnAlignment::Left),
        ("FORMAT", ColumnAlignment::Left),
        ("L2 CACHE", ColumnAlignment::Right),
        ("LIMIT", ColumnAlignment::Right),
        ("COVERS", ColumnAlignment::Right),
        ("HITS", ColumnAlignment::Right),
        ("MISSES", ColumnAlignment::Right),
        ("EVICTED", ColumnAlignment::Right),
        ("REFCOUNTS", ColumnAlignment::Right),
    ]);
    for disk in report.disks.iter().filter(|disk| selection.includes(&disk.name)) {
        let DiskStatus { name, size, format, l2_cache: Some(l2), refcount_cache, .. } = disk else {
            continue;
        };
        let CacheStatus { hits, misses, evictions, bytes, limit, covered } = *l2;
        // Any cache covers an empty disk.
        let covers = if *size == 0 { 1.0 } else { covered.unwrap_or(0) as f64 / *size as f64 };
        table.row(vec![
            name.clone(),
            format.clone(),
            figures::bytes(bytes as f64),
            figures::bytes(limit.unwrap_or(0) as f64),
            figures::share(covers),
            figures::count(hits as f64),
            figures::count(misses as f64),
            figures::count(evictions.unwrap_or(0) as f64),
            refcount_cache.map_or_else(dash, |cache| figures::bytes(cache.bytes as f64)),
        ]);
    }
    table
}

/// Memory for data: total, and each disk's part.
fn memory(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("MEMORY", ColumnAlignment::Left),
        ("LIMIT", ColumnAlignment::Right),
        ("RESERVED", ColumnAlignment::Right),
        ("DISKS", ColumnAlignment::Right),
        ("REQUESTS", ColumnAlignment::Right),
        ("WAIT", ColumnAlignment::Right),
    ]);
    let size = |bytes: u64| if bytes == 0 { dash() } else { figures::bytes(bytes as f64) };
    // The total of all disks would mislead beside a selection of them.
    let Some(all) = report.memory.filter(|_| selection.names.is_none()) else { return table };
    let waiting = if all.waiting == 0 { dash() } else { figures::count(all.waiting as f64) };
    table.row(vec![
        "all".to_owned(),
        all.total.map_or_else(dash, size),
        size(all.reserved),
        size(all.disks_in_memory),
        size(all.requests),
        waiting,
    ]);
    for disk in report.disks.iter().filter(|disk| disk.memory.reserved + disk.memory.requests > 0) {
        let DiskMemory { reserved, requests, .. } = disk.memory;
        table.row(vec![disk.name.clone(), dash(), size(reserved), dash(), size(requests), dash()]);
    }
    table
}

fn read_ahead(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("DISK", ColumnAlignment::Left),
        ("PREFETCH", ColumnAlignment::Left),
        ("HIT RATE", ColumnAlignment::Right),
        ("ACCURACY", ColumnAlignment::Right),
        ("PREFETCHED", ColumnAlignment::Right),
        ("WASTED", ColumnAlignment::Right),
        ("MEMORY", ColumnAlignment::Right),
        ("LIMIT", ColumnAlignment::Right),
        ("STREAMS", ColumnAlignment::Right),
    ]);
    for disk in report.disks.iter().filter(|disk| selection.includes(&disk.name)) {
        let Some(prefetch) = disk.settings.prefetch.as_ref().filter(|prefetch| prefetches(prefetch)) else {
            continue;
        };
        let PrefetchStatus { hit_rate, accuracy, read_ahead_bytes, wasted_bytes, memory, streams, .. } =
            disk.read_ahead;
        table.row(vec![
            disk.name.clone(),
            prefetch_state(prefetch, &disk.read_ahead),
            hit_rate.map_or_else(dash, figures::share),
            accuracy.map_or_else(dash, figures::share),
            figures::bytes(read_ahead_bytes as f64),
            figures::bytes(wasted_bytes as f64),
            figures::bytes(memory as f64),
            figures::bytes(prefetch_memory(prefetch) as f64),
            streams.to_string(),
        ]);
    }
    table
}

fn groups(
    report: &DaemonReport,
    rates: &IntervalRates,
    selection: &StatusSelection,
    form: StatusForm,
) -> TextTable {
    let all = || report.groups.iter().filter(|group| selection.includes(&group.name));
    // Columns with dashes only are omitted.
    let has_parents = form.wide || all().any(|group| group.settings.group.is_some());
    let has_watermarks = form.wide || all().any(|group| watermark(group) != dash());
    let mut columns = vec![("GROUP", ColumnAlignment::Left)];
    columns.extend(has_parents.then_some(("IN", ColumnAlignment::Left)));
    columns.extend([("DISKS", ColumnAlignment::Right), ("LIMITS", ColumnAlignment::Left)]);
    columns.extend(form.wide.then_some(WEIGHT));
    columns.extend(has_watermarks.then_some(("WATERMARK", ColumnAlignment::Left)));
    let measured_columns = measured_columns(form, rates);
    columns.extend(measured_columns.iter().map(|(name, side)| (name.as_str(), *side)));
    let mut table = TextTable::new(columns);
    for group in all() {
        let GroupStatus { name, settings, .. } = group;
        let mut row = vec![name.clone()];
        row.extend(has_parents.then(|| settings.group.clone().unwrap_or_else(dash)));
        row.extend([group.disks.len().to_string(), figures::limits(&settings.limits)]);
        row.extend(form.wide.then(|| weight(settings)));
        row.extend(has_watermarks.then(|| watermark(group)));
        row.extend(measured(report, name, StatusNode::Group(group), rates, form));
        table.row(row);
    }
    table
}

/// Bursts of limits: their duration, and the balance.
fn bursts(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("NAME", ColumnAlignment::Left),
        ("LIMIT", ColumnAlignment::Left),
        ("FULL BURST", ColumnAlignment::Right),
        ("BALANCE", ColumnAlignment::Right),
        ("USED UP IN", ColumnAlignment::Right),
        ("FULL IN", ColumnAlignment::Right),
    ]);
    let disks = report.disks.iter().map(|disk| (&disk.name, &disk.throttle));
    let all = disks.chain(report.groups.iter().map(|group| (&group.name, &group.throttle)));
    for (name, throttle) in all.filter(|(name, _)| selection.includes(name)) {
        for (limit, buckets) in &throttle.buckets {
            let Some(burst) = buckets.burst else { continue };
            table.row(vec![
                name.clone(),
                limit.clone(),
                burst.duration_ns.map_or_else(dash, burst_time),
                format!("{}%", burst.balance_percent),
                burst.used_up_in_ns.map_or_else(dash, burst_time),
                burst_time(burst.full_in_ns),
            ]);
        }
    }
    table
}

/// Configured limits in place of which others are in force, and schedules.
fn configured_limits(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("NAME", ColumnAlignment::Left),
        ("CONFIGURED", ColumnAlignment::Left),
        ("SCHEDULE", ColumnAlignment::Left),
        ("UNTIL", ColumnAlignment::Left),
    ]);
    let disks = report.disks.iter().map(|disk| (&disk.name, &disk.settings));
    let all = disks.chain(report.groups.iter().map(|group| (&group.name, &group.settings)));
    for (name, settings) in all.filter(|(name, _)| selection.includes(name)) {
        if settings.configured_limits.is_none() && settings.schedule.is_none() {
            continue;
        }
        let schedule = settings.schedule.clone().unwrap_or_default();
        table.row(vec![
            name.clone(),
            figures::limits(settings.configured_limits()),
            schedule.when.unwrap_or_else(dash),
            schedule.until.unwrap_or_else(dash),
        ]);
    }
    table
}

/// Quotas by volume.
fn quotas(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("NAME", ColumnAlignment::Left),
        ("QUOTA", ColumnAlignment::Left),
        ("OF", ColumnAlignment::Left),
        ("USED", ColumnAlignment::Right),
        ("RATE AFTER", ColumnAlignment::Right),
        ("UNTIL", ColumnAlignment::Left),
    ]);
    let disks = report.disks.iter().map(|disk| (&disk.name, &disk.settings));
    let all = disks.chain(report.groups.iter().map(|group| (&group.name, &group.settings)));
    for (name, settings) in all.filter(|(name, _)| selection.includes(name)) {
        let Some(status) = &settings.quota_status else { continue };
        let rate = settings.quota_rate.map_or_else(dash, figures::size);
        let both =
            [("all", &settings.quota, &status.total), ("writes", &settings.write_quota, &status.writes)];
        for (of, quota, used) in both {
            let (Some(quota), Some(used)) = (quota, used) else { continue };
            let percent = u128::from(used.used_bytes) * 100 / u128::from(used.quota_bytes.max(1));
            table.row(vec![
                name.clone(),
                quota.clone(),
                of.to_owned(),
                format!("{} ({percent}%)", figures::bytes(used.used_bytes as f64)),
                rate.clone(),
                used.period_end.clone().unwrap_or_else(dash),
            ]);
        }
    }
    table
}

/// A duration of seconds to days.
fn burst_time(nanoseconds: u64) -> String {
    match nanoseconds {
        0 => "0s".to_owned(),
        // Above two minutes, minutes are easier to read: `12m`.
        120_000_000_000.. => figures::age(nanoseconds),
        _ => figures::time(nanoseconds),
    }
}

/// Latency targets, and disks and groups that are throttled for targets of others. `MEASURED` is
/// from admission to completion; `WAIT P99` are the waits for limits before that.
fn latency_targets(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("NAME", ColumnAlignment::Left),
        ("LATENCY TARGET", ColumnAlignment::Left),
        ("STATE", ColumnAlignment::Left),
        ("MEASURED", ColumnAlignment::Right),
        ("WAIT P99", ColumnAlignment::Right),
        ("ALONE", ColumnAlignment::Right),
        ("CAP", ColumnAlignment::Right),
    ]);
    let disks = report.disks.iter();
    let disks = disks.map(|disk| (&disk.name, &disk.settings, &disk.latency_control, &disk.throttle));
    let groups = report.groups.iter();
    let groups = groups.map(|group| (&group.name, &group.settings, &group.latency_control, &group.throttle));
    for (name, settings, control, throttle) in disks.chain(groups) {
        if control.is_empty() || !selection.includes(name) {
            continue;
        }
        let state = control.state.clone().unwrap_or_else(|| "throttled".to_owned());
        let time = |nanoseconds: Option<u64>| nanoseconds.map_or_else(dash, figures::time);
        table.row(vec![
            name.clone(),
            latency_target(settings),
            state,
            time(control.measured_ns),
            time(throttle.recent_wait_ns.as_ref().map(|wait| wait.p99)),
            time(control.alone_ns),
            control.cap_iops.map_or_else(dash, |cap| format!("{cap}/s")),
        ]);
    }
    table
}

/// `5ms p99`, `5ms p99.9 of reads`; a dash without a target.
fn latency_target(settings: &MemberSettings) -> String {
    let Some(target) = &settings.latency_target else { return dash() };
    let percentile = settings.latency_percentile.as_deref().unwrap_or("99");
    let requests = settings.latency_of.as_deref().filter(|requests| *requests != "all");
    let requests = requests.map(|requests| format!(" of {requests}")).unwrap_or_default();
    format!("{target} p{percentile}{requests}")
}

/// Local groups of cluster-wide limits.
fn cluster_groups(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new(
        ["GROUP", "CLUSTER", "CLUSTER LIMITS", "QUOTA"].map(|name| (name, ColumnAlignment::Left)),
    );
    let Some(cluster) = &report.cluster else { return table };
    for group in report.groups.iter().filter(|group| selection.includes(&group.name)) {
        let Some(cluster_group) = &group.cluster else { continue };
        let mut here = if cluster_group.leased { "leased" } else { "fallback share" }.to_owned();
        if !cluster.connected {
            here += &format!(", disconnected: {}", cluster.reason.as_deref().unwrap_or("joining"));
        }
        table.row(vec![
            group.name.clone(),
            cluster.name.clone(),
            figures::limits(&cluster_group.limits),
            here,
        ]);
    }
    table
}

/// Unmet reservations.
fn unmet_reservations(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table =
        TextTable::new(["NAME", "UNMET RESERVATION", "REASON"].map(|name| (name, ColumnAlignment::Left)));
    let disks = report.disks.iter().map(|disk| (&disk.name, &disk.settings));
    let all = disks.chain(report.groups.iter().map(|group| (&group.name, &group.settings)));
    for (name, settings) in all.filter(|(name, _)| selection.includes(name)) {
        let Some(unmet) = &settings.unmet_reservation else { continue };
        let UnmetReservation { iops_reservation, bps_reservation, reason: why } = unmet;
        let amounts = [("iops", iops_reservation), ("bps", bps_reservation)].into_iter();
        let amounts: Vec<_> =
            amounts.filter_map(|(unit, amount)| Some(format!("{unit} {}", (*amount)?))).collect();
        table.row(vec![name.clone(), amounts.join(", "), why.clone()]);
    }
    table
}

/// `90% lifted`, `90% scaled ×3.5`; a dash without a watermark.
fn watermark(group: &GroupStatus) -> String {
    let Some(percent) = group.settings.watermark.filter(|&percent| percent > 0) else { return dash() };
    let state = group.watermark_status.enforcement.as_deref().unwrap_or_default();
    let scale =
        group.watermark_status.scale.filter(|_| state == "scaled").map(|scale| format!(" ×{scale:.1}"));
    format!("{percent}% {state}{}", scale.unwrap_or_default()).trim_end().to_owned()
}

/// Followed by the interval in the heading.
const WAIT_P99: &str = "WAIT P99";

/// Measured columns of disks and groups, each with true if only the wide form has it.
const MEASURED: [(&str, ColumnAlignment, bool); 10] = [
    ("IOPS", ColumnAlignment::Right, false),
    ("READ/s", ColumnAlignment::Right, false),
    ("WRITE/s", ColumnAlignment::Right, false),
    ("P50", ColumnAlignment::Right, true),
    ("P99", ColumnAlignment::Right, false),
    (WAIT_P99, ColumnAlignment::Right, false),
    ("WAIT P99 (START)", ColumnAlignment::Right, true),
    ("WAIT", ColumnAlignment::Right, false),
    ("HELD", ColumnAlignment::Right, false),
    ("HELD BY", ColumnAlignment::Left, false),
];

fn measured_columns(form: StatusForm, rates: &IntervalRates) -> Vec<(String, ColumnAlignment)> {
    let shown = MEASURED.into_iter().filter(|(.., wide)| form.wide || !wide);
    let named = shown.map(|(name, side, _)| match rates.interval_ns {
        // Named in the heading, as the column beside it covers the time since the start.
        interval_ns @ 1.. if name == WAIT_P99 => (format!("{name} ({})", figures::time(interval_ns)), side),
        _ => (name.to_owned(), side),
    });
    named.collect()
}

fn measured(
    report: &DaemonReport,
    name: &str,
    node: StatusNode<'_>,
    rates: &IntervalRates,
    form: StatusForm,
) -> impl Iterator<Item = String> {
    let (rate, held_by) = (rates.of(name), rates.throttle_cause(report, name, node));
    let rate_cell = |figure: fn(&NodeRate) -> String| rate.map_or_else(dash, figure);
    let ThrottleStatus { waiting, wait_ns, .. } = node.throttle();
    let latency = |get: fn(&RequestLatency) -> u64| {
        let latency = rate.and_then(|rate| rate.latency);
        latency.as_ref().map_or_else(dash, |latency| figures::time(get(latency)))
    };
    // Zero: fewer than one request in 100 waited. A dash is easier to read.
    let wait_p99 = rate.and_then(|rate| rate.wait_p99_ns).filter(|&p99_ns| p99_ns > 0);
    let cells = [
        rate_cell(|rate| figures::count(rate.iops())),
        rate_cell(|rate| figures::bytes(rate.read_bps)),
        rate_cell(|rate| figures::bytes(rate.write_bps)),
        latency(|latency| latency.p50_ns),
        latency(|latency| latency.p99_ns),
        wait_p99.map_or_else(dash, figures::time),
        wait_ns.map_or_else(dash, |waits: WaitPercentiles| figures::time(waits.p99)),
        waiting.total().to_string(),
        rate_cell(|rate| figures::share(rate.limited)),
        held_by.unwrap_or_else(dash),
    ];
    cells.into_iter().zip(MEASURED).filter(move |(_, (.., wide))| form.wide || !wide).map(|(cell, _)| cell)
}

fn devices(report: &DaemonReport, selection: &StatusSelection) -> TextTable {
    let mut table = TextTable::new([
        ("DEVICE", ColumnAlignment::Left),
        ("DISKS", ColumnAlignment::Left),
        ("UTILIZATION", ColumnAlignment::Right),
        ("CAPACITY READ", ColumnAlignment::Left),
        ("CAPACITY WRITE", ColumnAlignment::Left),
        ("SOURCE", ColumnAlignment::Left),
    ]);
    for device in &report.devices {
        if !device.disks.iter().any(|disk| selection.includes(disk)) {
            continue;
        }
        let DeviceStatus { name, disks, capacity, capacity_source, utilization } = device;
        let DeviceCapacity { read_iops, write_iops, read_bps, write_bps } = capacity.unwrap_or_default();
        table.row(vec![
            name.clone(),
            disks.join(" "),
            utilization.map_or_else(dash, figures::share),
            capacity_text(read_iops, read_bps),
            capacity_text(write_iops, write_bps),
            capacity_source.clone().unwrap_or_else(dash),
        ]);
    }
    table
}

/// `85.2K iops, 1.4G/s`, without unknown values.
fn capacity_text(iops: Option<u64>, bps: Option<u64>) -> String {
    let iops = iops.map(|iops| format!("{} iops", figures::count(iops as f64)));
    let bps = bps.map(|bps| format!("{}/s", figures::bytes(bps as f64)));
    let known: Vec<String> = iops.into_iter().chain(bps).collect();
    if known.is_empty() { dash() } else { known.join(", ") }
}

fn dash() -> String {
    "-".to_owned()
}
