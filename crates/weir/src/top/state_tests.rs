//! `TopState` with simulated keys and reports.

use ratatui::crossterm::event::KeyModifiers;
use serde_json::{Value, json};

use super::*;
use crate::client::{latency, report::DaemonReport};

/// A report of these disks, all in the group `gold`, each with about 1000 more operations and 4 MiB
/// more each second.
pub(in crate::top) fn report(second: u64, disks: &[&str]) -> DaemonReport {
    // Rates rise for twenty seconds, then start again.
    let requests = second * 1000 - 30 * (second % 20) * (20 - second % 20);
    let disk = |name: &&str| {
        let work = |factor: u64| json!({ "requests": requests * factor, "bytes": requests * factor * 4096 });
        json!({
            "name": name, "image": format!("/images/{name}.raw"), "size": 1 << 30, "group": "gold",
            "weight": 100, "cache": "none", "connections": 1,
            "limits": { "iops-total": 1000, "iops-total-max": 5000, "iops-total-max-length": 5 },
            "reads": work(1), "writes": work(0),
            "throttle": {
                "waiting": { "reads": 31, "writes": 0 }, "limited-ns": second * 750_000_000,
                "recent-wait-ns": { "p50": 9_000_000, "p99": 31_000_000, "max": 40_000_000 },
                "wait-ns": { "p50": 8_000_000, "p99": 29_000_000, "max": 55_000_000 },
                "throttle-cause": "iops-total", "buckets": { "iops-total": {
                    "level": 10_000, "capacity": 25_000, "burst-rate-level": 500, "burst-rate-capacity": 500,
                    "burst": { "duration-ns": 6_250_000_000_u64, "balance-percent": 60,
                               "used-up-in-ns": 3_750_000_000_u64, "full-in-ns": 10_000_000_000_u64 }
                } }
            },
            "prefetch": { "mode": "auto", "memory": 8 << 20, "largest-request": 64 << 10, "window-min": 128 << 10,
                          "window-max": 2 << 20, "streams": 256 },
            "read-ahead": { "hit-rate": 0.93, "accuracy": 0.98, "wasted-bytes": 24 << 20, "memory": 3 << 20, "streams": 3 }
        })
    };
    let times = |name: &&str| {
        let bucket = |above_ns: u64, requests: u64| json!({ "above-ns": above_ns, "at-most-ns": above_ns + 2, "requests": requests });
        let latencies = [bucket(850_000, second * 1000), bucket(42_000_000, second * 20)];
        let waits = [bucket(0, second * 1000), bucket(31_000_000, second * 20)];
        json!({ "name": name, "latencies": latencies, "waits": waits })
    };
    let latencies = latency::read(disks.iter().map(times).collect()).unwrap();
    let disks: Vec<Value> = disks.iter().map(disk).collect();
    let gold = json!({
        "name": "gold", "disks": ["vm1"], "weight": 100, "limits": { "bps-total": 20 << 20 },
        "watermark": 90, "enforcement": "scaled", "scale": 3.5
    });
    let report = json!({
        "version": "0.1.0", "uptime-ns": second * 1_000_000_000, "disks": disks, "groups": [gold]
    });
    DaemonReport { latencies, ..DaemonReport::read(&report.to_string()).unwrap() }
}

/// State after this many seconds.
pub(in crate::top) fn watched(seconds: u64, disks: &[&str]) -> TopState {
    let mut state = TopState::new("unix:/run/weir/qmp.sock".to_owned());
    for second in 1..=seconds {
        state.add_report(report(second, disks), Duration::from_secs(second));
    }
    state
}

pub(in crate::top) fn press(state: &mut TopState, code: KeyCode) -> Option<TopAction> {
    state.press(KeyEvent::new(code, KeyModifiers::NONE))
}

pub(in crate::top) fn write(state: &mut TopState, text: &str) {
    for character in text.chars() {
        assert_eq!(press(state, KeyCode::Char(character)), None);
    }
}

fn chosen(state: &TopState) -> &str {
    let rows = state.rows();
    rows[state.selected_row(&rows)].name
}

fn edit(state: &TopState) -> &SettingsEditor {
    match &state.mode {
        TopMode::Edit(edit) => edit,
        other => panic!("{other:?}"),
    }
}

#[test]
fn keys_walk_the_list_and_stop_at_its_ends() {
    let mut state = watched(1, &["vm1", "vm2", "vm3"]);
    state.page_rows = 2;
    let walk = [
        (KeyCode::Up, "gold"),
        (KeyCode::Down, "vm1"),
        (KeyCode::PageDown, "vm3"),
        (KeyCode::Down, "vm3"),
        (KeyCode::Char('k'), "vm2"),
        (KeyCode::Home, "gold"),
        (KeyCode::End, "vm3"),
    ];
    for (key, expect) in walk {
        press(&mut state, key);
        assert_eq!(chosen(&state), expect, "{key:?}");
    }
}

