//! `--http` with a plain HTTP client. The page in a browser is tested in `page`.

mod changes;
mod hostile;
mod jobs;

use std::{
    cell::Cell,
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::{fs::PermissionsExt as _, net::UnixStream},
    path::PathBuf,
};

use serde_json::{Value, json};

use crate::harness::{DEADLINE, Qmp, Scratch, Serve, TestClient, Weir, poll_until, text};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

struct HttpDaemon {
    weir: Weir,
    /// `127.0.0.1` and the port.
    address: String,
}

/// A response.
#[derive(Debug)]
struct HttpResponse {
    status: u16,
    head: String,
    body: String,
}

impl HttpResponse {
    fn of(response: &str) -> Self {
        let (head, body) =
            response.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {response:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Self { status: status.expect("a status"), head: head.to_owned(), body: body.to_owned() }
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Asserts this status; returns the error message.
    #[track_caller]
    fn error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{self:?}");
        self.json()["error"].as_str().expect("a reason").to_owned()
    }
}

fn token_file(scratch: &Scratch) -> PathBuf {
    let path = scratch.file("token", format!("{TOKEN}\n"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

impl HttpDaemon {
    fn start(serve: Serve) -> Self {
        let weir = serve.args(["--http", "127.0.0.1:0"]).start();
        let line = weir.wait_for_log("page at=");
        let address = line.split_once("at=").unwrap().1.split(' ').next().unwrap().to_owned();
        Self { weir, address }
    }

    /// A server with a token that permits changes of limits.
    fn with_token(scratch: &Scratch, serve: Serve) -> Self {
        Self::start(serve.args(["--http-token-file", text(&token_file(scratch))]))
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    /// Sends a request with additional header lines, each with its line end.
    fn send(&self, method: &str, path: &str, head: &str, body: &str) -> HttpResponse {
        let mut stream = self.connect();
        let host =
            if head.contains("Host: ") { String::new() } else { format!("Host: {}\r\n", self.address) };
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\n\
             {host}{head}Connection: close\r\n\
             Content-Length: {length}\r\n\
             \r\n\
             {body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        HttpResponse::of(&response)
    }

    fn get(&self, path: &str) -> HttpResponse {
        self.send("GET", path, "", "")
    }

    fn change(&self, path: &str, token: &str, body: &Value) -> HttpResponse {
        let head = format!("Authorization: Bearer {token}\r\n");
        self.send("PATCH", path, &head, &body.to_string())
    }

    #[track_caller]
    fn overview(&self) -> Value {
        let response = self.get("/api/v1/overview");
        assert_eq!(response.status, 200, "{response:?}");
        response.json()
    }

    fn listen(&self) -> EventStream {
        let mut stream = self.connect();
        let request = format!("GET /api/v1/stream HTTP/1.1\r\nHost: {}\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).unwrap();
        EventStream(BufReader::new(stream))
    }
}

/// Server-sent events in chunked encoding: lines with chunk lengths are skipped.
struct EventStream(BufReader<TcpStream>);

impl EventStream {
    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).unwrap() > 0, "the stream has ended");
        line
    }

    /// The next event of this type. Assumes that no message is split between chunks.
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

fn entry_named<'a>(overview: &'a Value, list: &str, name: &str) -> &'a Value {
    let all = overview[list].as_array().unwrap();
    all.iter().find(|entry| entry["name"] == name).unwrap_or_else(|| panic!("no {name} in {all:?}"))
}

#[test]
fn overview_lists_the_running_state() {
    let scratch = Scratch::new();
    let arguments = ["memory:16M", "--iops-total", "1000000", "--weight", "300"];
    let daemon = HttpDaemon::start(Serve::new(&scratch).args(arguments));
    daemon.weir.nbdsh("memory", "for i in range(100): h.pread(4096, 4096 * i)");
    // The overview may be as old as the last sample of the stream.
    let overview = poll_until(|| {
        let overview = daemon.overview();
        (entry_named(&overview, "disks", "memory")["reads"]["requests"] == 100).then_some(overview)
    });
    assert_eq!(
        (&overview["access"], &overview["daemon"]["version"]),
        (&json!("read"), &json!(env!("CARGO_PKG_VERSION")))
    );
    let disk = entry_named(&overview, "disks", "memory");
    let known = [
        ("size", json!(16 << 20)),
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
    assert_eq!(history["step-ms"], 10_000);
    assert_eq!(
        daemon.get("/api/v1/disks/memory/history?span=1y").error(400),
        "weir: span: is not 10m, 2h or 2d"
    );
    assert!(daemon.get("/api/v1/disks/other/history").error(404).contains("disk other: does not exist"));
    // Errors of the HTTP layer have the same form.
    assert!(daemon.get("/api/v1/disks/%ff/history").error(400).contains("UTF-8"));
    assert!(daemon.get("/api/v1/nothing").error(404).contains("there is no such path"));
    assert!(daemon.send("DELETE", "/api/v1/overview", "", "").error(405).contains("method is not supported"));
    let described = daemon.get("/api/v1/openapi.json").json();
    assert_eq!(described["openapi"], "3.1.0");
    daemon.weir.stop();
}

/// No disk has a limit, so the counters of limits are zero; totals must come from the disks.
#[test]
fn totals_without_limits_equal_metrics_and_status() {
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
    let daemon = HttpDaemon::start(serve.args(["--metrics", &format!("unix:{}", text(&metrics))]));
    daemon.weir.nbdsh("a", "for i in range(25): h.pread(4096, 4096 * i)\nh.pwrite(b'x' * 512, 0)");
    daemon.weir.nbdsh("b", "for i in range(7): h.pread(512, 512 * i)");
    let counts = |all: &Value, list: &str, name: &str| {
        let entry = entry_named(all, list, name);
        [["reads", "requests"], ["reads", "bytes"], ["writes", "requests"], ["writes", "bytes"]]
            .map(|[direction, counter]| entry[direction][counter].as_u64().unwrap())
    };
    // The sums over both disks.
    let both = [32, 25 * 4096 + 7 * 512, 1, 512];
    let overview =
        poll_until(|| Some(daemon.overview()).filter(|all| counts(all, "groups", "outer") == both));
    let (a, b) = ([25, 25 * 4096, 1, 512], [7, 7 * 512, 0, 0]);
    assert_eq!([counts(&overview, "disks", "a"), counts(&overview, "disks", "b")], [a, b]);
    assert_eq!(counts(&overview, "groups", "inner"), a);
    let status = Qmp::negotiated(&control).command("x-weir-query-status", json!({}));
    assert_eq!([counts(&status, "disks", "a"), counts(&status, "disks", "b")], [a, b]);
    let curl = ["--silent", "--fail", "--unix-socket", text(&metrics), "http://weir/metrics"];
    let page = TestClient::new("curl").args(curl).succeeds();
    let families = ["reads", "read_bytes", "writes", "written_bytes"];
    for (name, expected) in [("a", a), ("b", b)] {
        for (family, count) in families.into_iter().zip(expected) {
            let line = format!("weir_disk_{family}_total{{disk=\"{name}\"}} {count}\n");
            assert!(page.contains(&line), "{line} is not in {page}");
        }
    }
    // A group's rates and latencies are those of its disks.
    let history = |path: &str| daemon.get(&format!("/api/v1/{path}/history?span=10m")).json();
    poll_until(|| {
        let rates = history("groups/outer")["series"]["read-iops"].as_array()?.clone();
        rates.iter().any(|rate| rate.as_f64() > Some(0.0)).then_some(())
    });
    // The latencies of `b` arrive last.
    let known = |path: &str| -> Option<Vec<Value>> {
        let all = history(path)["series"]["latency-p99-ns"].as_array()?.clone();
        Some(all.into_iter().filter(|latency| !latency.is_null()).collect())
    };
    poll_until(|| known("disks/b").filter(|all| !all.is_empty()));
    assert_eq!(known("groups/inner"), known("disks/a"));
    let [outer, inner] = ["groups/outer", "groups/inner"].map(|path| history(path)["latency-heat"].clone());
    let columns = |heat: &Value| heat["rows"].as_array().unwrap().iter().filter(|row| !row.is_null()).count();
    assert!(columns(&outer) >= columns(&inner) && columns(&inner) > 0, "{outer} and {inner}");
    daemon.weir.stop();
}

#[test]
fn imitated_device_utilization_follows_its_rate() {
    let scratch = Scratch::new();
    let metrics = scratch.socket("metrics");
    let serve = Serve::new(&scratch).args(["memory:1M", "--rate", "iops=40", "--prefetch", "off"]);
    let daemon = HttpDaemon::start(serve.args(["--metrics", &format!("unix:{}", text(&metrics))]));
    let reads = Cell::new(0);
    poll_until(|| {
        daemon.weir.nbdsh("memory", "for i in range(20): h.pread(512, 1024 * i)");
        reads.set(reads.get() + 20);
        let overview = daemon.overview();
        let device = entry_named(&overview, "devices", "rate of memory");
        (device["busy-ratio"].as_f64() > Some(0.0) && device["read-iops"].as_f64() > Some(0.0)).then_some(())
    });
    let curl = ["--silent", "--fail", "--unix-socket", text(&metrics), "http://weir/metrics"];
    let reads = reads.get();
    let expected = [f64::from(reads), 512.0 * f64::from(reads), f64::from(reads) / 40.0];
    // A response is cached for a quarter of a second.
    poll_until(|| {
        let page = TestClient::new("curl").args(curl).succeeds();
        let counter = |family: &str| -> Option<f64> {
            let name = format!("weir_device_{family}_total{{device=\"rate of memory\"}} ");
            page.lines().find_map(|line| line.strip_prefix(&name))?.parse().ok()
        };
        (["reads", "read_bytes", "busy_seconds"].map(counter) == expected.map(Some)).then_some(())
    });
    daemon.weir.stop();
}

/// Fails if a response lacks a field of its schema, or has one that the schema lacks.
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
            assert!(is_described, "{at}: {other} does not match {schema}");
        }
    }
}

#[test]
fn responses_match_the_description() {
    let scratch = Scratch::new();
    let file = scratch.sparse("disk.raw", 16 << 20);
    let arguments =
        [text(&file), "memory:16M", "--group", "gold", "--iops-total", "200", "--watermark", "50"];
    let daemon =
        HttpDaemon::with_token(&scratch, Serve::new(&scratch).args(arguments).args(["--prefetch", "on"]));
    daemon.weir.nbdsh("memory", "for i in range(300): h.pread(4096, 4096 * i)");
    let described = daemon.get("/api/v1/openapi.json").json();
    let schemas = &described["components"]["schemas"];
    check(&schemas["Overview"], schemas, &daemon.overview(), "overview");
    for path in ["/api/v1/disks/memory/history", "/api/v1/groups/gold/history?span=2d"] {
        check(&schemas["History"], schemas, &daemon.get(path).json(), path);
    }
    let head = format!("Authorization: Bearer {TOKEN}\r\n");
    let preview = poll_until(|| {
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
fn vhost_user_export_lists_front_end_and_rings() {
    let scratch = Scratch::new();
    let socket = scratch.socket("vm");
    let address = format!("unix:{}", text(&socket));
    let daemon = HttpDaemon::start(Serve::new(&scratch).args(["memory:1M", "--vhost-user-blk", &address]));
    let exports = |overview: &Value| {
        let exports = entry_named(overview, "disks", "memory")["exports"].as_array().unwrap();
        ["nbd", "vhost-user-blk"]
            .map(|kind| exports.iter().find(|export| export["type"] == kind).unwrap().clone())
    };
    let [_, vhost_export] = exports(&daemon.overview());
    // No front end is connected yet.
    assert_eq!((&vhost_export["front-end"], &vhost_export["queues"]), (&Value::Null, &json!(0)));
    let front_end = UnixStream::connect(&socket).unwrap();
    let overview = poll_until(|| {
        let overview = daemon.overview();
        (exports(&overview)[1]["connections"] == 1).then_some(overview)
    });
    let described = daemon.get("/api/v1/openapi.json").json();
    let schemas = &described["components"]["schemas"];
    check(&schemas["Overview"], schemas, &overview, "overview");
    let [nbd, vhost_export] = exports(&overview);
    assert_eq!(vhost_export["front-end"]["pid"], std::process::id());
    for count in ["queues", "requests", "in-flight", "kicks", "calls", "copies"] {
        assert_eq!((&vhost_export[count], &nbd[count]), (&json!(0), &Value::Null), "{count}");
    }
    drop(front_end);
    poll_until(|| exports(&daemon.overview())[1]["front-end"].is_null().then_some(()));
    daemon.weir.stop();
}

#[test]
fn page_is_served_with_a_strict_policy() {
    let scratch = Scratch::new();
    let daemon = HttpDaemon::start(Serve::new(&scratch).arg("memory:1M"));
    for (path, kind) in
        [("/", "text/html"), ("/assets/main.js", "text/javascript"), ("/api/v1/overview", "application/json")]
    {
        let response = daemon.get(path);
        assert_eq!(response.status, 200, "{response:?}");
        for line in [
            &format!("content-type: {kind}"),
            "content-security-policy: default-src 'none'; script-src 'self';",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
        ] {
            assert!(response.head.contains(line), "{line} is not in {}", response.head);
        }
        assert!(
            !response.head.contains("set-cookie") && !response.head.contains("access-control"),
            "{}",
            response.head
        );
    }
    assert_eq!(daemon.get("/assets/../Cargo.toml").status, 404);
    // Two requests over one connection.
    let mut stream = daemon.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    for _ in 0..2 {
        let request = format!("GET /assets/icon.svg HTTP/1.1\r\nHost: {}\r\n\r\n", daemon.address);
        stream.write_all(request.as_bytes()).unwrap();
        let mut length = 0;
        loop {
            let mut line = String::new();
            assert!(reader.read_line(&mut line).unwrap() > 0);
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse().unwrap();
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
