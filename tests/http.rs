//! `--http`: what programs are told and may change, and clients that mean no good. What the page
//! shows is the browser's to test.

use std::{
    cell::Cell,
    env, fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::PathBuf,
    process::Command,
    thread,
    time::Instant,
};

use serde_json::{Value, json};

use crate::{
    harness::{Client, DEADLINE, Qmp, Scratch, Serve, WEIR, Weir, assert_says, text, until},
    tls::Authority,
};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

struct Daemon {
    weir: Weir,
    /// `127.0.0.1` and the port.
    address: String,
}

/// What came back.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn of(whole: &str) -> Self {
        let (head, body) = whole.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {whole:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Self { status: status.expect("a status"), head: head.to_owned(), body: body.to_owned() }
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Why it was refused, with that status.
    #[track_caller]
    fn refused(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{self:?}");
        self.json()["error"].as_str().expect("a reason").to_owned()
    }
}

fn token_file(scratch: &Scratch) -> PathBuf {
    let path = scratch.file("token", format!("{TOKEN}\n"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

impl Daemon {
    fn start(serve: Serve) -> Self {
        let weir = serve.args(["--http", "127.0.0.1:0"]).start();
        let line = weir.wait_for_log("page at=");
        let address = line.split_once("at=").unwrap().1.split(' ').next().unwrap().to_owned();
        Self { weir, address }
    }

    /// One in which limits may be changed.
    fn with_token(scratch: &Scratch, serve: Serve) -> Self {
        Self::start(serve.args(["--http-token-file", text(&token_file(scratch))]))
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    /// With these lines of a head, each with its end.
    fn send(&self, method: &str, path: &str, head: &str, body: &str) -> Answer {
        let mut stream = self.connect();
        let host =
            if head.contains("Host: ") { String::new() } else { format!("Host: {}\r\n", self.address) };
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{host}{head}Connection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut whole = String::new();
        stream.read_to_string(&mut whole).unwrap();
        Answer::of(&whole)
    }

    fn get(&self, path: &str) -> Answer {
        self.send("GET", path, "", "")
    }

    fn change(&self, path: &str, token: &str, body: &Value) -> Answer {
        let head = format!("Authorization: Bearer {token}\r\n");
        self.send("PATCH", path, &head, &body.to_string())
    }

    #[track_caller]
    fn overview(&self) -> Value {
        let answer = self.get("/api/v1/overview");
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    fn listen(&self) -> Events {
        let mut stream = self.connect();
        let request = format!("GET /api/v1/stream HTTP/1.1\r\nHost: {}\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).unwrap();
        Events(BufReader::new(stream))
    }
}

/// Server-sent events, in chunks of HTTP: a line of a chunk's length is no event's.
struct Events(BufReader<TcpStream>);

impl Events {
    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).unwrap() > 0, "the stream has ended");
        line
    }

    /// The next one of this kind. Messages longer than a chunk do not come here.
    fn next(&mut self, kind: &str) -> Value {
        loop {
            if self.line().trim_end() == format!("event: {kind}") {
                assert!(self.line().starts_with("id: "));
                let data = self.line();
                return serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
            }
        }
    }
}

fn one<'a>(all: &'a Value, of: &str, name: &str) -> &'a Value {
    let all = all[of].as_array().unwrap();
    all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("no {name} in {all:?}"))
}

#[test]
fn what_runs_is_told_with_what_it_does() {
    let scratch = Scratch::new();
    let arguments = ["memory:16M", "--iops-total", "1000000", "--weight", "300"];
    let daemon = Daemon::start(Serve::new(&scratch).args(arguments));
    daemon.weir.nbdsh("memory", "for i in range(100): h.pread(4096, 4096 * i)");
    // What is told may be as old as the stream's last look.
    let overview = until(|| {
        let overview = daemon.overview();
        (one(&overview, "disks", "memory")["reads"]["requests"] == 100).then_some(overview)
    });
    assert_eq!(
        (&overview["access"], &overview["daemon"]["version"]),
        (&json!("read"), &json!(env!("CARGO_PKG_VERSION")))
    );
    let disk = one(&overview, "disks", "memory");
    let known = [
        ("size_bytes", json!(16 << 20)),
        ("weight", json!(300)),
        ("limits", json!({"iops-total": 1_000_000})),
        ("group", json!(null)),
    ];
    for (key, value) in known {
        assert_eq!(disk[key], value, "{key}");
    }
    let exports = disk["exports"].as_array().unwrap();
    assert_eq!((exports.len(), &exports[0]["type"]), (1, &json!("nbd")));
    let history = daemon.get("/api/v1/disks/memory/history?span=2h").json();
    assert_eq!(history["step_ms"], 10_000);
    assert_eq!(
        daemon.get("/api/v1/disks/memory/history?span=1y").refused(400),
        "weir: span: there are 10m, 2h and 2d"
    );
    assert!(daemon.get("/api/v1/disks/other/history").refused(404).contains("disk other: there is none"));
    // What is refused before anybody looks for it has a reason in the same form.
    assert!(daemon.get("/api/v1/disks/%ff/history").refused(400).contains("UTF-8"));
    assert!(daemon.get("/api/v1/nothing").refused(404).contains("there is nothing of this name"));
    assert!(daemon.send("DELETE", "/api/v1/overview", "", "").refused(405).contains("no such method"));
    let described = daemon.get("/api/v1/openapi.json").json();
    assert_eq!(described["openapi"], "3.1.0");
    daemon.weir.stop();
}

