//! Events: in the log, over QMP, and delivered to hook commands, including hostile ones, which
//! cause a line in the log and nothing else.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::signal::kill,
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, children,
    operator::{run_ok, socket, start},
    poll_until, qemu_img, text, weir,
};

fn qmp(scratch: &Scratch) -> Qmp {
    Qmp::negotiated(&scratch.socket("qmp"))
}

/// The next event of this type.
#[track_caller]
fn next(client: &mut Qmp, kind: &str) -> Value {
    loop {
        let event = client.event("X_WEIR_EVENT");
        if event["kind"] == kind {
            return event;
        }
    }
}

fn limit(scratch: &Scratch, iops: u32) {
    run_ok(scratch, &["throttle", "a", "--iops-total", &iops.to_string()]);
}

fn assert_served(weir: &Weir) {
    weir.nbdsh("b", "h.pwrite(b'x' * 4096, 0)\nassert h.pread(4096, 0) == b'x' * 4096");
}

#[test]
fn changes_are_events_with_their_client() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let mut client = qmp(&scratch);
    limit(&scratch, 500);
    let event = next(&mut client, "config_changed");
    assert_eq!((&event["disk"], &event["severity"]), (&json!("a"), &json!("info")));
    let changed = json!([{"setting": "iops-total", "before": 0, "after": 500}]);
    assert_eq!(event["data"]["changes"], changed);
    assert_eq!(event["data"]["by"]["kind"], "qmp");
    assert_eq!(event["data"]["by"]["uid"], nix::unistd::geteuid().as_raw());
    // Changed by the client that receives the event.
    client.command("x-weir-set", json!({"name": "a", "weight": 7}));
    let by = next(&mut client, "config_changed")["data"]["by"].clone();
    assert_eq!(by["pid"], std::process::id());
    run_ok(&scratch, &["group", "add", "gold"]);
    run_ok(&scratch, &["group", "remove", "gold"]);
    assert_eq!(next(&mut client, "group_removed")["group"], "gold");
    let all = client.command("x-weir-query-events", json!({}));
    let kinds: Vec<_> = all.as_array().unwrap().iter().map(|event| event["kind"].clone()).collect();
    assert_eq!(kinds, ["config_changed", "config_changed", "group_added", "group_removed"]);
    let id = |at: usize| all[at]["id"].as_u64().unwrap();
    assert!(id(0) < id(1) && id(1) < id(2), "{all}");
    let rest = client.command("x-weir-query-events", json!({"since": id(2)}));
    assert_eq!(rest, json!([all[3]]));
    let line = weir.wait_for_log("kind=\"config_changed\"");
    assert_contains(
        &line,
        &["disk a was changed by process ", "over QMP: iops-total 500 (was 0)", "disk=\"a\""],
    );
}

#[test]
fn reload_event_names_its_client() {
    let scratch = Scratch::new();
    let config = |iops: u32| {
        let at = socket(&scratch);
        let text = format!(
            "[daemon]\nnbd = \"{}\"\nqmp = \"{at}\"\n[disk.a]\nimage = \"memory:1M\"\niops-total = {iops}\n",
            format_args!("unix:{}", text(&scratch.socket("nbd")))
        );
        scratch.file("weir.toml", text)
    };
    let weir = crate::harness::operator::serve(&scratch, &config(100));
    let mut client = qmp(&scratch);
    config(200);
    run_ok(&scratch, &["reload"]);
    let by = next(&mut client, "config_changed")["data"]["by"].clone();
    assert_eq!((&by["kind"], &by["by"]["kind"]), (&json!("reload"), &json!("qmp")));
    config(300);
    weir.signal(nix::sys::signal::Signal::SIGHUP);
    let by = next(&mut client, "config_changed")["data"]["by"].clone();
    assert_eq!(by, json!({"kind": "reload", "by": {"kind": "signal"}}));
}

