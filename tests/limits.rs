//! Limits under real clients: upper bounds that must never be exceeded, and shares.
//!
//! A stalled host lowers every rate and raises none, so the tests assert upper bounds in the
//! client's time: at most the work that limit and burst admit in that time. That a limit is
//! reached, and how exact shares are, is proved in virtual time beside the code
//! (`crates/policy/tests/throttle`) and measured by `make bench`.

use serde_json::{Value, json};

use crate::harness::{
    MIB, RawNbdClient, Scratch, Serve, TestClient, Weir, nbdsh,
    operator::{find, run_failing, run_misused, run_ok, serve, socket, status, wait_until},
    text,
    wire::{CMD_READ, RawNbdRequest},
};

/// The bound without a burst: the rate, a tenth of a second's worth at once, and one more request.
fn max_admitted(rate: f64, seconds: f64, request: f64) -> f64 {
    rate * seconds + rate / 10.0 + request
}

#[track_caller]
fn assert_at_most(passed: f64, max: f64, seconds: f64) {
    assert!(passed <= max, "{passed} admitted in {seconds:.4} s, {max:.1} permitted");
}

/// Runs `count` random reads with fio; returns the seconds that they took on fio's clock.
#[track_caller]
fn fio(uri: &str, block_bytes: u64, depth: u32, count: u64) -> f64 {
    let report = TestClient::new("fio")
        .args(["--name=load", "--ioengine=nbd", "--rw=randread", "--norandommap", "--output-format=json"])
        .arg(format!("--number_ios={count}"))
        .arg(format!("--io_size={}", count * block_bytes))
        .arg(format!("--uri={uri}"))
        .arg(format!("--bs={block_bytes}"))
        .arg(format!("--iodepth={depth}"))
        .succeeds();
    // libnbd's warnings may precede the report.
    let report = &report[report.find('{').expect("fio prints JSON")..];
    let report: Value = serde_json::from_str(report).expect("fio prints JSON");
    let load = &report["jobs"][0]["read"];
    assert_eq!(load["total_ios"], count, "all reads have completed");
    // fio reports whole milliseconds, rounded down.
    (load["runtime"].as_f64().expect("milliseconds") + 1.0) / 1000.0
}

/// Sends reads of 4 KiB all at once; returns for each export the seconds until all were answered.
#[track_caller]
fn read_at_once<const N: usize>(exports: [(String, u64); N]) -> [f64; N] {
    let script = "
import time
handles = []
for uri, count in zip(arguments[::2], arguments[1::2]):
    handle = nbd.NBD()
    handle.connect_uri(uri)
    handles.append((handle, int(count)))
began = time.monotonic()
answered = 0
def done(error):
    global answered
    assert error.value == 0, error.value
    answered += 1
    return 1
for handle, count in handles:
    for number in range(count):
        handle.aio_pread(nbd.Buffer(4096), number * 8192 % (1 << 20), done)
for handle, count in handles:
    while handle.aio_in_flight():
        handle.poll(-1)
    print(time.monotonic() - began)
assert answered == sum(count for handle, count in handles)
";
    let arguments = exports.into_iter().flat_map(|(uri, count)| [uri, count.to_string()]);
    let printed = nbdsh(script, arguments);
    let seconds: Vec<f64> = printed.lines().map(|line| line.parse().expect("seconds")).collect();
    seconds.try_into().expect("a line for each export")
}

#[test]
fn operations_per_second_are_limited_at_any_depth() {
    let weir = Serve::with_own_scratch().args(["memory:16M", "--iops-total", "1000"]).start();
    for depth in [1, 32] {
        let seconds = fio(&weir.uri("memory"), 4096, depth, 400);
        assert_at_most(400.0, max_admitted(1000.0, seconds, 1.0), seconds);
    }
}

#[test]
fn bytes_per_second_are_limited_at_any_size() {
    let rate = 10.0 * MIB as f64;
    let weir = Serve::with_own_scratch().args(["memory:16M", "--bps-total", "10M"]).start();
    for (size, depth) in [(4096, 16), (262_144, 4)] {
        let seconds = fio(&weir.uri("memory"), size, depth, 4 * MIB / size);
        assert_at_most(4.0 * MIB as f64, max_admitted(rate, seconds, size as f64), seconds);
    }
}

