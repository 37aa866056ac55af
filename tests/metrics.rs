//! `--metrics`: the metrics for Prometheus, compared with the document that lists them and with a
//! client's own figures, and under hostile clients.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use serde_json::Value;

use crate::{
    bench::{bench, interrupted, started},
    harness::{
        DEADLINE, MIB, Scratch, Serve, TestClient, Weir, need,
        operator::{run_ok, socket},
        poll_until, qemu_img, search_path, text, weir,
    },
};

const OPEN: &str = "application/openmetrics-text;version=1.0.0,*/*;q=0.1";

struct MetricsDaemon {
    weir: Weir,
    socket: PathBuf,
}

impl MetricsDaemon {
    fn start(scratch: &Scratch, serve: Serve) -> Self {
        let socket = scratch.socket("metrics");
        let weir = serve.args(["--metrics", &format!("unix:{}", text(&socket))]).start();
        Self { weir, socket }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    /// Sends a request; returns head and body of the response.
    fn ask(&self, request: &str, accept: &str) -> (String, Vec<u8>) {
        let mut stream = self.connect();
        let request = format!("{request} HTTP/1.1\r\nHost: weir\r\nAccept: {accept}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = Vec::new();
        stream.read_to_end(&mut response).unwrap();
        let end = response.windows(4).position(|window| window == b"\r\n\r\n").expect("a head") + 4;
        let body = response.split_off(end);
        let head = String::from_utf8(response).unwrap();
        let body = if head.contains("transfer-encoding: chunked\r\n") { unchunked(&body) } else { body };
        (head, body)
    }

    fn page(&self) -> MetricsPage {
        let (head, body) = self.ask("GET /metrics", OPEN);
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
        MetricsPage(String::from_utf8(body).unwrap())
    }

    /// Polls for a page that satisfies the predicate; a page may be slightly outdated.
    fn until(&self, condition: impl Fn(&MetricsPage) -> bool) -> MetricsPage {
        poll_until(|| Some(self.page()).filter(&condition))
    }
}

/// Decodes a complete body in chunked transfer coding (RFC 9112, section 7.1).
fn unchunked(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|window| window == b"\r\n").expect("the length of a chunk");
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        let chunk = &rest[line + 2..];
        body.extend_from_slice(&chunk[..length]);
        rest = chunk[length..].strip_prefix(b"\r\n").expect("the end of a chunk");
        if length == 0 {
            assert!(rest.is_empty(), "nothing follows the last chunk");
            return body;
        }
    }
}

struct MetricsPage(String);

impl MetricsPage {
    /// Value of a sample by its name and labels, as printed.
    #[track_caller]
    fn value(&self, sample: &str) -> f64 {
        self.find(sample).unwrap_or_else(|| panic!("no {sample} in:\n{}", self.0))
    }

    /// Upper bounds and cumulative counts of the histogram of a disk's requests.
    fn buckets(&self, family: &str, operation: &str) -> Vec<(f64, f64)> {
        let bucket = |line: &str| {
            let (bound, rest) = line
                .strip_prefix(family)?
                .strip_prefix("_bucket{le=\"")?
                .split_once("\",disk=\"memory\",")?;
            let cumulative = rest.strip_prefix(&format!("operation=\"{operation}\"}} "))?;
            Some((bound.replace("+Inf", "inf").parse().ok()?, cumulative.parse().ok()?))
        };
        self.0.lines().filter_map(bucket).collect()
    }

    fn find(&self, sample: &str) -> Option<f64> {
        let value = |line: &str| line.strip_prefix(sample)?.strip_prefix(' ')?.parse().ok();
        self.0.lines().find_map(value)
    }
}

fn read_each(weir: &Weir, export: &str, times: u32) {
    weir.nbdsh(export, &format!("for i in range({times}): h.pread(4096, 4096 * i)"));
}

