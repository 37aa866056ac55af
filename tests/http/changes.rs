//! Changes over HTTP: the token, atomicity, and the effects on other clients and on the config
//! file.

use std::{process::Command, thread, time::Instant};

use super::*;
use crate::harness::WEIR;

#[test]
fn changes_are_atomic_and_need_the_token() {
    let scratch = Scratch::new();
    let serve =
        Serve::new(&scratch).args(["memory:1M", "null:1M", "--group", "gold", "--iops-total", "1000"]);
    let daemon = HttpDaemon::with_token(&scratch, serve);
    assert_eq!(daemon.overview()["access"], "change");
    let (of_group, of_disk) = ("/api/v1/groups/gold/limits", "/api/v1/disks/memory/limits");
    let limits = || entry_named(&daemon.overview(), "groups", "gold")["limits"].clone();
    let response =
        daemon.change(of_group, TOKEN, &json!({"iops-total": "2048", "bps-read": "4K", "weight": 200}));
    assert_eq!(
        (response.status, &response.json()["limits"]),
        (200, &json!({"iops-total": 2048, "bps-read": 4096}))
    );
    assert_eq!(response.json()["weight"], 200);
    let line = daemon.weir.wait_for_log("changed over HTTP");
    assert!(line.contains("by=127.0.0.1") && line.contains("gold"), "{line}");
    let changed = poll_until(|| {
        let events = daemon.get("/api/v1/events").json();
        events.as_array().unwrap().iter().find(|event| event["kind"] == "config_changed").cloned()
    });
    let by = &changed["data"]["by"];
    assert_eq!(by["kind"], "http");
    assert!(by["client"].as_str().unwrap().starts_with("127.0.0.1"), "{by}");
    // An integer in floating-point notation.
    assert_eq!(daemon.change(of_group, TOKEN, &json!({"iops-total": 2048.0})).status, 200);
    let before = limits();
    for (body, why) in [
        (json!({"bps-read": 1, "iops-total-max": 7}), "iops-total-max (7) is below iops-total (2048)"),
        (json!({"iops-total": 1, "iops-totel": 2}), "did you mean iops-total?"),
        (json!({"iops-total": -1}), "out of range"),
        (json!({"iops-total": 1.5}), "expected: integer"),
        (json!({"iops-total": "0.4"}), "iops-total=0.4 is not a whole number of 0 or more"),
        (json!({"iops-total": "8M"}), "iops-total=8M is not a plain number; a count takes no suffix"),
        (json!({"bps-total": "0.4"}), "bps-total=0.4 is less than a byte"),
        (json!({"group": "gold"}), "cannot be set here"),
        (json!([1]), "not a JSON object"),
    ] {
        let message = daemon.change(of_group, TOKEN, &body).error(422);
        assert!(message.starts_with("weir: ") && message.contains(why), "{message}");
    }
    let head = format!("Authorization: Bearer {TOKEN}\r\n");
    assert!(daemon.send("PATCH", of_group, &head, "{\"iops").error(422).contains("not a JSON object"));
    let long = format!("{{\"iops-total\": 1{}}}", " ".repeat(64 << 10));
    assert!(daemon.send("PATCH", of_group, &head, &long).error(413).contains("longer than 16384"));
    assert!(
        daemon.change("/api/v1/groups/memory/limits", TOKEN, &json!({})).error(404).contains("group memory")
    );
    let message = daemon.send("PATCH", of_group, "", "{\"iops-total\": 1}").error(401);
    assert!(message.contains("a token is required"), "{message}");
    assert!(daemon.change(of_group, &TOKEN[1..], &json!({"iops-total": 1})).error(403).contains("is wrong"));
    assert_eq!(limits(), before);
    // An empty change succeeds, which verifies the token.
    assert_eq!(daemon.change(of_disk, TOKEN, &json!({})).json()["name"], "memory");
    daemon.weir.stop();
}

#[test]
fn changes_without_a_token_are_rejected() {
    let scratch = Scratch::new();
    let daemon = HttpDaemon::start(Serve::new(&scratch).arg("memory:1M"));
    let message = daemon.change("/api/v1/disks/memory/limits", TOKEN, &json!({"iops-total": 1})).error(403);
    assert!(message.contains("start weir with --http-token-file"), "{message}");
    assert_eq!(entry_named(&daemon.overview(), "disks", "memory")["limits"], json!({}));
}

