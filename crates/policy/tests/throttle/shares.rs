//! Division of a limit: by weight, whatever the sizes and depths; and by reservation.

use crate::timeline::{Timeline, Workload, assert_within_percent, reserved_share, s, weight};
use policy::request::Direction;
use policy::throttle::{Limits, NodeShare};
use policy::time::Duration;

const LATE: Duration = Duration::from_millis(1);

/// Share of each client in the bytes admitted between 1 s and 21 s.
fn parts(disks: &mut Timeline, clients: &[usize]) -> Vec<f64> {
    let bytes: Vec<_> = clients.iter().map(|client| disks.bytes_of(*client, s(1), s(21)) as f64).collect();
    let all: f64 = bytes.iter().sum();
    bytes.iter().map(|bytes| bytes / all).collect()
}

/// QEMU's round robin of requests gives 5 % and 95 %.
#[test]
fn small_and_large_requests_get_half_the_bytes_each() {
    for late in [Duration::ZERO, LATE] {
        let mut disks = Timeline::new("bps-total=20000000").with_late_timers(late);
        let small = disks.add(Workload::READS.with_length(4096).depth(32));
        let large = disks.add(Workload::READS.with_length(256 << 10).depth(32));
        for part in parts(&mut disks, &[small, large]) {
            assert_within_percent(2.0, part, 0.5);
        }
    }
}

/// QEMU gives 738 and 1290 of 2000 IOPS.
#[test]
fn depth_1_and_depth_64_get_half_each() {
    for (iops, late) in
        [(100, LATE), (500, LATE), (1000, LATE), (2000, Duration::from_micros(250)), (20_000, Duration::ZERO)]
    {
        // A client with a queue depth of 1 cannot use a share that its latency does not allow.
        let spacing = Duration::from_nanos(2_000_000_000 / iops);
        for latency in [Duration::ZERO, spacing / 4, spacing / 2] {
            let mut disks = Timeline::new(&format!("iops-total={iops}")).with_late_timers(late);
            let shallow = disks.add(Workload::READS.depth(1).latency(latency));
            let deep = disks.add(Workload::READS.depth(64).latency(latency));
            for part in parts(&mut disks, &[shallow, deep]) {
                assert_within_percent(2.0, part, 0.5);
            }
        }
    }
}

#[test]
fn weights_divide_the_contended_limit() {
    for (limit, lengths) in [("iops-total=1000", [4096; 3]), ("bps-total=20000000", [256 << 10, 4096, 16384])]
    {
        let mut disks = Timeline::new(limit).with_late_timers(LATE);
        let clients: Vec<_> = [100, 200, 700]
            .into_iter()
            .zip(lengths)
            .map(|(share, length)| {
                disks.add_with(weight(share), Workload::READS.with_length(length).depth(32))
            })
            .collect();
        for (part, expected) in parts(&mut disks, &clients).into_iter().zip([0.1, 0.2, 0.7]) {
            assert_within_percent(2.0, part, expected);
        }
    }
}

#[test]
fn extreme_weights_are_honoured() {
    let mut disks = Timeline::new("iops-total=20000");
    let lightest = disks.add_with(weight(1), Workload::READS.depth(64));
    let heaviest = disks.add_with(weight(10_000), Workload::READS.depth(64));
    let admitted = disks.admitted_of(lightest, s(1), s(101)) as f64;
    assert_within_percent(2.0, admitted / disks.admitted_of(heaviest, s(1), s(101)) as f64, 1e-4);
}

#[test]
fn a_weight_counts_reads_and_writes_together_under_a_total_limit() {
    let mut disks = Timeline::new("iops-total=1000");
    let mixed_reads = disks.add_with(weight(100), Workload::READS.depth(32));
    let mixed_writes = disks.add_to(disks.disk(mixed_reads), Workload::WRITES.depth(32));
    let reads = disks.add_with(weight(300), Workload::READS.depth(32));
    let [mixed_reads_part, mixed_writes_part, reads_part] =
        parts(&mut disks, &[mixed_reads, mixed_writes, reads])[..]
    else {
        unreachable!()
    };
    // Reads and writes of the first disk have one weight together, not one each.
    assert_within_percent(2.0, mixed_reads_part + mixed_writes_part, 0.25);
    assert_within_percent(2.0, reads_part, 0.75);
}

