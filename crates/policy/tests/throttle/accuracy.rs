//! Accuracy of a limit: within 0.5 % over ten seconds, excluding the first 100 ms with the initial
//! burst.
//!
//! With timers that are exact to the nanosecond, and with timers that are up to 5 ms late.

use crate::timeline::{Timeline, Workload, assert_within_percent, ms};
use policy::time::Duration;

const TIMERS_LATE_BY: [Duration; 2] = [Duration::ZERO, Duration::from_millis(5)];
const DISK_LATENCY: Duration = Duration::from_micros(80);

#[track_caller]
fn assert_rate(limits: &str, workload: Workload, bytes_per_second: u64) {
    for late in TIMERS_LATE_BY {
        let mut disk = Timeline::new(limits).with_late_timers(late);
        disk.add(workload.latency(DISK_LATENCY));
        assert_within_percent(0.5, disk.rate_between(ms(100), ms(10_100)), bytes_per_second as f64);
        let (bytes, expected) = (disk.bytes_between(ms(100), ms(10_100)), bytes_per_second * 10);
        assert!(
            bytes.abs_diff(expected) <= workload.length + expected / 200,
            "{bytes} in ten seconds, not {expected}"
        );
    }
}

#[test]
fn operations_and_bytes_at_every_depth_and_length() {
    let (reads, writes) = (Workload::READS, Workload::WRITES);
    for depth in [1, 32] {
        assert_rate("iops-total=1000", reads.depth(depth), 1000 * 4096);
        assert_rate("iops-write=1000", writes.depth(depth), 1000 * 4096);
    }
    assert_rate("iops-total=20000", reads.depth(32), 20_000 * 4096);
    assert_rate("iops-total=50000", reads.depth(32), 50_000 * 4096);
    for length in [4096, 1 << 20] {
        assert_rate("bps-total=10000000", reads.with_length(length).depth(4), 10_000_000);
        assert_rate("bps-write=10000000", writes.with_length(length), 10_000_000);
    }
}

#[test]
fn many_disks_share_the_rate_of_one() {
    let mut disks = Timeline::new("iops-total=20000").with_late_timers(Duration::from_millis(5));
    for _ in 0..50 {
        disks.add(Workload::READS.latency(DISK_LATENCY));
        disks.add(Workload::WRITES.latency(DISK_LATENCY));
    }
    let measured = disks.admitted_between(ms(100), ms(10_100)) as f64 / 10.0;
    assert_within_percent(0.5, measured, 20_000.0);
}

#[test]
fn a_mix_of_reads_and_writes_gets_the_total() {
    let mut disk = Timeline::new("iops-total=1000").with_late_timers(Duration::from_millis(5));
    let reads = disk.add(Workload::READS.depth(32));
    disk.add_to(disk.disk(reads), Workload::WRITES.depth(1));
    let measured = disk.admitted_between(ms(100), ms(10_100)) as f64 / 10.0;
    assert_within_percent(0.5, measured, 1000.0);
}
