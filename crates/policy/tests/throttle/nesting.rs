//! Disks in nested groups: every level applies at once, and each level schedules its own members.

use crate::timeline::{Timeline, Workload, assert_within_percent, limits, ms, reserved_share, s, weight};
use policy::throttle::{Enforcement, LimitScale, Limits, MAX_LEVELS, NodeShare, ThrottleError, ThrottleTree};
use policy::time::Duration;

/// A host with two tenants of weights 3 and 1, the second limited to 200; two disks each.
#[test]
fn all_levels_apply_at_once() {
    let mut disks = Timeline::new("iops-total=1000").with_late_timers(Duration::from_millis(1));
    let host = disks.group;
    let large = disks.tree.add(Some(host), Limits::default(), weight(300)).unwrap();
    let small = disks.tree.add(Some(host), limits("iops-total=200"), weight(100)).unwrap();
    let busy = Workload::READS.depth(32);
    let a = disks.add_below(large, "iops-total=50", NodeShare::default(), busy);
    let b = disks.add_below(large, "", NodeShare::default(), busy);
    let c = disks.add_below(small, "", weight(100), busy);
    let d = disks.add_below(small, "", weight(300), Workload::WRITES.depth(8));
    // `small` is limited to 200, divided 1:3; `large` gets the remaining 800, of which a can use
    // 50.
    for (client, iops) in [(a, 50.0), (b, 750.0), (c, 50.0), (d, 150.0)] {
        assert_within_percent(2.0, disks.admitted_of(client, s(1), s(21)) as f64 / 20.0, iops);
    }
}

#[test]
fn groups_share_by_their_own_weight_however_many_disks_they_have() {
    let mut disks = Timeline::new("bps-total=20000000");
    let [large_group, small_group] =
        [(); 2].map(|()| disks.tree.add(Some(disks.group), Limits::default(), NodeShare::default()).unwrap());
    let many: Vec<_> = (0..9)
        .map(|_| {
            disks.add_below(
                large_group,
                "",
                NodeShare::default(),
                Workload::READS.with_length(65_536).depth(32),
            )
        })
        .collect();
    let single = disks.add_below(small_group, "", NodeShare::default(), Workload::READS.depth(32));
    let of_many: u64 = many.iter().map(|client| disks.bytes_of(*client, s(1), s(21))).sum();
    // Half each for the two groups: nine disks in one of them do not count nine times.
    assert_within_percent(2.0, of_many as f64 / 20.0, 10e6);
    assert_within_percent(2.0, disks.bytes_of(single, s(1), s(21)) as f64 / 20.0, 10e6);
}

#[test]
fn unused_rate_is_given_to_the_busy_group() {
    let mut disks = Timeline::new("iops-total=1000");
    let [first, second] =
        [(); 2].map(|()| disks.tree.add(Some(disks.group), Limits::default(), NodeShare::default()).unwrap());
    let throttled_disk =
        disks.add_below(first, "iops-total=100", NodeShare::default(), Workload::READS.depth(64));
    let unlimited_disk = disks.add_below(second, "", NodeShare::default(), Workload::READS.depth(64));
    assert_eq!(disks.admitted_of(throttled_disk, s(1), s(11)), 1000);
    assert_eq!(disks.admitted_of(unlimited_disk, s(1), s(11)), 9000);
}

#[test]
fn group_reservation_reaches_its_disks() {
    let mut disks = Timeline::new("iops-total=1000");
    let tenant = disks.tree.add(Some(disks.group), Limits::default(), reserved_share(400, 0)).unwrap();
    let inside: Vec<_> =
        (0..2).map(|_| disks.add_below(tenant, "", NodeShare::default(), Workload::READS.depth(4))).collect();
    for _ in 0..10 {
        disks.add(Workload::READS.depth(64));
    }
    for client in inside {
        assert_within_percent(2.0, disks.admitted_of(client, s(1), s(21)) as f64 / 20.0, 200.0);
    }
}

#[test]
fn directions_share_a_nested_total_by_weight() {
    let mut disks = Timeline::new("iops-read=5000,iops-write=5000");
    let tenant = disks.tree.add(Some(disks.group), limits("iops-total=1000"), NodeShare::default()).unwrap();
    let reads = disks.add_below(tenant, "", weight(100), Workload::READS.depth(32));
    let writes = disks.add_below(tenant, "", weight(300), Workload::WRITES.depth(32));
    let sibling = disks.add_below(disks.group, "", NodeShare::default(), Workload::WRITES.depth(32));
    // Within the tenant reads and writes share its total 1:3. The 750 writes count against the
    // group's limit on writes.
    assert_within_percent(2.0, disks.admitted_of(reads, s(1), s(21)) as f64 / 20.0, 250.0);
    assert_within_percent(2.0, disks.admitted_of(writes, s(1), s(21)) as f64 / 20.0, 750.0);
    assert_within_percent(2.0, disks.admitted_of(sibling, s(1), s(21)) as f64 / 20.0, 4250.0);
}

