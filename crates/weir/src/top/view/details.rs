//! Five lines about the selected disk or group: state, settings, waits, throttling over time, and
//! prefetching.

use api::{DiskStatus, ExportCounters, ExportStatus, GroupStatus, PrefetchStatus, WatermarkStatus};
use console::{
    figures,
    screen::{DIMMED, THROTTLED},
};
use ratatui::{
    Frame,
    layout::Rect,
    style::Modifier,
    text::{Line, Span},
};
use settings::LatencySetting;

use crate::{
    client::{
        change::SettingName,
        report::{
            DaemonReport, StatusNode, device_users, is_vhost_user, prefetch_memory, prefetch_state,
            prefetches,
        },
    },
    top::{list::TopRow, state::TopState},
};

/// Bars for a share of time, from 0 to 1.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &TopState, row: &TopRow<'_>) {
    let width = usize::from(area.width);
    let lines = [
        labelled(row.node.kind(), about(&state.report, row.node)),
        labelled("set", settings(&state.report, row.node)),
        waits(row),
        throttled_time(state, row, width),
        prefetching(row.node),
    ];
    let lines = lines.map(|line| super::truncated(line, area.width));
    frame.render_widget(ratatui::text::Text::from(lines.to_vec()), area);
}

fn labelled(label: &str, text: String) -> Line<'static> {
    Line::from(vec![Span::styled(format!(" {label:<8}"), Modifier::BOLD), Span::raw(text)])
}

fn about(report: &DaemonReport, node: StatusNode<'_>) -> String {
    match node {
        StatusNode::Disk(disk) => about_disk(report, disk),
        StatusNode::Group(group) => about_group(group),
    }
}

fn about_disk(report: &DaemonReport, disk: &DiskStatus) -> String {
    let DiskStatus { name, image, size, read_only, cache, connections, .. } = disk;
    let cache = cache.as_ref().map(|cache| format!(" · cache {cache}")).unwrap_or_default();
    let read_only = if *read_only { " · read-only" } else { "" };
    let clients = super::count(*connections as usize, "client");
    let machines = report.exports.iter().filter(|export| export.disk == *name && is_vhost_user(export));
    let machines: String = machines.filter_map(front_end_text).collect();
    let devices: String =
        report.exports.iter().filter(|export| export.disk == *name).filter_map(device).collect();
    format!("{} · {clients}{machines}{devices}{cache}{read_only} · {image}", figures::size(*size))
}

/// The process connected to a vhost-user export, with its queues and requests in flight.
fn front_end_text(export: &ExportStatus) -> Option<String> {
    let ExportCounters { queues, in_flight, front_end, .. } = &export.counters;
    let queues = super::count(usize::try_from(queues.unwrap_or(0)).unwrap_or(usize::MAX), "queue");
    Some(format!(" · {}: {queues}, {} in flight", front_end.as_ref()?, in_flight.unwrap_or(0)))
}

/// A device of this host, and its users.
fn device(export: &ExportStatus) -> Option<String> {
    let users = device_users(export).map(|users| format!(": {users}")).unwrap_or_default();
    Some(format!(" · {}{users}", export.device.as_ref()?))
}

fn about_group(group: &GroupStatus) -> String {
    let GroupStatus { disks, settings, watermark_status, .. } = group;
    let WatermarkStatus { enforcement, scale } = watermark_status;
    let mut text = super::count(disks.len(), "disk");
    if settings.watermark.is_some_and(|percent| percent > 0) {
        text += &format!(" · limits {}", enforcement.as_deref().unwrap_or("enforced"));
        if let Some(scale) = scale {
            text += &format!(" ×{scale:.1}");
        }
    }
    text + " · " + &disks.join(" ")
}

fn settings(report: &DaemonReport, node: StatusNode<'_>) -> String {
    let node_settings = node.settings();
    let mut text = figures::limits(&node_settings.limits);
    for name in [
        SettingName::Weight,
        SettingName::IopsReservation,
        SettingName::BpsReservation,
        SettingName::Watermark,
        SettingName::Latency(LatencySetting::Target),
    ] {
        let value = name.of(node_settings);
        if value != name.default() || name == SettingName::Weight {
            text += &format!(" · {} {}", name.text(), name.format(&value));
        }
    }
    for group in report.groups_above(node_settings) {
        text += &format!(" · in {} {}", group.name, figures::limits(&group.settings.limits));
    }
    text
}