#[test]
fn stream_shows_changes_of_other_clients() {
    let scratch = Scratch::new();
    let control = scratch.socket("the-control");
    let qmp = format!("unix:{}", text(&control));
    let daemon = HttpDaemon::start(Serve::new(&scratch).args(["memory:1M", "--qmp", &qmp]));
    let mut events = daemon.listen();
    assert_eq!(entry_named(&events.next("overview"), "disks", "memory")["limits"], json!({}));
    Qmp::negotiated(&control).command("x-weir-set", json!({"name": "memory", "iops-total": 500}));
    let limits = loop {
        let delta = events.next("delta");
        let disks = delta["disks"].as_array();
        if let Some(limits) = disks.and_then(|disks| disks.first()?.get("limits").cloned()) {
            break limits;
        }
    };
    assert_eq!(limits, json!({"iops-total": 500}));
    daemon.weir.nbdsh("memory", "for i in range(10): h.pread(512, 512 * i)");
    let reads = loop {
        let delta = events.next("delta");
        let reads = delta["disks"][0]["reads"]["requests"].as_u64();
        if reads >= Some(10) {
            break reads;
        }
    };
    assert_eq!(reads, Some(10));
    daemon.weir.stop();
}

#[test]
fn upgraded_daemon_serves_the_page() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 1 << 20);
    let control = format!("unix:{}", text(&scratch.socket("the-control")));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let page = format!("127.0.0.1:{port}");
    let socket = scratch.socket("nbd");
    let serve = || {
        let nbd = format!("unix:{}", text(&socket));
        Serve::new(&scratch)
            .at_given_addresses()
            .args([text(&image), "--nbd", &nbd, "--http", &page])
            .env("WEIR_QMP", &control)
    };
    let old = serve().start();
    let new = serve().arg("--takeover").start();
    let (status, log) = old.wait();
    assert!(status.success(), "{log}");
    let daemon = HttpDaemon { weir: new, address: page };
    assert_eq!(entry_named(&daemon.overview(), "disks", "disk")["size"], 1 << 20);
    daemon.weir.stop();
}

#[test]
fn config_is_checked_and_later_changes_are_named() {
    let scratch = Scratch::new();
    let token = token_file(&scratch);
    let control = scratch.socket("the-control");
    let config = |names: &str| {
        let content = format!(
            "[daemon]\n\
             http = \"127.0.0.1:0\"\n\
             http-token-file = {:?}\n\
             http-name = {names}\n\
             nbd = {:?}\n\
             qmp = {:?}\n\
             [disk.a]\n\
             image = \"memory:1M\"\n",
            text(&token),
            format!("unix:{}", text(&scratch.socket("nbd"))),
            format!("unix:{}", text(&control)),
        );
        scratch.file("weir.toml", content)
    };
    let file = config("[\"one\", \"two.example.org\"]");
    let checked = Command::new(WEIR).args(["check-config", text(&file)]).output().unwrap();
    assert!(checked.status.success(), "{checked:?}");
    let weir = Serve::new(&scratch).at_given_addresses().args(["--config", text(&file)]).start();
    config("\"three\"");
    let (_, message) = Qmp::negotiated(&control).command_error("x-weir-reload", json!({}));
    assert!(message.contains("weir.toml:4: daemon.http-name = \"three\": cannot be changed"), "{message}");
    weir.stop();
    fs::remove_file(&token).unwrap();
    let checked = Command::new(WEIR).args(["check-config", text(&file)]).output().unwrap();
    let stderr = String::from_utf8(checked.stderr).unwrap();
    assert!(!checked.status.success() && stderr.contains("http-token-file"), "{stderr}");
    config("\"http://wrong\"");
    let checked = Command::new(WEIR).args(["check-config", text(&file)]).output().unwrap();
    assert!(String::from_utf8(checked.stderr).unwrap().contains("is not a host name"));
}