/// Nobody has a limit here, so no limit counts anything.
#[test]
fn totals_without_limits_are_those_of_metrics_and_of_status() {
    let scratch = Scratch::new();
    let control = scratch.socket("the-control");
    let config = format!(
        "[daemon]\nqmp = {:?}\n[group.outer]\n[group.inner]\ngroup = \"outer\"\n\
         [disk.a]\nimage = \"memory:1M\"\ngroup = \"inner\"\n\
         [disk.b]\nimage = \"memory:1M\"\ngroup = \"outer\"\n",
        format!("unix:{}", text(&control)),
    );
    let file = scratch.file("weir.toml", config);
    let metrics = scratch.socket("metrics");
    let serve = Serve::new(&scratch).args(["--config", text(&file)]);
    let daemon = Daemon::start(serve.args(["--metrics", &format!("unix:{}", text(&metrics))]));
    daemon.weir.nbdsh("a", "for i in range(25): h.pread(4096, 4096 * i)\nh.pwrite(b'x' * 512, 0)");
    daemon.weir.nbdsh("b", "for i in range(7): h.pread(512, 512 * i)");
    let counts = |all: &Value, of: &str, name: &str| {
        let one = one(all, of, name);
        [["reads", "requests"], ["reads", "bytes"], ["writes", "requests"], ["writes", "bytes"]]
            .map(|[direction, what]| one[direction][what].as_u64().unwrap())
    };
    let both = [32, 25 * 4096 + 7 * 512, 1, 512];
    let overview = until(|| Some(daemon.overview()).filter(|all| counts(all, "groups", "outer") == both));
    let (a, b) = ([25, 25 * 4096, 1, 512], [7, 7 * 512, 0, 0]);
    assert_eq!([counts(&overview, "disks", "a"), counts(&overview, "disks", "b")], [a, b]);
    assert_eq!(counts(&overview, "groups", "inner"), a);
    let told = Qmp::negotiated(&control).command("x-weir-query-status", json!({}));
    assert_eq!([counts(&told, "disks", "a"), counts(&told, "disks", "b")], [a, b]);
    let curl = ["--silent", "--fail", "--unix-socket", text(&metrics), "http://weir/metrics"];
    let page = Client::new("curl").args(curl).succeeds();
    let families = ["reads", "read_bytes", "writes", "written_bytes"];
    for (name, all) in [("a", a), ("b", b)] {
        for (family, count) in families.into_iter().zip(all) {
            let line = format!("weir_disk_{family}_total{{disk=\"{name}\"}} {count}\n");
            assert!(page.contains(&line), "{line} is not in {page}");
        }
    }
    // Rates and latencies of a group are its disks', too.
    let history = |of: &str| daemon.get(&format!("/api/v1/{of}/history?span=10m")).json();
    until(|| {
        let rates = history("groups/outer")["series"]["read_operations_per_second"].as_array()?.clone();
        rates.iter().any(|rate| rate.as_f64() > Some(0.0)).then_some(())
    });
    // Those of `b` came last.
    let known = |of: &str| -> Option<Vec<Value>> {
        let all = history(of)["series"]["latency_p99_ns"].as_array()?.clone();
        Some(all.into_iter().filter(|latency| !latency.is_null()).collect())
    };
    until(|| known("disks/b").filter(|all| !all.is_empty()));
    assert_eq!(known("groups/inner"), known("disks/a"));
    let [outer, inner] = ["groups/outer", "groups/inner"].map(|of| history(of)["latency_heat"].clone());
    let columns = |heat: &Value| heat["rows"].as_array().unwrap().iter().filter(|row| !row.is_null()).count();
    assert!(columns(&outer) >= columns(&inner) && columns(&inner) > 0, "{outer} and {inner}");
    daemon.weir.stop();
}

