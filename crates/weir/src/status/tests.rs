//! Output of `weir status` for recorded responses of a daemon.

use serde_json::{Value, json};

use super::*;
use crate::client::latency::{self, DiskRequestTimes};

fn answer(uptime_ns: u64, reads: u64) -> Value {
    let waits = json!({ "p50": 9_000_000, "p99": 31_000_000, "max": 40_000_000 });
    json!({
        "version": "0.1.0",
        "uptime-ns": uptime_ns,
        "disks": [
            {
                "name": "vm1", "image": "/images/vm1.raw", "size": 1 << 30, "group": "gold", "weight": 100,
                "limits": { "iops-total": 1000, "iops-total-max": 5000, "iops-total-max-length": 5 },
                "reads": { "requests": reads, "bytes": reads * 4096 }, "writes": { "requests": 0, "bytes": 0 },
                "throttle": {
                    "reads": { "requests": reads, "bytes": reads * 4096, "throttled": reads, "waited-ns": 9 },
                    "writes": { "requests": 0, "bytes": 0, "throttled": 0, "waited-ns": 0 },
                    "waiting": { "reads": 31, "writes": 0 }, "wait-ns": waits,
                    "recent-wait-ns": { "p50": 8_000_000, "p99": 12_000_000, "max": 13_000_000 },
                    "limited-ns": uptime_ns / 4 * 3, "throttle-cause": "iops-total", "tokens": { "iops-total": 0 },
                    "buckets": { "iops-total": {
                        "level": 2500, "capacity": 25_000, "burst-rate-level": 500, "burst-rate-capacity": 500,
                        "burst": { "duration-ns": 6_250_000_000_u64, "balance-percent": 90,
                                   "used-up-in-ns": 5_625_000_000_u64, "full-in-ns": 2_500_000_000_u64 }
                    } }
                },
                "prefetch": { "mode": "auto", "memory": 4 << 20, "streams": 256 },
                "read-ahead": {
                    "hits": 930, "partial-hits": 1, "misses": 69, "read-ahead-bytes": 1_u64 << 30,
                    "used-bytes": 1_u64 << 29, "wasted-bytes": 24 << 20, "memory": 3 << 20, "streams": 12,
                    "suspended": true, "hit-rate": 0.931, "accuracy": 0.955
                }
            },
            {
                "errors": { "reads": 0, "writes": 3, "flushes": 1, "discards": 0 }, "io-status": "nospace",
                "name": "vm2", "image": "vm2.qcow2", "size": 1_u64 << 34, "limits": {}, "format": "qcow2",
                "l2-cache": {
                    "hits": 123_456, "misses": 300, "evictions": 44, "bytes": 1 << 20, "limit": 1 << 20, "covered": 8_u64 << 30
                },
                "refcount-cache": { "hits": 5, "misses": 1, "bytes": 65536 },
                "prefetch": { "mode": "off", "memory": 4 << 20, "streams": 256 }, "read-ahead": { "hits": 7 }
            }
        ],
        "groups": [{
            "name": "gold", "disks": ["vm1"], "weight": 100, "limits": { "bps-total": 20 << 20 },
            "watermark": 90, "enforcement": "scaled", "scale": 3.5,
            "unmet-reservation": { "iops-reservation": 500, "reason": "b has it" },
            "cluster": { "limits": { "bps-total": 200 << 20 }, "leased": false }
        }],
        "cluster": { "name": "lab", "host": "a", "connected": false, "reason": "etcd http://e:2379: refused" },
        "devices": [{
            "name": "/dev/vda", "disks": ["vm1"], "capacity": { "read-iops": 85_200, "read-bps": 1_500_000_000 },
            "capacity-source": "probe", "utilization": 0.42
        }],
        "exports": [
            { "name": "vm1", "disk": "vm1", "type": "nbd" },
            {
                "name": "vm2", "disk": "vm2", "type": "vhost-user-blk", "id": "vm2", "queues": 4, "in-flight": 32,
                "requests": 1_500_000, "kicks": 20_000, "calls": 30_000, "copies": 7,
                "front-end": { "pid": 4711, "name": "qemu-system-x86" }
            }
        ]
    })
}