#[test]
fn metrics_equal_the_figures_of_fio() {
    let scratch = Scratch::new();
    let serve = Serve::new(&scratch).args(["memory:16M", "--delay", "read=2ms,write=1ms"]);
    let daemon = MetricsDaemon::start(&scratch, serve);
    let output = scratch.path("fio.json");
    TestClient::new("fio")
        .args(["--name=both", "--ioengine=nbd", "--rw=randrw", "--size=16M", "--io_size=4M"])
        .args([
            "--bsrange=4k-16k",
            "--iodepth=4",
            "--randseed=7",
            "--lat_percentiles=1",
            "--output-format=json",
        ])
        .arg(format!("--output={}", text(&output)))
        .arg(format!("--uri={}", daemon.weir.uri("memory")))
        .arg(format!("--aux-path={}", scratch.path("").display()))
        .succeeds();
    let report: Value = serde_json::from_slice(&fs::read(output).unwrap()).expect("fio speaks JSON");
    let job = &report["jobs"][0];
    let page = daemon.page();
    for (operation, requests, bytes, shortest) in
        [("read", "reads", "read_bytes", 0.002), ("write", "writes", "written_bytes", 0.001)]
    {
        let value = |name: &str| page.value(&format!("weir_disk_{name}{{disk=\"memory\"}}"));
        let figures = &job[operation];
        let total = figures["total_ios"].as_f64().unwrap();
        assert!(total > 0.0);
        assert_eq!(value(&format!("{requests}_total")), total, "{operation}");
        assert_eq!(value(&format!("{bytes}_total")), figures["io_bytes"].as_f64().unwrap(), "{operation}");
        let labels = format!("{{disk=\"memory\",operation=\"{operation}\"}}");
        let count = page.value(&format!("weir_disk_request_duration_seconds_count{labels}"));
        assert_eq!(count, total, "{operation}");
        // A request reaches the daemon after fio has started it, and completes before fio notices.
        // So the daemon's time is never longer than fio's, on any machine. It may be shorter,
        // because the daemon reads its clock once per iteration of its reactor.
        let sum = page.value(&format!("weir_disk_request_duration_seconds_sum{labels}"));
        let (mean, latency) = (sum / count, &figures["lat_ns"]);
        let of_client = latency["mean"].as_f64().unwrap() / 1e9;
        assert!(mean > shortest / 2.0 && mean <= of_client, "{mean} s, for fio {of_client} s");
        let buckets = page.buckets("weir_disk_request_duration_seconds", operation);
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{buckets:?}");
        assert_eq!(buckets.last(), Some(&(f64::INFINITY, total)), "{operation}");
        let (mut low, mut high, mut before) = (0.0, 0.0, (0.0, 0.0));
        let mut p99 = None;
        for &(bound, upto) in &buckets {
            let inside = upto - before.1;
            low += inside * before.0;
            high += if inside > 0.0 { inside * bound } else { 0.0 };
            // The percentile lies above this lower bound.
            p99 = p99.or((upto >= 0.99 * total).then_some(before.0));
            before = (bound, upto);
        }
        assert!(low <= sum && sum <= high, "{sum} s in all, and {low} s to {high} s by {buckets:?}");
        // fio's histogram rounds by up to 1 %.
        let (p99, of_client) = (p99.unwrap(), latency["percentile"]["99.000000"].as_f64().unwrap() / 1e9);
        assert!(p99 <= of_client * 1.01, "more than {p99} s, for fio {of_client} s");
    }
}

/// The row of the document for a metric family.
#[derive(Debug, PartialEq, Eq)]
struct MetricFamilyRow {
    kind: String,
    labels: BTreeSet<String>,
}

fn documented() -> BTreeMap<String, MetricFamilyRow> {
    let document =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md")).unwrap();
    let row = |line: &str| {
        let cells: Vec<_> = line.strip_prefix("| `")?.split('|').map(|cell| cell.trim().to_owned()).collect();
        let [name, kind, labels, ..] = &cells[..] else { return None };
        // Rows of the table of alerts begin with an upper-case letter.
        if name.starts_with(char::is_uppercase) {
            return None;
        }
        let labels = labels.split(',').map(|label| label.trim().trim_matches('`').to_owned());
        let labels = labels.filter(|label| !label.is_empty()).collect();
        Some((name.trim_end_matches('`').to_owned(), MetricFamilyRow { kind: kind.clone(), labels }))
    };
    document.lines().filter_map(row).collect()
}

