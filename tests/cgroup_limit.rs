//! `weir cgroup limit` on the host's own kernel; features of cgroup v2 are tested in a guest
//! (`tests/guest/cgroups`). Needs root.

use std::{fs, time::Instant};

use crate::harness::{BlkioGroup, MIB, Scratch, TestClient, assert_contains, text, weir};

fn limit(scratch: &Scratch, group: &str) -> TestClient {
    let limits_file = scratch.path("cgroups.json");
    weir(&["cgroup", "limit", "--limits", text(&limits_file), "--device", text(&scratch.path("")), group])
}

#[track_caller]
fn refused(status: i32, client: TestClient) -> String {
    let outcome = client.run();
    assert_eq!(outcome.code(), status, "{}", outcome.stderr());
    outcome.stderr()
}

#[test]
fn v1_limit_throttles_direct_writes_and_lists_escapes() {
    let Some(group) = BlkioGroup::new("rates") else { return };
    let scratch = Scratch::new();
    let stdout = limit(&scratch, &group.name).args(["--bps-write", "2M", "--iops-read", "500"]).succeeds();
    assert_contains(
        &stdout,
        &[&group.name, "bps-write 2M, iops-read 500", "note: cgroup v1", "buffered writes"],
    );
    assert_contains(&group.read("blkio.throttle.write_bps_device"), &[" 2097152\n"]);
    assert_contains(&group.read("blkio.throttle.read_iops_device"), &[" 500\n"]);
    let script = format!(
        "echo $$ > {0}/cgroup.procs; dd if=/dev/zero of={1} bs=256K count=8 oflag=direct \
         conv=notrunc 2>/dev/null",
        group.directory.display(),
        scratch.filled("file", 2 * MIB).display()
    );
    let begin = Instant::now();
    TestClient::new("sh").args(["-c", &script]).succeeds();
    let seconds = begin.elapsed().as_secs_f64();
    // Slices of a tenth of a second: one may pass immediately, and the last one early.
    let max = 2.0 * MIB as f64 * (seconds + 0.2) * 1.05;
    assert!(2 * MIB <= max as u64, "2 MiB in {seconds:.3} s");
    let report = limit(&scratch, &group.name).args(["--remove", "--json"]).json();
    assert!(report["bps-write"].is_null() && report["iops-read"].is_null(), "{report}");
    assert_eq!(group.read("blkio.throttle.write_bps_device"), "");
}

#[test]
fn options_without_v1_support_are_rejected() {
    let Some(group) = BlkioGroup::new("refusals") else { return };
    let scratch = Scratch::new();
    for (options, expect) in [
        (&["--bps-write", "2M", "--bps-write-max", "4M"][..], "bursts"),
        (&["--iops-total", "100"][..], "limits on reads and writes together"),
        (&["--bps-write", "2M", "--watermark", "90"][..], "watermarks"),
        (&["--bps-write", "2M", "--group", "tenant"][..], "groups"),
        (&["--weight", "200"][..], "weights"),
    ] {
        let stderr = refused(1, limit(&scratch, &group.name).args(options));
        assert_contains(&stderr, &["weir: ", expect, "need cgroup v2"]);
        assert_eq!(group.read("blkio.throttle.write_bps_device"), "");
    }
    assert!(!scratch.path("cgroups.json").exists());
    let stderr = refused(1, weir(&["cgroup", "watch", "--limits", text(&scratch.path("cgroups.json"))]));
    assert_contains(&stderr, &["need cgroup v2", "weir cgroup limit"]);
    let limits_file = scratch.path("cgroups.json");
    let stderr = refused(
        1,
        weir(&["serve", "null:1M", "--nbd", "127.0.0.1:0", "--cgroup-limits", text(&limits_file)]),
    );
    assert_contains(&stderr, &["need cgroup v2"]);
}

#[test]
fn usage_errors_have_status_2() {
    let Some(group) = BlkioGroup::new("use") else { return };
    let scratch = Scratch::new();
    assert_contains(&limit(&scratch, &group.name).succeeds(), &[&group.name, "no limit"]);
    assert_contains(
        &refused(2, limit(&scratch, &group.name).args(["--remove", "--bps-read", "1M"])),
        &["--remove"],
    );
    assert_contains(
        &refused(2, limit(&scratch, &group.name).args(["--weight", "0"])),
        &["--weight", "1..=10000"],
    );
    assert_contains(&refused(1, limit(&scratch, &group.name).arg("--remove")), &["has no limit on"]);
    assert_contains(
        &refused(1, limit(&scratch, "/").args(["--bps-read", "1M"])),
        &["the root cgroup has no limits"],
    );
    assert_contains(
        &refused(1, limit(&scratch, "weir-no-such-group").args(["--bps-read", "1M"])),
        &["weir-no-such-group"],
    );
    let contradiction =
        refused(1, limit(&scratch, &group.name).args(["--bps-read", "2M", "--bps-read-max", "1M"]));
    assert_contains(&contradiction, &["bps-read-max", &group.name]);
    fs::write(scratch.path("cgroups.json"), "{").unwrap();
    let broken = refused(1, limit(&scratch, &group.name).args(["--bps-read", "2M"]));
    assert_contains(&broken, &["cgroups.json: these limits are invalid", "correct the file"]);
    let no_disk =
        refused(1, weir(&["cgroup", "limit", &group.name, "--device", "/proc", "--bps-read", "1M"]));
    assert_contains(&no_disk, &["/proc"]);
}
