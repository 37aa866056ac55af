//! Counters never decrease at an upgrade, except those of the process; earlier events can still be
//! queried.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::UpgradedDaemon;
use crate::{
    bench::bench,
    harness::{Qmp, Scratch, TestClient, poll_until, qemu_img, text},
};

/// Prefixes of counters that restart: of the process, its threads, and caches that are empty.
const PROCESS_METRICS: [&str; 6] = [
    "process_",
    "weir_thread_",
    "weir_worker_",
    "weir_ring_",
    "weir_disk_l2_cache_",
    "weir_disk_refcount_cache_",
];

/// Counters and histograms by name and labels.
fn counters(fixture: &UpgradedDaemon) -> BTreeMap<String, f64> {
    let page = TestClient::new("curl").args(["-sS", "--unix-socket"]).arg(fixture.scratch.socket("metrics"));
    let page = page.args(["-H", "Accept: text/plain", "http://weir/metrics"]).succeeds();
    let mut kinds = BTreeMap::new();
    let mut counters = BTreeMap::new();
    for line in page.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            kinds.insert(name.to_owned(), kind.to_owned());
        } else if let Some((sample, value)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#')) {
            let name = sample.split('{').next().unwrap_or_default();
            let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let kind = kinds.get(name).or_else(|| kinds.get(of_histogram?)).map(String::as_str);
            let is_ours = !PROCESS_METRICS.iter().any(|prefix| name.starts_with(prefix));
            if matches!(kind, Some("counter" | "histogram")) && is_ours {
                counters.insert(sample.to_owned(), value.parse().unwrap());
            }
        }
    }
    counters
}

/// The cumulative throttle counters of a disk or a group in `x-weir-query-status`.
fn throttled(entry: &Value) -> Value {
    let mut counters = entry["throttle"].clone();
    // Current values, and statistics over a recent period.
    for now in ["tokens", "buckets", "waiting", "recent-wait-ns", "throttle-cause"] {
        counters.as_object_mut().expect("an object").remove(now);
    }
    counters
}

#[test]
fn counters_and_events_survive() {
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.path("disk.qcow2"), scratch.socket("machine"));
    qemu_img(["create", "-q", "-f", "qcow2", text(&disk), "16M"]).succeeds();
    let (listen_option, metrics) =
        (format!("unix:{}", text(&socket)), format!("unix:{}", text(&scratch.socket("metrics"))));
    let disk = [
        text(&disk),
        "-f",
        "qcow2",
        "--vhost-user-blk",
        &listen_option,
        "--iops-total",
        "2000",
        "--prefetch",
        "on",
    ];
    let rest = ["--group", "gold", "--fault", "kind=read,offset=8M-9M", "--metrics", &metrics];
    let fixture = UpgradedDaemon::new(scratch, &[&disk[..], &rest].concat());
    let mut current = fixture.serve().start();
    // Some statistics are collected only after a first query.
    counters(&fixture);
    bench("-w -c 3000 -d 32 -s 4K --flush-interval 100", format!("vhost-user:{}", text(&socket))).succeeds();
    bench("-c 1000 -d 32 -s 4K", current.uri("disk")).succeeds();
    current.nbdsh("disk", "try:\n h.pread(512, 8 << 20)\nexcept nbd.Error: pass\nelse: assert False");
    let status = |fixture: &UpgradedDaemon| {
        Qmp::negotiated(&fixture.control()).command("x-weir-query-status", json!({}))
    };
    for _ in 0..3 {
        // A page may be outdated, so wait for two equal ones.
        let before = poll_until(|| {
            let (first, second) = (counters(&fixture), counters(&fixture));
            (first == second).then_some(first)
        });
        let events = Qmp::negotiated(&fixture.control()).command("x-weir-query-events", json!({}));
        let was = status(&fixture);
        current = fixture.upgrade(current).0;
        let is = status(&fixture);
        for key in ["disks", "groups"] {
            assert_eq!(throttled(&is[key][0]), throttled(&was[key][0]), "{key}");
        }
        let after = counters(&fixture);
        for (sample, value) in &before {
            let now = after.get(sample).unwrap_or_else(|| panic!("{sample} is missing after the upgrade"));
            assert!(now >= value, "{sample} has fallen from {value} to {now}");
        }
        let has_increased =
            |part: &str| before.iter().any(|(sample, value)| sample.starts_with(part) && *value > 0.0);
        for part in [
            "weir_disk_request_duration_seconds_sum",
            "weir_disk_wait_duration_seconds_sum",
            "weir_disk_waiting_seconds_total",
            "weir_disk_throttled_seconds_total",
            "weir_disk_throttled_requests_total",
            "weir_disk_errors_total{disk=\"disk\",operation=\"read\"}",
            "weir_disk_prefetch_reads_total",
            "weir_group_admitted_requests_total",
            "weir_export_requests_total",
            "weir_export_kicks_total",
            "weir_events_total",
        ] {
            assert!(has_increased(part), "{part} in {before:#?}");
        }
        let known = Qmp::negotiated(&fixture.control()).command("x-weir-query-events", json!({}));
        let (events, known) = (events.as_array().unwrap(), known.as_array().unwrap());
        assert!(!events.is_empty() && known[..events.len()] == events[..], "{known:?}");
        assert!(known[events.len()..].iter().any(|event| event["kind"] == "taken_over"), "{known:?}");
    }
    current.stop();
}
