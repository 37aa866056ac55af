//! A disk's settings and its group, changed together: both or neither.
//!
//! Everything happens in one go on the main thread, so nobody sees the steps in between; what waits is looked at again after each.

use std::sync::Arc;

use block::{
    disk::Disk,
    layer::throttle::{DiskSettings, Group},
};
use policy::throttle::Refused;

/// Puts a disk into `group`, or none, with these settings.
///
/// # Errors
/// Limits that break a rule, or a reservation that the group cannot keep; everything is as it was.
pub(crate) fn place(disk: &Disk, settings: DiskSettings, group: Option<&Arc<Group>>) -> Result<(), Refused> {
    let member = disk.throttle();
    let (before, left) = (member.settings(), member.group());
    if same(left.as_ref(), group) {
        return member.set(settings);
    }
    member.set(unreserved(settings))?;
    let placed = member.move_to(group).and_then(|()| member.set(settings));
    if placed.is_err() {
        let restored = member
            .set(unreserved(before))
            .and_then(|()| member.move_to(left.as_ref()))
            .and_then(|()| member.set(before));
        // It stood a moment ago, and nobody else has had a chance to book anything.
        debug_assert!(restored.is_ok(), "{restored:?}");
    }
    placed
}

/// Where the old group could not keep the new reservation, or the new group the old one, none is carried across.
fn unreserved(settings: DiskSettings) -> DiskSettings {
    DiskSettings { share: settings.share.with_reservation(0, 0), ..settings }
}

/// Whether both are the same group, or none.
pub(crate) fn same(one: Option<&Arc<Group>>, other: Option<&Arc<Group>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (None, None) => true,
        _ => false,
    }
}
