//! Reservations that do not fit are rejected, with the numbers.

use crate::timeline::{limits, reserved_share, s};
use policy::request::Direction;
use policy::throttle::{
    AdmissionResult, Limits, NodeId, NodeShare, RequestCost, ReservableCapacity, ReservationBound,
    ReservationExceeded, ReservationUnit, ThrottleError, ThrottleTree,
};

fn group(text: &str) -> (ThrottleTree<()>, NodeId) {
    let mut tree = ThrottleTree::new(s(0));
    let group = tree.add(None, limits(text), NodeShare::default()).unwrap();
    (tree, group)
}

fn overbooked(
    unit: ReservationUnit,
    requested: u64,
    available: u64,
    bound: ReservationBound,
) -> ThrottleError {
    ThrottleError::Overbooked(ReservationExceeded { unit, requested, available, bound })
}

#[test]
fn reservations_of_members_may_add_up_to_the_group_s_limit_and_not_more() {
    let (mut tree, group) = group("iops-total=1000");
    tree.add(Some(group), Limits::default(), reserved_share(600, 0)).unwrap();
    let second = tree.add(Some(group), Limits::default(), reserved_share(400, 0)).unwrap();
    let error = tree.add(Some(group), Limits::default(), reserved_share(1, 0)).unwrap_err();
    assert_eq!(error, overbooked(ReservationUnit::Iops, 1001, 1000, ReservationBound::Limit));
    assert_eq!(
        error.to_string(),
        "iops-reservation: 1001 IOPS would be reserved, 1 more than the limit of 1000 (lower a \
         reservation, or raise the limit)"
    );
    assert!(tree.configure(second, Limits::default(), reserved_share(401, 0), s(0)).is_err());
    assert_eq!(tree.share(second), reserved_share(400, 0));
    tree.configure(second, Limits::default(), reserved_share(100, 0), s(0)).unwrap();
    tree.add(Some(group), Limits::default(), reserved_share(300, 0)).unwrap();
    assert_eq!(tree.remove(second).len(), 0);
    tree.add(Some(group), Limits::default(), reserved_share(100, 0)).unwrap();
}

#[test]
fn limit_cannot_be_lowered_below_reservations() {
    let (mut tree, group) = group("bps-total=1000");
    tree.add(Some(group), Limits::default(), reserved_share(0, 600)).unwrap();
    let error = tree.configure(group, limits("bps-total=500"), NodeShare::default(), s(0)).unwrap_err();
    assert_eq!(error, overbooked(ReservationUnit::Bps, 600, 500, ReservationBound::Limit));
    assert_eq!(tree.limits(group), limits("bps-total=1000"));
    tree.configure(group, limits("iops-total=5"), NodeShare::default(), s(0)).unwrap();
}

#[test]
fn separate_limits_bound_the_sum() {
    let (mut tree, group) = group("iops-read=100,iops-write=50");
    let error = tree.add(Some(group), Limits::default(), reserved_share(151, 0)).unwrap_err();
    assert_eq!(error, overbooked(ReservationUnit::Iops, 151, 150, ReservationBound::Limit));
    tree.add(Some(group), Limits::default(), reserved_share(150, 0)).unwrap();
    tree.configure(group, limits("iops-read=100"), NodeShare::default(), s(0)).unwrap();
}

#[test]
fn reservations_add_up_in_the_common_ancestor() {
    let (mut tree, host) = group("iops-total=1000");
    for _ in 0..2 {
        let tenant = tree.add(Some(host), Limits::default(), reserved_share(100, 0)).unwrap();
        tree.add(Some(tenant), Limits::default(), reserved_share(300, 0)).unwrap();
        // The tenant's own reservation includes those of its disks: 300 in total, not 400.
    }
    let third = tree.add(Some(host), Limits::default(), reserved_share(400, 0)).unwrap();
    assert!(tree.add(Some(third), Limits::default(), reserved_share(401, 0)).is_err());
    tree.add(Some(third), Limits::default(), reserved_share(400, 0)).unwrap();
}

