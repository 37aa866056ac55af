//! The members of devices with latency targets: which disks the controller treats as one.
//!
//! A disk is a member, with these exceptions for groups whose disks are all on one device:
//!
//! - The disks of a group with a target are one member. A target of a disk or group inside has no
//!   effect; the config and all commands reject it.
//! - The disks of a group with a reservation are one member, unless a disk or group inside has a
//!   target.
//!
//! Otherwise, each disk of a group with a target has that target.
//!
//! A group's weight, floor and reservation are divided among its disks by weight, over all levels:
//! the weight and the floor on each device, the reservation over all devices. A group that is one
//! member keeps at least the reservations inside it, and at least the sum of the floors that are
//! set inside it.
//!
//! Never measures; the daemon and the simulation have their own samplers.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::reserved::ReservedSum;
use super::{LatencySettings, MemberClass};
use crate::throttle::NodeShare;

/// Settings of a disk or a group that decide its membership.
#[derive(Clone, Copy, Debug)]
pub struct LatencyMemberSettings {
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
    pub settings: LatencyMemberSettings,
    /// Its groups and their settings.
    pub groups: Vec<(G, LatencyMemberSettings)>,
}

/// The member that a disk belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Membership<G> {
    /// The group whose disks are this member together; `None` if the disk is a member itself.
    pub group: Option<G>,
    /// Priority.
    pub class: MemberClass,
    /// Reservation, and a weight relative to those of the other members of the device.
    pub share: NodeShare,
    /// Floor, as in [`LatencySettings`].
    pub floor_permyriad: Option<u16>,
    /// The group that has the target, if it is not the disk's own.
    pub target_group: Option<G>,
}

/// What a group's members have in common.
struct GroupSummary<D> {
    has_target_below: bool,
    /// The larger of its own reservation and the sum of its members'.
    reserved: ReservedSum,
    /// Sum of the members' reservations.
    reserved_below: ReservedSum,
    /// The larger of its own floor and the sum of its members', in ten-thousandths of the device;
    /// 0 if none is set.
    floor: u16,
    /// Sum of the members' floors.
    floor_below: u16,
    /// Sum of the weights of its members: disks and groups.
    weights: u64,
    /// Sum of the weights of the members that have disks on a device.
    weights_on: BTreeMap<D, u64>,
}

impl<D> GroupSummary<D> {
    fn is_on_one_device(&self) -> bool {
        self.weights_on.len() == 1
    }

    /// Floor of the group as one member, with its own floor, if it has one: at least the floors
    /// that are set inside it.
    fn floor_as_one(&self, own: Option<u16>) -> Option<u16> {
        match own {
            // Disks inside without a floor have a part of the default one.
            None if self.floor > 0 => Some(self.floor.max(DEFAULT_FLOOR_PERMYRIAD)),
            None => None,
            Some(_) => Some(self.floor),
        }
    }
}

/// The default floor of a member (`claim::DEFAULT_FLOOR`) as a setting.
const DEFAULT_FLOOR_PERMYRIAD: u16 = 100;
const MAX_FLOOR: u16 = LatencySettings::MAX_FLOOR_PERMYRIAD;

type GroupSummaries<D, G> = BTreeMap<G, GroupSummary<D>>;

/// The membership of each disk, in the same order. `disks` are all disks of all devices.
pub fn memberships<D: Clone + Ord, G: Copy + Ord>(disks: &[PlacedDisk<D, G>]) -> Vec<Membership<G>> {
    let mut summaries = GroupSummaries::new();
    for disk in disks {
        summarize(disk, &mut summaries);
    }
    let all: Vec<_> = disks.iter().map(|disk| membership(disk, &summaries)).collect();
    let mut heaviest = BTreeMap::<&D, f64>::new();
    for (disk, (_, weight)) in disks.iter().zip(&all) {
        let of_device = heaviest.entry(&disk.device).or_default();
        *of_device = of_device.max(*weight);
    }
    let scaled = |(disk, (membership, weight)): (&PlacedDisk<D, G>, (Membership<G>, f64))| {
        let relative = weight / heaviest[&disk.device];
        let [lowest, highest] = [*NodeShare::WEIGHTS.start(), *NodeShare::WEIGHTS.end()];
        let weight = (relative * f64::from(highest) + 0.5) as u32;
        let share = NodeShare::new(weight.clamp(lowest, highest)).unwrap_or_default();
        let Membership { share: before, .. } = membership;
        let share = share.with_reservation(before.iops_reservation(), before.bps_reservation());
        Membership { share, ..membership }
    };
    disks.iter().zip(all).map(scaled).collect()
}