#[test]
fn an_imitated_device_is_as_busy_as_its_rate_has_it() {
    let scratch = Scratch::new();
    let metrics = scratch.socket("metrics");
    let serve = Serve::new(&scratch).args(["memory:1M", "--rate", "iops=40", "--prefetch", "off"]);
    let daemon = Daemon::start(serve.args(["--metrics", &format!("unix:{}", text(&metrics))]));
    let reads = Cell::new(0);
    until(|| {
        daemon.weir.nbdsh("memory", "for i in range(20): h.pread(512, 1024 * i)");
        reads.set(reads.get() + 20);
        let overview = daemon.overview();
        let device = one(&overview, "devices", "rate of memory");
        (device["busy_ratio"].as_f64() > Some(0.0)
            && device["read_operations_per_second"].as_f64() > Some(0.0))
        .then_some(())
    });
    let curl = ["--silent", "--fail", "--unix-socket", text(&metrics), "http://weir/metrics"];
    let reads = reads.get();
    let expected = [f64::from(reads), 512.0 * f64::from(reads), f64::from(reads) / 40.0];
    // An answer is given again for a quarter of a second.
    until(|| {
        let page = Client::new("curl").args(curl).succeeds();
        let of = |family: &str| -> Option<f64> {
            let name = format!("weir_device_{family}_total{{device=\"rate of memory\"}} ");
            page.lines().find_map(|line| line.strip_prefix(&name))?.parse().ok()
        };
        (["reads", "read_bytes", "busy_seconds"].map(of) == expected.map(Some)).then_some(())
    });
    daemon.weir.stop();
}

/// What an answer lacks of what is described, or has beside it.
fn check(schema: &Value, all: &Value, value: &Value, at: &str) {
    if let Some(name) = schema["$ref"].as_str() {
        return check(&all[name.rsplit('/').next().unwrap()], all, value, at);
    }
    if let Some(either) = schema["oneOf"].as_array() {
        let is_null = |schema: &&Value| schema["type"] == "null";
        match (value.is_null(), either.iter().find(|schema| !is_null(schema))) {
            (true, _) => assert!(either.iter().any(|schema| is_null(&schema)), "{at}: null"),
            (false, Some(schema)) => check(schema, all, value, at),
            (false, None) => panic!("{at}: {value}"),
        }
        return;
    }
    match value {
        Value::Object(members) if schema.get("properties").is_some() => {
            let properties = schema["properties"].as_object().unwrap();
            for key in schema["required"].as_array().into_iter().flatten() {
                assert!(members.contains_key(key.as_str().unwrap()), "{at}: {key} is missing");
            }
            for (key, member) in members {
                let schema = properties.get(key).unwrap_or_else(|| panic!("{at}: {key} is not described"));
                check(schema, all, member, &format!("{at}.{key}"));
            }
        }
        Value::Array(items) => {
            assert_eq!(schema["type"], "array", "{at}");
            items.iter().for_each(|item| check(&schema["items"], all, item, at));
        }
        other => {
            let kind = match other {
                Value::Null => "null",
                Value::Bool(_) => "boolean",
                Value::Number(number) if number.is_f64() => "number",
                Value::Number(_) => "integer",
                Value::String(_) => "string",
                _ => "object",
            };
            let kinds = match &schema["type"] {
                Value::String(one) => vec![one.as_str()],
                Value::Array(some) => some.iter().filter_map(Value::as_str).collect(),
                _ => Vec::new(),
            };
            let is_described = kinds.contains(&kind)
                || kind == "integer" && kinds.contains(&"number")
                || schema["enum"].as_array().is_some_and(|known| known.contains(other));
            assert!(is_described, "{at}: {other} is no {schema}");
        }
    }
}

#[test]
fn answers_are_as_they_are_described() {
    let scratch = Scratch::new();
    let file = scratch.sparse("disk.raw", 16 << 20);
    let arguments =
        [text(&file), "memory:16M", "--group", "gold", "--iops-total", "200", "--watermark", "50"];
    let daemon =
        Daemon::with_token(&scratch, Serve::new(&scratch).args(arguments).args(["--prefetch", "on"]));
    daemon.weir.nbdsh("memory", "for i in range(300): h.pread(4096, 4096 * i)");
    let described = daemon.get("/api/v1/openapi.json").json();
    let schemas = &described["components"]["schemas"];
    check(&schemas["Overview"], schemas, &daemon.overview(), "overview");
    for path in ["/api/v1/disks/memory/history", "/api/v1/groups/gold/history?span=2d"] {
        check(&schemas["History"], schemas, &daemon.get(path).json(), path);
    }
    let head = format!("Authorization: Bearer {TOKEN}\r\n");
    let preview = until(|| {
        let preview =
            daemon.send("POST", "/api/v1/groups/gold/preview", &head, "{\"iops-total\": 100}").json();
        (preview["requests"] == 300).then_some(preview)
    });
    check(&schemas["Preview"], schemas, &preview, "preview");
    let changed = daemon.change("/api/v1/groups/gold/limits", TOKEN, &json!({"iops-total": 100}));
    check(&schemas["Group"], schemas, &changed.json(), "group");
    daemon.weir.stop();
}