#[test]
fn throttling_and_connections_are_events() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let mut client = qmp(&scratch);
    limit(&scratch, 20);
    // A load that runs until the event of the limit has arrived.
    let done = scratch.path("done");
    let uri = weir.uri("a");
    let busy = thread::spawn({
        let done = done.clone();
        move || {
            let script = "import os\nh.connect_uri(arguments[0])\n\
                          while not os.path.exists(arguments[1]): h.pread(512, 0)";
            crate::harness::nbdsh(script, [uri, text(&done).to_owned()])
        }
    });
    let started = next(&mut client, "session_started");
    assert_eq!(
        (&started["disk"], &started["data"]["type"], &started["data"]["export"]),
        (&json!("a"), &json!("nbd"), &json!("a"))
    );
    let hit = next(&mut client, "limit_hit");
    assert_eq!((&hit["disk"], &hit["data"]["limit"]), (&json!("a"), &json!("iops-total")));
    assert!(hit["data"]["percent"].as_u64() >= Some(50), "{hit}");
    fs::write(&done, "").unwrap();
    busy.join().unwrap();
    let ended = next(&mut client, "session_ended");
    assert_eq!(ended["data"]["client"], started["data"]["client"]);
    let released = next(&mut client, "limit_released");
    assert_eq!((&released["disk"], &released["data"]["limit"]), (&json!("a"), &json!("iops-total")));
    let all = client.command("x-weir-query-events", json!({}));
    // One event for each throttled period, not one for each delayed request.
    let hits = all.as_array().unwrap().iter().filter(|event| event["kind"] == "limit_hit").count();
    assert_eq!(hits, 1, "{all}");
}

#[test]
fn stop_and_resume_of_a_disk_are_events() {
    let scratch = Scratch::new();
    let config = format!(
        "[daemon]\nnbd = \"unix:{}\"\nqmp = \"{}\"\n[disk.a]\nimage = \"memory:1M\"\n\
         on-write-error = \"stop\"\nfault = [\"kind=write,error=EIO,count=1\"]\n",
        text(&scratch.socket("nbd")),
        socket(&scratch)
    );
    let weir = crate::harness::operator::serve(&scratch, &scratch.file("weir.toml", config));
    let mut client = qmp(&scratch);
    let uri = format!("nbd+unix:///a?socket={}", text(&scratch.socket("nbd")));
    let writer = thread::spawn(move || {
        crate::harness::nbdsh("h.connect_uri(arguments[0])\nh.pwrite(b'x' * 512, 0)", [uri])
    });
    assert_eq!(next(&mut client, "image_error")["data"]["operation"], "write");
    assert_eq!(next(&mut client, "disk_stopped")["disk"], "a");
    run_ok(&scratch, &["resume"]);
    let resumed = next(&mut client, "disk_resumed");
    assert_eq!((&resumed["disk"], &resumed["data"]["by"]["kind"]), (&json!("a"), &json!("qmp")));
    writer.join().unwrap();
    weir.wait_for_log("kind=\"disk_stopped\"");
}

#[test]
fn missed_reservation_is_an_event() {
    let scratch = Scratch::new();
    // This byte rate admits fewer operations than the reservation.
    let config = format!(
        "[daemon]\nnbd = \"unix:{}\"\nqmp = \"{}\"\n[group.g]\niops-total = 2000\n\
         [disk.a]\nimage = \"memory:1M\"\ngroup = \"g\"\niops-reservation = 1000\nbps-total = \"40K\"\n",
        text(&scratch.socket("nbd")),
        socket(&scratch)
    );
    let weir = crate::harness::operator::serve(&scratch, &scratch.file("weir.toml", config));
    let mut client = qmp(&scratch);
    let done = scratch.path("done");
    let uri = format!("nbd+unix:///a?socket={}", text(&scratch.socket("nbd")));
    let busy = thread::spawn({
        let done = done.clone();
        move || {
            let script = "import os\nh.connect_uri(arguments[0])\n\
                          while not os.path.exists(arguments[1]): h.pread(4096, 0)";
            crate::harness::nbdsh(script, [uri, text(&done).to_owned()])
        }
    });
    let missed = next(&mut client, "reservation_missed");
    fs::write(&done, "").unwrap();
    busy.join().unwrap();
    assert_eq!((&missed["disk"], &missed["severity"]), (&json!("a"), &json!("warning")));
    weir.wait_for_log("disk a gets less than its reservation");
    // A disk without demand does not miss its reservation.
    assert_eq!(next(&mut client, "reservation_met")["disk"], "a");
}