#[test]
fn document_lists_exactly_the_metric_families() {
    let scratch = Scratch::new();
    let image = scratch.path("a.qcow2");
    qemu_img(["create", "-f", "qcow2", text(&image), "1M"]).succeeds();
    let config = scratch.file(
        "weir.toml",
        format!(
            "[group.gold]\n\
             iops-read = 1000\n\
             bps-write = \"1M\"\n\
             watermark = 90\n\
             [disk.a]\n\
             image = \"{}\"\n\
             format = \"qcow2\"\n\
             group = \"gold\"\n\
             iops-total = 10\n\
             iops-total-max = 20\n\
             bps-total = \"1M\"\n\
             iops-reservation = 5\n\
             bps-reservation = 5\n\
             prefetch = true\n",
            text(&image)
        ),
    );
    let daemon = MetricsDaemon::start(&scratch, Serve::new(&scratch).args(["--config", text(&config)]));
    read_each(&daemon.weir, "a", 25);
    let page = daemon.page();
    let mut families = BTreeMap::new();
    for line in page.0.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').unwrap();
            families
                .insert(name.to_owned(), MetricFamilyRow { kind: kind.to_owned(), labels: BTreeSet::new() });
        } else if let Some((name, labels)) = line.split_once('{')
            && !line.starts_with('#')
        {
            let suffixes = ["_total", "_info", "_bucket", "_count", "_sum"];
            let stem = suffixes.iter().find_map(|suffix| {
                families.contains_key(name.strip_suffix(suffix)?).then(|| name.strip_suffix(suffix))?
            });
            let row = families.get_mut(stem.unwrap_or(name)).expect(line);
            let (labels, _) = labels.rsplit_once('}').unwrap();
            row.labels
                .extend(labels.split("\",").filter_map(|label| Some(label.split_once('=')?.0.to_owned())));
            row.labels.remove("le");
        }
    }
    let documented = documented();
    assert_eq!(families.keys().collect::<Vec<_>>(), documented.keys().collect::<Vec<_>>());
    for (name, row) in &families {
        let row_in_docs = &documented[name];
        assert_eq!(row.kind, row_in_docs.kind, "{name}");
        // Labels of optional features (watermark, device) may have no sample.
        assert!(
            row.labels.is_subset(&row_in_docs.labels),
            "{name}: {:?} and {:?}",
            row.labels,
            row_in_docs.labels
        );
    }
    assert_eq!(page.0.lines().last(), Some("# EOF"));
}

#[test]
fn throttled_seconds_name_the_cause() {
    let scratch = Scratch::new();
    let config = scratch.file(
        "weir.toml",
        "[group.outer]\nbps-total = \"10K\"\n[group.inner]\ngroup = \"outer\"\n\
         [disk.own]\nimage = \"memory:1M\"\niops-read = 4\n\
         [disk.shared]\nimage = \"memory:1M\"\ngroup = \"inner\"\n",
    );
    let daemon = MetricsDaemon::start(&scratch, Serve::new(&scratch).args(["--config", text(&config)]));
    read_each(&daemon.weir, "own", 5);
    read_each(&daemon.weir, "shared", 4);
    let page = daemon.page();
    let throttled = |disk: &str, level: &str, limit: &str| {
        page.find(&format!(
            "weir_disk_throttled_seconds_total{{disk=\"{disk}\",level=\"{level}\",limit=\"{limit}\",operation=\"read\"}}"
        ))
    };
    // One or two are admitted at once, each later one after 250 or 400 ms, less the time that a
    // slow client needs.
    assert!(throttled("own", "disk", "iops-read") > Some(0.02));
    assert!(throttled("shared", "above", "bps-total") > Some(0.1));
    assert_eq!(
        (throttled("own", "above", "bps-total"), throttled("shared", "disk", "iops-read")),
        (None, None)
    );
    let of_disk = |name: &str| page.value(&format!("weir_{name}{{disk=\"own\",operation=\"read\"}}"));
    assert_eq!(of_disk("disk_wait_duration_seconds_count"), 5.0);
    assert_eq!(of_disk("disk_admitted_requests_total"), 5.0);
    assert!(of_disk("disk_waiting_seconds_total") > 0.02);
    assert!(page.value("weir_group_limited_seconds_total{group=\"outer\"}") > 0.1);
    assert_eq!(page.value("weir_disk_limit_operations_per_second{disk=\"own\",limit=\"iops-read\"}"), 4.0);
    assert_eq!(page.value("weir_group_limit_bytes_per_second{group=\"outer\",limit=\"bps-total\"}"), 10240.0);
}