#[test]
fn selection_follows_its_row_or_keeps_its_position() {
    let mut state = watched(1, &["vm1", "vm2", "vm3"]);
    write(&mut state, "jj");
    assert_eq!(chosen(&state), "vm2");
    press(&mut state, KeyCode::Char('r'));
    assert_eq!(chosen(&state), "vm2", "the order is the other one");
    press(&mut state, KeyCode::Char('r'));
    state.add_report(report(2, &["vm1", "vm3"]), Duration::from_secs(2));
    assert_eq!(chosen(&state), "vm3", "in its place");
    state.add_report(report(3, &[]), Duration::from_secs(3));
    assert_eq!(chosen(&state), "gold");
}

#[test]
fn filter_applies_while_typed_and_until_escape() {
    let mut state = watched(1, &["vm1", "vm2", "web"]);
    write(&mut state, "/wq");
    assert_eq!(state.rows().len(), 0, "q is a letter here");
    press(&mut state, KeyCode::Backspace);
    press(&mut state, KeyCode::Enter);
    assert_eq!((chosen(&state), state.rows().len(), &state.mode), ("web", 1, &TopMode::List));
    press(&mut state, KeyCode::Esc);
    assert_eq!(state.rows().len(), 4);
}

#[test]
fn limit_is_edited_sent_and_reported() {
    let mut state = watched(1, &["vm1"]);
    write(&mut state, "jt");
    let listed = "iops-total=1000 iops-total-max=5000 iops-total-max-length=5 group=gold prefetch-memory=8M ";
    assert_eq!(edit(&state).field.text(), listed);
    write(&mut state, "weight=200");
    let Some(TopAction::Change { name, change }) = press(&mut state, KeyCode::Enter) else {
        panic!("{:?}", state.mode)
    };
    assert_eq!((name.as_str(), Value::Object(change.arguments())), ("vm1", json!({ "weight": 200 })));
    assert_eq!(press(&mut state, KeyCode::Enter), None, "once");
    state.finish_edit(Err("weight (200) is too large".to_owned()));
    assert_eq!(edit(&state).error.as_deref(), Some("weight (200) is too large"));
    press(&mut state, KeyCode::Enter);
    state.finish_edit(Ok(()));
    assert_eq!((state.notice.as_deref(), &state.mode), (Some("vm1: weight: 100 → 200"), &TopMode::List));
}

#[test]
fn only_the_users_changes_are_sent() {
    let mut state = watched(1, &["vm1"]);
    write(&mut state, "jt");
    let mut other = report(2, &["vm1"]);
    other.status.disks[0].settings.limits.insert("iops-total".to_owned(), 7);
    state.add_report(other, Duration::from_secs(2));
    write(&mut state, "weight=200");
    let Some(TopAction::Change { change, .. }) = press(&mut state, KeyCode::Enter) else {
        panic!("no change")
    };
    assert_eq!(Value::Object(change.arguments()), json!({ "weight": 200 }));
}

#[test]
fn malformed_input_is_reported_and_not_sent() {
    let mut state = watched(1, &["vm1"]);
    write(&mut state, "jtnonsense");
    assert_eq!(press(&mut state, KeyCode::Enter), None);
    assert_eq!(edit(&state).error.as_deref(), Some("nonsense: is not of the form name=value"));
    press(&mut state, KeyCode::Esc);
    assert_eq!(state.mode, TopMode::List);
    write(&mut state, "t");
    assert_eq!((press(&mut state, KeyCode::Enter), &state.mode), (None, &TopMode::List), "nothing changed");
}

#[test]
fn control_ends_and_stops_from_everywhere() {
    let control = |state: &mut TopState, character| {
        state.press(KeyEvent::new(KeyCode::Char(character), KeyModifiers::CONTROL))
    };
    for key in ["", "t", "/", "?"] {
        let mut state = watched(1, &["vm1"]);
        write(&mut state, key);
        assert_eq!(control(&mut state, 'z'), Some(TopAction::Leave(ExitKey::Stop)));
        assert_eq!(control(&mut state, 'c'), Some(TopAction::Leave(ExitKey::End)));
    }
    assert_eq!(press(&mut watched(1, &["vm1"]), KeyCode::Char('q')), Some(TopAction::Leave(ExitKey::End)));
    // Before the first report.
    let mut empty = TopState::new(String::new());
    write(&mut empty, "jkGgtsr");
    assert_eq!(empty.mode, TopMode::List);
}

#[test]
fn restarted_daemon_is_accepted() {
    let mut state = watched(30, &["vm1"]);
    state.set_unreachable("gone".to_owned());
    assert_eq!(state.rates.of("vm1"), None, "nothing is known of now");
    state.add_report(report(20, &["vm1"]), Duration::from_secs(9));
    assert_eq!((state.query_error.as_deref(), state.rates.of("vm1")), (None, None), "it counts anew");
    state.add_report(report(40, &["vm1"]), Duration::from_secs(10));
    assert_eq!(state.rates.of("vm1").unwrap().iops(), 1000.0);
}