#[test]
fn who_has_a_machine_s_export_is_told_with_its_rings() {
    let scratch = Scratch::new();
    let socket = scratch.socket("vm");
    let machine = format!("unix:{}", text(&socket));
    let daemon = Daemon::start(Serve::new(&scratch).args(["memory:1M", "--vhost-user-blk", &machine]));
    let exports = |overview: &Value| {
        let exports = one(overview, "disks", "memory")["exports"].as_array().unwrap();
        ["nbd", "vhost-user-blk"].map(|kind| exports.iter().find(|one| one["type"] == kind).unwrap().clone())
    };
    let [_, machine] = exports(&daemon.overview());
    assert_eq!((&machine["front_end"], &machine["queues"]), (&Value::Null, &json!(0)));
    let front_end = UnixStream::connect(&socket).unwrap();
    let overview = until(|| {
        let overview = daemon.overview();
        (exports(&overview)[1]["connections"] == 1).then_some(overview)
    });
    let described = daemon.get("/api/v1/openapi.json").json();
    let schemas = &described["components"]["schemas"];
    check(&schemas["Overview"], schemas, &overview, "overview");
    let [nbd, machine] = exports(&overview);
    assert_eq!(machine["front_end"]["pid"], std::process::id());
    for count in ["queues", "requests", "in_flight_requests", "kicks", "calls", "copies"] {
        assert_eq!((&machine[count], &nbd[count]), (&json!(0), &Value::Null), "{count}");
    }
    drop(front_end);
    until(|| exports(&daemon.overview())[1]["front_end"].is_null().then_some(()));
    daemon.weir.stop();
}