/// Adds a disk to the summaries of its groups.
fn summarize<D: Clone + Ord, G: Copy + Ord>(disk: &PlacedDisk<D, G>, summaries: &mut GroupSummaries<D, G>) {
    let mut has_target = disk.settings.latency.target.is_some();
    // What the member adds to its parent, on the device and in total: a group's weight counts once.
    let weight = u64::from(disk.settings.share.weight());
    let [mut weight_on_device, mut weight] = [weight; 2];
    let mut added = ReservedSum::of(disk.settings.share);
    let mut added_floor = disk.settings.latency.floor_permyriad.unwrap_or(0);
    for (group, settings) in &disk.groups {
        let group_weight = u64::from(settings.share.weight());
        let mut next_weight = 0;
        let summary = summaries.entry(*group).or_insert_with(|| {
            next_weight = group_weight;
            GroupSummary {
                has_target_below: false,
                reserved: ReservedSum::default(),
                reserved_below: ReservedSum::default(),
                floor: 0,
                floor_below: 0,
                weights: 0,
                weights_on: BTreeMap::new(),
            }
        });
        summary.has_target_below |= has_target;
        has_target |= settings.latency.target.is_some();
        let next_weight_on_device =
            if summary.weights_on.contains_key(&disk.device) { 0 } else { group_weight };
        summary.weights += weight;
        *summary.weights_on.entry(disk.device.clone()).or_default() += weight_on_device;
        (weight, weight_on_device) = (next_weight, next_weight_on_device);
        summary.reserved_below = summary.reserved_below.plus(added);
        let reserved = summary.reserved_below.max(ReservedSum::of(settings.share));
        added = reserved.minus(summary.reserved);
        summary.reserved = reserved;
        // At most the whole device, however many floors are set.
        summary.floor_below = (summary.floor_below + added_floor).min(MAX_FLOOR);
        let floor = summary.floor_below.max(settings.latency.floor_permyriad.unwrap_or(0));
        // Disks may differ in the settings of a group that is being changed meanwhile.
        added_floor = floor.saturating_sub(summary.floor);
        summary.floor = floor;
    }
}

/// The membership of a disk with the reservation, and its weight among all members of all devices.
fn membership<D: Ord, G: Copy + Ord>(
    disk: &PlacedDisk<D, G>,
    summaries: &GroupSummaries<D, G>,
) -> (Membership<G>, f64) {
    let PlacedDisk { settings, groups, .. } = disk;
    // The outermost group with a target, so that nested targets have one meaning.
    let with_target = groups.iter().rposition(|(_, settings)| settings.latency.target.is_some());
    let with_reservation = || {
        let is_one = |(group, settings): &(G, LatencyMemberSettings)| {
            let summary = &summaries[group];
            let is_reserved = !ReservedSum::of(settings.share).is_empty();
            is_reserved && summary.is_on_one_device() && !summary.has_target_below
        };
        groups.iter().rposition(is_one)
    };
    let as_one = match with_target {
        Some(owner) => Some(owner).filter(|&index| summaries[&groups[index].0].is_on_one_device()),
        None if settings.latency.target.is_none() => with_reservation(),
        None => None,
    };
    let with_target = with_target.map(|index| groups[index]);
    let target = with_target.map_or(settings.latency.target, |(_, settings)| settings.latency.target);
    let (own, reserved, above) = match as_one {
        Some(index) => {
            let (group, mut own) = groups[index];
            let summary = &summaries[&group];
            own.latency.floor_permyriad = summary.floor_as_one(own.latency.floor_permyriad);
            (own, summary.reserved, &groups[index + 1..])
        }
        None => (*settings, ReservedSum::of(settings.share), &groups[..]),
    };
    let parts = Parts::of(own, reserved, &disk.device, above, summaries);
    let membership = Membership {
        group: as_one.map(|index| groups[index].0),
        class: target.map_or(MemberClass::Ordinary, MemberClass::Target),
        share: parts.reserved.reserve(own.share),
        floor_permyriad: parts.floor_permyriad,
        target_group: with_target.map(|(group, _)| group),
    };
    (membership, parts.weight)
}