#[test]
fn reservation_above_own_limit_is_rejected() {
    let (mut tree, group) = group("");
    let error = tree.add(Some(group), limits("iops-total=10"), reserved_share(11, 0)).unwrap_err();
    assert_eq!(error, overbooked(ReservationUnit::Iops, 11, 10, ReservationBound::Limit));
}

#[test]
fn moving_disk_keeps_its_reservation() {
    let (mut tree, host) = group("iops-total=1000,iops-total-max=1000");
    let [first, second] =
        [(); 2].map(|()| tree.add(Some(host), Limits::default(), reserved_share(200, 0)).unwrap());
    let disk = tree.add(Some(first), Limits::default(), reserved_share(800, 0)).unwrap();
    let error =
        tree.add_replacing(disk, Some(second), Limits::default(), reserved_share(801, 0)).unwrap_err();
    assert_eq!(
        error,
        overbooked(ReservationUnit::Iops, 1001, 1000, ReservationBound::Limit),
        "the 200 of the group it leaves stay"
    );
    assert_eq!(tree.share(disk), reserved_share(800, 0));
    assert!(tree.add(Some(second), Limits::default(), reserved_share(800, 0)).is_err(), "and so do its 800");
    let moved = tree.add_replacing(disk, Some(second), Limits::default(), reserved_share(800, 0)).unwrap();
    assert!(tree.remove(disk).is_empty());
    assert_eq!(tree.parent(moved), Some(second));
    assert!(tree.add(Some(first), Limits::default(), reserved_share(201, 0)).is_err());
    tree.add(Some(first), Limits::default(), reserved_share(200, 0)).unwrap();
}

#[test]
fn rejected_move_changes_nothing() {
    let (mut tree, host) = group("bps-read=1000,bps-write=1000");
    let disk = tree.add(Some(host), Limits::default(), reserved_share(0, 1000)).unwrap();
    for direction in [Direction::Write, Direction::Read] {
        let submit =
            |tree: &mut ThrottleTree<()>| tree.submit(disk, direction, RequestCost::one(400), (), s(0));
        while matches!(submit(&mut tree), AdmissionResult::Admitted(())) {}
    }
    let before = [host, disk].map(|node| tree.stats(node, s(0)));
    assert!(tree.add_replacing(disk, Some(host), limits("bps-total=1"), reserved_share(0, 2)).is_err());
    assert!(tree.add_replacing(disk, Some(host), Limits::default(), reserved_share(0, 2001)).is_err());
    assert_eq!([host, disk].map(|node| tree.stats(node, s(0))), before);
}

#[test]
fn device_capacity_bounds_reservations() {
    let (mut tree, group) = group("");
    let reservable = |iops, probed_at_s| ReservableCapacity { amounts: [iops, 0], probed_at_s };
    tree.set_reservable(group, reservable(1000, Some(1_795_241_721))).unwrap();
    let disk = tree.add(Some(group), Limits::default(), reserved_share(1000, u64::MAX)).unwrap();
    let error = tree.configure(disk, Limits::default(), reserved_share(1200, 0), s(0)).unwrap_err();
    let expect = "iops-reservation: 1200 IOPS would be reserved, 200 more than the 1000 that `weir \
                  probe` measured for the device, 2026-11-21 06:15:21 UTC (lower a reservation, or \
                  measure again with `weir probe`, or remove its file in capacity/ of the state \
                  directory, and restart weir)";
    assert_eq!(error.to_string(), expect);
    assert!(tree.set_reservable(group, reservable(999, None)).is_err());
    tree.set_reservable(group, reservable(1000, None)).unwrap();
    let error = tree.configure(disk, Limits::default(), reserved_share(1200, 0), s(0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "iops-reservation: 1200 IOPS would be reserved, 200 more than the configured `rate` of 1000 (lower a \
         reservation, or raise that `rate`)"
    );
    tree.set_reservable(group, ReservableCapacity::default()).unwrap();
    tree.configure(disk, Limits::default(), reserved_share(1200, 0), s(0)).unwrap();
}
