//! Whether reservations fit into the limits around them, before anything is opened.
//!
//! The policy's own tree judges, so that what passes here is what the daemon takes; a device's
//! capacity is known to the daemon alone.

use policy::{
    throttle::{Overbooked, Refused, Tree, Unit},
    time::Instant,
};

use super::{Disk, Draft, Group, Place, SettingsDraft, Wrong};

/// Fails at the first reservation, groups before disks, that is more than a limit leaves.
pub(crate) fn check(draft: &Draft, groups: &[Group], disks: &[Disk]) -> Result<(), Wrong> {
    let mut tree = Tree::<()>::new(Instant::from_nanos(0));
    let mut nodes = Vec::new();
    for group in groups {
        let said = draft.groups.iter().find(|said| said.name.value == group.name);
        let wrong = |refused| {
            said.and_then(|said| blamed(&refused, &said.settings, &said.name.place)).map_or(Ok(()), Err)
        };
        let parent = group.parent.and_then(|parent| nodes.get(parent).copied().flatten());
        let added = tree.add(parent, group.settings.limits, group.settings.share());
        nodes.push(added.as_ref().ok().copied());
        added.map(drop).or_else(wrong)?;
    }
    for (disk, said) in disks.iter().zip(&draft.disks) {
        let group = disk.group.and_then(|group| nodes.get(group).copied().flatten());
        let added = tree.add(group, disk.settings.limits, disk.settings.share());
        let wrong = |refused| blamed(&refused, &said.settings, &said.name.place).map_or(Ok(()), Err);
        added.map(drop).or_else(wrong)?;
    }
    Ok(())
}

/// The reservation that is refused. Nothing else is judged here.
fn blamed(refused: &Refused, settings: &SettingsDraft, name: &Place) -> Option<Wrong> {
    let Refused::Overbooked(overbooked @ Overbooked { unit, .. }) = refused else { return None };
    let said = match unit {
        Unit::Iops => &settings.iops_reservation,
        Unit::Bps => &settings.bps_reservation,
    };
    let rule = overbooked.to_string();
    let rule =
        rule.strip_prefix(unit.reservation()).and_then(|rule| rule.strip_prefix(": ")).unwrap_or(&rule);
    Some(said.as_ref().map_or(name, |said| &said.place).wrong(rule))
}