/// Waiting requests, waits in the list's interval, and balances of the bursts.
fn waits(row: &TopRow<'_>) -> Line<'static> {
    let throttle = row.node.throttle();
    let mut text = format!("{} reads, {} writes now", throttle.waiting.reads, throttle.waiting.writes);
    if let Some(p99_ns @ 1..) = row.rate.and_then(|rate| rate.wait_p99_ns) {
        text += &format!(" · wait p99 {}", figures::time(p99_ns));
    }
    let mut line = labelled("waiting", text);
    if let Some(held_by) = &row.held_by {
        line.push_span(Span::styled(format!(" · held by {held_by}"), THROTTLED));
    }
    for (limit, buckets) in &throttle.buckets {
        let Some(burst) = buckets.burst else { continue };
        let mut text = format!(" · {limit} burst {}% left", burst.balance_percent);
        if let Some(used_up_in_ns) = burst.used_up_in_ns.filter(|_| burst.balance_percent > 0) {
            text += &format!(", used up in {}", figures::time(used_up_in_ns));
        }
        line.push_span(Span::raw(text));
    }
    if let Some(waits) = throttle.wait_ns {
        line.push_span(Span::raw(format!(" · wait p99 since start {}", figures::time(waits.p99))));
    }
    line
}

/// State of prefetching, and its counters since the disk was opened; empty for a group.
fn prefetching(node: StatusNode<'_>) -> Line<'static> {
    let StatusNode::Disk(disk) = node else { return Line::default() };
    let Some(prefetch) = &disk.settings.prefetch else { return Line::default() };
    let mut text = prefetch_state(prefetch, &disk.read_ahead);
    if prefetches(prefetch) {
        let PrefetchStatus { hit_rate, accuracy, memory, streams, wasted_bytes, .. } = disk.read_ahead;
        let share = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), figures::share);
        text += &format!(
            " · hits {} · accuracy {} · wasted {} · {} of {} · {}",
            share(hit_rate),
            share(accuracy),
            figures::bytes(wasted_bytes as f64),
            figures::bytes(memory as f64),
            settings::exact_size(prefetch_memory(prefetch)),
            super::count(usize::try_from(streams).unwrap_or(usize::MAX), "stream"),
        );
    }
    labelled("ahead", text)
}

/// Share of time in which requests waited, newest at the right.
fn throttled_time(state: &TopState, row: &TopRow<'_>, width: usize) -> Line<'static> {
    let bar = |share: f32| BARS[(share.clamp(0.0, 1.0) * 8.0).ceil() as usize];
    let available = width.saturating_sub(16);
    let mut bars: Vec<char> =
        state.history.of(row.name).rev().take(available).map(|p| bar(p.limited)).collect();
    bars.reverse();
    let now = row.rate.map_or_else(String::new, |rate| format!("{:>4}", figures::share(rate.limited)));
    Line::from(vec![
        Span::styled(" held    ", Modifier::BOLD),
        Span::styled(format!("{now} "), DIMMED),
        Span::styled(bars.into_iter().collect::<String>(), THROTTLED),
    ])
}

#[cfg(test)]
mod tests {
    use api::{DaemonStatus, FrontEndProcess};

    use super::*;

    #[test]
    fn front_end_is_shown_while_connected() {
        let front_end = FrontEndProcess { pid: 4711, name: "qemu-system-x86".to_owned() };
        let counters = ExportCounters {
            queues: Some(4),
            in_flight: Some(32),
            front_end: Some(front_end),
            ..ExportCounters::default()
        };
        let machine = ExportStatus {
            kind: "vhost-user-blk".to_owned(),
            disk: "vm1".to_owned(),
            counters,
            ..ExportStatus::default()
        };
        let disk = DiskStatus {
            name: "vm1".to_owned(),
            size: 1 << 20,
            image: "a.raw".to_owned(),
            connections: 1,
            ..DiskStatus::default()
        };
        let absent = ExportStatus { counters: ExportCounters::default(), ..machine.clone() };
        let summary_of = |export| {
            let status = DaemonStatus { exports: vec![export], ..DaemonStatus::default() };
            about_disk(&DaemonReport { status, ..DaemonReport::default() }, &disk)
        };
        assert_eq!(
            summary_of(machine),
            "1M · 1 client · qemu-system-x86 (4711): 4 queues, 32 in flight · a.raw"
        );
        assert_eq!(summary_of(absent), "1M · 1 client · a.raw");
    }
}