/// A member's parts of the shares and floors of its groups.
struct Parts {
    weight: f64,
    reserved: ReservedSum,
    floor_permyriad: Option<u16>,
}

impl Parts {
    /// The parts of a member on a device with these settings, inside the groups `above`, innermost
    /// first. What the member has itself is a minimum.
    fn of<D: Ord, G: Copy + Ord>(
        own: LatencyMemberSettings,
        reserved: ReservedSum,
        device: &D,
        above: &[(G, LatencyMemberSettings)],
        summaries: &GroupSummaries<D, G>,
    ) -> Self {
        let mut parts = Self {
            weight: f64::from(own.share.weight()),
            reserved,
            floor_permyriad: own.latency.floor_permyriad,
        };
        let [mut fraction, mut fraction_on_device] = [1.0; 2];
        let mut weight = parts.weight;
        for (group, settings) in above {
            let summary = &summaries[group];
            fraction *= weight / summary.weights as f64;
            fraction_on_device *= weight / summary.weights_on[device] as f64;
            weight = f64::from(settings.share.weight());
            parts.reserved = parts.reserved.max(ReservedSum::of(settings.share).part(fraction));
            // Rounded, but not to 0, which would be no floor.
            let floor = settings
                .latency
                .floor_permyriad
                .map(|floor| ((f64::from(floor) * fraction_on_device + 0.5) as u16).max(floor.min(1)));
            parts.floor_permyriad = parts.floor_permyriad.max(floor);
        }
        parts.weight = weight * fraction_on_device;
        parts
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

    fn settings(latency: LatencySettings, iops_reservation: u64) -> LatencyMemberSettings {
        LatencyMemberSettings { latency, share: NodeShare::default().with_reservation(iops_reservation, 0) }
    }

    fn disk(
        device: u32,
        latency: LatencySettings,
        groups: &[(u32, LatencyMemberSettings)],
    ) -> PlacedDisk<u32, u32> {
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

    fn share(weight: u32, iops_reservation: u64, bps_reservation: u64) -> NodeShare {
        let share = NodeShare::new(weight).expect("a weight");
        share.with_reservation(iops_reservation, bps_reservation)
    }

    fn shared(share: NodeShare) -> LatencyMemberSettings {
        LatencyMemberSettings { latency: NONE, share }
    }

    #[test]
    fn group_that_is_one_keeps_the_reservations_inside() {
        let reserving = |share, groups: &[_]| PlacedDisk { settings: shared(share), ..disk(0, NONE, groups) };
        let outer = (1, settings(NONE, 1200));
        let inner = (2, settings(NONE, 500));
        let sum = |disks: &[_]| {
            let all = memberships(disks);
            assert!(all.iter().all(|one| one.group == Some(1)));
            [all[0].share.iops_reservation(), all[0].share.bps_reservation()]
        };
        let in_both = |iops| reserving(share(100, iops, 0), &[inner, outer]);
        let in_outer = reserving(share(100, 300, 0), &[outer]);
        assert_eq!(sum(&[in_both(400), in_outer.clone()]), [1200, 0], "its own is larger");
        assert_eq!(sum(&[in_both(400), in_outer.clone(), in_both(600)]), [1300, 0], "400 + 600 + 300");
        // Reserved bytes do not lower the minimum that follows from reserved requests.
        let bytes = reserving(share(100, 0, 640 * 1024), &[outer]);
        assert_eq!(sum(&[bytes, in_outer]), [1210, 0]);
        let targeted = (1, settings(TARGET, 0));
        assert_eq!(sum(&[reserving(share(100, 1000, 0), &[targeted])]), [1000, 0]);
    }

    #[test]
    fn weights_of_groups_are_divided_over_all_levels() {
        let weighted = |weight, groups: &[_]| PlacedDisk {
            settings: shared(share(weight, 0, 0)),
            ..disk(0, NONE, groups)
        };
        let (outer, inner) = ((1, shared(share(200, 0, 0))), (2, shared(share(300, 0, 0))));
        let disks = [
            weighted(100, &[]),
            weighted(100, &[outer]),
            weighted(100, &[inner, outer]),
            weighted(200, &[inner, outer]),
        ];
        let weights: Vec<_> = memberships(&disks).iter().map(|one| one.share.weight()).collect();
        // 100 : 200 / 4 : 200 * 3 / 4 / 3 : 200 * 3 / 4 * 2 / 3
        assert_eq!(weights, [10_000, 5_000, 5_000, 10_000]);
        // Members on other devices do not compete.
        let group = (1, shared(share(100, 0, 0)));
        let apart = [disk(0, NONE, &[group]), disk(0, NONE, &[]), disk(7, NONE, &[group])];
        assert!(memberships(&apart).iter().all(|one| one.share.weight() == 10_000));
    }

    #[test]
    fn group_that_is_one_keeps_the_floors_inside() {
        let floor = |floor_permyriad| LatencySettings { floor_permyriad, ..NONE };
        let floors = |disks: &[_]| memberships(disks).iter().map(|one| one.floor_permyriad).max().flatten();
        for own in [NONE, TARGET] {
            // One member by its target or by its reservation.
            let group = |own_floor| {
                let latency = LatencySettings { floor_permyriad: own_floor, ..own };
                (1, settings(latency, 600))
            };
            let of = |own_floor, inside: &[Option<u16>]| {
                let inside = inside.iter().map(|inside| disk(0, floor(*inside), &[group(own_floor)]));
                floors(&inside.collect::<Vec<_>>())
            };
            assert_eq!(of(None, &[None, None]), None, "the default");
            assert_eq!(of(None, &[Some(200), Some(300), None]), Some(500));
            assert_eq!(of(None, &[Some(20)]), Some(100), "not below the default");
            assert_eq!(of(Some(50), &[Some(20)]), Some(50));
            assert_eq!(of(Some(50), &[Some(20), Some(70)]), Some(90));
            assert_eq!(of(Some(0), &[None]), Some(0));
            assert_eq!(of(Some(0), &[Some(6000), Some(6000)]), Some(10_000), "the whole device");
        }
        // A group inside counts with the larger of its floor and the sum of its disks'.
        let (outer, inner) = ((1, settings(NONE, 600)), (2, settings(floor(Some(400)), 0)));
        let in_both = |own| disk(0, floor(Some(own)), &[inner, outer]);
        assert_eq!(floors(&[in_both(100), disk(0, floor(Some(50)), &[outer])]), Some(450));
        assert_eq!(floors(&[in_both(300), in_both(300), disk(0, floor(Some(50)), &[outer])]), Some(650));
    }

    #[test]
    fn floor_that_is_lowered_while_it_is_read_is_no_panic() {
        let group = |floor_permyriad| (1, settings(LatencySettings { floor_permyriad, ..NONE }, 600));
        let all = memberships(&[disk(0, NONE, &[group(Some(600))]), disk(0, NONE, &[group(None)])]);
        assert!(all.iter().all(|one| one.group == Some(1)));
    }

    #[test]
    fn floor_of_a_group_is_divided_among_its_disks() {
        let floor = |floor_permyriad| LatencySettings { floor_permyriad, ..NONE };
        let group = (1, settings(floor(Some(600)), 0));
        let heavy = LatencyMemberSettings { latency: NONE, share: share(200, 0, 0) };
        let disks = [
            disk(0, NONE, &[group]),
            PlacedDisk { settings: heavy, ..disk(0, NONE, &[group]) },
            disk(7, floor(Some(700)), &[group]),
            disk(0, NONE, &[(2, settings(floor(Some(0)), 0))]),
            disk(0, NONE, &[]),
        ];
        let floors: Vec<_> = memberships(&disks).iter().map(|one| one.floor_permyriad).collect();
        assert_eq!(floors, [Some(200), Some(400), Some(700), Some(0), None]);
    }
}