#[test]
fn jobs_have_metrics_until_they_conclude() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", MIB);
    let config =
        format!("[group.gold]\n[disk.vm1]\nimage = {:?}\nformat = \"raw\"\ngroup = \"gold\"\n", text(&image));
    let config = scratch.file("weir.toml", config);
    let root = scratch.path("");
    let serve = Serve::new(&scratch).args(["--config", text(&config), "--image-root", text(&root)]);
    let daemon = MetricsDaemon::start(&scratch, serve.args(["--qmp", &socket(&scratch)]));
    let target = scratch.path("backup.raw");
    run_ok(&scratch, &["backup", "vm1", "--to", text(&target), "--detach", "--bps-total", "64K"]);
    let labels = "job_id=\"backup-vm1\",kind=\"backup\",disk=\"vm1\",group=\"gold\"";
    let sample = |name: &str| format!("weir_job_{name}{{{labels}}}");
    let state = |state: &str| format!("weir_job_state{{{labels},state=\"{state}\"}}");
    let concluded =
        |result: &str| format!("weir_jobs_concluded_total{{kind=\"backup\",result=\"{result}\"}}");
    let page = daemon.until(|page| page.find(&sample("copied_bytes_total")).is_some_and(|bytes| bytes > 0.0));
    assert_eq!((page.value(&state("running")), page.value(&state("paused"))), (1.0, 0.0));
    assert_eq!(
        (page.value(&sample("total_bytes")), page.value(&sample("old_data_bytes"))),
        (MIB as f64, 0.0)
    );
    assert!(page.value(&sample("done_bytes")) >= page.value(&sample("copied_bytes_total")));
    assert_eq!((page.value(&concluded("complete")), page.value(&concluded("cancelled"))), (0.0, 0.0));
    run_ok(&scratch, &["job", "pause", "backup-vm1"]);
    daemon.until(|page| page.find(&state("paused")) == Some(1.0));
    run_ok(&scratch, &["job", "cancel", "backup-vm1"]);
    let page = daemon.until(|page| page.find(&concluded("cancelled")) == Some(1.0));
    assert_eq!((page.find(&sample("done_bytes")), page.value(&concluded("failed"))), (None, 0.0));
}

#[test]
fn added_disks_have_metrics_and_removed_ones_none() {
    let scratch = Scratch::new();
    let control = scratch.socket("qmp");
    let at = format!("unix:{}", text(&control));
    let serve = Serve::new(&scratch).args(["memory:1M", "--qmp", &at]);
    let daemon = MetricsDaemon::start(&scratch, serve);
    let command = |arguments: &[&str]| weir(arguments).env("WEIR_QMP", &at).succeeds();
    command(&["disk", "add", "late", "memory:1M"]);
    read_each(&daemon.weir, "late", 3);
    let count = "weir_disk_request_duration_seconds_count{disk=\"late\",operation=\"read\"}";
    daemon.until(|page| page.find(count) == Some(3.0));
    command(&["disk", "remove", "late"]);
    daemon.until(|page| !page.0.contains("\"late\""));
}

