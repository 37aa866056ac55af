//! Groups share one set of limits: the scenarios that QEMU's own group tests run, in virtual time.

use crate::timeline::{Timeline, Workload, assert_within_percent, ms, s};
use policy::throttle::{Counters, Share};

#[test]
fn each_disk_gets_its_share_of_the_bytes_the_operations_and_the_burst() {
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
                (0..number).map(|_| disks.add(Workload::READS.of(512).queued(10_000))).collect();
            for client in clients {
                for &(from, to, requests) in passes {
                    assert_eq!(disks.admitted_of(client, s(from), s(to)), requests, "{}", limits(number));
                }
            }
        }
    }
}

#[test]
fn limits_of_one_direction_leave_the_other_alone() {
    let mut disk = Timeline::new("iops-read=100");
    let reads = disk.add(Workload::READS.depth(8));
    let writes = disk.add_to(disk.disk(reads), Workload::WRITES.queued(50_000));
    assert_eq!(disk.admitted_of(writes, s(0), ms(1)), 50_000);
    assert_eq!(disk.admitted_of(reads, s(1), s(11)), 1000);

    let mut disk = Timeline::new("bps-write=409600");
    let writes = disk.add(Workload::WRITES.depth(8));
    let reads = disk.add_to(disk.disk(writes), Workload::READS.queued(50_000));
    assert_eq!(disk.admitted_of(reads, s(0), ms(1)), 50_000);
    assert_eq!(disk.admitted_of(writes, s(1), s(11)), 1000);
}

#[test]
fn reads_and_writes_each_keep_their_own_limit() {
    let mut disk = Timeline::new("iops-read=300,iops-write=100");
    let reads = disk.add(Workload::READS.depth(8));
    let writes = disk.add_to(disk.disk(reads), Workload::WRITES.depth(8));
    assert_eq!(disk.admitted_of(reads, s(1), s(11)), 3000);
    assert_eq!(disk.admitted_of(writes, s(1), s(11)), 1000);
}

#[test]
fn disks_with_limits_of_their_own_take_nothing_from_each_other() {
    let mut disks = Timeline::new("");
    let [a, b] = ["iops-total=500", "iops-total=500"]
        .map(|limits| disks.add_below(disks.group, limits, Share::default(), Workload::READS.depth(8)));
    for disk in [a, b] {
        assert_eq!(disks.admitted_of(disk, s(0), ms(1)), 51, "a tenth of a second's worth, and one over");
        assert_eq!(disks.admitted_of(disk, s(1), s(11)), 5000);
    }
}

#[test]
fn the_slowest_limit_decides() {
    let mut disk = Timeline::new("iops-total=1000,bps-total=409600");
    disk.add(Workload::READS.depth(8));
    assert_eq!(disk.admitted_between(s(1), s(11)), 1000, "of 4096 bytes each");
    let mut disk = Timeline::new("iops-total=1000,bps-total=409600");
    disk.add(Workload::READS.of(1).depth(8));
    assert_eq!(disk.admitted_between(s(1), s(11)), 10_000);
}

#[test]
fn no_limits_let_everything_pass_at_once() {
    let mut disk = Timeline::new("");
    disk.queue_reads(100_000);
    assert_eq!(disk.admitted_between(s(0), ms(1)), 100_000);
    assert_eq!(
        disk.tree.stats(disk.group, s(1)).reads,
        Counters { requests: 100_000, bytes: 409_600_000, ..Counters::default() }
    );
}

#[test]
fn counters_tell_what_passed_what_waited_and_for_how_long() {
    let mut disks = Timeline::new("iops-total=10");
    let first = disks.add(Workload::READS.of(512).queued(3));
    let second = disks.add(Workload::WRITES.of(4096).queued(1));
    disks.run_until(s(1));
    // Two pass at once, one being exactly full. Then reads and writes alternate, 100 ms apart.
    let reads = disks.tree.stats(disks.disk(first), s(1)).reads;
    let writes = disks.tree.stats(disks.disk(second), s(1)).writes;
    assert_eq!((reads.requests, reads.bytes), (3, 1536));
    assert_eq!((writes.requests, writes.bytes), (1, 4096));
    assert_eq!(reads.throttled + writes.throttled, 2);
    assert_eq!(reads.waited_ns + writes.waited_ns, 100_000_000 + 200_000_000);
    let group = disks.tree.stats(disks.group, s(1));
    assert_eq!((group.reads, group.writes), (reads, writes), "a group counts what its members do");
}

#[test]
fn idle_members_take_nothing_from_the_busy() {
    let mut disks = Timeline::new("iops-total=1000");
    for _ in 0..8000 {
        disks.add(Workload::READS.queued(0));
    }
    let busy = disks.add(Workload::READS.depth(1));
    assert_within_percent(0.5, disks.admitted_of(busy, s(1), s(11)) as f64, 10_000.0);
}
