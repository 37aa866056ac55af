//! Groups share one set of limits: the scenarios of QEMU's own group tests in virtual time.

use crate::timeline::{Timeline, Workload, ms, s};
use policy::throttle::{AdmissionCounters, NodeShare};

#[test]
fn disks_share_bytes_operations_and_bursts_equally() {
    type Limits = fn(u64) -> String;
    type Passes = (u64, u64, usize);
    let rows: [(Limits, &[Passes]); 3] = [
        (|number| format!("bps-total={}", 4096 * number), &[(1, 11, 4096 * 10 / 512)]),
        (|number| format!("iops-total={}", 10 * number), &[(1, 11, 100)]),
        (
            |number| {
                format!("iops-total={},iops-total-max={},iops-total-max-length=4", 10 * number, 70 * number)
            },
            &[(1, 4, 3 * 70), (5, 10, 5 * 10)],
        ),
    ];
    for (limits, passes) in rows {
        // One to three disks, each entitled to 4096 B/s in 512-byte requests or to 10 IOPS.
        for number in 1..=3 {
            let mut disks = Timeline::new(&limits(number));
            let clients: Vec<_> =
                (0..number).map(|_| disks.add(Workload::READS.with_length(512).queued(10_000))).collect();
            for client in clients {
                for &(from, to, requests) in passes {
                    assert_eq!(disks.admitted_of(client, s(from), s(to)), requests, "{}", limits(number));
                }
            }
        }
    }
}

/// Checks two clients of one disk: the number of requests of each in an interval, in milliseconds.
#[test]
fn directions_share_only_a_total_limit() {
    let (reads, writes) = (Workload::READS, Workload::WRITES);
    let (at_once, in_ten_seconds) = ((0, 1, 50_000), |requests| (1000, 11_000, requests));
    let rows = [
        ("iops-read=100", reads.depth(8), in_ten_seconds(1000), writes.queued(50_000), at_once),
        ("bps-write=409600", writes.depth(8), in_ten_seconds(1000), reads.queued(50_000), at_once),
        (
            "iops-read=300,iops-write=100",
            reads.depth(8),
            in_ten_seconds(3000),
            writes.depth(8),
            in_ten_seconds(1000),
        ),
        ("iops-total=1000", reads.depth(64), in_ten_seconds(5000), writes.depth(2), in_ten_seconds(5000)),
    ];
    for (limits, first, of_first, second, of_second) in rows {
        let mut disk = Timeline::new(limits);
        let first = disk.add(first);
        let second = disk.add_to(disk.disk(first), second);
        for (client, (from, to, requests)) in [(first, of_first), (second, of_second)] {
            assert_eq!(disk.admitted_of(client, ms(from), ms(to)), requests, "{limits}");
        }
    }
}

#[test]
fn separate_limits_are_independent() {
    let mut disks = Timeline::new("");
    let [a, b] = ["iops-total=500", "iops-total=500"]
        .map(|limits| disks.add_below(disks.group, limits, NodeShare::default(), Workload::READS.depth(8)));
    for disk in [a, b] {
        let burst = disks.admitted_of(disk, s(0), ms(1));
        assert_eq!(burst, 51, "a tenth of a second at the rate, plus the request that overruns the bucket");
        assert_eq!(disks.admitted_of(disk, s(1), s(11)), 5000);
    }
}

#[test]
fn unlimited_requests_are_admitted_at_once() {
    let mut disk = Timeline::new("");
    disk.queue_reads(100_000);
    assert_eq!(disk.admitted_between(s(0), ms(1)), 100_000);
    assert_eq!(
        disk.tree.stats(disk.group, s(1)).reads,
        AdmissionCounters { requests: 100_000, bytes: 409_600_000, ..AdmissionCounters::default() }
    );
}

#[test]
fn counters_record_admissions_and_waits() {
    let mut disks = Timeline::new("iops-total=10");
    let first = disks.add(Workload::READS.with_length(512).queued(3));
    let second = disks.add(Workload::WRITES.with_length(4096).queued(1));
    disks.run_until(s(1));
    // Two are admitted at once: the first fills the bucket, the second overruns it. Then reads and
    // writes alternate, 100 ms apart.
    let reads = disks.tree.stats(disks.disk(first), s(1)).reads;
    let writes = disks.tree.stats(disks.disk(second), s(1)).writes;
    assert_eq!((reads.requests, reads.bytes), (3, 1536));
    assert_eq!((writes.requests, writes.bytes), (1, 4096));
    assert_eq!(reads.throttled + writes.throttled, 2);
    // The third request waits 100 ms, the fourth 200 ms, whichever direction is first.
    assert_eq!(reads.waited_ns + writes.waited_ns, 100_000_000 + 200_000_000);
    let group = disks.tree.stats(disks.group, s(1));
    assert_eq!((group.reads, group.writes), (reads, writes), "a group counts what its members do");
}