fn start_with_config(scratch: &Scratch, config: &str) -> Weir {
    let sockets =
        format!("[daemon]\nqmp = \"{}\"\nnbd = \"unix:{}\"\n", socket(scratch), text(&scratch.socket("nbd")));
    serve(scratch, &scratch.file("weir.toml", sockets + config))
}

fn uri(scratch: &Scratch, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", text(&scratch.socket("nbd")))
}

fn throttled(scratch: &Scratch, disk: &str) -> u64 {
    find(&status(scratch, "0"), "disks", disk)["throttle"]["reads"]["throttled"].as_u64().expect("a count")
}

#[test]
fn burst_is_admitted_at_once_then_the_rate_holds() {
    let scratch = Scratch::new();
    let limits = "iops-total = 1000\niops-total-max = 2000\n";
    let _weir = start_with_config(&scratch, &format!("[disk.a]\nimage = \"memory:16M\"\n{limits}"));
    let [_] = read_at_once([(uri(&scratch, "a"), 2000)]);
    assert_eq!(throttled(&scratch, "a"), 0, "the whole burst is admitted without waiting");
    // The bucket has leaked for an unknown time, at most until it was empty.
    let [seconds] = read_at_once([(uri(&scratch, "a"), 2500)]);
    assert_at_most(2500.0, 1000.0 * seconds + 2000.0 + 1.0, seconds);
}

#[test]
fn balance_and_duration_of_a_burst_are_reported() {
    let scratch = Scratch::new();
    let config =
        "[disk.a]\nimage = \"memory:16M\"\niops-total = 1\niops-total-max = 1000\nburst-for = \"10s\"\n";
    let _weir = start_with_config(&scratch, config);
    read_at_once([(uri(&scratch, "a"), 2000)]);
    let buckets = || find(&status(&scratch, "0"), "disks", "a")["throttle"]["buckets"]["iops-total"].clone();
    let after = buckets();
    // (1000 − 1) × 10 s. The bucket leaks one operation a second.
    assert_eq!(after["capacity"], 9990);
    let level = after["level"].as_u64().expect("a number");
    assert!((1000..=2010).contains(&level), "{after}");
    let burst = &after["burst"];
    assert_eq!(burst["duration-ns"], 10_000_000_000_u64);
    let balance = burst["balance-percent"].as_u64().expect("a number");
    assert!(balance.abs_diff(100 - level * 100 / 9990) <= 1, "{after}");
    assert!(burst["full-in-ns"].as_u64().expect("a number") >= level * 1_000_000_000, "{after}");
    assert_eq!(after["burst-rate-capacity"], 100);
    let table = run_ok(&scratch, &["status", "--interval", "0"]);
    assert!(table.contains("iops 1↑1000 for 10s") && table.contains("FULL BURST  BALANCE"), "{table}");
    assert!(run_ok(&scratch, &["throttle", "a"]).contains("a full burst of iops-total lasts 10 s\n"));
    // The level stays, and so does the duration of the burst after a change of its rate.
    run_ok(&scratch, &["throttle", "a", "--burst-for", "20s", "--save"]);
    assert_eq!(buckets()["capacity"], 19_980);
    run_ok(&scratch, &["throttle", "a", "--iops-total-max", "2000", "--save"]);
    let changed = buckets();
    assert_eq!(
        (&changed["capacity"], &changed["burst"]["duration-ns"]),
        (&json!(39_980), &json!(20_000_000_000_u64))
    );
    assert!(changed["level"].as_u64() >= Some(1000), "{changed}");
    assert!(run_ok(&scratch, &["reload", "--dry-run"]).contains("nothing would change"));
    for (options, why) in [
        (&["--iops-total-max-length", "5"][..], "cannot be set together with burst-for (20)"),
        (&["--iops-total-max", "0", "--burst-for", "5s"], "needs a burst rate"),
    ] {
        let stderr = run_failing(&scratch, &[&["throttle", "a"], options].concat());
        assert!(stderr.contains(why), "{stderr}");
    }
    let stderr = run_misused(&scratch, &["throttle", "a", "--burst-for", "1.5s"]);
    assert!(stderr.contains("has a fraction of a second"), "{stderr}");
    assert_eq!(buckets()["capacity"], 39_980, "a rejected change changes nothing");
    let lengths = ["throttle", "a", "--burst-for", "0", "--iops-total-max-length", "30", "--save"];
    assert!(run_ok(&scratch, &lengths).contains("burst-for: 20s → none"));
    assert_eq!(buckets()["capacity"], 60_000);
    let back = run_ok(&scratch, &["throttle", "a", "--burst-for", "30s", "--save"]);
    assert!(back.contains("iops-total-max-length: 30 → 1"), "{back}");
    assert!(run_ok(&scratch, &["reload", "--dry-run"]).contains("nothing would change"));
}

