//! Parts of limits divided over hosts: capacity moves between them, and none is created.

use crate::timeline::{limits, s};
use policy::request::Direction;
use policy::throttle::{Admission, Cost, LimitKind, Limits, Share, Tree};

const IOPS: usize = LimitKind::IopsTotal.index();

fn only(units: u64) -> [u64; 6] {
    core::array::from_fn(|at| if at == IOPS { units } else { 0 })
}

/// 100 per second with a burst of 1000, scaled to `part` hundredths.
fn part(part: u64) -> Limits {
    limits(&format!("iops-total={part},iops-total-max={}", part * 10))
}

#[test]
fn a_part_begins_full_and_keeps_its_room_when_it_grows() {
    let mut tree = Tree::<()>::new(s(0));
    let group = tree.add(None, Limits::default(), Share::default()).unwrap();
    let tokens = |tree: &Tree<()>, at| tree.stats(group, at).tokens[IOPS];
    assert_eq!(tree.divide(group, part(10), only(0), s(0)), Ok(only(0)));
    assert_eq!(tokens(&tree, s(0)), Some(0));
    assert_eq!(tokens(&tree, s(3)), Some(30), "by time alone");
    assert_eq!(tree.divide(group, part(50), only(0), s(3)), Ok(only(0)));
    assert_eq!(tokens(&tree, s(3)), Some(30));
    assert_eq!(tree.divide(group, part(60), only(25), s(3)), Ok(only(0)));
    assert_eq!(tokens(&tree, s(3)), Some(55), "what another host gave up");
    assert_eq!(tree.divide(group, part(4), only(0), s(3)), Ok(only(15)), "40 fit");
    assert_eq!(tree.divide(group, part(60), only(0), s(3)), Ok(only(0)));
    assert_eq!(tokens(&tree, s(3)), Some(40));
}

#[test]
fn what_a_request_made_run_over_is_owed_after_a_change() {
    let mut tree = Tree::new(s(0));
    let group = tree.add(None, Limits::default(), Share::default()).unwrap();
    tree.divide(group, part(1), only(0), s(0)).unwrap();
    assert_eq!(tree.request(group, Direction::Read, Cost::one(1), (), s(0)), Admission::Admitted(()));
    tree.divide(group, part(100), only(0), s(0)).unwrap();
    let next = tree.request(group, Direction::Read, Cost::one(1), (), s(0));
    assert!(matches!(next, Admission::Queued(_)), "{next:?}");
    let invalid = limits("iops-total-max=5");
    assert!(tree.divide(group, invalid, only(0), s(0)).is_err());
    assert_eq!(tree.limits(group), part(100));
}
