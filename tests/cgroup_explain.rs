//! `weir cgroup explain` on the host's own kernel: a limit of cgroup v1 that a buffered `dd`
//! ignores. Features of cgroup v2 are tested in a guest (`tests/guest/cgroups`). Needs root and
//! cgroup v1's blkio.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        stat::{major, minor},
    },
    unistd::{Pid, syncfs},
};
use serde_json::Value;

use crate::harness::{BlkioGroup, DEADLINE, MIB, Scratch, TestClient, WEIR, assert_contains, text, weir};

const LIMIT: u64 = 2 * MIB;

struct LimitedBlkioGroup(BlkioGroup);

impl LimitedBlkioGroup {
    /// `None` on a host that has only cgroup v2.
    fn new(label: &str, scratch: &Scratch) -> Option<Self> {
        let group = BlkioGroup::new(&format!("explain-{label}"))?;
        let limit = format!("{} {LIMIT}", disk(&scratch.path("")));
        fs::write(group.directory.join("blkio.throttle.write_bps_device"), limit).expect("a limit");
        Some(Self(group))
    }

    /// Starts a `dd` in the cgroup that copies from a pipe, filled by the test, to a file.
    fn dd(&self, output: &Path, options: &str) -> DdProcess {
        let script = format!(
            "echo $$ > {}/cgroup.procs && exec dd of={} bs=64K iflag=fullblock status=none {options}",
            self.0.directory.display(),
            output.display()
        );
        let mut child = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell");
        let input = child.stdin.take();
        DdProcess { child, input }
    }

    fn written(&self) -> u64 {
        written(&self.0.directory).expect("the cgroup exists")
    }

    fn explain(&self) -> TestClient {
        weir(&["cgroup", "explain", &self.0.name])
    }
}

struct DdProcess {
    child: Child,
    input: Option<ChildStdin>,
}

impl DdProcess {
    fn feed(&mut self, bytes: u64) {
        let zeros = vec![0; usize::try_from(bytes).expect("it fits into memory")];
        self.input.as_mut().expect("dd's input is open").write_all(&zeros).expect("`dd` reads");
    }

    fn end(&mut self) {
        drop(self.input.take());
        assert!(self.child.wait().expect("a child").success());
    }
}

impl Drop for DdProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes written that were charged to a cgroup; `None` if the cgroup does not exist.
fn written(directory: &Path) -> Option<u64> {
    let text = fs::read_to_string(directory.join("blkio.throttle.io_service_bytes")).ok()?;
    let writes = text.lines().filter_map(|line| line.split_once(" Write "));
    Some(writes.map(|(_, bytes)| bytes.parse::<u64>().expect("a number")).sum())
}

/// Device number (major:minor) of the whole disk that holds a directory.
fn disk(directory: &Path) -> String {
    let device = fs::metadata(directory).expect("a directory").dev();
    let link = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let mut known = fs::canonicalize(link).expect("tests run on a disk");
    if known.join("partition").exists() {
        known.pop();
    }
    fs::read_to_string(known.join("dev")).expect("a disk has a number").trim().to_owned()
}

fn of_cause<'a>(report: &'a Value, cause: &str) -> Vec<&'a Value> {
    let findings = report["findings"].as_array().expect("a list");
    findings.iter().filter(|finding| finding["cause"] == cause).collect()
}