#[test]
fn vhost_user_exports_have_ring_metrics() {
    let scratch = Scratch::new();
    let socket = scratch.socket("vm");
    let address = format!("unix:{}", text(&socket));
    let serve = Serve::new(&scratch).args(["memory:1M", "--name", "a", "--iops-total", "1000"]);
    let daemon = MetricsDaemon::start(&scratch, serve.args(["--vhost-user-blk", &address]));
    let labels = format!("{{export=\"a@{address}\",disk=\"a\",type=\"vhost-user-blk\"}}");
    let value_of = |page: &MetricsPage, family: &str| page.value(&format!("weir_export_{family}{labels}"));
    let target = format!("vhost-user:{}", text(&socket));

    bench("-c 100 -d 4 -s 4K", &target).succeeds();
    let page = daemon.until(|page| value_of(page, "connections") == 0.0);
    assert_eq!([value_of(&page, "queues"), value_of(&page, "in_flight_requests")], [0.0; 2]);
    assert!(value_of(&page, "requests_total") >= 100.0, "{}", page.0);
    for family in ["kicks_total", "calls_total"] {
        assert!(
            (1.0..=value_of(&page, "requests_total") + 2.0).contains(&value_of(&page, family)),
            "{family}: {}",
            page.0
        );
    }
    assert_eq!(value_of(&page, "copies_total"), 0.0);
    // Exports over NBD have no queues.
    assert_eq!(page.0.matches("\nweir_export_queues{").count(), 1, "{}", page.0);
    assert_eq!(page.0.matches("\nweir_export_connections{").count(), 2, "{}", page.0);

    let at_work = started(&["--runtime", "600s", "-d", "4", "-s", "4K", "--jobs", "2", &target]);
    daemon.until(|page| value_of(page, "queues") == 2.0 && value_of(page, "in_flight_requests") > 0.0);
    interrupted(at_work);
    daemon.until(|page| value_of(page, "queues") == 0.0 && value_of(page, "in_flight_requests") == 0.0);
    daemon.weir.stop();
}

#[test]
fn names_are_escaped() {
    let scratch = Scratch::new();
    let serve = Serve::new(&scratch).args(["memory:1M", "--name", "a\"}\\ 1é"]);
    let daemon = MetricsDaemon::start(&scratch, serve);
    daemon.page().value("weir_disk_size_bytes{disk=\"a\\\"}\\\\ 1é\"}");
}

#[test]
fn three_formats_on_one_path() {
    let scratch = Scratch::new();
    let daemon = MetricsDaemon::start(&scratch, Serve::new(&scratch).args(["memory:1M"]));
    read_each(&daemon.weir, "memory", 3);
    let (head, body) = daemon.ask("GET /metrics", "*/*");
    assert!(head.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
    let plain = String::from_utf8(body).unwrap();
    assert!(plain.contains("\n# TYPE weir_disk_reads_total counter\nweir_disk_reads_total{"), "{plain}");
    assert!(!plain.contains("# EOF") && !plain.contains("# UNIT"), "{plain}");
    let messages =
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
    let (head, body) = daemon.ask("GET /metrics", messages);
    assert!(head.contains("proto=io.prometheus.client.MetricFamily; encoding=delimited\r\n"), "{head}");
    let contains = |name: &str| body.windows(name.len()).any(|window| window == name.as_bytes());
    assert!(contains("weir_disk_request_duration_seconds") && contains("weir_disk_reads_total"));
    for (request, status) in [
        ("GET /", "200 OK"),
        ("GET /metrics/", "404 Not Found"),
        ("GET /../metrics", "404 Not Found"),
        ("POST /metrics", "405 Method Not Allowed"),
        ("HEAD /metrics", "200 OK"),
        ("metrics", "400 Bad Request"),
    ] {
        let (head, _) = daemon.ask(request, "*/*");
        assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request}: {head}");
    }
}

