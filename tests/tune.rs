//! `weir tune`: recommends settings in forms that other programs accept, and leaves no files
//! behind. Some tests need root.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::harness::{
    LoopDevice, MIB, Scratch, Serve, TestClient, WEIR, assert_contains, nbdsh, need_root, qemu_img, qemu_io,
    script_without_foreign_mounts, text, wait_for_programs, weir,
};

/// Time budget that no run uses up, because each run is interrupted or fails. The duration of a
/// measurement is a fraction of it.
const NEVER_SPENT: &str = "3m";
/// A run reaches its second round once every configuration was measured in the first.
const ALL_MEASURED: &str = "round 2 ";

fn directory(scratch: &Scratch) -> PathBuf {
    let path = scratch.path("images");
    fs::create_dir(&path).unwrap();
    path
}

#[track_caller]
fn assert_empty(directory: &Path) {
    let left: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn most_samples(result: &Value) -> usize {
    let measures = result["findings"]["measures"].as_array().unwrap();
    measures.iter().map(|measure| measure["samples"].as_array().unwrap().len()).max().unwrap_or(0)
}

/// Output of a run that is interrupted as soon as it has results.
#[track_caller]
fn tuned(arguments: &[&str]) -> String {
    let arguments = [arguments, &["--budget", NEVER_SPENT]].concat();
    let (status, printed) = interrupted_at(ALL_MEASURED, &arguments);
    assert_eq!(status, 1, "{printed}");
    assert_contains(&printed, &["Partial: interrupted"]);
    printed
}

#[test]
fn recommendations_are_accepted_by_other_programs() {
    let scratch = Scratch::new();
    let directory = directory(&scratch);
    let result_file = scratch.path("tune.json");
    let arguments = [text(&directory), "--size", "16M", "--result", text(&result_file), "--disk", "1G"];
    let printed = tuned(&arguments);
    for goal in ["throughput", "latency", "integrity", "balanced"] {
        assert_contains(&printed, &[&format!("\nFor {goal}: ")]);
    }
    assert_contains(
        &printed,
        &[
            "CONFIGURATION",
            "Safety: survives a power failure",
            "the default settings, then the fewest changes to them, then the least memory",
        ],
    );
    assert_empty(&directory);
    let result = json(&result_file);
    assert_eq!(result["partial"], "interrupted");
    assert!(most_samples(&result) >= 1);

    // Each recommended line is run by the program that it is for.
    let tables = result["findings"]["tables"].as_array().unwrap();
    let integrity = tables.iter().find(|table| table["title"].as_str().unwrap().starts_with("For integrity"));
    let rows = integrity.unwrap()["rows"].as_array().unwrap();
    let image = scratch.path("made.qcow2");
    let line = |name: &str| {
        let row = rows.iter().find(|row| row[0] == name).unwrap();
        row[1].as_str().unwrap().replace("DISK", text(&image))
    };
    let create = line("image");
    let create_arguments: Vec<_> = create.split(' ').skip(1).collect();
    qemu_img(["create", "-q"].into_iter().chain(create_arguments[1..].iter().copied())).succeeds();
    let blockdev = line("or");
    let options = blockdev.split(' ').nth(1).unwrap();
    qemu_io(["--image-opts"], ["write 0 4k", "read 0 4k"], options);
    let serve = line("weir");
    let serve_arguments: Vec<_> = serve.split(' ').skip(2).map(str::to_owned).collect();
    Serve::new(&scratch).args(serve_arguments).start().stop();
    let driver = line("libvirt");
    nbdsh(
        "
import xml.etree.ElementTree as tree
driver = tree.fromstring(arguments[0])
assert driver.tag == 'driver' and driver.get('cache') in ('writethrough', 'directsync'), driver.attrib
assert int(driver.find('metadata_cache/max_size').text) > 0
",
        [driver],
    );
}

/// Sends SIGINT once a line of progress contains `mark`; returns the exit status and the output.
fn interrupted_at(mark: &str, arguments: &[&str]) -> (i32, String) {
    let mut child = Command::new(WEIR)
        .arg("tune")
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it was built");
    let mut lines = BufReader::new(child.stderr.take().expect("it is a pipe")).lines().map(Result::unwrap);
    let mut before = Vec::new();
    while !before.last().is_some_and(|line: &String| line.contains(mark)) {
        before.push(lines.next().unwrap_or_else(|| panic!("no line contains {mark:?}: {before:#?}")));
    }
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    // Both pipes are read to their ends before the wait: a full pipe would block the child.
    let rest: Vec<_> = lines.collect();
    let mut printed = String::new();
    child.stdout.take().expect("it is a pipe").read_to_string(&mut printed).unwrap();
    let status = child.wait().unwrap();
    (status.code().unwrap_or_else(|| panic!("{status}: {rest:?}")), printed)
}

#[test]
fn interrupted_run_leaves_no_image_and_can_be_resumed() {
    let scratch = Scratch::new();
    let directory = directory(&scratch);
    let result_file = scratch.path("tune.json");
    let printed = tuned(&[text(&directory), "--size", "16M", "--result", text(&result_file)]);
    assert_contains(&printed, &["\nFor balanced: "]);
    assert_empty(&directory);
    let first = json(&result_file);
    assert_eq!(first["partial"], "interrupted");
    assert!(most_samples(&first) >= 1);

    let resume = [text(&directory), "--result", text(&result_file), "--resume", text(&result_file)];
    let resume_again = [&resume[..], &["--budget", NEVER_SPENT]].concat();
    let (status, printed) = interrupted_at("round 3 ", &resume_again);
    assert_eq!(status, 1, "{printed}");
    assert!(
        most_samples(&json(&result_file)) > most_samples(&first),
        "it continued with the samples of the first run"
    );
    assert_empty(&directory);

    // A second suffices, because every configuration has samples already.
    let printed = weir(&["tune"]).args(resume).args(["--budget", "1s"]).succeeds();
    assert_contains(&printed, &["\nFor balanced: "]);
    assert_eq!(json(&result_file)["partial"], Value::Null);
    assert_empty(&directory);
    let elsewhere =
        weir(&["tune", text(result_file.parent().unwrap()), "--resume", text(&result_file)]).fails();
    assert_contains(&elsewhere, &["the samples to continue with belong to", text(&directory)]);
}

#[test]
fn interrupt_while_writing_images_leaves_none() {
    let scratch = Scratch::new();
    let directory = directory(&scratch);
    let (status, _) = interrupted_at("writing base.raw", &[text(&directory), "--size", "64M"]);
    assert_eq!(status, 1);
    assert_empty(&directory);
}

/// Tunes a tmpfs of 200 MiB at `$0`, which is filled up once the first image is being written.
const ON_A_DISK_THAT_FILLS_UP: &str = r#"
mount -t tmpfs -o size=200M tmpfs "$0" || exit 9
"$1" tune "$0" --size 16M --budget 5m --result "$2" 2>&1 >/dev/null | { read line; head -c 1G /dev/zero >"$0/others"; cat; }
ls -A "$0"
"#;

#[test]
fn full_disk_is_reported_and_images_removed() {
    need_root("mounts");
    let scratch = Scratch::new();
    let mount = directory(&scratch);
    let result_file = scratch.path("tune.json");
    let printed = TestClient::new("unshare")
        .args([
            "--mount",
            "sh",
            "-c",
            &script_without_foreign_mounts(ON_A_DISK_THAT_FILLS_UP),
            text(&mount),
            WEIR,
            text(&result_file),
        ])
        .run()
        .stdout();
    assert_contains(&printed, &["cannot be measured to the end", "No space left on device"]);
    // Only the test's own file is left.
    assert_eq!(printed.lines().last(), Some("others"), "{printed}");
    assert_contains(
        json(&result_file)["partial"].as_str().unwrap(),
        &["it failed: ", "No space left on device"],
    );
}

#[test]
fn insufficient_space_is_rejected_before_writing() {
    let scratch = Scratch::new();
    let directory = directory(&scratch);
    let stderr = weir(&["tune", text(&directory), "--size", "100T"]).fails();
    assert_contains(
        &stderr,
        &["needs ", " bytes for images of 100T, and ", "(make room, or give a smaller --size)"],
    );
    assert_empty(&directory);
}

#[test]
fn device_in_use_is_rejected() {
    let scratch = Scratch::new();
    let file = scratch.filled("device", 16 * MIB);
    let before = fs::read(&file).unwrap();
    let device = LoopDevice::attach(&file, 512);
    let printed = tuned(&[text(device.path())]);
    assert_contains(&printed, &["--format raw --cache ", "Not measured: writes: they would destroy"]);
    assert!(fs::read(&file).unwrap() == before, "reading changes nothing");

    // An exclusive open, as by a mounted file system.
    let user = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(nix::fcntl::OFlag::O_EXCL.bits())
        .open(device.path())
        .unwrap();
    let refused = weir(&["tune", text(device.path()), "--budget", "3s"]).fails();
    assert_contains(&refused, &["the system holds it"]);
    drop(user);
    // Children of parallel tests hold the device open until they call exec.
    wait_for_programs();
    assert_contains(&tuned(&[text(device.path()), "--write", "--force"]), &["--format raw --cache "]);
    assert!(fs::read(&file).unwrap() != before, "the device was not written");
}

#[test]
fn image_is_read_and_unchanged() {
    let scratch = Scratch::new();
    let image = scratch.path("vm.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", "-o", "cluster_size=128K", text(&image), "32M"]).succeeds();
    // Holes say nothing about the speed of a disk.
    let refused = weir(&["tune", text(&image), "--format", "qcow2", "--budget", "3s"]).fails();
    assert_contains(&refused, &["0 % of it hold data, and the rest are holes"]);
    let full = scratch.filled("full", 32 * MIB);
    let convert =
        ["convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=128K", text(&full), text(&image)];
    qemu_img(convert).succeeds();
    let before = fs::read(&image).unwrap();
    let printed = tuned(&[text(&image), "--format", "qcow2"]);
    assert_contains(&printed, &["writeback, 128K", "Not measured: writes and cluster sizes"]);
    assert!(!printed.contains("qemu-img create"), "it would overwrite the image: {printed}");
    assert!(fs::read(&image).unwrap() == before);
}

#[test]
fn conclusions_of_a_published_table_are_verified() {
    let scratch = Scratch::new();
    let directory = directory(&scratch);
    let arguments = [text(&directory), "--size", "16M", "--preset", "cache-modes"];
    let printed = tuned(&arguments);
    assert_contains(
        &printed,
        &[
            "agree",
            "Cache modes: sequential requests beside the raw disk",
            "read performance is better with the page cache",
            "none has much better writes",
        ],
    );
    assert_empty(&directory);
    let image = scratch.filled("a.raw", 16 * MIB);
    let refused = weir(&["tune", text(&image), "--format", "raw", "--preset", "pcache"]).run();
    assert_eq!(refused.code(), 2, "{}", refused.stderr());
}
