//! Remarks on settings that are valid but have no effect, and are probably mistakes. They are not
//! errors, because later changes can give them an effect: a disk joins an empty group, or a disk
//! with a weight joins a group.

use std::{
    collections::{HashMap, HashSet},
    iter::successors,
};

use crate::{
    DesiredState, DiskConfig, ExportSpec, ExportTarget, GroupConfig, ThrottleConfig, throttle::DEFAULT_WEIGHT,
};

/// Remark on a disk, a group, `[cluster]` or `[daemon]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigRemark<'a> {
    /// The disk or group, or `cluster` or `daemon`.
    pub name: &'a str,
    /// Remark, with the remedy.
    pub remark: &'static str,
}

impl DesiredState {
    /// All remarks, first those on `[cluster]` and `[daemon]`, then groups.
    pub fn ineffective_settings(&self) -> Vec<ConfigRemark<'_>> {
        let groups_with_disks = self.groups_with_disks();
        let old_names = self.process.rename_warnings.iter();
        let mut remarks: Vec<_> = old_names.map(|&remark| ConfigRemark { name: "cluster", remark }).collect();
        let has_no_peers =
            self.process.cluster.as_ref().is_some_and(|cluster| cluster.peer_address.is_none());
        let peers = has_no_peers.then_some(ConfigRemark { name: "cluster", remark: WITHOUT_PEER_ADDRESS });
        remarks.extend(peers);
        let deprecated = self.process.config.deprecated_control();
        remarks.extend(deprecated.map(|remark| ConfigRemark { name: "daemon", remark }));
        for group in &self.groups {
            let mut add = |remark| remarks.push(ConfigRemark { name: &group.name, remark });
            if !groups_with_disks.contains(group.name.as_str()) {
                add("no disk is in this group");
            }
            // A top-level group has no siblings to share with.
            if group.group.is_none() {
                share_remark(&group.settings).into_iter().for_each(&mut add);
            }
            if group.settings.watermark > 0
                && group.settings.limits.is_unlimited()
                && group.schedule.entries.is_empty()
            {
                add(WATERMARK_WITHOUT_LIMITS);
            }
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let mut add = |remark| remarks.push(ConfigRemark { name: &disk.name, remark });
            if disk.group.is_none() {
                share_remark(&disk.settings).into_iter().for_each(&mut add);
            }
            if disk.settings.watermark > 0
                && disk.settings.limits.is_unlimited()
                && disk.schedule.entries.is_empty()
            {
                add(WATERMARK_WITHOUT_LIMITS);
            }
            let is_guest_export = |export: &ExportSpec| {
                export.disk == index && matches!(export.target, ExportTarget::VhostUserBlk(_))
            };
            if disk.handover && !self.exports.iter().any(is_guest_export) {
                add(HANDOVER_WITHOUT_GUEST);
            }
        }
        let alone = self.targets_without_neighbours();
        remarks
            .extend(alone.into_iter().map(|name| ConfigRemark { name, remark: TARGET_WITHOUT_NEIGHBOURS }));
        remarks.extend(self.duplicate_serials().map(|name| ConfigRemark { name, remark: DUPLICATE_SERIAL }));
        remarks
    }

    /// Names of the disks and groups with a latency target for which no disk can be throttled: no
    /// other disk of the file can be on the same device.
    fn targets_without_neighbours(&self) -> Vec<&str> {
        let has_target = |settings: &ThrottleConfig| settings.latency.target_ns > 0;
        let parent_of: HashMap<&str, &GroupConfig> =
            self.groups.iter().map(|group| (group.name.as_str(), &**group)).collect();
        // The disk itself, or the outermost of its groups with a target.
        let owner = |disk: &'_ DiskConfig| {
            let first = disk.group.as_deref().and_then(|group| parent_of.get(group).copied());
            let above = successors(first, |group| parent_of.get(group.group.as_deref()?).copied());
            let of_group = above.filter(|group| has_target(&group.settings)).last();
            of_group.map(|group| group.name.as_str())
        };
        let placed: Vec<(Option<String>, &str, bool)> = self
            .disks
            .iter()
            .map(|disk| match owner(disk) {
                Some(group) => (shared_device(disk), group, true),
                None => (shared_device(disk), disk.name.as_str(), has_target(&disk.settings)),
            })
            .collect();
        let mut owners_on: HashMap<&str, HashSet<&str>> = HashMap::new();
        for (device, owner, _) in &placed {
            if let Some(device) = device {
                owners_on.entry(device).or_default().insert(owner);
            }
        }
        let has_neighbour = |device: &Option<String>| {
            device
                .as_deref()
                .is_some_and(|device| owners_on.get(device).is_some_and(|owners| owners.len() > 1))
        };
        let with_neighbours: HashSet<&str> =
            placed.iter().filter(|(device, ..)| has_neighbour(device)).map(|(_, owner, _)| *owner).collect();
        let mut alone: Vec<&str> =
            placed.iter().filter(|(_, _, has_target)| *has_target).map(|(_, owner, _)| *owner).collect();
        alone.retain(|owner| !with_neighbours.contains(owner));
        alone.dedup();
        alone
    }

    /// Disks whose serial numbers a guest cannot distinguish from another disk's.
    fn duplicate_serials(&self) -> impl Iterator<Item = &str> {
        let mut disk_of = HashMap::new();
        self.exports.iter().filter_map(move |ExportSpec { target, disk }| {
            let ExportTarget::VhostUserBlk(machine) = target else { return None };
            let name = &*self.disks[*disk].name;
            // Several exports of one disk may share its serial number.
            (disk_of.entry(machine.guest_serial(name)).or_insert(disk) != &disk).then_some(name)
        })
    }

    /// Names of the groups that contain a disk, directly or in a subgroup.
    fn groups_with_disks(&self) -> HashSet<&str> {
        let mut occupied: HashSet<&str> =
            self.disks.iter().filter_map(|disk| disk.group.as_deref()).collect();
        // From the end, because each group follows its parent.
        for group in self.groups.iter().rev().filter(|group| group.group.is_some()) {
            if occupied.contains(group.name.as_str()) {
                occupied.extend(group.group.as_deref());
            }
        }
        occupied
    }
}