#[test]
fn hostile_clients_block_no_other() {
    let scratch = Scratch::new();
    let daemon = MetricsDaemon::start(&scratch, Serve::new(&scratch).args(["memory:1M"]));
    let mut first = daemon.connect();
    first.write_all(b"G").unwrap();
    // Half of the clients send an incomplete request, half never read the response.
    let mut idle: Vec<_> = (0..500).map(|_| daemon.connect()).collect();
    for (index, stream) in idle.iter_mut().enumerate() {
        let sent: &[u8] =
            if index % 2 == 0 { b"GET /metrics HTTP/1.1\r\nHost:" } else { b"GET /metrics HTTP/1.1\r\n\r\n" };
        // The connection may be closed already.
        let _ = stream.write_all(sent);
    }
    daemon.page().value("weir_disk_size_bytes{disk=\"memory\"}");
    // The oldest connection was closed to make room.
    assert_eq!(first.read(&mut [0]).unwrap_or(0), 0);
    // A head without an end is rejected at the maximum size.
    let mut endless = daemon.connect();
    assert!(
        (0..1000).any(|_| endless.write_all(&[b'x'; 4096]).is_err()),
        "the daemon received 4 MB without rejecting them"
    );
    daemon.page();
    read_each(&daemon.weir, "memory", 1);
}

#[test]
fn silent_client_is_disconnected() {
    let scratch = Scratch::new();
    let daemon = MetricsDaemon::start(&scratch, Serve::new(&scratch).args(["memory:1M"]));
    assert_eq!(daemon.connect().read(&mut [0]).unwrap(), 0, "the daemon closes the connection");
}

#[test]
fn log_names_the_tcp_address() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).args(["memory:1M", "--metrics", "127.0.0.1:0"]).start();
    let line = weir.wait_for_log("metrics at=");
    let address = line.split_once("at=").unwrap().1.trim();
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    assert!(response.contains("weir_disk_size_bytes{disk=\"memory\"} 1048576\n"), "{response}");
    let second = Serve::new(&scratch).args(["null:1M", "--metrics", address]).fails();
    assert!(second.contains("metrics: ") && second.contains("the port is in use"), "{second}");
}

/// A Prometheus server that scrapes weir.
struct PrometheusServer {
    process: Child,
    address: String,
    _directory: Scratch,
}

impl PrometheusServer {
    /// Starts Prometheus with these feature flags.
    fn scraping(target: &str, features: &[&str]) -> Self {
        need("prometheus");
        let directory = Scratch::new();
        let config = directory.file(
            "prometheus.yml",
            format!(
                "global: {{scrape_interval: 1s}}\nrule_files: [{}]\n\
                 scrape_configs: [{{job_name: weir, static_configs: [{{targets: [\"{target}\"]}}]}}]\n",
                text(&packaged("weir.rules.yml")),
            ),
        );
        let mut process = Command::new("prometheus")
            .env("PATH", search_path())
            .arg(format!("--config.file={}", text(&config)))
            .arg(format!("--storage.tsdb.path={}", text(&directory.path("data"))))
            .arg("--web.listen-address=127.0.0.1:0")
            .args(features)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let (_, address) = line.contains("Listening on").then(|| line.split_once("address="))??;
            Some(address.trim().to_owned())
        });
        // Drain its output, so that it never blocks on the pipe.
        thread::spawn(move || lines.for_each(drop));
        Self { process, address: address.expect("it listens"), _directory: directory }
    }

    /// Value of a query, once it has a result.
    fn ask(&self, query: &str) -> f64 {
        let url = format!("http://{}", self.address);
        let value =
            |output: String| output.lines().last()?.rsplit_once("=> ")?.1.split(' ').next()?.parse().ok();
        poll_until(|| {
            let outcome = TestClient::new("promtool").args(["query", "instant", &url, query]).run();
            (outcome.code() == 0).then(|| outcome.stdout()).and_then(value)
        })
    }
}

impl Drop for PrometheusServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/prometheus").join(name)
}