/// Histograms of vm1: `quick` requests of 1.0 ms, and 2% as many of 31 ms.
fn latencies(quick: u64) -> DiskRequestTimes {
    let bucket = |above_ns: u64, requests: u64| json!({ "above-ns": above_ns, "at-most-ns": above_ns + 2, "requests": requests });
    let latencies = [bucket(999_999, quick), bucket(31_000_000, quick / 50)];
    let waits = [bucket(0, quick), bucket(12_000_000, quick / 50)];
    let vm1 = json!({ "name": "vm1", "latencies": latencies, "waits": waits });
    latency::read(json!([vm1, { "name": "vm2", "latencies": [] }])).unwrap()
}

fn reports() -> (Value, DaemonReport, IntervalRates) {
    let mut earlier = DaemonReport::read(&answer(1_000_000_000, 1000).to_string()).unwrap();
    let mut later = DaemonReport::read(&answer(2_000_000_000, 2000).to_string()).unwrap();
    (earlier.latencies, later.latencies) = (latencies(9_000), latencies(10_000));
    let rates = IntervalRates::between(&earlier, &later);
    (answer(2_000_000_000, 2000), later, rates)
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Tables of the disks and groups with these names, or of all.
fn tables_of(requested: &[&str], form: StatusForm) -> String {
    let (_, report, rates) = reports();
    tables::render(&report, &rates, &StatusSelection::new(&report, &names(requested)).unwrap(), form, false)
}

#[test]
fn the_tables() {
    let expect = "\
last 1.0s
DISK  GROUP  LIMITS             IOPS  READ/s  WRITE/s   P99  WAIT P99 (1.0s)  WAIT  HELD  HELD BY
vm1   gold   iops 1000↑5000×5s  1.0K    3.9M        0  31ms             12ms    31   75%  iops-total
vm2   -      -                     0       0        0     -                -     0    0%  -

GROUP  DISKS  LIMITS   WATERMARK        IOPS  READ/s  WRITE/s   P99  WAIT P99 (1.0s)  WAIT  HELD  HELD BY
gold       1  bps 20M  90% scaled ×3.5  1.0K    3.9M        0  31ms             12ms     0    0%  -

NAME  LIMIT       FULL BURST  BALANCE  USED UP IN  FULL IN
vm1   iops-total        6.2s      90%        5.6s     2.5s

GROUP  CLUSTER  CLUSTER LIMITS  QUOTA
gold   lab      bps 200M        fallback share, disconnected: etcd http://e:2379: refused

NAME  UNMET RESERVATION  REASON
gold  iops 500           b has it

DISK  STATE             READ ERRORS  WRITE ERRORS  FLUSH ERRORS  DISCARD ERRORS
vm2   stopped: nospace            0             3             1               0
";
    assert_eq!(tables_of(&[], StatusForm::default()), expect);
}

#[test]
fn all_tables_with_all_columns() {
    let expect = "\
last 1.0s
DISK  GROUP  LIMITS             WEIGHT  IOPS  READ/s  WRITE/s    P50   P99  WAIT P99 (1.0s)  WAIT P99 (START)  WAIT  HELD  HELD BY
vm1   gold   iops 1000↑5000×5s     100  1.0K    3.9M        0  1.0ms  31ms             12ms              31ms    31   75%  iops-total
vm2   -      -                       -     0       0        0      -     -                -                 -     0    0%  -

GROUP  IN  DISKS  LIMITS   WEIGHT  WATERMARK        IOPS  READ/s  WRITE/s    P50   P99  WAIT P99 (1.0s)  WAIT P99 (START)  WAIT  HELD  HELD BY
gold   -       1  bps 20M     100  90% scaled ×3.5  1.0K    3.9M        0  1.0ms  31ms             12ms                 -     0    0%  -

NAME  LIMIT       FULL BURST  BALANCE  USED UP IN  FULL IN
vm1   iops-total        6.2s      90%        5.6s     2.5s

GROUP  CLUSTER  CLUSTER LIMITS  QUOTA
gold   lab      bps 200M        fallback share, disconnected: etcd http://e:2379: refused

NAME  UNMET RESERVATION  REASON
gold  iops 500           b has it

DISK  STATE             READ ERRORS  WRITE ERRORS  FLUSH ERRORS  DISCARD ERRORS
vm2   stopped: nospace            0             3             1               0

DISK  FORMAT  L2 CACHE  LIMIT  COVERS  HITS  MISSES  EVICTED  REFCOUNTS
vm2   qcow2       1.0M   1.0M     50%  123K     300       44      64.0K

DISK  PREFETCH        HIT RATE  ACCURACY  PREFETCHED  WASTED  MEMORY  LIMIT  STREAMS
vm1   auto suspended       93%       96%        1.0G   24.0M    3.0M   4.0M       12

DEVICE    DISKS  UTILIZATION  CAPACITY READ       CAPACITY WRITE  SOURCE
/dev/vda  vm1            42%  85.2K iops, 1.4G/s  -               probe

VHOST-USER EXPORT  DISK  USED BY                 QUEUES  IN FLIGHT  REQUESTS  KICKS  CALLS  COPIES
vm2                vm2   qemu-system-x86 (4711)       4         32      1.5M  20.0K  30.0K       7
";
    assert_eq!(tables_of(&[], StatusForm { all: true, wide: true }), expect);
}

#[test]
fn names_select_disks_and_groups() {
    let table = |requested: &[&str]| tables_of(requested, StatusForm { all: true, ..StatusForm::default() });
    assert!(!table(&["vm2"]).contains("vm1") && !table(&["vm2"]).contains("DEVICE"));
    assert!(table(&["gold"]).contains("\nvm1 ") && table(&["gold"]).contains("/dev/vda"));
    let (_, report, _) = reports();
    let unknown = StatusSelection::new(&report, &names(&["vm3"])).err().unwrap();
    assert_eq!(unknown, "vm3: no disk and no group has this name (did you mean \"vm2\"?)");
}

#[test]
fn json_is_the_daemons_status_with_rates() {
    let (response, report, rates) = reports();
    let shown = StatusSelection::new(&report, &names(&["vm1"])).unwrap();
    let printed = serde_json::to_value(shown.select(with_rates(report.clone(), &rates))).unwrap();
    assert_eq!(printed["disks"].as_array().unwrap().len(), 1);
    assert_eq!(printed["exports"].as_array().unwrap().len(), 1);
    assert_eq!(printed["groups"], json!([]));
    let throttle = &printed["disks"][0]["throttle"];
    for (key, value) in response["disks"][0]["throttle"].as_object().unwrap() {
        assert_eq!(&throttle[key], value, "{key}");
    }
    let rate = &printed["disks"][0]["rate"];
    assert_eq!((&rate["reads"]["iops"], &rate["limited"]), (&json!(1000.0), &json!(0.75)));
    assert_eq!(rate["interval-ns"], 1_000_000_000);
    assert_eq!(rate["latency-ns"], json!({ "p50": 1_000_000, "p99": 31_000_001 }));
    assert_eq!(rate["wait-ns"], json!({ "p99": 12_000_001 }));
    assert_eq!(printed["disks"][0]["latency-ns"], json!({ "p50": 1_000_000, "p99": 31_000_001 }));
    let all = serde_json::to_value(with_rates(report, &rates)).unwrap();
    assert!(
        all["disks"][1].get("latency-ns").is_none() && all["disks"][1]["rate"].get("latency-ns").is_none()
    );
}

#[test]
fn one_report_has_no_rates() {
    let (_, report, _) = reports();
    let shown = StatusSelection::new(&report, &[]).unwrap();
    let table = tables::render(&report, &IntervalRates::default(), &shown, StatusForm::default(), false);
    let row =
        "vm1   gold   iops 1000↑5000×5s     -       -        -    -         -    31     -  iops-total\n";
    assert!(table.starts_with("DISK") && table.contains(row), "{table}");
}