#[test]
fn the_page_is_there_under_a_strict_policy() {
    let scratch = Scratch::new();
    let daemon = Daemon::start(Serve::new(&scratch).arg("memory:1M"));
    for (path, kind) in
        [("/", "text/html"), ("/assets/main.js", "text/javascript"), ("/api/v1/overview", "application/json")]
    {
        let answer = daemon.get(path);
        assert_eq!(answer.status, 200, "{answer:?}");
        for line in [
            &format!("content-type: {kind}"),
            "content-security-policy: default-src 'none'; script-src 'self';",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
        ] {
            assert!(answer.head.contains(line), "{line} is not in {}", answer.head);
        }
        assert!(
            !answer.head.contains("set-cookie") && !answer.head.contains("access-control"),
            "{}",
            answer.head
        );
    }
    assert_eq!(daemon.get("/assets/../Cargo.toml").status, 404);
    // Twice over one connection.
    let mut stream = daemon.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    for _ in 0..2 {
        let request = format!("GET /assets/icon.svg HTTP/1.1\r\nHost: {}\r\n\r\n", daemon.address);
        stream.write_all(request.as_bytes()).unwrap();
        let mut length = 0;
        loop {
            let mut line = String::new();
            assert!(reader.read_line(&mut line).unwrap() > 0);
            if let Some(said) = line.strip_prefix("content-length: ") {
                length = said.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        assert!(body.starts_with(b"<"));
    }
}

#[test]
fn changes_are_all_or_nothing_and_need_the_token() {
    let scratch = Scratch::new();
    let serve =
        Serve::new(&scratch).args(["memory:1M", "null:1M", "--group", "gold", "--iops-total", "1000"]);
    let daemon = Daemon::with_token(&scratch, serve);
    assert_eq!(daemon.overview()["access"], "change");
    let (of_group, of_disk) = ("/api/v1/groups/gold/limits", "/api/v1/disks/memory/limits");
    let limits = || one(&daemon.overview(), "groups", "gold")["limits"].clone();
    let answer =
        daemon.change(of_group, TOKEN, &json!({"iops-total": "2048", "bps-read": "4K", "weight": 200}));
    assert_eq!(
        (answer.status, &answer.json()["limits"]),
        (200, &json!({"iops-total": 2048, "bps-read": 4096}))
    );
    assert_eq!(answer.json()["weight"], 200);
    let line = daemon.weir.wait_for_log("changed over HTTP");
    assert!(line.contains("by=127.0.0.1") && line.contains("gold"), "{line}");
    let changed = until(|| {
        let told = daemon.get("/api/v1/events").json();
        told.as_array().unwrap().iter().find(|event| event["kind"] == "config_changed").cloned()
    });
    let by = &changed["data"]["by"];
    assert_eq!(by["kind"], "http");
    assert!(by["client"].as_str().unwrap().starts_with("127.0.0.1"), "{by}");
    // The same, as JSON has it.
    assert_eq!(daemon.change(of_group, TOKEN, &json!({"iops-total": 2048.0})).status, 200);
    let before = limits();
    for (body, why) in [
        (json!({"bps-read": 1, "iops-total-max": 7}), "iops-total-max (7) is below iops-total (2048)"),
        (json!({"iops-total": 1, "iops-totel": 2}), "did you mean iops-total?"),
        (json!({"iops-total": -1}), "out of range"),
        (json!({"iops-total": 1.5}), "expected: integer"),
        (json!({"iops-total": "0.4"}), "iops-total=0.4 is not a whole number of 0 or more"),
        (json!({"iops-total": "8M"}), "iops-total=8M is not a plain number; a count takes no suffix"),
        (json!({"bps-total": "0.4"}), "bps-total=0.4 is less than a byte"),
        (json!({"group": "gold"}), "nothing of this name can be set here"),
        (json!([1]), "no JSON object"),
    ] {
        let said = daemon.change(of_group, TOKEN, &body).refused(422);
        assert!(said.starts_with("weir: ") && said.contains(why), "{said}");
    }
    let head = format!("Authorization: Bearer {TOKEN}\r\n");
    assert!(daemon.send("PATCH", of_group, &head, "{\"iops").refused(422).contains("no JSON"));
    let long = format!("{{\"iops-total\": 1{}}}", " ".repeat(64 << 10));
    assert!(daemon.send("PATCH", of_group, &head, &long).refused(413).contains("longer than 16384"));
    assert!(
        daemon
            .change("/api/v1/groups/memory/limits", TOKEN, &json!({}))
            .refused(404)
            .contains("group memory")
    );
    let said = daemon.send("PATCH", of_group, "", "{\"iops-total\": 1}").refused(401);
    assert!(said.contains("a token is needed"), "{said}");
    assert!(
        daemon.change(of_group, &TOKEN[1..], &json!({"iops-total": 1})).refused(403).contains("is wrong")
    );
    assert_eq!(limits(), before);
    // Nothing asked for is nothing changed, and tells whether the token is right.
    assert_eq!(daemon.change(of_disk, TOKEN, &json!({})).json()["name"], "memory");
    daemon.weir.stop();
}

#[test]
fn without_a_token_nothing_can_be_changed() {
    let scratch = Scratch::new();
    let daemon = Daemon::start(Serve::new(&scratch).arg("memory:1M"));
    let said = daemon.change("/api/v1/disks/memory/limits", TOKEN, &json!({"iops-total": 1})).refused(403);
    assert!(said.contains("start weir with --http-token-file"), "{said}");
    assert_eq!(one(&daemon.overview(), "disks", "memory")["limits"], json!({}));
}

#[test]
fn what_others_change_is_seen_on_the_stream() {
    let scratch = Scratch::new();
    let control = scratch.socket("the-control");
    let qmp = format!("unix:{}", text(&control));
    let daemon = Daemon::start(Serve::new(&scratch).args(["memory:1M", "--qmp", &qmp]));
    let mut events = daemon.listen();
    assert_eq!(one(&events.next("overview"), "disks", "memory")["limits"], json!({}));
    Qmp::negotiated(&control).command("x-weir-set", json!({"name": "memory", "iops-total": 500}));
    let limits = loop {
        let delta = events.next("delta");
        let disks = delta["disks"].as_array();
        if let Some(limits) = disks.and_then(|disks| disks.first()?.get("limits").cloned()) {
            break limits;
        }
    };
    assert_eq!(limits, json!({"iops-total": 500}));
    daemon.weir.nbdsh("memory", "for i in range(10): h.pread(512, 512 * i)");
    let reads = loop {
        let delta = events.next("delta");
        let reads = delta["disks"][0]["reads"]["requests"].as_u64();
        if reads >= Some(10) {
            break reads;
        }
    };
    assert_eq!(reads, Some(10));
    daemon.weir.stop();
}

#[test]
fn another_page_reads_nothing() {
    let scratch = Scratch::new();
    let daemon = Daemon::start(Serve::new(&scratch).args(["memory:1M", "--http-name", "weir.example.org"]));
    let path = "/api/v1/overview";
    for host in ["evil.example.org", "weir.example.org.evil", ""] {
        let said = daemon.send("GET", path, &format!("Host: {host}\r\n"), "").refused(421);
        assert!(said.contains("--http-name"), "{said}");
    }
    for host in ["weir.example.org", "localhost:1", "[::1]:9", "192.0.2.7"] {
        assert_eq!(daemon.send("GET", path, &format!("Host: {host}\r\n"), "").status, 200, "{host}");
    }
    let origin = |origin: &str| daemon.send("GET", path, &format!("Origin: {origin}\r\n"), "");
    assert_eq!(origin(&format!("http://{}", daemon.address)).status, 200);
    for other in ["http://evil.example.org", "null", "http://127.0.0.1:1"] {
        assert!(origin(other).refused(403).contains("another page"), "{other}");
    }
}

#[test]
fn wrong_tokens_cost_one_line_of_the_log() {
    let scratch = Scratch::new();
    let daemon = Daemon::with_token(&scratch, Serve::new(&scratch).arg("memory:1M"));
    let attempts = env::var("WEIR_WRONG_TOKENS").map_or(300, |text| text.parse().expect("a number"));
    let path = "/api/v1/disks/memory/limits";
    let mut stream = daemon.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut statuses = std::collections::BTreeMap::new();
    for number in 0..attempts {
        let request = format!(
            "PATCH {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer wrong{number}\r\nContent-Length: 2\r\n\r\n{{}}",
            daemon.address
        );
        stream.write_all(request.as_bytes()).unwrap();
        let (mut status, mut length) = (String::new(), 0);
        reader.read_line(&mut status).unwrap();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if let Some(said) = line.strip_prefix("content-length: ") {
                length = said.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        reader.read_exact(&mut vec![0; length]).unwrap();
        *statuses.entry(status.split(' ').nth(1).unwrap_or_default().to_owned()).or_insert(0) += 1;
    }
    // Some are compared, and the rest have to wait; one a second more on a slow machine.
    assert!(statuses["403"] >= 10 && statuses["429"] > 0 && statuses.len() == 2, "{statuses:?}");
    daemon.weir.nbdsh("memory", "h.pread(512, 0)");
    let log = daemon.weir.stop();
    assert_eq!(log.matches("wrong token").count(), 1, "{log}");
}

#[test]
fn thousands_that_listen_or_say_nothing_keep_nobody_out() {
    let scratch = Scratch::new();
    let daemon = Daemon::start(Serve::new(&scratch).args(["memory:1M", "--name", "disk"]));
    let mut first = daemon.listen();
    first.next("overview");
    let before = daemon.weir.resident_bytes();
    // They listen and do not read; some do not even ask to the end.
    let idle: Vec<_> = (0..1000)
        .map(|number| {
            let mut stream = daemon.connect();
            let end = if number % 8 == 7 { "" } else { "\r\n\r\n" };
            // It may have been closed before.
            let _ = write!(stream, "GET /api/v1/stream HTTP/1.1\r\nHost: localhost{end}");
            stream
        })
        .collect();
    // Whoever asks is answered, and who listened goes on to be told.
    let overview = daemon.overview();
    assert_eq!(one(&overview, "disks", "disk")["size_bytes"], 1 << 20);
    daemon.weir.nbdsh("disk", "h.pread(512, 0)");
    while first.next("delta")["disks"][0]["reads"]["requests"] != 1 {}
    let descriptors = fs::read_dir(format!("/proc/{}/fd", daemon.weir.pid())).unwrap().count();
    assert!(descriptors < 500, "{descriptors} are open");
    let grown = daemon.weir.resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes for a thousand clients that do nothing");
    drop(idle);
    daemon.weir.stop();
}

#[test]
fn one_address_does_not_have_all_streams() {
    let scratch = Scratch::new();
    let daemon = Daemon::start(Serve::new(&scratch).arg("memory:1M"));
    let mut streams: Vec<_> = (0..64).map(|_| daemon.listen()).collect();
    streams.iter_mut().for_each(|stream| drop(stream.next("overview")));
    let said = daemon.get("/api/v1/stream").refused(429);
    assert!(said.starts_with("weir: 64 pages of your address listen already"), "{said}");
    // This host has many addresses, and is one; it has room once one is gone.
    let url = format!("http://{}/api/v1/stream", daemon.address);
    let head = ["--silent", "--show-error", "--fail", "--head", "--interface", "127.0.0.2", &url];
    assert_says(&Client::new("curl").args(head).fails(), &["429"]);
    streams.pop();
    until(|| {
        let mut stream = daemon.connect();
        let request = format!("GET /api/v1/stream HTTP/1.1\r\nHost: {}\r\n\r\n", daemon.address);
        stream.write_all(request.as_bytes()).unwrap();
        let mut status = String::new();
        BufReader::new(stream).read_line(&mut status).unwrap();
        status.contains(" 200 ").then_some(())
    });
    daemon.weir.stop();
}

#[test]
fn a_head_or_a_body_that_does_not_end_is_let_go() {
    let scratch = Scratch::new();
    let daemon = Daemon::with_token(&scratch, Serve::new(&scratch).arg("memory:1M"));
    let mut endless = daemon.connect();
    // Far more than sockets hold where the daemon has no turn.
    assert!((0..1000).any(|_| endless.write_all(&[b'x'; 64 << 10]).is_err()), "64 MB were taken");
    // Both at once: each takes its ten seconds.
    let half = |request: String| {
        let mut stream = daemon.connect();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    let mut heads = half("GET / HTTP/1.1\r\nHost: local".to_owned());
    let mut bodies = half(format!(
        "PATCH /api/v1/disks/memory/limits HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\n{{"
    ));
    let mut said = String::new();
    bodies.read_to_string(&mut said).unwrap();
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    let mut rest = Vec::new();
    heads.read_to_end(&mut rest).unwrap();
    daemon.overview();
}

#[test]
fn a_token_is_not_sent_over_a_network_in_plain_text() {
    let scratch = Scratch::new();
    let token = token_file(&scratch);
    let serve = || Serve::new(&scratch).arg("memory:1M");
    let said = serve().args(["--http", "0.0.0.0:0", "--http-token-file", text(&token)]).rejects_usage();
    assert!(said.contains("would be sent over the network in plain text to 0.0.0.0:0"), "{said}");
    let weir = serve().args(["--http", "0.0.0.0:0"]).start();
    weir.wait_for_log("everybody on the way reads the names of disks");
    weir.stop();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o644)).unwrap();
    let said = serve().args(["--http", "127.0.0.1:0", "--http-token-file", text(&token)]).fails();
    assert!(said.contains("mode 0644 lets others than its owner have it (chmod 600"), "{said}");
    let said = serve().args(["--http-token-file", text(&token)]).rejects_usage();
    assert!(said.contains("there is no page (set http too)"), "{said}");
}

#[test]
fn over_tls_it_has_the_certificates_of_nbd() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "authority");
    let serve =
        Serve::new(&scratch).args(["memory:1M", "--tls", "on", "--tls-certificates", authority.path()]);
    let daemon = Daemon::with_token(&scratch, serve);
    let port = daemon.address.rsplit(':').next().unwrap();
    let url = format!("https://localhost:{port}/api/v1/overview");
    let certificate = format!("{}/ca-cert.pem", authority.path());
    let overview = Client::new("curl")
        .args(["--silent", "--show-error", "--fail", "--cacert", &certificate, &url])
        .json();
    assert_eq!(one(&overview, "disks", "memory")["size_bytes"], 1 << 20);
    // In plain text nobody is answered.
    let mut stream = daemon.connect();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(!rest.starts_with(b"HTTP"), "{rest:?}");
    daemon.weir.stop();
}