#[test]
fn promtool_finds_nothing_wrong() {
    TestClient::new("promtool").args(["check", "rules", text(&packaged("weir.rules.yml"))]).succeeds();
    TestClient::new("promtool").args(["test", "rules", text(&packaged("weir.rules.test.yml"))]).succeeds();
    let scratch = Scratch::new();
    let daemon =
        MetricsDaemon::start(&scratch, Serve::new(&scratch).args(["memory:1M", "--iops-total", "1000"]));
    read_each(&daemon.weir, "memory", 3);
    let (_, body) = daemon.ask("GET /metrics", "*/*");
    let stdout = TestClient::new("promtool")
        .args(["check", "metrics"])
        .with_stdin(&String::from_utf8(body).unwrap())
        .succeeds();
    assert_eq!(stdout, "");
}

#[test]
fn alerts_and_dashboard_use_existing_metrics() {
    let families = documented();
    let dashboard = fs::read_to_string(packaged("weir.dashboard.json")).unwrap();
    let _: Value = serde_json::from_str(&dashboard).expect("JSON");
    let mut names = BTreeSet::new();
    for file in [dashboard, fs::read_to_string(packaged("weir.rules.yml")).unwrap()] {
        let tokens = file.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        names.extend(tokens.filter(|token| token.starts_with("weir_")).map(str::to_owned));
    }
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let suffixes = ["", "_total", "_bucket", "_info"];
        let is_exported = suffixes
            .iter()
            .any(|suffix| name.strip_suffix(suffix).is_some_and(|stem| families.contains_key(stem)));
        assert!(is_exported, "{name}");
    }
}

#[test]
fn balance_of_a_burst_is_exported() {
    let scratch = Scratch::new();
    let limits = ["--iops-total", "1", "--iops-total-max", "1000", "--burst-for", "10s"];
    let daemon = MetricsDaemon::start(&scratch, Serve::new(&scratch).args(["memory:16M"]).args(limits));
    read_each(&daemon.weir, "memory", 1000);
    let labels = "{disk=\"memory\",limit=\"iops-total\"}";
    let sample = |name: &str| format!("weir_disk_{name}{labels}");
    let page =
        daemon.until(|page| page.find(&sample("bucket_level_operations")).is_some_and(|level| level > 900.0));
    let level = page.value(&sample("bucket_level_operations"));
    // (1000 − 1) × 10 s.
    assert_eq!(page.value(&sample("bucket_capacity_operations")), 9990.0);
    assert_eq!(page.value(&sample("burst_rate_bucket_capacity_operations")), 100.0);
    assert_eq!(page.value(&sample("burst_duration_seconds")), 10.0);
    let balance = page.value(&sample("burst_balance_ratio"));
    assert!((balance - (1.0 - level / 9990.0)).abs() < 0.001, "{balance} at level {level}");
    assert!((page.value(&sample("burst_balance_full_seconds")) - level).abs() <= 1.0);
    // The second bucket does not determine the balance, unlike in a limit without a burst.
    assert!(balance > 0.85, "{balance}");
}