#[test]
fn modified_backing_file_is_one_event() {
    let scratch = Scratch::new();
    let (base, top) = (scratch.sparse("base.raw", MIB), scratch.path("top.qcow2"));
    qemu_img(["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "raw", text(&top)]).succeeds();
    let weir = Serve::new(&scratch)
        .args([text(&top), "--format", "qcow2", "--name", "a", "--qmp", &socket(&scratch)])
        .start();
    let mut client = qmp(&scratch);
    let file = fs::OpenOptions::new().write(true).open(&base).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"other", 4096).unwrap();
    let changed = next(&mut client, "backing_file_changed");
    assert_eq!((&changed["disk"], &changed["severity"]), (&json!("a"), &json!("error")));
    weir.wait_for_log("another program changed a backing file of disk a");
    // A later event: a second one of the first type would have arrived before it.
    limit(&scratch, 100);
    assert_eq!(next(&mut client, "config_changed")["disk"], "a");
    let all = client.command("x-weir-query-events", json!({}));
    let changes = all.as_array().unwrap().iter().filter(|event| event["kind"] == "backing_file_changed");
    assert_eq!(changes.count(), 1, "{all}");
}

/// An executable script.
fn script(scratch: &Scratch, content: &str) -> PathBuf {
    let path = scratch.file("hook.sh", format!("#!/bin/sh\n{content}\n"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn with_command(scratch: &Scratch, content: &str) -> Weir {
    let (script, out) = (script(scratch, content), scratch.path("out"));
    start(scratch, &["--on-event", &format!("{} {}", text(&script), text(&out))])
}

/// Waits for the first line that a command writes to `path`.
fn first_line(path: &Path) -> String {
    poll_until(|| fs::read_to_string(path).ok().filter(|text| text.ends_with('\n')))
}

/// The events in the complete lines that a command has written.
fn events_in(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    lines.map(|line| serde_json::from_str(line).expect("an event")).collect()
}

/// The limit that an event reports; 0 if it reports none.
fn limit_after(event: &Value) -> u64 {
    event["data"]["changes"][0]["after"].as_u64().unwrap_or(0)
}

#[test]
fn hook_receives_the_event_on_stdin_inside_the_sandbox() {
    let scratch = Scratch::new();
    let weir = with_command(&scratch, "cat > $1.new && mv $1.new $1");
    limit(&scratch, 100);
    let event: Value = serde_json::from_str(&first_line(&scratch.path("out"))).unwrap();
    assert_eq!((&event["kind"], &event["disk"]), (&json!("config_changed"), &json!("a")));
    let runner = children(weir.pid()).next().expect("the daemon has a child that runs hooks");
    let status = fs::read_to_string(format!("/proc/{runner}/status")).unwrap();
    let assert_field = |field: &str, value: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(field)).map(str::trim);
        assert_eq!(found, Some(value), "{field}");
    };
    assert_field("Seccomp:", "2");
    assert_field("NoNewPrivs:", "1");
    assert_field("CapEff:", "0000000000000000");
    assert_field("Threads:", "1");
}

#[test]
fn hook_inherits_no_descriptors() {
    let scratch = Scratch::new();
    let passed = fs::File::open(scratch.file("passed", "geheim")).unwrap();
    // The standard library sets close-on-exec on the descriptors that it opens.
    fcntl(&passed, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let weir = with_command(&scratch, "readlink /proc/$$/fd/* > $1.new; mv $1.new $1");
    drop(passed);
    let open_files = |pid: Pid| {
        let open = fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        open.map(|file| file.display().to_string()).collect::<Vec<_>>().join("\n")
    };
    assert!(open_files(weir.pid()).contains("/passed"), "the daemon open_files the passed descriptor");
    let runner = children(weir.pid()).next().expect("the daemon has a child that runs hooks");
    assert!(!open_files(runner).contains("/passed"), "{}", open_files(runner));
    limit(&scratch, 100);
    let open = first_line(&scratch.path("out"));
    assert!(open.contains("/dev/null") && !open.contains("/passed"), "{open}");
}

#[test]
fn failing_and_recovered_hook_are_logged_once_each() {
    let scratch = Scratch::new();
    let weir = with_command(&scratch, "cat >> $1; test -e $1.ok || exit 3");
    limit(&scratch, 100);
    let line = weir.wait_for_log("an event was not delivered");
    assert_contains(&line, &["it has ended with exit status: 3", "hook.sh"]);
    // The hook's arguments must not appear in the log.
    assert!(!line.contains("/out"), "an argument may be a secret: {line}");
    scratch.file("out.ok", "");
    limit(&scratch, 200);
    assert_contains(&weir.wait_for_log("events are delivered again"), &["lost=1"]);
    let limits: Vec<_> = events_in(&scratch.path("out")).iter().map(limit_after).collect();
    assert_eq!(limits, [100, 200]);
    assert_served(&weir);
}

#[test]
fn hanging_hook_blocks_nothing_and_skips_old_events() {
    let scratch = Scratch::new();
    let weir = with_command(&scratch, "cat >> $1; while ! test -e $1.ok; do sleep 0.05; done");
    limit(&scratch, 100);
    first_line(&scratch.path("out"));
    let mut client = qmp(&scratch);
    for iops in 101..=200 {
        client.command("x-weir-set", json!({"name": "a", "iops-total": iops}));
    }
    assert_served(&weir);
    let line = weir.wait_for_log("an event was not delivered");
    assert_contains(&line, &["it did not end within 10 s"]);
    scratch.file("out.ok", "");
    // At most 64 of the hundred are queued.
    let arrived = poll_until(|| {
        let events = events_in(&scratch.path("out"));
        events.iter().any(|event| limit_after(event) == 200).then_some(events)
    });
    let skipped: u64 = arrived.iter().filter_map(|event| event["skipped"].as_u64()).sum();
    assert!(
        arrived.len() <= 64 + 2 && skipped >= 30,
        "{} events arrived, {skipped} were skipped",
        arrived.len()
    );
    weir.wait_for_log("events are delivered again");
}

#[test]
fn missing_hook_is_logged_once() {
    let scratch = Scratch::new();
    let weir = with_command(&scratch, "true");
    fs::remove_file(scratch.path("hook.sh")).unwrap();
    for iops in 0..5 {
        limit(&scratch, 100 + iops);
    }
    weir.wait_for_log("it cannot be started: No such file");
    assert_served(&weir);
    let log = weir.stop();
    assert_eq!(log.matches("an event was not delivered").count(), 1, "{log}");
}

#[test]
fn endless_hook_is_killed() {
    let scratch = Scratch::new();
    let weir = with_command(&scratch, "echo $$ > $1; trap '' TERM; while :; do sleep 1; done");
    limit(&scratch, 100);
    let pid = Pid::from_raw(first_line(&scratch.path("out")).trim().parse().unwrap());
    assert_served(&weir);
    let line = weir.wait_for_log("an event was not delivered");
    assert_contains(&line, &["it did not end within 10 s, and was killed"]);
    assert!(kill(pid, None).is_err(), "the hook's child was killed");
}

#[test]
fn children_of_a_hook_are_killed_and_its_status_logged() {
    let scratch = Scratch::new();
    // One child is in the command's process group; the other has left it and holds the standard
    // input of the command open.
    let content = "sleep 1000 & echo $! > $1.a\nsetsid sh -c 'echo $$ > '$1'.b; exec sleep 1000' &\n\
                   while ! test -s $1.b; do sleep 0.01; done; exit 3";
    let weir = with_command(&scratch, content);
    limit(&scratch, 100);
    let line = weir.wait_for_log("an event was not delivered");
    assert_contains(&line, &["it has ended with exit status: 3"]);
    for name in ["out.a", "out.b"] {
        let pid = Pid::from_raw(first_line(&scratch.path(name)).trim().parse().unwrap());
        poll_until(|| kill(pid, None).err());
    }
}

#[test]
fn background_daemon_with_a_hook_releases_its_parent() {
    let scratch = Scratch::new();
    let (script, control) = (script(&scratch, "cat > /dev/null"), socket(&scratch));
    let nbd = format!("unix:{}", text(&scratch.socket("nbd")));
    let arguments = ["serve", "memory:1M", "--nbd", &nbd, "--qmp", &control, "--on-event", text(&script)];
    weir(&arguments).arg("--daemonize").succeeds();
    let quit = qmp(&scratch).command_reply("quit", json!({}));
    assert!(quit.get("return").is_some(), "{quit}");
}

#[test]
fn invalid_hook_is_rejected_at_the_start() {
    let scratch = Scratch::new();
    let serve = |target: &str| Serve::new(&scratch).args(["memory:1M", "--on-event", target]);
    assert_contains(&serve("/nowhere/hook").fails(), &["on-event: /nowhere/hook: ", "no such program"]);
    assert_contains(&serve("hook.sh").rejects_usage(), &["--on-event", "absolute path"]);
    assert_contains(&serve("http://host/").rejects_usage(), &["--on-event", "is a URL", "/usr/bin/curl"]);
}

/// An HTTPS server that answers every POST, and writes its body to a file.
struct HttpsHookServer {
    process: Child,
    port: u16,
}

impl HttpsHookServer {
    fn start(scratch: &Scratch) -> Self {
        let (key, certificate) = (scratch.path("key.pem"), scratch.path("cert.pem"));
        TestClient::new("openssl")
            .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"])
            .args(["-addext", "subjectAltName=IP:127.0.0.1"])
            .args(["-keyout", text(&key), "-out", text(&certificate)])
            .succeeds();
        let script = "import http.server, ssl, sys\n\
            class Hook(http.server.BaseHTTPRequestHandler):\n\
            \tdef do_POST(self):\n\
            \t\tbody = self.rfile.read(int(self.headers['Content-Length']))\n\
            \t\topen(sys.argv[3], 'wb').write(body + b'\\n')\n\
            \t\tself.send_response(204)\n\
            \t\tself.end_headers()\n\
            \tdef log_message(self, *arguments): pass\n\
            server = http.server.HTTPServer(('127.0.0.1', 0), Hook)\n\
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n\
            context.load_cert_chain(sys.argv[1], sys.argv[2])\n\
            server.socket = context.wrap_socket(server.socket, server_side=True)\n\
            print(server.server_address[1], flush=True)\n\
            server.serve_forever()\n";
        let arguments = [&certificate, &key, &scratch.path("body")];
        let mut command = Command::new("python3");
        command.args(["-c", script]).args(arguments).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().expect("python3 is there, nbdsh needs it");
        let mut port = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
        Self { process, port: port.trim().parse().expect("it listens") }
    }
}

impl Drop for HttpsHookServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn curl_as_in_the_guide_posts_an_event_over_tls() {
    let scratch = Scratch::new();
    let server = HttpsHookServer::start(&scratch);
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/events.md");
    let guide = fs::read_to_string(guide).unwrap();
    let command = guide.lines().find_map(|line| line.strip_prefix("on-event = \"/usr/bin/curl "));
    let (options, _) = command.and_then(|line| line.split_once(" https://")).expect("the guide has it");
    let serve = |more: &str| {
        let target = format!("/usr/bin/curl {options} {more} https://127.0.0.1:{}/events", server.port);
        let serve = Serve::new(&scratch).args(["memory:1M", "--name", "a"]);
        serve.args(["--qmp", &socket(&scratch), "--on-event", &target]).start()
    };
    let weir = serve("");
    limit(&scratch, 100);
    // 60: the certificate cannot be verified.
    assert_contains(&weir.wait_for_log("an event was not delivered"), &["it has ended with exit status: 60"]);
    weir.stop();
    let weir = serve(&format!("--cacert {}", text(&scratch.path("cert.pem"))));
    limit(&scratch, 200);
    let event: Value = serde_json::from_str(&first_line(&scratch.path("body"))).unwrap();
    assert_eq!(limit_after(&event), 200);
    weir.stop();
}

/// Voluntary context switches of all threads of the daemon.
fn voluntary_switches(weir: &Weir) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{}/task", weir.pid())).unwrap();
    let statuses = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok());
    let count = |status: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    statuses.map(|status| count(&status)).sum()
}

#[test]
fn idle_daemon_does_not_wake() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    // The daemon is idle after a request and a change of limits.
    assert_served(&weir);
    limit(&scratch, 500);
    // Temporary threads end with a short delay. A poll that is never cancelled would wake the
    // daemon each second.
    poll_until(|| {
        let before = voluntary_switches(&weir);
        thread::sleep(std::time::Duration::from_millis(2500));
        (voluntary_switches(&weir) == before).then_some(())
    });
}