#[test]
fn who_takes_over_has_the_page_too() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 1 << 20);
    let control = format!("unix:{}", text(&scratch.socket("the-control")));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let page = format!("127.0.0.1:{port}");
    let socket = scratch.socket("nbd");
    let serve = || {
        let nbd = format!("unix:{}", text(&socket));
        Serve::new(&scratch)
            .where_said()
            .args([text(&image), "--nbd", &nbd, "--http", &page])
            .env("WEIR_QMP", &control)
    };
    let old = serve().start();
    let new = serve().arg("--takeover").start();
    let (status, log) = old.wait();
    assert!(status.success(), "{log}");
    let daemon = Daemon { weir: new, address: page };
    assert_eq!(one(&daemon.overview(), "disks", "disk")["size_bytes"], 1 << 20);
    daemon.weir.stop();
}

#[test]
fn a_config_is_checked_and_what_is_changed_in_it_later_is_named() {
    let scratch = Scratch::new();
    let token = token_file(&scratch);
    let control = scratch.socket("the-control");
    let config = |names: &str| {
        let content = format!(
            "[daemon]\nhttp = \"127.0.0.1:0\"\nhttp-token-file = {:?}\nhttp-name = {names}\nnbd = {:?}\nqmp = {:?}\n[disk.a]\nimage = \"memory:1M\"\n",
            text(&token),
            format!("unix:{}", text(&scratch.socket("nbd"))),
            format!("unix:{}", text(&control)),
        );
        scratch.file("weir.toml", content)
    };
    let file = config("[\"one\", \"two.example.org\"]");
    let checked = Command::new(WEIR).args(["check-config", text(&file)]).output().unwrap();
    assert!(checked.status.success(), "{checked:?}");
    let weir = Serve::new(&scratch).where_said().args(["--config", text(&file)]).start();
    config("\"three\"");
    let (_, said) = Qmp::negotiated(&control).refused("x-weir-reload", json!({}));
    assert!(said.contains("daemon: http, http-token-file or http-name ("), "{said}");
    assert!(said.contains("weir.toml:4: daemon.http-name = \"three\"): cannot be changed"), "{said}");
    weir.stop();
    fs::remove_file(&token).unwrap();
    let checked = Command::new(WEIR).args(["check-config", text(&file)]).output().unwrap();
    let said = String::from_utf8(checked.stderr).unwrap();
    assert!(!checked.status.success() && said.contains("http-token-file"), "{said}");
    config("\"http://wrong\"");
    let checked = Command::new(WEIR).args(["check-config", text(&file)]).output().unwrap();
    assert!(String::from_utf8(checked.stderr).unwrap().contains("is no name of a host"));
}

