//! `--http`: the page in a browser.
//!
//! Each scenario is a file of `tests/page`, in Python because the browser's driver is: it starts
//! daemons, opens their pages in Debian's Chromium, and queries the limits in force over QMP. A
//! message on the browser's console or a violation of the content security policy fails the test.

use console::figures;
use serde_json::{Value, json};

use crate::harness::{TestClient, WEIR};

fn scenario(name: &str) -> TestClient {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/page/run.py");
    // -B: compiled files would be written into the repository.
    TestClient::new("page-python").arg("-B").args([script, name, WEIR])
}

#[test]
fn page_opens_with_2_100_and_1000_disks() {
    scenario("sizes").succeeds();
}

#[test]
fn limit_is_previewed_and_changed_with_the_token() {
    scenario("change").succeeds();
}

#[test]
fn lost_connection_is_shown_and_restored() {
    scenario("restart").succeeds();
}

#[test]
fn too_many_streams_are_explained() {
    scenario("crowded").succeeds();
}

#[test]
fn hostile_names_stay_names() {
    scenario("hostile").succeeds();
}

#[test]
fn missing_fields_are_shown_as_unknown() {
    scenario("sparse").succeeds();
}

#[test]
fn first_view_shows_the_most_throttled_disk() {
    scenario("start").succeeds();
}

#[test]
fn latency_targets_rates_for_each_gib_and_schedules_are_previewed() {
    scenario("targets").succeeds();
}

#[test]
fn jobs_are_shown_until_they_conclude_unless_they_fail() {
    scenario("jobs").succeeds();
}

#[test]
fn appearance_and_accessibility() {
    scenario("looks").with_stdin(&json!(figures()).to_string()).succeeds();
}

/// Numbers as the console formats them; the page must format them equally.
fn figures() -> Vec<Value> {
    let given = |formatter: &str, value: Value, text: String| json!({ "how": formatter, "value": value, "text": text });
    let mut entries = Vec::new();
    for digits in [
        0.0, 0.04, 0.25, 0.4, 1.0, 2.25, 2.5, 5.5, 9.94, 9.96, 42.0, 99.94, 99.96, 512.0, 100.5, 998.4, 999.7,
    ] {
        for scale in [1.0, 1e3, 1e6, 1e9, 1024.0, 1024.0 * 1024.0] {
            let value = digits * scale;
            entries.push(given("count", json!(value), figures::count(value)));
            entries.push(given("bytes", json!(value), figures::bytes(value)));
        }
    }
    for nanoseconds in [0, 999, 1000, 85_000, 999_499, 999_500, 1_234_567, 9_949_999, 31_000_000, 999_600_000]
    {
        entries.push(given("time", json!(nanoseconds), figures::time(nanoseconds)));
    }
    for share in [0.0, 0.001, 0.005, 0.015, 0.42, 0.996, 1.0] {
        entries.push(given("share", json!(share), figures::share(share)));
    }
    for seconds in [0, 9, 59, 60, 700, 3599, 11_100, 86_399, 200_000] {
        entries.push(given("age", json!(seconds * 1000), figures::age(seconds * 1_000_000_000)));
    }
    for size in [0, 1000, 1024, 1536, 10 << 20, 1 << 40, (1 << 40) + 1, 5 << 50] {
        entries.push(given("exactSize", json!(size), settings::exact_size(size)));
    }
    for limits in [
        &[][..],
        &[("iops-total", 1000), ("iops-total-max", 5000), ("iops-total-max-length", 5)],
        &[("bps-read", 10 << 20), ("bps-read-max-length", 1), ("iops-write", 7)],
        &[("bps-total", 1_000_000), ("bps-total-max", 3 << 30), ("iops-size", 4096)],
    ] {
        let limits: figures::SettingValues =
            limits.iter().map(|&(name, value)| (name.to_owned(), value)).collect();
        entries.push(given("limits", json!(limits), figures::limits(&limits)));
    }
    entries
}
