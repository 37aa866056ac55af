//! `weir record`: requests to a daemon's disks are written to a file, whether the command or the
//! daemon ends first.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, Stdio},
    thread,
    time::Instant,
};

use nix::{
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::harness::{
    DEADLINE, Qmp, RawNbdClient, Scratch, Serve, TestClient, WEIR, Weir, assert_contains, need_root,
    operator::{run_failing, run_misused, run_ok, socket, start},
    pause, script_without_foreign_mounts, text, weir,
    wire::{CMD_READ, RawNbdRequest},
};

/// A running `weir record`.
pub(crate) struct RunningRecorder {
    child: Child,
    stderr: BufReader<ChildStderr>,
    to: PathBuf,
}

impl RunningRecorder {
    /// Returns once the recording has started.
    #[track_caller]
    pub(crate) fn begin(scratch: &Scratch, to: &Path, names: &[&str]) -> Self {
        let mut command = Command::new(WEIR);
        command.args(["record", "--qmp", &socket(scratch), "--output", text(to)]).args(names);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it was built");
        let mut stderr = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("it prints a line");
        assert_contains(&line, &["weir: recording to ", " (stop with Ctrl-C)"]);
        Self { child, stderr, to: to.to_owned() }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).expect("the process is running");
    }

    /// Waits for its end; returns its status and its messages.
    fn wait(mut self) -> (Option<i32>, String) {
        let mut output = String::new();
        self.stderr.read_to_string(&mut output).expect("its output is UTF-8");
        (self.child.wait().expect("the child can be waited for").code(), output)
    }

    /// Ends the recording with SIGINT; returns its content.
    #[track_caller]
    pub(crate) fn end(self) -> RecordedRequests {
        self.signal(Signal::SIGINT);
        let to = self.to.clone();
        let (code, log) = self.wait();
        assert_eq!(code, Some(0), "{log}");
        let recorded = RecordedRequests::read(&to);
        assert_contains(&log, &[&format!("weir: {} requests in ", recorded.0.len())]);
        recorded
    }
}

/// Requests: disk, operation, throttle cause.
pub(crate) struct RecordedRequests(Vec<[String; 3]>);

impl RecordedRequests {
    #[track_caller]
    fn read(from: &Path) -> Self {
        let to = from.with_extension("csv");
        weir(&["trace", "convert", text(from), text(&to)]).succeeds();
        let csv = fs::read_to_string(&to).expect("it was written");
        let mut lines = csv.lines();
        let header: Vec<_> = lines.next().expect("a header").split(',').collect();
        let columns = ["disk", "op", "bucket"]
            .map(|name| header.iter().position(|column| *column == name).expect("a column"));
        let request = |line: &str| {
            let fields: Vec<_> = line.split(',').collect();
            columns.map(|index| fields[index].to_owned())
        };
        Self(lines.map(request).collect())
    }

    /// Number of requests by disk and operation.
    fn counts(&self) -> BTreeMap<(&str, &str), u64> {
        let mut counts = BTreeMap::new();
        for [disk, op, _] in &self.0 {
            *counts.entry((disk.as_str(), op.as_str())).or_default() += 1;
        }
        counts
    }
}

/// Runs fio; returns the number of requests that it reports as completed.
#[track_caller]
pub(crate) fn fio(weir: &Weir, disk: &str, rw: &str, requests: u64) -> u64 {
    let printed = TestClient::new("fio")
        .args(["--name=load", "--ioengine=nbd", "--bs=4096", "--iodepth=16", "--output-format=json"])
        .args(["--size=16M".to_owned(), format!("--rw={rw}"), format!("--number_ios={requests}")])
        .arg(format!("--uri={}", weir.uri(disk)))
        .succeeds();
    // fio prints a line about the connection first.
    let json = printed.find('{').map(|from| &printed[from..]).expect("an object");
    let report: Value = serde_json::from_str(json).expect("it is JSON");
    let job = &report["jobs"][0];
    ["read", "write"].iter().map(|kind| job[kind]["total_ios"].as_u64().expect("a number")).sum()
}