#[test]
fn previews_are_serialized_and_change_nothing() {
    let (scratch, begin) = (Scratch::new(), Instant::now());
    let serve = Serve::new(&scratch).args(["memory:16M", "--iops-total", "2000"]);
    let daemon = HttpDaemon::with_token(&scratch, serve);
    let head = format!("Authorization: Bearer {TOKEN}\r\n");
    let preview = |body: &str| daemon.send("POST", "/api/v1/disks/memory/preview", &head, body);
    let none = preview("{\"iops-total\": 100}").json();
    assert_eq!((&none["requests"], &none["now"], &none["then"]), (&json!(0), &json!(null), &json!(null)));
    daemon.weir.nbdsh("memory", "for i in range(1000): h.pread(4096, 4096 * i)");
    // The recorder processes the requests with a delay.
    let prediction = poll_until(|| {
        Some(preview("{\"iops-total\": 10}").json()).filter(|prediction| prediction["requests"] == 1000)
    });
    // The reported period is not longer than the daemon has run.
    let (seconds, max) = (prediction["seconds"].as_f64().unwrap(), begin.elapsed().as_secs_f64());
    assert!(seconds > 0.0 && seconds <= max * 1.001, "{seconds} of {max}");
    // Sequential requests, so the rate is that of the limit.
    let rate = prediction["then"]["iops"].as_f64().unwrap();
    assert!((rate / 10.0 - 1.0).abs() < 0.1, "{prediction}");
    assert!(preview("{\"iops-total-max\": 1}").error(422).contains("is below iops-total (2000)"));
    assert_eq!(daemon.send("POST", "/api/v1/disks/memory/preview", "", "{}").status, 401);
    let statuses = thread::scope(|scope| {
        let all: Vec<_> = (1..=8)
            .map(|rate| scope.spawn(move || preview(&format!("{{\"iops-total\": {rate}}}")).status))
            .collect();
        all.into_iter().map(|handle| handle.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(
        statuses.iter().all(|status| [200, 409].contains(status)) && statuses.contains(&200),
        "{statuses:?}"
    );
    assert_eq!(entry_named(&daemon.overview(), "disks", "memory")["limits"], json!({"iops-total": 2000}));
    daemon.weir.stop();
}

/// Sixteen requests in flight at limits far below the speed of the storage, so that a slow host has
/// little effect on the waits. The accuracy of the prediction is a row of the bench,
/// `preview-predicts`.
#[test]
fn preview_predicts_the_waits() {
    let scratch = Scratch::new();
    let control = scratch.socket("the-control");
    let limits = [("a", 25_u32, "80"), ("b", 100, "240"), ("c", 400, "800")];
    let mut serve = Serve::new(&scratch).args(["--qmp", &format!("unix:{}", text(&control))]);
    for (name, ..) in limits {
        serve = serve.args(["memory:16M", "--name", name]);
    }
    let daemon = HttpDaemon::with_token(&scratch, serve.args(["--delay", "read=1ms"]));
    let load = |name: &str, count: &str| {
        let load = ["bench", "-d", "16", "-s", "4K", "--random", "--count", count];
        TestClient::new(WEIR).args(load).arg(daemon.weir.uri(name)).succeeds();
    };
    let head = format!("Authorization: Bearer {TOKEN}\r\n");
    let mut waits = Vec::new();
    for (name, limit, count) in limits {
        // Requests may be merged, and are counted separately.
        load(name, "600");
        let (path, body) = (format!("/api/v1/disks/{name}"), json!({ "iops-total": limit }));
        let preview = || daemon.send("POST", &format!("{path}/preview"), &head, &body.to_string()).json();
        let prediction = poll_until(|| Some(preview()).filter(|said| said["requests"] == 600));
        assert_eq!(daemon.change(&format!("{path}/limits"), TOKEN, &body).status, 200);
        load(name, count);
        // Only requests that the limit applied to are counted here.
        let status = Qmp::negotiated(&control).command("x-weir-query-status", json!({}));
        let measured = &entry_named(&status, "disks", name)["throttle"]["wait-ns"];
        for (part, of_said) in [("p50", "wait-p50-ns"), ("p99", "wait-p99-ns")] {
            let (measured, predicted) =
                (measured[part].as_f64().unwrap(), prediction["then"][of_said].as_f64().unwrap());
            assert!(
                predicted / 4.0 < measured && measured < predicted * 4.0,
                "{name}, {part}: {measured} measured, {predicted} predicted"
            );
        }
        waits.push((prediction["then"]["wait-p50-ns"].as_u64(), measured["p50"].as_u64()));
    }
    // The order is the same: a quarter of the limit is four times the wait.
    assert!(waits.windows(2).all(|pair| pair[0].0 > pair[1].0 && pair[0].1 > pair[1].1), "{waits:?}");
    daemon.weir.stop();
}
