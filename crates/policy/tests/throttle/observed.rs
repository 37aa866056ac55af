//! Statistics of a tree: waits, throttle cause, throttled time, remaining capacity.

use crate::timeline::{Timeline, Workload, assert_within_percent, limits, ms, reserved_share, s};
use policy::request::Direction;
use policy::throttle::{
    BucketLevel, BurstBalance, CauseKind, FullBurst, LimitKind, LimitLevel, NodeShare, ReservationTimes,
    ThrottleStats, WaitSummary,
};
use policy::time::{Duration, Instant};
use proptest::prelude::*;

#[test]
fn waits_are_summed_up() {
    let mut disk = Timeline::new("iops-total=10");
    disk.queue_reads(102);
    disk.run_until(s(60));
    let stats = disk.tree.stats(disk.group, s(60));
    assert_eq!(stats.reads.requests, 102);
    assert_eq!(stats.reads.throttled, 100, "at 100 ms, 200 ms, … 10 s");
    assert_eq!(stats.reads.waited_ns, (1..=100).map(|tenth| tenth * 100_000_000).sum::<u64>());
    assert_eq!(stats.waits.max_ns, 10_000_000_000);
    assert_within_percent(5.0, stats.waits.p50_ns as f64, 5e9);
    assert_within_percent(5.0, stats.waits.p99_ns as f64, 9.9e9);
}

/// Counters of another process are added to those of this one; the distribution of waits stays the
/// same.
#[test]
fn cumulative_stats_transfer() {
    let mut disk = Timeline::new("iops-total=10");
    disk.queue_reads(102);
    disk.run_until(s(60));
    let group = disk.group;
    let (counted, once) = (disk.tree.cumulative(group, s(60)), disk.tree.stats(group, s(60)));
    disk.tree.add_cumulative(group, &counted);
    let twice = disk.tree.stats(group, s(60));
    assert_eq!(twice.reads, once.reads.sum(once.reads));
    assert_eq!((twice.writes, twice.throttled_ns), (once.writes, 2 * once.throttled_ns));
    assert_eq!((twice.waits, twice.recent_waits), (once.waits, once.recent_waits));
    assert_eq!((twice.tokens, twice.levels, twice.waiting), (once.tokens, once.levels, once.waiting));
    // The added counters are neither new demand nor recent waits.
    let mut fresh = Timeline::new("iops-total=10");
    fresh.tree.add_cumulative(fresh.group, &counted);
    let transferred = fresh.tree.stats(fresh.group, s(0));
    assert_eq!(
        (transferred.reads, transferred.waits, transferred.throttled_ns),
        (once.reads, once.waits, once.throttled_ns)
    );
    assert_eq!(transferred.recent_waits, WaitSummary::default());
}

#[test]
fn no_waits_are_all_zero() {
    let mut disk = Timeline::new("iops-total=10");
    disk.queue_reads(1);
    disk.run_until(s(1));
    let stats = disk.tree.stats(disk.group, s(1));
    assert_eq!(stats.waits, WaitSummary::default());
    assert_eq!((stats.throttled_ns, stats.throttle_cause), (0, None));
}

#[test]
fn throttle_cause_is_the_limit_of_the_level_that_throttles() {
    let mut disks = Timeline::new("iops-total=1000");
    let throttled = disks.add_below(
        disks.group,
        "bps-read=409600,iops-write=7",
        NodeShare::default(),
        Workload::READS.depth(8),
    );
    disks.run_until(ms(10_005));
    let (disk, group) = (disks.disk(throttled), disks.group);
    let (disk_stats, group_stats) = (disks.tree.stats(disk, ms(10_005)), disks.tree.stats(group, ms(10_005)));
    assert_eq!(disk_stats.throttle_cause, Some(CauseKind::Limit(LimitKind::BpsRead)));
    assert_within_percent(2.0, disk_stats.throttled_ns as f64, 10e9);
    assert_eq!(
        (group_stats.throttle_cause, group_stats.throttled_ns),
        (None, 0),
        "the limit is 1000, the load 100"
    );
    assert_eq!(disk_stats.waiting, [8, 0]);
    assert_eq!(group_stats.waiting, [8, 0], "below it");
    assert_eq!(disk_stats.reads, group_stats.reads);
}

#[test]
fn cause_moves_to_the_group_above() {
    let mut disks = Timeline::new("iops-total=150");
    let throttled_disk =
        disks.add_below(disks.group, "iops-total=100", NodeShare::default(), Workload::READS.depth(8));
    disks.run_until(s(5));
    let binding = |disks: &Timeline, now| {
        [disks.disk(throttled_disk), disks.group].map(|node| disks.tree.stats(node, now).throttle_cause)
    };
    let iops_total = Some(CauseKind::Limit(LimitKind::IopsTotal));
    assert_eq!(binding(&disks, s(5)), [iops_total, None]);
    for _ in 0..3 {
        disks.add(Workload::READS.depth(8));
    }
    disks.run_until(s(10));
    assert_eq!(binding(&disks, s(10)), [None, iops_total], "37 of its 100");
    assert_eq!(disks.tree.stats(disks.disk(throttled_disk), s(10)).waiting, [8, 0]);
}