#[test]
fn previews_follow_each_other_and_change_nothing() {
    let (scratch, begun) = (Scratch::new(), Instant::now());
    let serve = Serve::new(&scratch).args(["memory:16M", "--iops-total", "2000"]);
    let daemon = Daemon::with_token(&scratch, serve);
    let head = format!("Authorization: Bearer {TOKEN}\r\n");
    let preview = |body: &str| daemon.send("POST", "/api/v1/disks/memory/preview", &head, body);
    let none = preview("{\"iops-total\": 100}").json();
    assert_eq!((&none["requests"], &none["now"], &none["then"]), (&json!(0), &json!(null), &json!(null)));
    daemon.weir.nbdsh("memory", "for i in range(1000): h.pread(4096, 4096 * i)");
    // The recorder takes what was told a moment later.
    let said = until(|| Some(preview("{\"iops-total\": 10}").json()).filter(|said| said["requests"] == 1000));
    // It says how far back it went, and that is no further than it can.
    let (seconds, most) = (said["seconds"].as_f64().unwrap(), begun.elapsed().as_secs_f64());
    assert!(seconds > 0.0 && seconds <= most * 1.001, "{seconds} of {most}");
    // One request at a time, as many as the limit lets pass.
    let rate = said["then"]["operations_per_second"].as_f64().unwrap();
    assert!((rate / 10.0 - 1.0).abs() < 0.1, "{said}");
    assert!(preview("{\"iops-total-max\": 1}").refused(422).contains("is below iops-total (2000)"));
    assert_eq!(daemon.send("POST", "/api/v1/disks/memory/preview", "", "{}").status, 401);
    let statuses = thread::scope(|scope| {
        let all: Vec<_> = (1..=8)
            .map(|rate| scope.spawn(move || preview(&format!("{{\"iops-total\": {rate}}}")).status))
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(
        statuses.iter().all(|status| [200, 409].contains(status)) && statuses.contains(&200),
        "{statuses:?}"
    );
    assert_eq!(one(&daemon.overview(), "disks", "memory")["limits"], json!({"iops-total": 2000}));
    daemon.weir.stop();
}

/// Sixteen requests in flight at limits far below what the storage does, so that a slow machine
/// changes waits by little. How near they are to what was said is a row of the bench,
/// `preview-predicts`.
#[test]
fn what_is_said_beforehand_is_what_is_felt_then() {
    let scratch = Scratch::new();
    let control = scratch.socket("the-control");
    let limits = [("a", 25_u32, "80"), ("b", 100, "240"), ("c", 400, "800")];
    let mut serve = Serve::new(&scratch).args(["--qmp", &format!("unix:{}", text(&control))]);
    for (name, ..) in limits {
        serve = serve.args(["memory:16M", "--name", name]);
    }
    let daemon = Daemon::with_token(&scratch, serve.args(["--delay", "read=1ms"]));
    let load = |name: &str, count: &str| {
        let load = ["bench", "-d", "16", "-s", "4K", "--random", "--count", count];
        Client::new(WEIR).args(load).arg(daemon.weir.uri(name)).succeeds();
    };
    let head = format!("Authorization: Bearer {TOKEN}\r\n");
    let mut waits = Vec::new();
    for (name, limit, count) in limits {
        // Some may be merged, and count as what they were.
        load(name, "600");
        let (path, body) = (format!("/api/v1/disks/{name}"), json!({ "iops-total": limit }));
        let preview = || daemon.send("POST", &format!("{path}/preview"), &head, &body.to_string()).json();
        let said = until(|| Some(preview()).filter(|said| said["requests"] == 600));
        assert_eq!(daemon.change(&format!("{path}/limits"), TOKEN, &body).status, 200);
        load(name, count);
        // Only requests that a limit was asked for are in these.
        let told = Qmp::negotiated(&control).command("x-weir-query-status", json!({}));
        let felt = &one(&told, "disks", name)["throttle"]["wait-ns"];
        for (part, of_said) in [("p50", "wait_p50_ns"), ("p99", "wait_p99_ns")] {
            let (felt, said) = (felt[part].as_f64().unwrap(), said["then"][of_said].as_f64().unwrap());
            assert!(said / 4.0 < felt && felt < said * 4.0, "{name}, {part}: {felt}, and {said} was said");
        }
        waits.push((said["then"]["wait_p50_ns"].as_u64(), felt["p50"].as_u64()));
    }
    // In the same order, too: a quarter of the limit is four times the wait.
    assert!(waits.windows(2).all(|pair| pair[0].0 > pair[1].0 && pair[0].1 > pair[1].1), "{waits:?}");
    daemon.weir.stop();
}