#[test]
fn recording_contains_fios_requests_for_simulate() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &["--iops-total", "500"]);
    let file = scratch.path("day.recording");
    let recorder = RunningRecorder::begin(&scratch, &file, &[]);
    let reads = fio(&weir, "a", "randread", 1000);
    let writes = fio(&weir, "b", "randwrite", 300);
    let recorded = recorder.end();
    let counts = recorded.counts();
    assert_eq!((reads, counts[&("a", "read")]), (1000, 1000));
    assert_eq!((writes, counts[&("b", "write")]), (300, 300));
    assert!(recorded.0.iter().any(|[disk, _, held]| disk == "a" && held == "iops-total"));

    let predicted = self::weir(&["simulate", text(&file), "--iops-total", "100", "--json"]).json();
    assert_eq!(predicted["all"]["after"]["requests"].as_u64(), Some(1300), "{predicted:#}");
    weir.stop();
}

#[test]
fn empty_recording_is_reported() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let file = scratch.path("none.recording");
    let recorder = RunningRecorder::begin(&scratch, &file, &[]);
    recorder.signal(Signal::SIGINT);
    assert_eq!(recorder.wait(), (Some(0), "weir: no requests\n".to_owned()));
    weir.stop();
    assert_eq!(self::weir(&["trace", "info", text(&file)]).succeeds(), "no requests\n");
    let report = self::weir(&["trace", "info", "--json", text(&file)]).json();
    assert_eq!(report, json!({ "disks": {}, "lost": 0 }));
}

#[test]
fn file_name_selects_the_format() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &["--iops-total", "200"]);
    let files = ["day.csv.zst", "day.iolog", "day.dat"].map(|name| scratch.path(name));
    let recorders = files.each_ref().map(|file| RunningRecorder::begin(&scratch, file, &["a"]));
    assert_eq!(fio(&weir, "a", "randread", 300), 300);
    for recorder in recorders {
        recorder.signal(Signal::SIGINT);
        let (status, log) = recorder.wait();
        assert_eq!(status, Some(0), "{log}");
        assert_contains(&log, &["300 requests in "]);
    }
    weir.stop();
    // The text format has the same columns as a recording.
    let as_recorded = TestClient::new("zstd").args(["-dcq", text(&files[0])]).succeeds();
    let header = "time_ns,disk,op,offset,length,admitted_ns,completed_ns,bucket\n";
    assert!(as_recorded.starts_with(header), "{as_recorded}");
    assert_eq!(as_recorded.lines().count(), 301);
    assert!(as_recorded.contains(",iops-total\n"), "{as_recorded}");
    assert!(fs::read_to_string(&files[1]).expect("it was written").starts_with("fio version 3 iolog\n"));
    let read_info = |file: &Path| {
        let printed = crate::harness::weir(&["trace", "info", "--json", text(file)]).succeeds();
        serde_json::from_str::<Value>(&printed).expect("it is JSON")["disks"]["a"].clone()
    };
    for file in &files[1..] {
        assert_eq!(read_info(file)["requests"], 300);
    }
    // fio keeps 16 in flight at 200 a second; the number of throttled requests depends on the
    // machine.
    let measured = &read_info(&files[2])["measured"];
    let [waited, latency] =
        ["waited-ns", "latency-ns"].map(|measure| measured[measure]["mean"].as_f64().expect("a number"));
    assert!(0.0 < waited && waited <= latency, "{measured:#}");
    assert!(measured["held-by"]["iops-total"].as_u64() > Some(0), "{measured:#}");
}

#[test]
fn text_recording_survives_a_kill_of_the_command() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    for name in ["day.csv", "day.CSV.ZST", "day.csv.gz"] {
        let file = scratch.path(name);
        let mut recorder = RunningRecorder::begin(&scratch, &file, &["a"]);
        fio(&weir, "a", "randread", 300);
        let info = || crate::harness::weir(&["trace", "info", "--json", text(&file)]).run();
        let end = Instant::now() + DEADLINE;
        // A truncated file is readable up to its last complete block.
        while !info().stdout().contains("\"requests\": 300") {
            assert!(Instant::now() < end, "{name}: the recording does not exist: {}", info().stderr());
            pause();
        }
        recorder.signal(Signal::SIGKILL);
        recorder.child.wait().expect("the child can be waited for");
        assert!(info().stdout().contains("\"requests\": 300"));
    }
    weir.stop();
}