const WITHOUT_PEER_ADDRESS: &str = "without peer-address, the fallback share applies while etcd is \
                                    unreachable (set peer-address on all hosts)";

const WATERMARK_WITHOUT_LIMITS: &str =
    "the watermark has no effect, because there are no limits to lift (set some)";

const TARGET_WITHOUT_NEIGHBOURS: &str = "no other disk of this file can be on the same device, so there is \
                                         no disk to throttle for the latency-target";

const HANDOVER_WITHOUT_GUEST: &str = "handover opens the image only for a virtual machine, and the \
                                      disk has no vhost-user-blk export (add one, or remove \
                                      handover)";

const DUPLICATE_SERIAL: &str =
    "another disk has the same serial number, of which a guest sees 20 bytes (set serial)";

/// The device of a disk, as far as the file shows it; `None` if no other disk can be on it.
fn shared_device(disk: &DiskConfig) -> Option<String> {
    match &disk.rate {
        // An imitated rate is the device.
        Some(rate) => rate.shared.as_ref().map(|name| format!("rate {name}")),
        None => disk.image.shared_storage(),
    }
}

/// Remark on a share outside of a group.
fn share_remark(settings: &ThrottleConfig) -> Option<&'static str> {
    if settings.iops_reservation > 0 || settings.bps_reservation > 0 {
        return Some("the reservation has no effect, because the disk is in no group (set group)");
    }
    (settings.weight != DEFAULT_WEIGHT)
        .then_some("the weight has no effect, because the disk is in no group (set group)")
}
