//! `weir bench`: accesses the same bytes as qemu-img bench, measures weir and other servers, prints
//! fio's JSON, and can be interrupted.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::net::UnixListener,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::harness::{
    MIB, Scratch, Serve, Terminal, TestClient, WEIR, assert_contains, need, qemu_img, qemu_io, text, weir,
};

const SIZE: u64 = 4 * MIB;

pub(crate) fn bench(options: &str, target: impl AsRef<std::ffi::OsStr>) -> TestClient {
    weir(&["bench"]).args(options.split_whitespace()).arg(target)
}

pub(crate) fn bench_json(options: &str, target: impl AsRef<std::ffi::OsStr>) -> Value {
    bench(options, target).arg("--json").json()
}

#[test]
fn accesses_the_same_bytes_as_qemu_img_bench() {
    let scratch = Scratch::new();
    for form in ["raw", "qcow2"] {
        for options in [
            "-c 100 -d 8 -s 4096",
            "-c 100 -d 8 -s 4096 -S 12288",
            "-c 3000 -d 64 -s 512 -S 8192 -o 4096",
            "-c 50 -d 1 -s 64K -S 1000000",
            "-c 200 -d 4 -s 4096 -S 40960 --flush-interval=8",
            "-c 200 -d 4 -s 4096 -S 40960 --flush-interval=8 --no-drain",
        ] {
            let [ours, theirs] = ["ours", "theirs"].map(|name| {
                let path = scratch.path(name);
                qemu_img(["create", "-q", "-f", form, text(&path), &SIZE.to_string()]).succeeds();
                path
            });
            let with = |client: TestClient, path: &Path| {
                let written = format!("-f {form} -w --pattern 165 {options}");
                client.args(written.split_whitespace()).arg(path).describing(options).succeeds()
            };
            let stdout = with(weir(&["bench"]), &ours);
            let expect = with(qemu_img(["bench"]), &theirs);
            // qemu-img does not print "without draining".
            let before = |printed: &str| printed.split("Run completed in ").next().map(str::to_owned);
            let stdout = before(&stdout).map(|said| said.replace(" without draining", ""));
            assert_eq!(stdout, before(&expect), "{form} {options}");
            qemu_img(["compare", "-f", form, "-F", form, text(&ours), text(&theirs)])
                .describing(options)
                .succeeds();
            fs::remove_file(&ours).and_then(|()| fs::remove_file(&theirs)).unwrap();
        }
    }
}

#[test]
fn written_pattern_is_in_the_image() {
    let scratch = Scratch::new();
    let path = scratch.sparse("disk.raw", SIZE);
    bench("-f raw -w --pattern 90 -c 64 -d 16 -s 64K", &path).succeeds();
    qemu_io(["-f", "raw"], ["read -P 90 0 4M"], &path);
    // Half of the requests read, so that only part of the image changes, to the given pattern.
    bench("-f raw -w --pattern 165 --rwmixread 50 -c 1024 -d 16 -s 4K", &path).succeeds();
    let bytes = fs::read(&path).unwrap();
    let blocks: Vec<&[u8]> = bytes.chunks(4096).collect();
    let written = blocks.iter().filter(|block| block.iter().all(|&byte| byte == 165)).count();
    let unwritten = blocks.iter().filter(|block| block.iter().all(|&byte| byte == 90)).count();
    assert_eq!(written + unwritten, 1024);
    assert!((400..624).contains(&written), "{written}");
}

#[test]
fn every_request_of_several_jobs_is_sent() {
    let scratch = Scratch::new();
    let path = scratch.sparse("disk.raw", SIZE);
    let report = bench_json("-f raw -w --pattern 7 --jobs 4 -c 1024 -d 4 -s 4K", &path);
    assert_eq!(report["jobs"][0]["write"]["total_ios"], 1024);
    let bytes = fs::read(&path).unwrap();
    let written = bytes.chunks(4096).filter(|block| block.iter().all(|&byte| byte == 7)).count();
    assert!(written > 1000, "{written} of 1024 blocks");
}

#[test]
fn server_is_measured_like_a_disk() {
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.raw", SIZE);
    let servers =
        [Serve::new(&scratch).arg(&disk).start(), Serve::new(&scratch).arg("memory:4M").on_tcp().start()];
    for (server, export) in servers.iter().zip(["disk", "memory"]) {
        let uri = server.uri(export);
        let printed = bench("-f raw -w --pattern 90 -c 64 -d 16 -s 64K --flush-interval 16", &uri).succeeds();
        assert_contains(
            &printed,
            &["Sending 64 write requests, 65536 bytes each, 16 in parallel", "Run completed in "],
        );
        qemu_io(["-f", "raw"], ["read -P 90 0 4M"], &uri);
        let report = bench_json("-c 5000 -d 16 --jobs 3 --random", &uri);
        assert_eq!(report["jobs"][0]["read"]["total_ios"], 5000);
        assert_eq!(report["weir"]["image"], uri);
    }
}