/// The queries of the dashboard, with all disks selected.
fn queries() -> Vec<String> {
    let dashboard: Value =
        serde_json::from_str(&fs::read_to_string(packaged("weir.dashboard.json")).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let query = |target: &Value| {
        let query = target["expr"].as_str().unwrap().replace("$__rate_interval", "1m");
        ["$job", "$instance", "$disk", "$group"].iter().fold(query, |query, name| query.replace(name, ".*"))
    };
    targets.map(query).collect()
}

#[test]
fn dashboard_supports_both_kinds_of_histograms() {
    let scratch = Scratch::new();
    // At this limit the second of two reads waits, even on a slow host.
    let serve = Serve::new(&scratch).args(["memory:16M", "--iops-total", "2", "--metrics", "127.0.0.1:0"]);
    let weir = serve.start();
    let line = weir.wait_for_log("metrics at=");
    let target = line.split_once("at=").unwrap().1.trim();
    let kinds = [&["--enable-feature=native-histograms"][..], &[]];
    let prometheuses = kinds.map(|features| PrometheusServer::scraping(target, features));
    for prometheus in &prometheuses {
        poll_until(|| (prometheus.ask("up") == 1.0).then_some(()));
    }
    let queries: Vec<_> = queries().into_iter().filter(|query| query.contains("_bucket{")).collect();
    assert!(queries.len() >= 3, "{queries:?}");
    // A rate needs two scrapes.
    poll_until(|| {
        read_each(&weir, "memory", 3);
        let counts = prometheuses.iter().map(|prometheus| prometheus.ask("weir_disk_reads_total"));
        counts.into_iter().all(|count| count > 0.0).then_some(())
    });
    for query in queries {
        // The query of a heatmap yields a histogram, which has no numeric value.
        let query = if query.contains("histogram_quantile") { query } else { format!("count({query})") };
        for (prometheus, features) in prometheuses.iter().zip(kinds) {
            let has_result = || {
                read_each(&weir, "memory", 3);
                let result = prometheus.ask(&query);
                (result > 0.0 && result.is_finite()).then_some(())
            };
            println!("{features:?}: {query}");
            poll_until(has_result);
        }
    }
    weir.stop();
}

/// Duration of one run of fio.
const LOAD_SECONDS: usize = 120;

/// `WEIR_SCRAPE_SECONDS` is the duration of the load.
#[test]
fn prometheus_scrapes_a_daemon_under_load() {
    let seconds = env::var("WEIR_SCRAPE_SECONDS");
    let seconds: u64 = seconds.map_or(3, |text| text.parse().expect("a number of seconds"));
    let scratch = Scratch::new();
    let serve = Serve::new(&scratch).args(["memory:16M", "--iops-total", "200", "--metrics", "127.0.0.1:0"]);
    let weir = serve.start();
    let line = weir.wait_for_log("metrics at=");
    let target = line.split_once("at=").unwrap().1.trim();
    let prometheus = PrometheusServer::scraping(target, &["--enable-feature=native-histograms"]);
    let output = scratch.path("fio.json");
    let (mut total, mut bytes, mut latency_ns) = (0.0, 0.0, 0.0);
    // Consecutive runs, because the harness limits the run time of a client.
    for from in (0..seconds).step_by(LOAD_SECONDS) {
        let runtime = (seconds - from).min(LOAD_SECONDS as u64);
        let fio = TestClient::new("fio")
            .args(["--name=load", "--ioengine=nbd", "--rw=randread", "--size=16M", "--bs=4k", "--iodepth=8"])
            .args(["--time_based", &format!("--runtime={runtime}"), "--output-format=json"])
            .arg(format!("--output={}", text(&output)))
            .arg(format!("--uri={}", weir.uri("memory")));
        fio.arg(format!("--aux-path={}", scratch.path("").display())).succeeds();
        let report: Value = serde_json::from_slice(&fs::read(&output).unwrap()).expect("fio speaks JSON");
        let of_fio = |name: &str| report["jobs"][0]["read"][name].as_f64().unwrap();
        total += of_fio("total_ios");
        bytes += of_fio("io_bytes");
        latency_ns += of_fio("total_ios") * report["jobs"][0]["read"]["lat_ns"]["mean"].as_f64().unwrap();
    }
    // The last scrape may precede the end of the load.
    poll_until(|| (prometheus.ask("weir_disk_reads_total") == total).then_some(()));
    assert_eq!(prometheus.ask("histogram_count(weir_disk_request_duration_seconds)"), total, "native");
    assert_eq!(prometheus.ask("weir_disk_read_bytes_total"), bytes);
    let seconds = prometheus.ask("histogram_sum(weir_disk_request_duration_seconds)");
    // Shown with --nocapture, for long runs.
    println!("figure            fio           Prometheus");
    println!("reads             {total:<13} {}", prometheus.ask("weir_disk_reads_total"));
    println!("bytes             {bytes:<13} {}", prometheus.ask("weir_disk_read_bytes_total"));
    println!("mean latency, ms  {:<13.3} {:.3}", latency_ns / total / 1e6, seconds / total * 1e3);
    assert_eq!(prometheus.ask("min_over_time(up[15m])"), 1.0, "each scrape succeeded");
    assert!(prometheus.ask("sum(weir_disk_throttled_seconds_total)") > 0.0);
}