#[test]
fn disks_of_a_group_share_one_limit() {
    let disks = ["memory:16M", "memory:16M", "--name", "a", "--name", "b"];
    let weir =
        Serve::with_own_scratch().args(disks).args(["--group", "tenant", "--iops-total", "1000"]).start();
    let seconds = read_at_once(["a", "b"].map(|disk| (weir.uri(disk), 200)));
    let last = seconds.into_iter().fold(0.0, f64::max);
    assert_at_most(400.0, max_admitted(1000.0, last, 1.0), last);
}

#[test]
fn disks_without_a_group_have_separate_limits() {
    let scratch = Scratch::new();
    let disks = ["memory:16M", "memory:16M", "--name", "a", "--name", "b", "--qmp", &socket(&scratch)];
    let limits = ["--iops-total", "300", "--iops-total-max", "300"];
    let weir = Serve::new(&scratch).args(disks).args(limits).start();
    read_at_once(["a", "b"].map(|disk| (weir.uri(disk), 300)));
    for disk in ["a", "b"] {
        assert_eq!(throttled(&scratch, disk), 0, "{disk} has a bucket of its own");
    }
    for disk in ["a", "b"] {
        let [seconds] = read_at_once([(weir.uri(disk), 400)]);
        assert_at_most(400.0, 300.0 * seconds + 300.0 + 1.0, seconds);
    }
}

#[test]
fn limits_of_every_level_hold() {
    let scratch = Scratch::new();
    let _weir = start_with_config(
        &scratch,
        r#"
        [group.host]
        iops-total = 2000
        [group.tenant]
        iops-total = 1200
        group = "host"
        [disk.limited]
        image = "memory:16M"
        group = "tenant"
        iops-total = 300
        [disk.free]
        image = "memory:16M"
        group = "tenant"
        [disk.neighbour]
        image = "memory:16M"
        group = "host"
        "#,
    );
    let counts = [("limited", 130), ("free", 300), ("neighbour", 500)];
    let [limited, free, neighbour] = read_at_once(counts.map(|(disk, count)| (uri(&scratch, disk), count)));
    let tenant = limited.max(free);
    let host = tenant.max(neighbour);
    assert_at_most(130.0, max_admitted(300.0, limited, 1.0), limited);
    assert_at_most(430.0, max_admitted(1200.0, tenant, 1.0), tenant);
    assert_at_most(930.0, max_admitted(2000.0, host, 1.0), host);
}

/// A daemon with a group that has this limit, and two disks in it, each with a setting or none.
fn tenant(scratch: &Scratch, limit: &str, settings: [&str; 2]) -> Weir {
    let disk =
        |(name, setting)| format!("[disk.{name}]\nimage = \"memory:16M\"\ngroup = \"tenant\"\n{setting}\n");
    let disks: String = ["a", "b"].into_iter().zip(settings).map(disk).collect();
    start_with_config(scratch, &format!("[group.tenant]\n{limit}\n{disks}"))
}

/// A counter of the reads of both disks; `requests` counts admitted reads.
fn reads(status: &Value, counter: &str) -> [u64; 2] {
    ["a", "b"].map(|disk| {
        let throttle = &find(status, "disks", disk)["throttle"];
        let counter =
            if counter == "waiting" { &throttle[counter]["reads"] } else { &throttle["reads"][counter] };
        counter.as_u64().expect("a count")
    })
}

/// Admitted reads of both disks since this call, taken from a later status.
fn passed_from_now(scratch: &Scratch) -> impl Fn(&Value) -> [u64; 2] + use<> {
    let before = reads(&status(scratch, "0"), "requests");
    move |status| {
        let now = reads(status, "requests");
        [now[0] - before[0], now[1] - before[1]]
    }
}