#[test]
fn other_servers_are_measured() {
    let scratch = Scratch::new();
    let disk = scratch.filled("disk.raw", SIZE);
    let socket = scratch.socket("qemu.sock");
    need("qemu-nbd");
    let mut server = Command::new("qemu-nbd")
        .args(["--persistent", "--shared=8", "--format=raw", "--export-name=vm1", "--fork"])
        .arg(format!("--socket={}", text(&socket)))
        .arg(format!("--pid-file={}", text(&scratch.path("pid"))))
        .arg(&disk)
        .spawn()
        .unwrap();
    assert!(server.wait().unwrap().success());
    let pid = fs::read_to_string(scratch.path("pid")).unwrap().trim().parse().unwrap();
    let uri = format!("nbd+unix:///vm1?socket={}", text(&socket));
    let read = bench("-c 5000 -d 64 --jobs 2 --stats", &uri).run();
    let refused = bench("-c 1", format!("nbd+unix:///vm2?socket={}", text(&socket))).run();
    kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    assert_contains(&read.succeeded(), &["read: 5000 requests", "p99.99"]);
    assert_eq!(refused.code(), 1);
    assert_contains(&refused.stderr(), &["vm2", "refused export \"vm2\""]);
}

#[test]
fn missing_server_feature_is_reported_before_any_request() {
    let scratch = Scratch::new();
    let disk = scratch.filled("disk.raw", MIB);
    let server = Serve::new(&scratch).arg(&disk).arg("--read-only").start();
    let uri = server.uri("disk");
    assert_contains(&bench("-w -c 1", &uri).fails(), &["is read-only (leave out -w"]);
    assert_contains(
        &bench("-s 64M -d 1 -c 1", &uri).fails(),
        &["accepts requests of up to 33554432 bytes, but -s is 67108864"],
    );
    assert_contains(
        &bench("-s 2M -d 1 -c 1", &uri).fails(),
        &["has 1048576 bytes, fewer than one request of 2097152"],
    );
    assert_eq!(bench("-t none", &uri).run().code(), 2);
    assert_eq!(bench("", uri.replace("nbd+unix", "nbd+vsock")).run().code(), 2);
    let nobody = format!("nbd+unix:///a?socket={}", text(&scratch.socket("nobody")));
    assert_contains(&bench("", nobody).fails(), &["cannot connect: No such file or directory"]);
}

#[test]
fn disconnect_ends_the_load() {
    let server = Serve::with_own_scratch().args(["memory:1M", "--delay", "read=10ms"]).start();
    let client = started(&["-d", "4", "--runtime", "60s", &server.uri("memory")]);
    drop(server);
    let [_, stderr] = failed(client);
    assert!(stderr.contains("a request failed: ") && stderr.contains("connection"), "{stderr}");
}

#[test]
fn invalid_reply_ends_the_load() {
    let scratch = Scratch::new();
    let socket = scratch.socket("odd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let uri = format!("nbd+unix:///a?socket={}", text(&socket));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            std::io::Write::write_all(&mut stream, b"SSH-2.0-OpenSSH_9.2p1\r\n").unwrap();
            let _ = stream.read(&mut [0; 100]);
        });
        assert_contains(&bench("", uri).fails(), &["violates the NBD protocol"]);
    });
}