#[test]
fn merged_requests_are_recorded_separately() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let file = scratch.path("merged.recording");
    let recorder = RunningRecorder::begin(&scratch, &file, &["a"]);
    // Sent in one piece, so that they are received together and are adjacent.
    let lengths = [16384, 512, 4096, 65536].repeat(8);
    let mut offset = 0;
    let ranges = lengths.iter().map(|&length| {
        offset += length;
        [offset - length, length]
    });
    let expected: Vec<_> = ranges.collect();
    let read = |&[offset, length]: &[u64; 2]| {
        RawNbdRequest { flags: 0, kind: CMD_READ, cookie: length, offset, length }.compact()
    };
    let (mut client, _) = RawNbdClient::negotiated(weir.socket(), "a");
    client.send(&expected.iter().flat_map(read).collect::<Vec<_>>());
    for _ in &expected {
        let (error, length) = client.simple_reply();
        assert_eq!(error, 0);
        client.receive_many(length as u32);
    }
    recorder.end();
    let csv = fs::read_to_string(file.with_extension("csv")).expect("it was written");
    let mut lines = csv.lines();
    let header: Vec<_> = lines.next().expect("a header").split(',').collect();
    let columns = ["offset", "length"].map(|name| header.iter().position(|column| *column == name));
    let range = |line: &str| {
        let fields: Vec<_> = line.split(',').collect();
        columns.map(|index| fields[index.expect("a column")].parse::<u64>().expect("a number"))
    };
    let mut ranges: Vec<_> = lines.map(range).collect();
    ranges.sort_unstable();
    assert_eq!(ranges, expected);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let stats = qmp.command("query-blockstats", json!({}));
    let merged = ["rd_merged", "wr_merged"].map(|member| stats[0]["stats"][member].as_u64());
    assert!(merged.iter().any(|count| *count > Some(0)), "none was merged: {stats:#}");
    weir.stop();
}

#[test]
fn recording_covers_named_disks_and_groups() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &["--iops-total", "0"]);
    run_ok(&scratch, &["group", "add", "gold", "--iops-total", "20000"]);
    let file = scratch.path("gold.recording");
    let recorder = RunningRecorder::begin(&scratch, &file, &["gold"]);
    fio(&weir, "a", "read", 100);
    // Disk b joins the group.
    run_ok(&scratch, &["throttle", "b", "--group", "gold"]);
    fio(&weir, "b", "read", 200);
    let recorded = recorder.end();
    assert_eq!(recorded.counts().get(&("b", "read")), Some(&200));
    assert!(recorded.0.iter().all(|[disk, ..]| disk == "b"), "{:?}", recorded.counts());

    // The requests of a removed disk stay in the recording.
    let recorder = RunningRecorder::begin(&scratch, &file, &["a"]);
    fio(&weir, "a", "write", 50);
    fio(&weir, "b", "write", 50);
    run_ok(&scratch, &["disk", "remove", "a"]);
    let recorded = recorder.end();
    assert_eq!(recorded.counts().get(&("a", "write")), Some(&50));
    assert!(recorded.0.iter().all(|[disk, ..]| disk == "a"), "{:?}", recorded.counts());

    let before = fs::read(&file).expect("the file exists");
    let stderr = run_failing(&scratch, &["record", "a", "--output", text(&file)]);
    assert_contains(&stderr, &["a: no disk and no group has this name (`weir status` lists them)"]);
    assert!(fs::read(&file).expect("the file exists") == before, "nothing was touched");
    let missing = scratch.path("nowhere/a");
    let stderr = run_failing(&scratch, &["record", "--output", text(&missing)]);
    assert_contains(&stderr, &["nowhere/a: cannot be written", "No such file or directory"]);
    let pipe = scratch.path("pipe");
    nix::unistd::mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR).expect("a pipe");
    let stderr = run_failing(&scratch, &["record", "--output", text(&pipe)]);
    assert_contains(&stderr, &["pipe: this pipe has no reader"]);
    let recorder = RunningRecorder::begin(&scratch, &file, &["b"]);
    let stderr = run_failing(&scratch, &["record", "--output", text(&file)]);
    assert_contains(&stderr, &["another `weir record` writes to it"]);
    fio(&weir, "b", "write", 50);
    assert_eq!(recorder.end().counts().get(&("b", "write")), Some(&50));
    run_misused(&scratch, &["record"]);
    weir.stop();
}

/// Waits until no recording is running.
fn wait_for_none(weir: &Weir, scratch: &Scratch) {
    weir.wait_for_log("a recording has ended");
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    assert_eq!(qmp.command("x-weir-query-recordings", json!({})), json!([]));
    let refused = qmp.command_error("x-weir-record-stop", json!({ "id": 0 }));
    assert_contains(&refused.1, &["there is no recording 0"]);
}