/// Clients with this number and size of reads in flight, once the daemon has received them all.
fn queue(scratch: &Scratch, queued: [(u64, u64); 2]) -> [RawNbdClient; 2] {
    let client = |disk: &str, (count, length): (u64, u64)| {
        let (mut client, _) = RawNbdClient::negotiated(&scratch.socket("nbd"), disk);
        for cookie in 0..count {
            // With gaps, so that none are merged.
            let offset = cookie * 2 * length % (8 * MIB);
            client.request(RawNbdRequest { flags: 0, kind: CMD_READ, cookie, offset, length }, &[]);
        }
        client
    };
    let clients = [client("a", queued[0]), client("b", queued[1])];
    wait_until(scratch, |status| {
        let (waiting, passed) = (reads(status, "waiting"), reads(status, "requests"));
        [0, 1].into_iter().all(|disk| waiting[disk] + passed[disk] == queued[disk].0)
    });
    clients
}

/// The shares of disks `a` and `b` in a burst that is granted while both have requests waiting.
struct SharedBurst<'a> {
    /// `iops-total` or `bps-total`, with a rate close to zero; the burst is granted later.
    limit: &'a str,
    rate: u64,
    burst: u64,
    settings: [&'a str; 2],
    /// Number and size of the reads that each disk queues.
    queued: [(u64, u64); 2],
}

impl SharedBurst<'_> {
    /// Admitted requests of each disk: the burst, since the rate is negligible.
    #[track_caller]
    fn passed(&self) -> [u64; 2] {
        let scratch = Scratch::new();
        let Self { limit, rate, burst, settings, queued } = self;
        let _weir = tenant(&scratch, &format!("{limit} = {rate}"), *settings);
        let _clients = queue(&scratch, *queued);
        let passed = passed_from_now(&scratch);
        run_ok(&scratch, &["throttle", "tenant", &format!("--{limit}-max"), &burst.to_string()]);
        let units = |[a, b]: [u64; 2]| match *limit {
            "iops-total" => a + b,
            _ => a * queued[0].1 + b * queued[1].1,
        };
        wait_until(&scratch, |status| units(passed(status)) >= *burst);
        passed(&status(&scratch, "0"))
    }
}

#[track_caller]
fn assert_part([a, b]: [u64; 2], part: f64, slack: f64) {
    let expected = (a + b) as f64 * part;
    assert!((a as f64 - expected).abs() <= slack, "{a} and {b} admitted, expected share {expected:.0}");
}

#[test]
fn disks_of_a_group_alternate() {
    let sharing =
        SharedBurst { limit: "iops-total", rate: 1, burst: 300, settings: ["", ""], queued: [(500, 512); 2] };
    assert_part(sharing.passed(), 1.0 / 2.0, 4.0);
}

#[test]
fn weights_decide_the_shares_of_a_group() {
    let settings = ["", "weight = 300"];
    let sharing = SharedBurst { limit: "iops-total", rate: 1, burst: 400, settings, queued: [(500, 512); 2] };
    assert_part(sharing.passed(), 1.0 / 4.0, 4.0);
}

#[test]
fn small_reads_get_as_many_bytes_as_large_ones() {
    let queued = [(500, 4096), (100, 32_768)];
    let sharing = SharedBurst { limit: "bps-total", rate: 4096, burst: 2 << 20, settings: ["", ""], queued };
    let [small, large] = sharing.passed();
    assert_part([small, large * 8], 1.0 / 2.0, 32.0);
}

/// By weight its share would be one percent. A slow host can only increase it.
#[test]
fn reservation_is_met_despite_heavier_neighbours() {
    let scratch = Scratch::new();
    let settings = ["iops-reservation = 30", "weight = 10000"];
    let _weir = tenant(&scratch, "iops-total = 40", settings);
    let _clients = queue(&scratch, [(500, 512); 2]);
    let passed = passed_from_now(&scratch);
    wait_until(&scratch, |status| passed(status).into_iter().sum::<u64>() >= 60);
    let [reserved, heavy] = passed(&status(&scratch, "0"));
    assert!(reserved * 2 >= heavy * 3, "{reserved} admitted with a reservation, {heavy} beside them");
}
