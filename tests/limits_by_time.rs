//! Schedules: the entry that holds now limits real clients, across restart, upgrade and reload.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::harness::{
    MIB, Scratch, Serve, Weir, nbdsh,
    operator::{find, run_failing, run_ok, socket, status, wait_until},
    text,
};

struct ScheduledGroup {
    scratch: Scratch,
}

impl ScheduledGroup {
    /// A group `g` with 1000 IOPS and a disk `a`, whose entries are these lines.
    fn new(entries: &str) -> Self {
        let group = Self { scratch: Scratch::new() };
        group.scratch.sparse("a.raw", 16 * MIB);
        group.configure(entries);
        group
    }

    fn configure(&self, entries: &str) {
        let image = self.scratch.path("a.raw");
        let config = format!(
            "[daemon]\nqmp = \"{}\"\nnbd = \"unix:{}\"\n\
             [disk.a]\nimage = \"{}\"\nformat = \"raw\"\ngroup = \"g\"\n\
             [group.g]\niops-total = 1000\ntime-zone = \"UTC\"\n{entries}",
            socket(&self.scratch),
            text(&self.scratch.socket("nbd")),
            text(&image)
        );
        self.scratch.file("weir.toml", config);
    }

    fn serve(&self) -> Serve {
        let file = self.scratch.path("weir.toml");
        let serve = Serve::new(&self.scratch).at_given_addresses().arg("--config").arg(file);
        serve.env("WEIR_QMP", socket(&self.scratch))
    }

    fn upgrade(&self, old: Weir) -> Weir {
        let new = self.serve().arg("--takeover").start();
        let (status, log) = old.wait();
        assert!(status.success(), "{log}");
        new
    }

    fn group(&self) -> Value {
        find(&status(&self.scratch, "0"), "groups", "g").clone()
    }

    fn assert_holds(&self, when: &str) {
        let group = self.group();
        assert_eq!(group["limits"], json!({ "iops-total": 100 }), "{group}");
        assert_eq!(group["configured-limits"], json!({ "iops-total": 1000 }), "{group}");
        assert_eq!(group["schedule"]["when"], when, "{group}");
        assert!(
            group["schedule"]["until"].as_str().is_some_and(|until| until.ends_with(":00+00:00")),
            "{group}"
        );
    }
}

/// Times from `from` to `to` minutes after the present one, in UTC.
fn times(from: u64, to: u64) -> String {
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let time = |minutes: u64| {
        let minute = (now_s / 60 + minutes) % (24 * 60);
        format!("{:02}:{:02}", minute / 60, minute % 60)
    };
    format!("{}-{}", time(from), time(to))
}

fn entry(when: &str) -> String {
    format!("[[group.g.schedule]]\nwhen = \"{when}\"\niops-total = 100\n")
}

#[test]
fn entry_that_holds_limits_clients() {
    // From two hours ago to in two hours.
    let when = times(22 * 60, 26 * 60);
    let scheduled = ScheduledGroup::new(&entry(&when));
    let daemon = scheduled.serve().start();
    scheduled.assert_holds(&when);
    let script = "
import time
h.connect_uri(arguments[0])
began = time.monotonic()
for number in range(60):
    h.aio_pread(nbd.Buffer(4096), number * 8192, lambda error: 1)
while h.aio_in_flight():
    h.poll(-1)
print(time.monotonic() - began)
";
    let uri = format!("nbd+unix:///a?socket={}", text(&scheduled.scratch.socket("nbd")));
    let seconds: f64 = nbdsh(script, [uri]).trim().parse().expect("seconds");
    // A tenth of a second's worth is admitted at once.
    assert!(seconds >= 49.0 / 100.0, "60 reads took {seconds:.3} s");
    let shown = run_ok(&scheduled.scratch, &["throttle", "g"]);
    assert!(
        shown.contains("in force: iops 100") && shown.contains(&format!("schedule: {when} until ")),
        "{shown}"
    );
    // A change sets the configured limit; the entry still holds.
    run_ok(&scheduled.scratch, &["throttle", "g", "--iops-total", "500"]);
    assert_eq!(scheduled.group()["configured-limits"], json!({ "iops-total": 500 }));
    assert_eq!(scheduled.group()["limits"], json!({ "iops-total": 100 }));
    let refused =
        run_failing(&scheduled.scratch, &["throttle", "g", "--iops-total", "0", "--iops-read", "5"]);
    assert!(refused.contains("iops-total (100) cannot be set together with iops-read (5)"), "{refused}");
    // The config file is in force again in a new process.
    let daemon = scheduled.upgrade(daemon);
    scheduled.assert_holds(&when);
    daemon.stop();
    let daemon = scheduled.serve().start();
    scheduled.assert_holds(&when);
    // Without entries, the configured limit holds.
    scheduled.configure("");
    let error = run_failing(&scheduled.scratch, &["reload"]);
    assert!(error.contains("time-zone = \"UTC\": is not used, because there is no schedule"), "{error}");
    scheduled.configure(&entry(&times(60, 120)));
    run_ok(&scheduled.scratch, &["reload"]);
    let group = scheduled.group();
    assert_eq!(group["limits"], json!({ "iops-total": 1000 }), "{group}");
    assert_eq!((&group["configured-limits"], &group["schedule"]["when"]), (&Value::Null, &Value::Null));
    daemon.stop();
}

#[test]
fn entry_begins_at_its_minute() {
    let scheduled = ScheduledGroup::new("");
    let when = times(1, 120);
    scheduled.configure(&entry(&when));
    let daemon = scheduled.serve().start();
    wait_until(&scheduled.scratch, |status| find(status, "groups", "g")["limits"]["iops-total"] == 100);
    scheduled.assert_holds(&when);
    daemon.stop();
}