#[test]
fn lifting_one_level_keeps_other_levels_in_force() {
    let mut disks = Timeline::new("iops-total=100");
    let disk = disks.add_below(disks.group, "iops-total=10", NodeShare::default(), Workload::READS.depth(32));
    assert_eq!(disks.admitted_of(disk, s(1), s(11)), 100);
    disks.tree.enforce(disks.disk(disk), Enforcement::Lifted, s(11));
    disks.poll_now();
    assert_eq!(disks.admitted_of(disk, s(12), s(22)), 1000);
    disks.tree.enforce(disks.disk(disk), Enforcement::Enforced, s(22));
    disks.poll_now();
    assert_eq!(disks.admitted_of(disk, s(23), s(33)), 100);
}

/// QEMU waits for the timer that was armed for the old limit: 8.3 s were measured.
#[test]
fn lifting_admits_all_waiting_requests_at_once() {
    let lift: [fn(&mut Timeline); 3] = [
        |disks| disks.change_limits(""),
        |disks| {
            disks.tree.enforce(disks.group, Enforcement::Lifted, s(1));
            disks.poll_now();
        },
        |disks| disks.change_limits("bps-total=1000000000000"),
    ];
    for lift in lift {
        let mut disks = Timeline::new("bps-total=1000000");
        for _ in 0..10 {
            disks.add(Workload::READS.with_length(8 << 20).queued(5));
            disks.queue_reads(100);
        }
        disks.run_until(s(1));
        let before = disks.admitted_between(s(0), s(1));
        lift(&mut disks);
        assert_eq!(disks.admitted_between(s(1), ms(1001)), 1050 - before);
    }
}

#[test]
fn scale_multiplies_rates_and_keeps_levels() {
    let mut disks = Timeline::new("iops-total=1000");
    disks.add(Workload::READS.depth(64));
    disks.run_until(s(1));
    disks.tree.enforce(disks.group, Enforcement::Scaled(LimitScale::from_thousandths(3500)), s(1));
    disks.poll_now();
    // The bucket of 100 was full; scaled to 350 it has capacity for 250 more.
    assert_eq!(disks.admitted_between(s(1), ms(1001)), 250 + 4);
    assert_eq!(disks.admitted_between(s(2), s(12)), 35_000);
    assert_eq!(disks.tree.enforcement(disks.group), Enforcement::Scaled(LimitScale::from_thousandths(3500)));
}

#[test]
fn groups_nest_to_eight_levels() {
    let mut tree = ThrottleTree::<()>::new(s(0));
    let mut parent = None;
    for _ in 0..MAX_LEVELS {
        let node = tree.add(parent, limits("iops-total=10"), NodeShare::default()).unwrap();
        assert_eq!(tree.parent(node), parent);
        parent = Some(node);
    }
    assert_eq!(tree.add(parent, Limits::default(), NodeShare::default()), Err(ThrottleError::TooDeep));
    let disk = parent.unwrap();
    assert!(!tree.is_unlimited(disk));
    assert!(tree.try_admit(
        disk,
        policy::request::Direction::Read,
        &policy::throttle::RequestCost::one(1),
        s(0)
    ));
}

/// Ten neighbours with a hundred times the weight, each in a separate group.
#[test]
fn reservation_holds_through_unreserved_group() {
    let mut disks = Timeline::new("iops-total=2000").with_late_timers(Duration::from_millis(1));
    let group = |disks: &mut Timeline, weight: NodeShare| {
        disks.tree.add(Some(disks.group), Limits::default(), weight).expect("no reservations")
    };
    let small = group(&mut disks, weight(10));
    let reserved = disks.add_below(small, "", reserved_share(600, 0), Workload::READS.depth(32));
    for _ in 0..10 {
        let hostile = group(&mut disks, weight(1000));
        disks.add_below(hostile, "", NodeShare::default(), Workload::READS.with_length(65_536).depth(64));
    }
    let passed = disks.admitted_of(reserved, s(1), s(11));
    assert_within_percent(2.0, passed as f64, 6000.0);
}