#[test]
fn throttled_time_counts_only_time_with_waiting_requests() {
    let mut disk = Timeline::new("iops-total=100");
    disk.queue_reads(111);
    disk.run_until(s(10));
    let stats = disk.tree.stats(disk.group, s(10));
    assert_eq!(stats.throttled_ns, 1_000_000_000, "eleven at once, then a hundred for 10 ms each");
    assert_eq!(stats.throttle_cause, None, "nothing waits any more");
}

#[test]
fn tokens_are_the_units_admitted_without_waiting() {
    let mut disk =
        Timeline::new("iops-total=100,bps-write=1000000,bps-write-max=5000000,bps-write-max-length=2");
    let client = disk.add(Workload::WRITES.with_length(100_000).queued(4));
    disk.run_until(ms(1));
    let ThrottleStats { tokens, levels, .. } = disk.tree.stats(disk.group, ms(1));
    let main = BucketLevel { units: 3, capacity: 10 };
    let level = LimitLevel { main, burst_rate: None, balance: None };
    assert_eq!(levels[LimitKind::IopsTotal.index()], Some(level), "of 4 at 100 a second, 0.1 leaked");
    let bytes = levels[LimitKind::BpsWrite.index()].expect("a limit is set");
    assert_eq!(bytes.main, BucketLevel { units: 399_000, capacity: 10_000_000 });
    assert_eq!(bytes.burst_rate, Some(BucketLevel { units: 395_000, capacity: 500_000 }));
    assert_eq!(levels[LimitKind::BpsRead.index()], None);
    assert_eq!(tokens[LimitKind::IopsTotal.index()], Some(6), "of 10; 4 passed, 0.1 leaked");
    assert_eq!(
        tokens[LimitKind::BpsWrite.index()],
        Some(105_000),
        "the burst's own rate allows 500,000 at once"
    );
    assert_eq!(tokens[LimitKind::BpsRead.index()], None);
    assert_eq!(disk.tree.stats(disk.disk(client), ms(1)).tokens, [None; 6], "it has no limits of its own");
    assert_eq!(disk.tree.waiting(disk.group, Direction::Write), 0);
}

/// Level of the limit on operations.
fn iops_level(disk: &Timeline, at: Instant) -> LimitLevel {
    disk.tree.stats(disk.group, at).levels[LimitKind::IopsTotal.index()].expect("a limit is set")
}

fn iops_balance(disk: &Timeline, at: Instant) -> BurstBalance {
    iops_level(disk, at).balance.expect("it has a burst")
}

#[test]
fn a_long_burst_uses_a_tenth_of_its_balance_in_a_tenth_of_its_length() {
    let mut disk = Timeline::new("iops-total=100,iops-total-max=400,iops-total-max-length=30");
    let full_burst = FullBurst::Lasts { ms: 40_000 };
    let full = BurstBalance { full_burst, free_ppm: 1_000_000, used_up_in_ns: None, full_in_ns: 0 };
    assert_eq!(iops_balance(&disk, s(0)), full);
    disk.queue_reads(20_000);
    disk.run_until(s(4));
    let LimitLevel { main, burst_rate, balance } = iops_level(&disk, s(4));
    assert_eq!(main.capacity, 12_000, "400 for 30 s");
    assert_within_percent(5.0, main.units as f64, 4.0 * (400.0 - 100.0));
    let burst_rate = burst_rate.expect("the burst is longer than a second");
    assert_eq!(burst_rate.capacity, 40, "a tenth of a second at 400");
    assert!(burst_rate.units >= 39, "{burst_rate:?}");
    let balance = balance.expect("it has a burst");
    assert_within_percent(2.0, balance.ratio(), 0.9);
    // 30 s × 400 / (400 - 100) = 40 s, of which 4 have passed.
    assert_within_percent(2.0, balance.used_up_in_ns.expect("it decreases") as f64, 36e9);
    assert_within_percent(5.0, balance.full_in_ns as f64, 12e9);
    disk.run_until(s(41));
    assert!(iops_balance(&disk, s(41)).ratio() < 0.01, "{:?}", iops_balance(&disk, s(41)));
}

