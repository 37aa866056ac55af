//! Jobs in the overview, the stream and `/api/v1/jobs`, and in `weir status`.

use serde_json::{Value, json};

use super::{HttpDaemon, check};
use crate::harness::{
    MIB, Scratch, Serve, assert_contains,
    operator::{run_ok, socket, status},
    poll_until, text,
};

const SIZE: u64 = 4 * MIB;

#[test]
fn job_is_shown_with_its_throttle_cause_and_its_failure() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", SIZE);
    let config = format!(
        "[group.gold]\nbps-total = \"64K\"\n\
         [disk.vm1]\nimage = {:?}\nformat = \"raw\"\ngroup = \"gold\"\n",
        text(&image)
    );
    let file = scratch.file("weir.toml", config);
    let serve = Serve::new(&scratch).args(["--config", text(&file), "--qmp", &socket(&scratch)]);
    let root = scratch.path("");
    let daemon = HttpDaemon::start(serve.args(["--image-root", text(&root)]));
    let mut stream = daemon.listen();
    assert_eq!(stream.next("overview")["jobs"], json!([]));
    assert_eq!(daemon.get("/api/v1/jobs").json(), json!([]));

    let target = scratch.path("backup.raw");
    run_ok(&scratch, &["backup", "vm1", "--to", text(&target), "--detach"]);
    let job = || daemon.get("/api/v1/jobs").json()[0].clone();
    let has_cause = |job: &Value, level: &str, name: &str| {
        job["throttle-cause"] == json!({ "level": level, "name": name, "limit": "bps-total" })
    };
    let running = poll_until(|| Some(job()).filter(|job| has_cause(job, "group", "gold")));
    let known = [("id", "backup-vm1"), ("kind", "backup"), ("disk", "vm1"), ("group", "gold")];
    for (key, value) in known {
        assert_eq!(running[key], value, "{key}");
    }
    assert_eq!((&running["state"], &running["total-bytes"]), (&"running".into(), &SIZE.into()));
    assert_eq!(running["old-data-bytes"], 0);
    let described = daemon.get("/api/v1/openapi.json").json();
    let schemas = &described["components"]["schemas"];
    check(&schemas["Overview"], schemas, &daemon.overview(), "overview");
    let delta = loop {
        let delta = stream.next("delta");
        if delta["jobs"][0]["state"] == "running" {
            break delta;
        }
    };
    check(&schemas["Job"], schemas, &delta["jobs"][0], "delta.jobs");
    let printed = poll_until(|| {
        let printed = run_ok(&scratch, &["status", "--interval", "0"]);
        printed.contains("gold: bps-total").then_some(printed)
    });
    assert_contains(&printed, &["backup-vm1", "HELD BY", "spare"]);
    assert_eq!(status(&scratch, "0")["jobs"][0]["group"], "gold");
    // Its own limit is lower.
    run_ok(&scratch, &["job", "set", "backup-vm1", "--bps-total", "1K"]);
    poll_until(|| has_cause(&job(), "job", "backup-vm1").then_some(()));

    // Reads fail beyond the end of the file.
    std::fs::OpenOptions::new().write(true).open(&image).and_then(|file| file.set_len(0)).expect("truncated");
    run_ok(&scratch, &["throttle", "gold", "--bps-total", "0"]);
    run_ok(&scratch, &["job", "set", "backup-vm1", "--bps-total", "0"]);
    let failure = loop {
        let event = stream.next("event");
        if event["kind"] == "job_failed" {
            break event;
        }
    };
    assert_eq!((&failure["disk"], &failure["data"]["job"]), (&"vm1".into(), &"backup-vm1".into()));
    let failed = poll_until(|| Some(job()).filter(|job| job["state"] == "concluded"));
    assert_eq!(failed["error"], failure["data"]["reason"]);
    assert_eq!(failed.get("throttle-cause"), None);
    check(&schemas["Job"], schemas, &failed, "failed");
    run_ok(&scratch, &["job", "dismiss", "backup-vm1"]);
    while stream.next("delta")["removed"]["jobs"] != json!(["backup-vm1"]) {}
    assert_eq!(daemon.overview()["jobs"], json!([]));
    daemon.weir.stop();
}