#[test]
fn unresponsive_server_can_be_interrupted() {
    let scratch = Scratch::new();
    let socket = scratch.socket("silent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    for target in [format!("nbd+unix:///a?socket={}", text(&socket)), format!("vhost-user:{}", text(&socket))]
    {
        let client = spawned(&[&target]);
        let _connected = listener.accept().unwrap();
        let [printed, stderr] = interrupted(client);
        assert_contains(&stderr, &[&target, ": interrupted before anything was sent"]);
        assert_eq!(printed, "");
    }
}

#[test]
fn stalled_job_can_be_interrupted() {
    let scratch = Scratch::new();
    let socket = scratch.socket("busy.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let client = spawned(&["--jobs", "2", &format!("nbd+unix:///a?socket={}", text(&socket))]);
    let (mut first, _) = listener.accept().unwrap();
    std::io::Write::write_all(&mut first, &server_handshake()).unwrap();
    std::io::copy(&mut first, &mut std::io::sink()).unwrap();
    let _jobs = [listener.accept().unwrap(), listener.accept().unwrap()];
    let [_, stderr] = interrupted(client);
    assert_contains(&stderr, &[": interrupted after "]);
}

/// The server's half of a handshake.
fn server_handshake() -> Vec<u8> {
    let reply = |option: u32, kind: u32, data: &[u8]| {
        let head = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        let numbers = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
        [head, numbers, data.to_vec()].concat()
    };
    let export = [&[0, 0][..], &MIB.to_be_bytes(), &[0, 1]].concat();
    [b"NBDMAGICIHAVEOPT\0\x03".to_vec(), reply(8, (1 << 31) + 1, &[]), reply(7, 3, &export), reply(7, 1, &[])]
        .concat()
}

/// Serves two handshakes, then receives requests without replying. Sends a message on the channel
/// for each connection that has received `enough` bytes of requests.
fn serve_stalled(listener: &UnixListener, enough: usize, stalled: &mpsc::Sender<()>) {
    for _ in 0..2 {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, &server_handshake()).unwrap();
        let mut taken = vec![0; enough];
        if std::io::Read::read_exact(&mut stream, &mut taken).is_ok() {
            stalled.send(()).unwrap();
            std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
        }
    }
}

#[test]
fn interrupt_does_not_wait_for_replies() {
    let scratch = Scratch::new();
    let (socket, file) = (scratch.socket("stalled.sock"), scratch.path("result.json"));
    let listener = UnixListener::bind(&socket).unwrap();
    let uri = format!("nbd+unix:///a?socket={}", text(&socket));
    std::thread::scope(|scope| {
        let (sender, stalled) = mpsc::channel();
        scope.spawn(move || serve_stalled(&listener, 4 * 4096, &sender));
        let client = started(&["-w", "-d", "4", "--result", text(&file), &uri]);
        stalled.recv().unwrap();
        let [printed, stderr] = interrupted(client);
        assert_contains(&stderr, &[": interrupted after "]);
        assert_contains(&printed, &["Requests not completed when the run ended: 4"]);
    });
    assert_eq!(saved_result(&file)["partial"], "interrupted");
}

#[test]
fn json_has_the_keys_of_fio() {
    let scratch = Scratch::new();
    let file = scratch.filled("disk.raw", MIB);
    let theirs = TestClient::new("fio")
        .args(["--name=a", "--ioengine=psync", "--rw=randrw", "--bs=4k", "--size=1M", "--output-format=json"])
        .args(["--fsync=16", &format!("--filename={}", text(&file))])
        .arg(format!("--aux-path={}", scratch.path("").display()))
        .succeeds();
    let theirs: Value = serde_json::from_str(&theirs[theirs.find('{').unwrap()..]).unwrap();
    let ours = bench_json("-f raw -w --rwmixread 50 --random -c 500 -d 16 --flush-interval 16", &file);
    let keys = |value: &Value| -> BTreeSet<String> { value.as_object().unwrap().keys().cloned().collect() };
    for direction in ["read", "write", "trim"] {
        let [ours, theirs] = [&ours, &theirs].map(|report| &report["jobs"][0][direction]);
        let missing: Vec<_> = keys(theirs).difference(&keys(ours)).cloned().collect();
        assert!(missing.is_empty(), "{direction}: {missing:?} are missing");
        for part in ["slat_ns", "clat_ns", "lat_ns"] {
            let missing: Vec<_> = keys(&theirs[part]).difference(&keys(&ours[part])).cloned().collect();
            assert!(missing.is_empty(), "{direction}, {part}: {missing:?} are missing");
        }
    }
    let percentiles = |report: &Value| keys(&report["jobs"][0]["read"]["clat_ns"]["percentile"]);
    assert_eq!(percentiles(&ours), percentiles(&theirs));
    assert!(ours["jobs"][0]["sync"]["total_ios"].as_u64() > Some(0));
}

#[test]
fn rate_holds_and_latency_counts_from_the_due_time() {
    // The disk completes 25 requests a second and 50 are due: request n is due at 20·n ms and
    // completes at 40·(n + 1) ms at the earliest.
    let counted = bench_json("-d 1 --rate-iops 50 --arrivals fixed -c 25 --delay read=40ms", "memory:1M");
    let read = &counted["jobs"][0]["read"];
    assert_eq!(read["total_ios"], 25);
    let percentile = |name: &str| read["clat_ns"]["percentile"][name].as_u64().unwrap();
    assert!(percentile("50.000000") >= 260_000_000, "the median latency is below its minimum: {read:#}");
    assert!(percentile("99.000000") >= 500_000_000, "the 99th percentile is below its minimum: {read:#}");
    // After a second at most 25 of 50 have been sent, plus the requests then in flight.
    let timed =
        bench_json("-d 1 --rate-iops 50 --arrivals fixed --runtime 1s --delay read=40ms", "memory:1M");
    assert!(timed["jobs"][0]["read"]["total_ios"].as_u64() <= Some(51), "more requests than were due");
    let delay = timed["weir"]["behind-seconds"].as_f64().unwrap();
    assert!(delay >= 0.45, "it was {delay} s behind");
}

#[test]
fn results_are_saved() {
    let scratch = Scratch::new();
    let file = scratch.path("result.json");
    bench("-c 1000 -w --rwmixread 50 -q", "memory:1M").args(["--result", text(&file)]).succeeds();
    let result = saved_result(&file);
    let measures = result["findings"]["measures"].as_array().unwrap();
    let names: Vec<_> = measures.iter().map(|measure| measure["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"read IOPS") && names.contains(&"write latency, p99.99"), "{names:?}");
    assert_eq!(result["partial"], Value::Null);
}

#[test]
fn unknown_result_name_is_rejected_before_measuring() {
    let scratch = Scratch::new();
    let image = scratch.filled("vm1.raw", MIB);
    let before = fs::read(&image).unwrap();
    for options in ["--result", "--report"] {
        let stderr = bench("--runtime 60s", "memory:1M").args([options, text(&image)]).fails();
        assert_contains(&stderr, &["vm1.raw: cannot be written: exists"]);
    }
    assert!(fs::read(&image).unwrap() == before);
    bench("-q -c 100", "memory:1M").args(["--result", "/dev/null"]).succeeds();
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
}

#[test]
fn results_are_saved_if_output_fails() {
    let scratch = Scratch::new();
    let file = scratch.path("result.json");
    let mut command = Command::new(WEIR);
    command.args(["bench", "--json", "-c", "100", "--result", text(&file), "memory:1M"]);
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert_eq!(command.stdout(full).stderr(Stdio::null()).status().unwrap().code(), Some(1));
    assert!(fs::read_to_string(&file).unwrap().contains("weir-result"));
}

fn spawned(arguments: &[&str]) -> Child {
    let mut command = Command::new(WEIR);
    command.arg("bench").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("cargo built the program")
}

/// Starts `weir bench` and waits until it sends requests.
pub(crate) fn started(arguments: &[&str]) -> Child {
    let mut child = spawned(arguments);
    let mut line = Vec::new();
    // One byte at a time: later lines must stay in the pipe for the next reader.
    let mut output = BufReader::with_capacity(1, child.stdout.as_mut().expect("piped"));
    output.read_until(b'\n', &mut line).unwrap();
    assert!(line.starts_with(b"Sending "), "{line:?}");
    child
}

/// Asserts that the process fails; returns its stdout and stderr.
#[track_caller]
pub(crate) fn failed(child: Child) -> [String; 2] {
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
}

/// Interrupts the process with SIGINT; returns its stdout and stderr.
#[track_caller]
pub(crate) fn interrupted(child: Child) -> [String; 2] {
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    failed(child)
}

fn saved_result(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

#[test]
fn interrupted_run_prints_its_results() {
    let scratch = Scratch::new();
    let file = scratch.path("result.json");
    let options = ["--runtime", "60s", "--delay", "read=1ms", "--result", text(&file), "memory:1M"];
    let [printed, stderr] = interrupted(started(&options));
    assert_contains(&stderr, &["weir: memory:1048576: interrupted after "]);
    assert!(!printed.contains("Run completed"));
    assert_eq!(saved_result(&file)["partial"], "interrupted");
}

#[test]
fn progress_is_shown_on_a_terminal() {
    let terminal =
        Terminal::weir(["bench", "-d", "4", "--runtime", "2s", "--delay", "read=1ms", "memory:1M"]);
    terminal.wait_for("Sending read requests");
    terminal.wait_for(" IOPS █");
    terminal.wait_for("Run completed in ");
    terminal.wait_for("read: ");
    terminal.wait_for("IOPS each second: ");
    assert!(terminal.wait().success());
}
