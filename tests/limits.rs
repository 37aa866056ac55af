//! Limits hold under a real client: coarse checks with fio, since exact ones are made in virtual time beside the code.

use crate::harness::{Client, MIB, Scratch, Serve, Weir, one_at_a_time};

/// How long each load lasts, in seconds.
const SECONDS: f64 = 3.0;
/// How far off a rate may be on a busy machine.
const TOLERANCE: f64 = 0.05;

/// What fio measured.
struct Measured {
    iops: f64,
    bytes_per_second: f64,
}

/// Random reads for [`SECONDS`].
#[track_caller]
fn fio(uri: &str, block_bytes: u64, depth: u32) -> Measured {
    let [measured] = fio_together([uri.to_owned()], block_bytes, depth);
    measured
}

/// Random reads for [`SECONDS`] from several exports, begun together.
#[track_caller]
fn fio_together<const N: usize>(uris: [String; N], block_bytes: u64, depth: u32) -> [Measured; N] {
    fio_apart(uris.map(|uri| Load { uri, block_bytes, depth }), 0.0)
}

/// One client's random reads.
struct Load {
    uri: String,
    block_bytes: u64,
    depth: u32,
}

/// Random reads of several kinds for [`SECONDS`], begun together, measured from `ramp` seconds on.
#[track_caller]
fn fio_apart<const N: usize>(loads: [Load; N], ramp: f64) -> [Measured; N] {
    let mut fio = Client::new("fio")
        .args(["--ioengine=nbd", "--rw=randread", "--time_based", "--output-format=json"])
        .arg(format!("--ramp_time={}ms", ramp * 1000.0))
        .arg(format!("--runtime={SECONDS}"));
    for (number, load) in loads.iter().enumerate() {
        fio = fio
            .arg(format!("--name=load{number}"))
            .arg(format!("--uri={}", load.uri))
            .arg(format!("--bs={}", load.block_bytes))
            .arg(format!("--iodepth={}", load.depth));
    }
    let report = fio.succeeds();
    // libnbd's warnings may precede the report.
    let report = &report[report.find('{').expect("fio prints JSON")..];
    let report: serde_json::Value = serde_json::from_str(report).expect("fio prints JSON");
    std::array::from_fn(|number| {
        let load = &report["jobs"][number]["read"];
        let runtime = load["runtime"].as_f64().expect("milliseconds") / 1000.0;
        Measured {
            iops: load["total_ios"].as_f64().expect("a count") / runtime,
            bytes_per_second: load["io_bytes"].as_f64().expect("a count") / runtime,
        }
    })
}

/// What a limit lets through on average: its rate, and the tenth of a second's worth that may pass at once.
fn expected(rate: f64) -> f64 {
    rate + rate / 10.0 / SECONDS
}

/// A limit is never exceeded, and reached. A machine that stops the daemon or the client for longer than the tenth of a second that a bucket holds
/// makes any one measurement miss.
#[track_caller]
fn assert_limited(expected: f64, mut measure: impl FnMut() -> f64) {
    let checked = || {
        let seen = measure();
        assert!(seen <= expected * (1.0 + TOLERANCE), "{seen:.0} instead of {expected:.0}");
        seen
    };
    one_at_a_time()
        .measured(&format!("{expected:.0}"), checked, |seen| *seen >= expected * (1.0 - TOLERANCE));
}

#[test]
fn operations_per_second_are_limited_at_any_depth() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).args(["memory:16M", "--iops-total", "1000"]).start();
    for depth in [1, 32] {
        assert_limited(expected(1000.0), || fio(&weir.uri("memory"), 4096, depth).iops);
    }
}

#[test]
fn bytes_per_second_are_limited_at_any_size() {
    let scratch = Scratch::new();
    let rate = 10.0 * MIB as f64;
    let weir = Serve::new(&scratch).args(["memory:16M", "--bps-total", "10M"]).start();
    for (size, depth) in [(4096, 16), (262_144, 4)] {
        assert_limited(expected(rate), || fio(&weir.uri("memory"), size, depth).bytes_per_second);
    }
}

#[test]
fn a_burst_passes_and_then_the_rate_holds() {
    let scratch = Scratch::new();
    // 2000 at once, then 200 a second.
    assert_limited(2000.0 + 200.0 * SECONDS, || {
        let limits = ["--iops-total", "200", "--iops-total-max", "2000"];
        let weir = Serve::new(&scratch).arg("memory:16M").args(limits).start();
        fio(&weir.uri("memory"), 4096, 32).iops * SECONDS
    });
}

