//! Limits for each GiB of a disk: they follow every resize, and survive restart and upgrade.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, Scratch, Serve, Weir, nbdsh,
    operator::{find, run_failing, run_ok, socket, status},
    text,
};

const GIB: u64 = 1024 * MIB;

/// A daemon with a raw disk `a` of 2 GiB, whose config file has these lines.
struct SizedDisk {
    scratch: Scratch,
}

impl SizedDisk {
    fn new(limits: &str) -> Self {
        let scratch = Scratch::new();
        let image = scratch.sparse("a.raw", 2 * GIB);
        let sized = Self { scratch };
        sized.configure(limits, text(&image));
        sized
    }

    fn configure(&self, limits: &str, image: &str) {
        let daemon = format!(
            "[daemon]\nqmp = \"{}\"\nnbd = \"unix:{}\"\n",
            socket(&self.scratch),
            text(&self.scratch.socket("nbd"))
        );
        self.scratch
            .file("weir.toml", format!("{daemon}[disk.a]\nimage = \"{image}\"\nformat = \"raw\"\n{limits}"));
    }

    fn serve(&self) -> Serve {
        let file = self.scratch.path("weir.toml");
        Serve::new(&self.scratch)
            .at_given_addresses()
            .arg("--config")
            .arg(file)
            .env("WEIR_QMP", socket(&self.scratch))
    }

    fn upgrade(&self, old: Weir) -> Weir {
        let new = self.serve().arg("--takeover").start();
        let (status, log) = old.wait();
        assert!(status.success(), "{log}");
        new
    }

    fn resize(&self, size: u64) {
        Qmp::negotiated(&self.scratch.socket("qmp"))
            .command("block_resize", json!({ "node-name": "a", "size": size }));
    }

    fn disk(&self) -> Value {
        find(&status(&self.scratch, "0"), "disks", "a").clone()
    }

    fn rate(&self) -> Value {
        self.disk()["limits"]["iops-total"].clone()
    }

    /// Seconds until this many reads, sent at once, are answered.
    fn seconds_of(&self, reads: u32) -> f64 {
        let script = "
import time
h.connect_uri(arguments[0])
began = time.monotonic()
for number in range(int(arguments[1])):
    h.aio_pread(nbd.Buffer(4096), number * 8192, lambda error: 1)
while h.aio_in_flight():
    h.poll(-1)
print(time.monotonic() - began)
";
        let uri = format!("nbd+unix:///a?socket={}", text(&self.scratch.socket("nbd")));
        nbdsh(script, [uri, reads.to_string()]).trim().parse().expect("seconds")
    }
}

#[test]
fn limits_follow_each_resize() {
    let sized = SizedDisk::new("iops-total-per-gib = 100\niops-total-per-gib-max = 350\n");
    let daemon = sized.serve().start();
    assert_eq!(sized.rate(), 200);
    assert_eq!(
        sized.disk()["configured-limits"],
        json!({ "iops-total-per-gib": 100, "iops-total-per-gib-max": 350 })
    );
    // All but a tenth of a second's worth is admitted at the rate.
    let seconds = sized.seconds_of(100);
    assert!(seconds >= 79.0 / 200.0, "100 reads took {seconds:.3} s");
    for (size, rate) in [(GIB, 100), (3 * GIB, 300), (4 * GIB, 350), (GIB / 2, 50)] {
        sized.resize(size);
        assert_eq!(sized.rate(), rate, "{size} bytes");
    }
    let seconds = sized.seconds_of(25);
    assert!(seconds >= 19.0 / 50.0, "25 reads took {seconds:.3} s");
    // A new process, and a restarted one, have the size and the rate again.
    let daemon = sized.upgrade(daemon);
    assert_eq!(sized.rate(), 50);
    sized.resize(GIB);
    assert_eq!(sized.rate(), 100);
    daemon.stop();
    let daemon = sized.serve().start();
    assert_eq!(sized.rate(), 100);
    // A file that is resized from outside counts once its size is noticed, by a new client.
    let image = sized.scratch.path("a.raw");
    fs::OpenOptions::new().write(true).open(&image).expect("the image").set_len(2 * GIB).expect("grown");
    sized.seconds_of(1);
    assert_eq!(sized.rate(), 200);
    sized.configure("iops-total-per-gib = 7\n", text(&image));
    run_ok(&sized.scratch, &["reload"]);
    assert_eq!(sized.rate(), 14);
    daemon.stop();
}

#[test]
fn names_of_cinder_and_contradictions() {
    let sized = SizedDisk::new("iops-total = 500\n");
    let daemon = sized.serve().start();
    let scratch = &sized.scratch;
    let changed = run_ok(
        scratch,
        &["throttle", "a", "--total_iops_sec_per_gb", "30", "--total-iops-sec-per-gb-min", "100"],
    );
    for line in
        ["iops-total: 500 → none", "iops-total-per-gib: none → 30", "iops-total-per-gib-min: none → 100"]
    {
        assert!(changed.contains(line), "{changed}");
    }
    assert_eq!(sized.rate(), 100);
    let shown = run_ok(scratch, &["throttle", "a"]);
    assert!(shown.contains("iops-total-per-gib      30") && shown.contains("in force: iops 100"), "{shown}");
    let refused = run_failing(scratch, &["throttle", "a", "--iops-total", "5"]);
    let rule = "iops-total-per-gib (30) cannot be set together with iops-total (5)";
    assert!(refused.contains(rule), "{refused}");
    assert_eq!(sized.rate(), 100, "a refused change has no effect");
    run_ok(scratch, &["group", "add", "g"]);
    let refused = run_failing(scratch, &["throttle", "g", "--bps-read-per-gib", "1M"]);
    assert!(refused.contains("follows the size of a disk, and a group has none"), "{refused}");
    run_ok(scratch, &["throttle", "a", "--iops-total-per-gib", "0"]);
    assert_eq!((sized.rate(), &sized.disk()["configured-limits"]), (Value::Null, &Value::Null));
    daemon.stop();
}