/// With a single alternation for all disks, this disk would only write.
#[test]
fn mixed_disk_reads_and_writes_equally_beside_a_reader() {
    let mut disks = Timeline::new("iops-total=1000");
    let reads = disks.add(Workload::READS.depth(8));
    let writes = disks.add_to(disks.disk(reads), Workload::WRITES.depth(8));
    disks.add(Workload::READS.depth(8));
    for client in [reads, writes] {
        assert_within_percent(2.0, disks.admitted_of(client, s(1), s(21)) as f64 / 20.0, 250.0);
    }
}

#[test]
fn separate_limits_keep_separate_shares() {
    let mut disks = Timeline::new("iops-read=1000,iops-write=10");
    let both = disks.add(Workload::READS.depth(32));
    disks.add_to(disks.disk(both), Workload::WRITES.depth(32));
    let reads = disks.add(Workload::READS.depth(32));
    // Its many waiting writes do not lower its share of the reads.
    assert_eq!(disks.admitted_of(both, s(1), s(11)), 5000);
    assert_eq!(disks.admitted_of(reads, s(1), s(11)), 5000);
}

#[test]
fn new_weight_applies_at_once() {
    let mut disks = Timeline::new("iops-total=1000");
    let [first, second] = [(); 2].map(|()| disks.add(Workload::READS.depth(32)));
    assert_eq!(disks.admitted_of(first, s(1), s(11)), 5000);
    disks.tree.configure(disks.disk(second), Limits::default(), weight(300), s(11)).unwrap();
    assert_within_percent(1.0, disks.admitted_of(second, s(11), s(21)) as f64, 7500.0);
    assert_within_percent(2.0, disks.admitted_of(second, s(11), s(12)) as f64, 750.0);
}

#[test]
fn idle_time_gives_no_extra_share() {
    let mut disks = Timeline::new("iops-total=1000");
    let busy = disks.add(Workload::READS.depth(32));
    let late = disks.add(Workload::READS.queued(0));
    disks.run_until(s(60));
    let late = disks.add_to(disks.disk(late), Workload::READS.depth(32));
    // Half of the rate, plus 20 ms at its cost.
    let admitted = disks.admitted_of(late, s(60), s(61));
    assert!((500..=520).contains(&admitted), "{admitted}");
    assert!(disks.admitted_of(busy, s(60), s(61)) >= 480);
}

#[test]
fn use_of_spare_capacity_does_not_reduce_the_later_share() {
    // Alone, the first disk uses the whole burst. That must not count against it later.
    let mut disks = Timeline::new("iops-total=1000,iops-total-max=5000,iops-total-max-length=10");
    let first = disks.add(Workload::READS.depth(32));
    disks.run_until(s(30));
    let second = disks.add(Workload::READS.depth(32));
    let admitted = disks.admitted_of(first, s(30), s(31));
    assert!((480..=500).contains(&admitted), "{admitted}");
    assert!(disks.admitted_of(second, s(30), s(31)) <= 520);
}

/// A reservation of 300 of 1000 IOPS; the share by weight would be 91.
#[test]
fn a_reservation_is_met_under_ten_hostile_neighbours() {
    for (depth, latency) in [(1, Duration::ZERO), (1, Duration::from_millis(1)), (32, LATE)] {
        for late in [Duration::ZERO, LATE] {
            let mut disks = Timeline::new("iops-total=1000").with_late_timers(late);
            let reserved =
                disks.add_with(reserved_share(300, 0), Workload::READS.depth(depth).latency(latency));
            for _ in 0..10 {
                disks.add_with(weight(100), Workload::WRITES.with_length(1 << 20).depth(64));
            }
            let rate = disks.admitted_of(reserved, s(1), s(21)) as f64 / 20.0;
            assert_within_percent(2.0, rate, 300.0);
        }
    }
}