#[test]
fn disks_of_a_group_share_its_limit_evenly() {
    let scratch = Scratch::new();
    let disks = ["memory:16M", "memory:16M", "--name", "a", "--name", "b"];
    let weir = Serve::new(&scratch).args(disks).args(["--group", "tenant", "--iops-total", "1000"]).start();
    let expected = expected(1000.0);
    let share = || {
        let [a, b] = fio_together(["a", "b"].map(|disk| weir.uri(disk)), 4096, 16).map(|load| load.iops);
        assert!(a + b <= expected * (1.0 + TOLERANCE), "{a:.0} and {b:.0} instead of {expected:.0}");
        [a, b]
    };
    // Whoever of the two is connected first has the group to itself for a moment, its first tenth of a second's
    // worth included; and whoever is stopped for longer leaves its share.
    one_at_a_time().measured(&format!("{expected:.0} in halves"), share, |[a, b]| {
        a + b >= expected * (1.0 - TOLERANCE) && (a / b - 1.0).abs() < 0.25
    });
}

#[test]
fn disks_without_a_group_have_a_limit_each() {
    let scratch = Scratch::new();
    let disks = ["memory:16M", "memory:16M", "--name", "a", "--name", "b"];
    let weir = Serve::new(&scratch).args(disks).args(["--iops-total", "500"]).start();
    assert_limited(2.0 * expected(500.0), || {
        let loads = fio_together(["a", "b"].map(|disk| weir.uri(disk)), 4096, 8);
        for load in &loads {
            assert!(load.iops <= expected(500.0) * (1.0 + TOLERANCE), "one got {:.0}", load.iops);
        }
        loads.iter().map(|load| load.iops).sum()
    });
}

/// Long enough for every client to be connected and for what passed at once to be paid for.
const RAMP_SECONDS: f64 = 0.5;

/// As many requests in flight as keep a client asking for its share, of so many a second, though it is not scheduled for some 30 ms: who asks
/// for less gets less, and the others have the rest. And no more: what is in flight at the end is not counted.
fn in_flight(iops: f64) -> u32 {
    (iops * 0.032).ceil() as u32
}

/// A daemon of these groups and disks.
fn configured(scratch: &Scratch, config: &str) -> Weir {
    Serve::new(scratch).arg("--config").arg(scratch.file("weir.toml", config)).start()
}

/// A daemon of a group that has this limit, and two disks in it, each with a setting or none.
fn tenant(scratch: &Scratch, limit: &str, disks: [(&str, &str); 2]) -> Weir {
    let disks = disks.map(|(name, setting)| {
        format!("[disk.{name}]\nimage = \"memory:16M\"\ngroup = \"tenant\"\n{setting}\n")
    });
    configured(scratch, &format!("[group.tenant]\n{limit}\n{}", disks.concat()))
}

/// Every rate is within [`TOLERANCE`] of what is expected.
#[track_caller]
fn assert_shared<const N: usize>(expected: [f64; N], measure: impl FnMut() -> [f64; N]) {
    one_at_a_time().measured(&format!("{expected:.0?}"), measure, |seen| {
        seen.iter().zip(expected).all(|(seen, expected)| (seen / expected - 1.0).abs() <= TOLERANCE)
    });
}

/// Asserts that disks whose clients all ask for more get so many operations a second each.
#[track_caller]
fn assert_iops<const N: usize>(weir: &Weir, shares: [(&str, f64); N]) {
    assert_shared(shares.map(|(_, iops)| iops), || {
        let loads = shares.map(|(disk, iops)| Load {
            uri: weir.uri(disk),
            block_bytes: 4096,
            depth: in_flight(iops),
        });
        fio_apart(loads, RAMP_SECONDS).map(|load| load.iops)
    });
}

#[test]
fn small_reads_get_as_many_bytes_as_large_ones() {
    let scratch = Scratch::new();
    let weir = tenant(&scratch, "bps-total = 8000000", [("small", ""), ("large", "")]);
    assert_shared([4e6, 4e6], || {
        let small = Load { uri: weir.uri("small"), block_bytes: 4096, depth: in_flight(4e6 / 4096.0) };
        let large = Load { uri: weir.uri("large"), block_bytes: 65_536, depth: 16 };
        fio_apart([small, large], RAMP_SECONDS).map(|load| load.bytes_per_second)
    });
}

#[test]
fn weights_decide_the_shares_of_a_group() {
    let scratch = Scratch::new();
    let weir = tenant(&scratch, "iops-total = 2000", [("one", ""), ("three", "weight = 300")]);
    assert_iops(&weir, [("one", 500.0), ("three", 1500.0)]);
}

#[test]
fn a_reservation_is_met_beside_heavier_neighbours() {
    let scratch = Scratch::new();
    let weir = tenant(
        &scratch,
        "iops-total = 2000",
        [("promised", "iops-reservation = 800"), ("heavy", "weight = 10000")],
    );
    assert_iops(&weir, [("promised", 800.0), ("heavy", 1200.0)]);
}

#[test]
fn the_limits_of_every_level_hold() {
    let scratch = Scratch::new();
    let weir = configured(
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
    // Tenant and neighbour have a thousand each of the host's; of the tenant's, the limited disk takes what it may.
    assert_iops(&weir, [("limited", 300.0), ("free", 700.0), ("neighbour", 1000.0)]);
}
