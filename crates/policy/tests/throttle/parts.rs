//! Parts of limits divided over hosts: capacity moves between them, and none is created.

use crate::timeline::{limits, s};
use policy::request::Direction;
use policy::throttle::{AdmissionResult, LimitKind, Limits, NodeShare, RequestCost, ThrottleTree};

const IOPS: usize = LimitKind::IopsTotal.index();

fn iops_only(units: u64) -> [u64; 6] {
    core::array::from_fn(|at| if at == IOPS { units } else { 0 })
}

/// 100 per second with a burst of 1000, scaled to `part` hundredths.
fn part(part: u64) -> Limits {
    limits(&format!("iops-total={part},iops-total-max={}", part * 10))
}

#[test]
fn quota_starts_filled_and_keeps_free_capacity() {
    let mut tree = ThrottleTree::<()>::new(s(0));
    let group = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
    let tokens = |tree: &ThrottleTree<()>, at| tree.stats(group, at).tokens[IOPS];
    assert_eq!(tree.set_quota(group, part(10), iops_only(0), s(0)), Ok(iops_only(0)));
    assert_eq!(tokens(&tree, s(0)), Some(0));
    assert_eq!(tokens(&tree, s(3)), Some(30), "by time alone");
    assert_eq!(tree.set_quota(group, part(50), iops_only(0), s(3)), Ok(iops_only(0)));
    assert_eq!(tokens(&tree, s(3)), Some(30));
    assert_eq!(tree.set_quota(group, part(60), iops_only(25), s(3)), Ok(iops_only(0)));
    assert_eq!(tokens(&tree, s(3)), Some(55), "what another host gave up");
    assert_eq!(tree.set_quota(group, part(4), iops_only(0), s(3)), Ok(iops_only(15)), "40 fit");
    assert_eq!(tree.set_quota(group, part(60), iops_only(0), s(3)), Ok(iops_only(0)));
    assert_eq!(tokens(&tree, s(3)), Some(40));
}

#[test]
fn overrun_is_kept_after_a_quota_change() {
    let mut tree = ThrottleTree::new(s(0));
    let group = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
    tree.set_quota(group, part(1), iops_only(0), s(0)).unwrap();
    assert_eq!(
        tree.submit(group, Direction::Read, RequestCost::one(1), (), s(0)),
        AdmissionResult::Admitted(())
    );
    tree.set_quota(group, part(100), iops_only(0), s(0)).unwrap();
    let next = tree.submit(group, Direction::Read, RequestCost::one(1), (), s(0));
    assert!(matches!(next, AdmissionResult::Queued(_)), "{next:?}");
    let invalid = limits("iops-total-max=5");
    assert!(tree.set_quota(group, invalid, iops_only(0), s(0)).is_err());
    assert_eq!(tree.limits(group), part(100));
}

#[test]
fn a_member_without_a_reservation_fits_where_reservations_exceed_the_quota() {
    let mut tree = ThrottleTree::<()>::new(s(0));
    let outer = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
    let group = tree.add(Some(outer), Limits::default(), NodeShare::default()).unwrap();
    let reserved = NodeShare::default().with_reservation(50, 0);
    tree.add(Some(group), Limits::default(), reserved).unwrap();
    tree.set_quota(outer, part(10), iops_only(0), s(0)).unwrap();
    let small = NodeShare::default().with_reservation(1, 0);
    assert!(tree.add(Some(group), Limits::default(), small).is_err());
    let disk = tree.add(Some(group), Limits::default(), NodeShare::default()).unwrap();
    let moved = tree.add_replacing(disk, Some(outer), Limits::default(), NodeShare::default());
    assert!(moved.is_ok(), "{moved:?}");
    assert_eq!(tree.configure(disk, part(5), NodeShare::default(), s(0)), Ok(()));
}