#[test]
fn recording_ends_after_its_duration() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let file = scratch.path("short.recording");
    run_ok(&scratch, &["record", "--for", "10ms", "--output", text(&file)]);
    wait_for_none(&weir, &scratch);
    // Output to standard output.
    let printed = self::weir(&["record", "--for", "10ms", "--output", "-", "--qmp", &socket(&scratch)]).run();
    assert_contains(&printed.stdout(), &["weir recording 2\n"]);
    // Existing content of the output file is kept.
    let existing = scratch.file("others", "before\n");
    let script =
        format!("{WEIR} record --for 10ms --output - --qmp {} >> {}", socket(&scratch), text(&existing));
    TestClient::new("sh").args(["-c", &script]).succeeds();
    assert!(fs::read(&existing).expect("the file exists").starts_with(b"before\n"));
    // If the recording cannot begin, no file is left.
    let never = scratch.path("never");
    run_failing(&scratch, &["record", "nobody", "--output", text(&never)]);
    assert!(!never.exists());
    weir.stop();
}

#[test]
fn end_of_the_daemon_is_reported_and_the_recording_kept() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let file = scratch.path("until.recording");
    let recorder = RunningRecorder::begin(&scratch, &file, &["a"]);
    fio(&weir, "a", "read", 100);
    weir.stop();
    let (code, log) = recorder.wait();
    assert_eq!(code, Some(1));
    assert_contains(&log, &["weir: the daemon has ended ("]);
    assert_eq!(RecordedRequests::read(&file).counts()[&("a", "read")], 100);
}

#[test]
fn full_disk_ends_only_the_recording() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let recorder = RunningRecorder::begin(&scratch, Path::new("/dev/full"), &[]);
    let (code, log) = recorder.wait();
    assert_eq!(code, Some(1));
    assert_contains(&log, &["/dev/full: cannot be written", "No space left on device"]);
    wait_for_none(&weir, &scratch);
    assert_eq!(fio(&weir, "a", "read", 100), 100);
    weir.stop();
}

