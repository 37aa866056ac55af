//! The members of devices with latency targets: which disks the controller treats as one.
//!
//! A disk is a member, with these exceptions for groups whose disks are all on one device:
//!
//! - The disks of a group with a target are one member. A target of a disk or group inside has no
//!   effect; the config and all commands reject it.
//! - The disks of a group with a reservation are one member, unless a disk or group inside has a
//!   target.
//!
//! Otherwise, each disk of a group with a target has that target, and each disk of a group with a
//! reservation has a part of it by weight.
//!
//! Never measures; the daemon and the simulation have their own samplers.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::{LatencySettings, MemberClass};
use crate::throttle::NodeShare;

/// Settings of a disk or a group that decide its membership.
#[derive(Clone, Copy, Debug)]
pub struct MemberSettings {
    /// Target and floor.
    pub latency: LatencySettings,
    /// Weight and reservation.
    pub share: NodeShare,
}

/// A disk on a device, with the groups that contain it, innermost first. `D` and `G` identify
/// devices and groups.
#[derive(Clone, Debug)]
pub struct PlacedDisk<D, G> {
    /// Its device.
    pub device: D,
    /// Its own settings.
    pub settings: MemberSettings,
    /// Its groups and their settings.
    pub groups: Vec<(G, MemberSettings)>,
}

/// The member that a disk belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Membership<G> {
    /// The group whose disks are this member together; `None` if the disk is a member itself.
    pub group: Option<G>,
    /// Priority.
    pub class: MemberClass,
    /// Weight and reservation.
    pub share: NodeShare,
    /// Floor, as in [`LatencySettings`].
    pub floor_permyriad: Option<u16>,
    /// The group that has the target, if it is not the disk's own.
    pub target_group: Option<G>,
}

/// What the disks below a group have in common.
struct GroupSummary<D> {
    device: D,
    is_on_one_device: bool,
    has_target_below: bool,
    /// Sum of the weights of the disks.
    weights: u64,
}

type GroupSummaries<D, G> = BTreeMap<G, GroupSummary<D>>;

/// The membership of each disk, in the same order. `disks` are all disks of all devices.
pub fn memberships<D: Clone + PartialEq, G: Copy + Ord>(disks: &[PlacedDisk<D, G>]) -> Vec<Membership<G>> {
    let mut summaries = GroupSummaries::new();
    for disk in disks {
        summarize(disk, &mut summaries);
    }
    disks.iter().map(|disk| membership(disk, &summaries)).collect()
}

/// Adds a disk to the summaries of its groups.
fn summarize<D: Clone + PartialEq, G: Copy + Ord>(
    disk: &PlacedDisk<D, G>,
    summaries: &mut GroupSummaries<D, G>,
) {
    let mut has_target = disk.settings.latency.target.is_some();
    for (group, settings) in &disk.groups {
        let empty = || GroupSummary {
            device: disk.device.clone(),
            is_on_one_device: true,
            has_target_below: false,
            weights: 0,
        };
        let summary = summaries.entry(*group).or_insert_with(empty);
        summary.is_on_one_device &= summary.device == disk.device;
        summary.has_target_below |= has_target;
        summary.weights += u64::from(disk.settings.share.weight());
        has_target |= settings.latency.target.is_some();
    }
}

fn membership<D, G: Copy + Ord>(disk: &PlacedDisk<D, G>, summaries: &GroupSummaries<D, G>) -> Membership<G> {
    let PlacedDisk { settings, groups, .. } = disk;
    // The outermost group with a target, so that nested targets have one meaning.
    let with_target = groups.iter().rev().find(|(_, settings)| settings.latency.target.is_some());
    let with_reservation = || {
        let is_one = |(group, settings): &&(G, MemberSettings)| {
            let is_reserved = settings.share.iops_reservation() > 0 || settings.share.bps_reservation() > 0;
            let summary = &summaries[group];
            is_reserved && summary.is_on_one_device && !summary.has_target_below
        };
        groups.iter().rev().find(is_one)
    };
    let as_one = match with_target {
        Some(owner) => Some(owner).filter(|(group, _)| summaries[group].is_on_one_device),
        None if settings.latency.target.is_none() => with_reservation(),
        None => None,
    };
    let target = with_target.map_or(settings.latency.target, |(_, settings)| settings.latency.target);
    let class = target.map_or(MemberClass::Ordinary, MemberClass::Target);
    let target_group = with_target.map(|(group, _)| *group);
    if let Some((group, of_group)) = as_one {
        return Membership {
            group: Some(*group),
            class,
            share: of_group.share,
            floor_permyriad: of_group.latency.floor_permyriad,
            target_group,
        };
    }
    let share = settings.share;
    let [mut iops, mut bps] = [share.iops_reservation(), share.bps_reservation()];
    for (group, of_group) in groups {
        let part = |reserved: u64| {
            let weights = u128::from(summaries[group].weights.max(1));
            (u128::from(reserved) * u128::from(share.weight()) / weights) as u64
        };
        iops = iops.max(part(of_group.share.iops_reservation()));
        bps = bps.max(part(of_group.share.bps_reservation()));
    }
    Membership {
        group: None,
        class,
        share: share.with_reservation(iops, bps),
        floor_permyriad: settings.latency.floor_permyriad,
        target_group,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PercentileTarget, TargetDirections};
    use super::*;

    const TARGET: LatencySettings = LatencySettings {
        target: PercentileTarget::new(5_000_000, 9900, TargetDirections::All),
        floor_permyriad: None,
    };
    const NONE: LatencySettings = LatencySettings { target: None, floor_permyriad: None };

    fn settings(latency: LatencySettings, iops_reservation: u64) -> MemberSettings {
        MemberSettings { latency, share: NodeShare::default().with_reservation(iops_reservation, 0) }
    }

    fn disk(device: u32, latency: LatencySettings, groups: &[(u32, MemberSettings)]) -> PlacedDisk<u32, u32> {
        PlacedDisk { device, settings: settings(latency, 0), groups: groups.to_vec() }
    }

    fn is_target(membership: &Membership<u32>) -> bool {
        matches!(membership.class, MemberClass::Target(_))
    }

    #[test]
    fn disks_of_a_group_with_a_target_on_one_device_are_one() {
        let (outer, inner) = ((1, settings(TARGET, 0)), (2, settings(NONE, 0)));
        let all = memberships(&[disk(0, NONE, &[inner, outer]), disk(0, NONE, &[outer]), disk(0, NONE, &[])]);
        assert_eq!(all.iter().map(|one| one.group).collect::<Vec<_>>(), [Some(1), Some(1), None]);
        assert_eq!(all.iter().map(is_target).collect::<Vec<_>>(), [true, true, false]);

        let apart = memberships(&[disk(0, NONE, &[inner, outer]), disk(7, NONE, &[outer])]);
        assert!(apart.iter().all(|one| one.group.is_none() && is_target(one) && one.target_group == Some(1)));
    }

    #[test]
    fn group_with_a_reservation_is_one_without_a_target_inside() {
        let group = (1, settings(NONE, 600));
        let all = memberships(&[disk(0, NONE, &[group]), disk(0, NONE, &[group])]);
        assert!(all.iter().all(|one| one.group == Some(1) && one.share.iops_reservation() == 600));
        // Otherwise each disk has its part.
        let all = memberships(&[disk(0, TARGET, &[group]), disk(0, NONE, &[group])]);
        assert!(all.iter().all(|one| one.group.is_none() && one.share.iops_reservation() == 300));
        assert!(is_target(&all[0]) && !is_target(&all[1]));
    }
}