/// The types of I/O of `pid` in the findings with this coverage.
fn ios(report: &Value, coverage: &str, pid: u32) -> Vec<String> {
    let findings = report["findings"].as_array().expect("a list");
    let findings = findings.iter().filter(|finding| finding["coverage"] == coverage);
    let acts = findings.flat_map(|finding| finding["io"].as_array().expect("a list"));
    acts.filter(|act| act["pid"] == pid).map(|act| act["io"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn v1_limit_that_buffered_writes_escape_is_reported() {
    let scratch = Scratch::new();
    let Some(group) = LimitedBlkioGroup::new("dd", &scratch) else { return };
    let bytes = 3 * LIMIT;
    let (buffered, direct) = (scratch.path("buffered"), scratch.path("direct"));

    let mut dd = group.dd(&buffered, "");
    dd.feed(bytes);
    let report = group.explain().arg("--json").json();
    assert_eq!(report["verdict"], "missed", "{report:#}");
    assert_eq!(ios(&report, "escapes", dd.child.id()), ["buffered-writes"], "{report:#}");
    let finding = of_cause(&report, "version-1")[0];
    let file = group.0.directory.join("blkio.throttle.write_bps_device");
    let cited =
        finding["evidence"].as_array().expect("a list").iter().find(|cited| cited["file"] == text(&file));
    let value = cited.unwrap_or_else(|| panic!("{report:#}"))["value"].clone();
    assert_eq!(value, format!("{} {LIMIT}", disk(&scratch.path(""))));
    dd.end();
    syncfs(fs::File::open(&buffered).expect("dd has created it")).expect("a file system");
    assert!(group.written() < bytes / 4, "{} of {bytes} were charged", group.written());

    let begin = Instant::now();
    let mut dd = group.dd(&direct, "oflag=direct");
    // The pipe holds 64 KiB, and those it held half-way were not yet limited.
    dd.feed(bytes);
    let report = group.explain().arg("--json").json();
    assert_eq!(
        (ios(&report, "escapes", dd.child.id()).len(), &report["verdict"]),
        (0, &"covered".into()),
        "{report:#}"
    );
    dd.end();
    // The kernel admits the first tenth of a second's worth immediately.
    assert!(
        begin.elapsed() > Duration::from_millis(2500),
        "three seconds' worth of data was written in {:?}",
        begin.elapsed()
    );
    assert!(group.written() >= bytes, "{} of {bytes} were charged", group.written());
}

#[test]
fn measurement_shows_the_limited_paths() {
    let scratch = Scratch::new();
    let Some(group) = LimitedBlkioGroup::new("measure", &scratch) else { return };
    let directory = scratch.path("files");
    fs::create_dir(&directory).expect("a directory");
    let measure = ["--measure", "--directory", text(&directory), "--size", "4M", "--seconds", "2", "--json"];
    let report = group.explain().args(measure).json();
    assert_eq!(fs::read_dir(&directory).expect("still there").count(), 0, "nothing is left");
    let paths = report["measured"]["paths"].as_array().expect("a list");
    let value_of = |path: &str, key: &str| {
        paths.iter().find(|known| known["path"] == path).unwrap_or_else(|| panic!("{report:#}"))[key].clone()
    };
    // I/O submitted by the process is charged and limited; writeback by a kernel worker is not.
    let number = |path: &str, key: &str| value_of(path, key).as_f64().unwrap_or_else(|| panic!("{report:#}"));
    for path in ["direct-writes", "writes-and-fsync"] {
        // Slices of a tenth of a second: one may pass immediately, and the last one early.
        let max = LIMIT as f64 * (number(path, "seconds") + 0.2) * 1.05;
        assert!(number(path, "charged-bytes") <= max, "{path}: {max}: {report:#}");
    }
    assert!(number("direct-writes", "charged-bytes") >= number("direct-writes", "bytes"), "{report:#}");
    // A sync(2) by another process may have written a part of the data.
    assert!(number("writes-and-fsync", "charged-bytes") > 0.0, "{report:#}");
    let charged = value_of("buffered-writes", "charged-bytes").as_u64();
    assert!(charged.is_some_and(|bytes| bytes < MIB), "{report:#}");
    // A host may be too slow to exceed a limit that is not enforced. The verdict must match the
    // figure in any case.
    for path in ["direct-writes", "buffered-writes", "writes-and-fsync"] {
        let of_limit = number(path, "bps") / LIMIT as f64;
        let verdict = match of_limit {
            _ if of_limit > 1.25 => "IGNORED",
            _ if of_limit < 0.5 => "not reached",
            _ => "kept",
        };
        assert_eq!(value_of(path, "limit-is"), verdict, "{path}: {report:#}");
    }
    assert_eq!(value_of("reads-from-the-page-cache", "limit-is"), "no I/O");
    assert_eq!(value_of("reads", "limit-is"), "not set");
}

#[test]
fn measurement_files_are_removed_on_a_signal() {
    let scratch = Scratch::new();
    let Some(group) = LimitedBlkioGroup::new("signal", &scratch) else { return };
    let directory = scratch.path("");
    let options = ["--measure", "--directory", text(&directory), "--seconds", "60", "--size", "64M"];
    for (signal, min_bytes) in [(Signal::SIGTERM, 0), (Signal::SIGINT, 1)] {
        let mut measuring = Command::new(WEIR)
            .args(["cgroup", "explain", &group.0.name])
            .args(options)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("weir runs");
        let subgroup = group.0.directory.with_file_name(format!("weir-explain-{}", measuring.id()));
        let begin = Instant::now();
        while written(&subgroup).is_none_or(|bytes| bytes < min_bytes) {
            assert!(begin.elapsed() < DEADLINE, "no write was charged to {}", subgroup.display());
            thread::yield_now();
        }
        let pid = i32::try_from(measuring.id()).expect("a pid");
        kill(Pid::from_raw(pid), signal).expect("the process is running");
        let status = measuring.wait().expect("it ends");
        assert_eq!(status.code(), Some(1), "{signal}");
        assert!(!subgroup.exists(), "{} is left", subgroup.display());
        let instance = Path::new("/sys/kernel/tracing/instances").join(format!("weir-explain-{pid}"));
        assert!(!instance.exists(), "{} is left", instance.display());
    }
    assert_eq!(fs::read_dir(scratch.path("")).expect("a directory").count(), 0, "files are left");
}

#[test]
fn unreadable_cgroup_is_an_error() {
    let stderr = weir(&["cgroup", "explain", "no-such-thing"]).fails();
    assert_contains(&stderr, &["weir: cgroup \"no-such-thing\": "]);
    let outcome = weir(&["cgroup", "explain", "self", "--size", "1M"]).run();
    assert_eq!(outcome.code(), 2, "{}", outcome.stderr());
    assert_contains(&outcome.stderr(), &["--measure"]);

    let scratch = Scratch::new();
    let Some(group) = LimitedBlkioGroup::new("errors", &scratch) else { return };
    fs::write(
        group.0.directory.join("blkio.throttle.write_bps_device"),
        format!("{} 0", disk(&scratch.path(""))),
    )
    .expect("the limit can be removed");
    let printed = group.explain().succeeds();
    assert_contains(
        &printed,
        &["(cgroup v1): nothing is limited\n", "ESCAPES   no-limit\n", "fix: set a limit"],
    );
    let outcome = group.explain().args(["--measure", "--directory", text(&scratch.path(""))]).run();
    assert_eq!(outcome.code(), 1);
    assert_contains(&outcome.stderr(), &[": its disk ", " has no limit (set one"]);
    let outcome = group.explain().args(["--measure", "--directory", "/proc"]).run();
    assert_eq!(outcome.code(), 1, "{}", outcome.stderr());
}