#[test]
fn killed_command_ends_only_its_recording() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let killed = RunningRecorder::begin(&scratch, &scratch.path("killed.recording"), &[]);
    let other = RunningRecorder::begin(&scratch, &scratch.path("other.recording"), &["a"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let running = qmp.command("x-weir-query-recordings", json!({}));
    assert_eq!((&running[0]["of"], &running[1]["of"]), (&json!([]), &json!(["a"])));
    killed.signal(Signal::SIGKILL);
    assert_eq!(killed.wait().0, None);
    fio(&weir, "a", "read", 100);
    let line = weir.wait_for_log("a recording has ended");
    assert_contains(&line, &["the reader has closed the recording"]);
    assert_eq!(qmp.command("x-weir-query-recordings", json!({})).as_array().map(Vec::len), Some(1));
    fio(&weir, "a", "read", 100);
    assert_eq!(other.end().counts()[&("a", "read")], 200);
    weir.stop();
}

/// Files of the daemon's own recording.
fn recording_files(directory: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(directory).expect("the directory exists");
    let mut names: Vec<_> = names.map(|file| file.expect("it can be read").path()).collect();
    names.sort();
    names
}

#[test]
fn daemon_records_to_its_directory() {
    let scratch = Scratch::new();
    let directory = scratch.path("day");
    fs::create_dir(&directory).expect("the directory can be created");
    let config = |keys: &str| {
        let qmp = socket(&scratch);
        let disk = "[disk.a]\nimage = \"memory:16M\"\n";
        let daemon = format!("[daemon]\nqmp = \"{qmp}\"\n{keys}\n{disk}");
        scratch.file("weir.toml", daemon)
    };
    let file = config("record = { directory = \"day\", keep = \"2h\", limit = \"64M\" }");
    let daemon = Serve::new(&scratch).arg("--config").arg(&file).start();
    assert_eq!(fio(&daemon, "a", "read", 300), 300);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let running = qmp.command("x-weir-query-recordings", json!({}));
    assert_eq!(running[0]["directory"].as_str(), Some(text(&directory)), "{running:#}");
    let refused = qmp.command_error("x-weir-record-stop", json!({ "id": running[0]["id"] }));
    assert_contains(
        &refused.1,
        &["belongs to the daemon (remove `record` from its config or command line, and restart it)"],
    );
    // A second recording beside the daemon's own.
    let recorder = RunningRecorder::begin(&scratch, &scratch.path("more.recording"), &["a"]);
    assert_eq!(fio(&daemon, "a", "write", 20), 20);
    assert_eq!(recorder.end().counts()[&("a", "write")], 20);

    // Another directory may be outside of the sandbox, if it is enabled.
    config("record = { directory = \"nowhere\" }");
    assert_contains(&run_failing(&scratch, &["reload"]), &["nowhere: recordings cannot be written there"]);
    config("");
    let before = format!("record: {},keep=7200s,limit=64M → none", text(&directory));
    assert_contains(&run_ok(&scratch, &["reload"]), &[&before]);
    assert_eq!(qmp.command("x-weir-query-recordings", json!({})), json!([]));
    fio(&daemon, "a", "read", 500);
    config("record = { directory = \"day\" }");
    assert_contains(&run_ok(&scratch, &["reload"]), &["record: none → "]);
    config("record = { directory = \"day\", keep = \"3h\" }");
    assert_contains(&run_ok(&scratch, &["reload"]), &["keep=10800s"]);
    assert_eq!(fio(&daemon, "a", "write", 30), 30);
    // A second daemon would delete the files of the first.
    let other = Serve::with_own_scratch().args(["memory:1M", "--record", text(&directory)]);
    let expect = format!(
        "record: {}: another daemon records there (give each a directory of its own)",
        text(&directory)
    );
    let (status, log) = other.spawn_unready().wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert_contains(&log, &[&expect]);
    daemon.stop();
    let mut counts = BTreeMap::<String, u64>::new();
    for file in recording_files(&directory) {
        let to = scratch.path(file.file_name().and_then(|name| name.to_str()).expect("a name"));
        fs::copy(file, &to).expect("there is room");
        for ((_, op), count) in RecordedRequests::read(&to).counts() {
            *counts.entry(op.to_owned()).or_default() += count;
        }
    }
    assert_eq!((counts["read"], counts["write"]), (300, 50));

    config("record = { directory = \"nowhere\" }");
    let check = || weir(&["check-config", text(&file)]).fails();
    let place = ": daemon.record.directory = \"nowhere\": record: ";
    assert_contains(
        &check(),
        &[place, "nowhere: recordings cannot be written there (", "No such file or directory"],
    );
    config("record = { directory = \"day\", limit = \"1M\" }");
    assert_contains(&check(), &["daemon.record.limit = \"1M\": is too small; it must be at least 16M"]);
    config("record = { keep = \"2h\" }");
    assert_contains(&check(), &["daemon.record: no directory (add directory = \"PATH\")"]);
}

#[test]
fn full_directory_suspends_recording() {
    need_root("mounts");
    let scratch = Scratch::new();
    let mount = scratch.path("mount");
    fs::create_dir(&mount).expect("the directory can be created");
    // Space for the header of a file, and for no block.
    let script = r#"mount -t tmpfs -o size=4k record "$0" && dd if=/dev/zero of="$0/full" bs=4k count=1 2>/dev/null && exec "$@""#;
    let weir = Serve::new(&scratch)
        .args(["memory:16M", "--name", "a", "--qmp", &socket(&scratch), "--record", text(&mount)])
        .wrapped_by(["unshare", "--mount", "sh", "-c", &script_without_foreign_mounts(script), text(&mount)])
        .start();
    assert_eq!(fio(&weir, "a", "read", 100), 100);
    let line = weir.wait_for_log("nothing is recorded until this is fixed");
    assert_contains(&line, &["No space left on device"]);
    let pid = weir.pid().to_string();
    let inside = ["--mount", "--target", &pid, "mount", "-o", "remount,size=16M", text(&mount)];
    TestClient::new("nsenter").args(inside).succeeds();
    // A load runs until the recording continues and the daemon ends.
    let uri = weir.uri("a");
    thread::scope(|scope| {
        let load = TestClient::new("fio")
            .args(["--name=load", "--ioengine=nbd", "--rw=randread", "--bs=4096", "--size=16M"])
            .args(["--rate_iops=500", "--time_based", "--runtime=10m"])
            .arg(format!("--uri={uri}"));
        scope.spawn(|| load.run());
        weir.wait_for_log("recording resumes");
        weir.stop();
    });
}

#[test]
fn recording_summary_is_printed_as_json() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let file = scratch.path("a.recording");
    let arguments = ["record", "a", "--for", "1s", "--json", "--output", text(&file)];
    let report: Value = serde_json::from_str(&run_ok(&scratch, &arguments)).expect("JSON");
    let bytes = fs::metadata(&file).unwrap().len();
    assert_eq!(report, json!({ "output": text(&file), "requests": 0, "lost": 0, "bytes": bytes }));
    let stderr = run_misused(&scratch, &["record", "--json", "--output", "-"]);
    assert_contains(&stderr, &["--json: the recording is written to standard output"]);
    weir.stop();
}