/// The share by weight would be 0.9 MB/s.
#[test]
fn a_reservation_of_bytes_is_met_under_neighbours_with_huge_requests() {
    let mut disks = Timeline::new("bps-total=10000000").with_late_timers(LATE);
    let reserved = disks.add_with(reserved_share(0, 3_000_000), Workload::READS.with_length(65_536).depth(8));
    for _ in 0..10 {
        disks.add(Workload::WRITES.with_length(4 << 20).depth(16));
    }
    let rate = disks.bytes_of(reserved, s(1), s(21)) as f64 / 20.0;
    assert_within_percent(2.0, rate, 3e6);
}

#[test]
fn a_reservation_counts_towards_the_share_by_weight() {
    let mut disks = Timeline::new("iops-total=1000");
    let reserved = disks.add_with(reserved_share(300, 0), Workload::READS.depth(32));
    let other = disks.add(Workload::READS.depth(32));
    for client in [reserved, other] {
        assert_within_percent(2.0, disks.admitted_of(client, s(1), s(21)) as f64, 10_000.0);
    }
}

#[test]
fn double_reservation_ends_with_the_first_used_up() {
    // 300 IOPS, or 100 requests of 10,000 bytes.
    let mut disks = Timeline::new("iops-total=1000");
    let reserved =
        disks.add_with(reserved_share(300, 1_000_000), Workload::READS.with_length(10_000).depth(32));
    for _ in 0..99 {
        disks.add(Workload::READS.with_length(512).depth(32));
    }
    assert_within_percent(2.0, disks.admitted_of(reserved, s(1), s(21)) as f64 / 20.0, 100.0);
}

#[test]
fn unused_reservation_goes_to_others() {
    let mut disks = Timeline::new("iops-total=1000");
    disks.add_with(reserved_share(900, 0), Workload::READS.queued(0));
    let other = disks.add(Workload::READS.depth(32));
    assert_eq!(disks.admitted_of(other, s(1), s(11)), 10_000);
}

#[test]
fn full_reservations_leave_one_percent_by_weight() {
    let mut disks = Timeline::new("iops-total=1000");
    let reserved = disks.add_with(reserved_share(1000, 0), Workload::READS.depth(64));
    let other = disks.add(Workload::READS.depth(64));
    assert_within_percent(1.0, disks.admitted_of(reserved, s(1), s(21)) as f64 / 20.0, 990.0);
    let gap = disks.longest_gap_of(other, s(1), s(21));
    assert!(gap <= Duration::from_millis(202), "{gap:?}");
}

#[test]
fn lost_reservation_starves_at_most_one_slice() {
    let mut disks = Timeline::new("iops-total=1000");
    let reserved = disks.add_with(reserved_share(900, 0), Workload::READS.depth(64));
    for _ in 0..9 {
        disks.add(Workload::READS.depth(64));
    }
    disks.run_until(s(60));
    disks.tree.configure(disks.disk(reserved), Limits::default(), NodeShare::default(), s(60)).unwrap();
    // Its share by weight is a tenth. Of the nine tenths it had, only 100 ms at its cost count
    // against it.
    let gap = disks.longest_gap_of(reserved, s(60), s(70));
    assert!(gap <= Duration::from_millis(1_020), "{gap:?}");
    assert_within_percent(2.0, disks.admitted_of(reserved, s(62), s(72)) as f64, 1000.0);
}

#[test]
fn a_thousand_members_get_a_thousandth_each() {
    let mut disks = Timeline::new("iops-total=50000");
    let clients: Vec<_> = (0..1000u64)
        .map(|number| {
            let direction = Direction::ALL[number as usize % 2];
            disks.add(Workload { direction, ..Workload::READS.depth(1 + number % 8) })
        })
        .collect();
    disks.run_until(s(11));
    for client in clients {
        let admitted = disks.admitted_of(client, s(1), s(11));
        assert!((498..=502).contains(&admitted), "{admitted}");
    }
}

#[test]
fn ten_thousand_idle_members_take_nothing() {
    let mut disks = Timeline::new("iops-total=1000");
    for _ in 0..10_000 {
        disks.add(Workload::READS.queued(0));
    }
    let busy = disks.add(Workload::READS.depth(1));
    assert_eq!(disks.admitted_of(busy, s(1), s(11)), 10_000);
}