#[test]
fn a_balance_recovers_at_the_rate() {
    let mut disk = Timeline::new("iops-total=100,iops-total-max=400,iops-total-max-length=30");
    disk.queue_reads(3000);
    disk.run_until(s(10));
    let before = iops_balance(&disk, s(10));
    let after = iops_balance(&disk, s(15));
    assert_eq!(after.used_up_in_ns, None, "nothing is admitted");
    assert_eq!(before.full_in_ns - after.full_in_ns, 5_000_000_000);
    assert_within_percent(1.0, after.ratio() - before.ratio(), 500.0 / 12_000.0);
    let full_at = Instant::from_nanos(s(15).as_nanos() + after.full_in_ns);
    assert!(iops_balance(&disk, full_at).free_ppm >= 999_999);
}

#[test]
fn a_changed_limit_restarts_the_forecast() {
    let mut disk = Timeline::new("iops-total=100,iops-total-max=400,iops-total-max-length=30");
    disk.queue_reads(20_000);
    disk.run_until(s(10));
    let larger = limits("iops-total=100,iops-total-max=800,iops-total-max-length=30");
    disk.tree.configure(disk.group, larger, NodeShare::default(), s(10)).expect("valid limits");
    assert_eq!(iops_balance(&disk, s(10)).used_up_in_ns, None, "the new rate is not known yet");
    disk.run_until(s(13));
    let balance = iops_balance(&disk, s(13));
    let left_s = balance.ratio() * 24_000.0 / (800.0 - 100.0);
    assert_within_percent(5.0, balance.used_up_in_ns.expect("it decreases") as f64, left_s * 1e9);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Load between the rate and the burst rate: the balance reaches 0 at the predicted time.
    #[test]
    fn the_predicted_end_of_a_balance_is_exact(
        rate in 20..200_u64,
        times in 2..6_u64,
        length_s in 10..40_u64,
        load_percent in 30..=100_u64,
    ) {
        let burst_rate = rate * times;
        let load = rate + (burst_rate - rate) * load_percent / 100;
        let mut disk = Timeline::new(&format!(
            "iops-total={rate},iops-total-max={burst_rate},iops-total-max-length={length_s}"
        ));
        disk.add(Workload::READS.paced(Duration::from_nanos(1_000_000_000 / load)));
        disk.run_until(s(5));
        let left_ns = iops_balance(&disk, s(5)).used_up_in_ns.expect("the load is above the rate");
        let end_s = 5.0 + left_ns as f64 / 1e9;
        let expected_s = (burst_rate * length_s) as f64 / (load - rate) as f64;
        prop_assert!((end_s - expected_s).abs() <= 0.05 * expected_s + 0.5, "{end_s} s, not {expected_s} s");
        let at = |seconds: f64| Instant::from_nanos((seconds * 1e9) as u64);
        disk.run_until(at(end_s * 0.9));
        prop_assert!(iops_balance(&disk, at(end_s * 0.9)).ratio() > 0.02);
        disk.run_until(at(end_s * 1.1 + 1.0));
        prop_assert!(iops_balance(&disk, at(end_s * 1.1 + 1.0)).ratio() < 0.02);
    }
}

fn reservation_times(disks: &Timeline, client: usize, at_s: u64) -> ReservationTimes {
    disks.tree.stats(disks.disk(client), s(at_s)).reservation.expect("it has a reservation")
}

#[test]
fn met_and_unmet_reservations_are_reported() {
    let mut disks = Timeline::new("iops-total=1000");
    let reserved = disks.add_with(reserved_share(300, 0), Workload::READS.depth(8));
    let other = disks.add(Workload::READS.with_length(1 << 20).depth(64));
    disks.run_until(s(10));
    let before = reservation_times(&disks, reserved, 10);
    assert!(before.met_ns > 8_000_000_000 && before.missed_ns == 0, "{before:?}");
    // A part of a limit divided over hosts: below the reservation.
    disks.tree.set_quota(disks.group, limits("iops-total=100"), [0; 6], s(10)).expect("valid limits");
    disks.run_until(s(20));
    let after = reservation_times(&disks, reserved, 20);
    assert!(after.missed_ns > 8_000_000_000, "{after:?}");
    assert!(after.met_ns <= before.met_ns + 2_000_000_000, "{after:?}");
    assert_eq!(disks.tree.stats(disks.disk(other), s(20)).reservation, None);
    let brief = disks.tree.summary(disks.disk(reserved), s(20));
    assert_eq!(brief.reservation_times, Some(after));
}

#[test]
fn reservations_count_by_iops_size() {
    // Each request counts as four operations: 100 requests meet the reservation.
    let mut disks = Timeline::new("iops-total=1000,iops-size=4096");
    let reserved = disks.add_with(reserved_share(400, 0), Workload::READS.with_length(16 << 10).depth(8));
    for _ in 0..9 {
        disks.add(Workload::READS.with_length(4096).depth(64));
    }
    disks.run_until(s(10));
    let times = reservation_times(&disks, reserved, 10);
    assert!(times.met_ns > 8_000_000_000 && times.missed_ns == 0, "{times:?}");
}
