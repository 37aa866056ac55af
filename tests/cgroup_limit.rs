//! `weir cgroup limit` on this machine's own kernel; what needs cgroup v2 is tested in a guest
//! (`tests/guest/cgroups`). Needs root.

use std::{fs, time::Instant};

use crate::harness::{BlkioGroup, Client, MIB, Scratch, assert_says, text, weir};

fn limit(scratch: &Scratch, group: &str) -> Client {
    let kept = scratch.path("cgroups.json");
    weir(&["cgroup", "limit", "--limits", text(&kept), "--device", text(&scratch.path("")), group])
}

#[track_caller]
fn refused(status: i32, client: Client) -> String {
    let outcome = client.run();
    assert_eq!(outcome.code(), status, "{}", outcome.said());
    outcome.said()
}

#[test]
fn a_limit_of_v1_holds_direct_writes_and_says_what_it_misses() {
    let Some(group) = BlkioGroup::new("rates") else { return };
    let scratch = Scratch::new();
    let said = limit(&scratch, &group.name).args(["--bps-write", "2M", "--iops-read", "500"]).succeeds();
    assert_says(&said, &[&group.name, "bps-write 2M, iops-read 500", "note: cgroup v1", "buffered writes"]);
    assert_says(&group.read("blkio.throttle.write_bps_device"), &[" 2097152\n"]);
    assert_says(&group.read("blkio.throttle.read_iops_device"), &[" 500\n"]);
    let script = format!(
        "echo $$ > {0}/cgroup.procs; dd if=/dev/zero of={1} bs=256K count=8 oflag=direct conv=notrunc 2>/dev/null",
        group.directory.display(),
        scratch.filled("file", 2 * MIB).display()
    );
    let begin = Instant::now();
    Client::new("sh").args(["-c", &script]).succeeds();
    let seconds = begin.elapsed().as_secs_f64();
    // Slices of a tenth of a second: one may pass at once, and the last early.
    let most = 2.0 * MIB as f64 * (seconds + 0.2) * 1.05;
    assert!(2 * MIB <= most as u64, "2 MiB in {seconds:.3} s");
    let said = limit(&scratch, &group.name).args(["--remove", "--json"]).json();
    assert!(said["bps-write"].is_null() && said["iops-read"].is_null(), "{said}");
    assert_eq!(group.read("blkio.throttle.write_bps_device"), "");
}

#[test]
fn what_v1_cannot_do_is_refused_and_nothing_is_changed() {
    let Some(group) = BlkioGroup::new("refusals") else { return };
    let scratch = Scratch::new();
    for (asked, what) in [
        (&["--bps-write", "2M", "--bps-write-max", "4M"][..], "bursts"),
        (&["--iops-total", "100"][..], "limits on reads and writes together"),
        (&["--bps-write", "2M", "--watermark", "90"][..], "watermarks"),
        (&["--bps-write", "2M", "--group", "tenant"][..], "groups"),
        (&["--weight", "200"][..], "weights"),
    ] {
        let said = refused(1, limit(&scratch, &group.name).args(asked));
        assert_says(&said, &["weir: ", what, "need cgroup v2"]);
        assert_eq!(group.read("blkio.throttle.write_bps_device"), "");
    }
    assert!(!scratch.path("cgroups.json").exists());
    let said = refused(1, weir(&["cgroup", "watch", "--limits", text(&scratch.path("cgroups.json"))]));
    assert_says(&said, &["need cgroup v2", "weir cgroup limit"]);
    let kept = scratch.path("cgroups.json");
    let said =
        refused(1, weir(&["serve", "null:1M", "--nbd", "127.0.0.1:0", "--cgroup-limits", text(&kept)]));
    assert_says(&said, &["need cgroup v2"]);
}

#[test]
fn wrong_use_is_told_from_failure() {
    let Some(group) = BlkioGroup::new("use") else { return };
    let scratch = Scratch::new();
    assert_says(&limit(&scratch, &group.name).succeeds(), &[&group.name, "no limit"]);
    assert_says(
        &refused(2, limit(&scratch, &group.name).args(["--remove", "--bps-read", "1M"])),
        &["--remove"],
    );
    assert_says(
        &refused(2, limit(&scratch, &group.name).args(["--weight", "0"])),
        &["--weight", "1..=10000"],
    );
    assert_says(&refused(1, limit(&scratch, &group.name).arg("--remove")), &["has no limit on"]);
    assert_says(
        &refused(1, limit(&scratch, "/").args(["--bps-read", "1M"])),
        &["the root cgroup has no limits"],
    );
    assert_says(
        &refused(1, limit(&scratch, "weir-no-such-group").args(["--bps-read", "1M"])),
        &["weir-no-such-group"],
    );
    let contradiction =
        refused(1, limit(&scratch, &group.name).args(["--bps-read", "2M", "--bps-read-max", "1M"]));
    assert_says(&contradiction, &["bps-read-max", &group.name]);
    fs::write(scratch.path("cgroups.json"), "{").unwrap();
    let broken = refused(1, limit(&scratch, &group.name).args(["--bps-read", "2M"]));
    assert_says(&broken, &["cgroups.json: these limits are invalid", "correct the file"]);
    let no_disk =
        refused(1, weir(&["cgroup", "limit", &group.name, "--device", "/proc", "--bps-read", "1M"]));
    assert_says(&no_disk, &["/proc"]);
}
