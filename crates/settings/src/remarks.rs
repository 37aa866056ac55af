//! Remarks on settings of a plan that are valid but have no effect, and are probably mistakes. Not
//! errors, because a running daemon can change: an empty group gets members, a disk with a weight a
//! group.

use std::collections::{HashMap, HashSet};

use crate::{Door, DoorExport, Plan, Settings, shares::DEFAULT_WEIGHT};

/// Remark on a disk or group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark<'a> {
    /// The disk or group.
    pub name: &'a str,
    /// Remark, with the remedy.
    pub remark: &'static str,
}

impl Plan {
    /// All remarks, groups first.
    pub fn remarks(&self) -> Vec<Remark<'_>> {
        let peopled = self.peopled();
        let mut remarks = Vec::new();
        for group in &self.groups {
            let mut add = |remark| remarks.push(Remark { name: &group.name, remark });
            if !peopled.contains(group.name.as_str()) {
                add("no disk is in this group");
            }
            // A top-level group has no siblings to share with.
            if group.group.is_none() {
                of_share(&group.settings).into_iter().for_each(&mut add);
            }
            if group.settings.watermark > 0 && group.settings.limits.is_unlimited() {
                add(NOTHING_TO_LIFT);
            }
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let mut add = |remark| remarks.push(Remark { name: &disk.name, remark });
            if disk.group.is_none() {
                of_share(&disk.settings).into_iter().for_each(&mut add);
            }
            if disk.settings.watermark > 0 && disk.settings.limits.is_unlimited() {
                add(NOTHING_TO_LIFT);
            }
            let is_machines =
                |export: &DoorExport| export.disk == index && matches!(export.door, Door::VhostUserBlk(_));
            if disk.handover && !self.doors.iter().any(is_machines) {
                add(NOBODY_TAKES_IT);
            }
        }
        remarks.extend(self.same_serials().map(|name| Remark { name, remark: SAME_SERIAL }));
        remarks
    }

    /// Disks whose serial numbers a guest cannot distinguish from another disk's.
    fn same_serials(&self) -> impl Iterator<Item = &str> {
        let mut disk_of = HashMap::new();
        self.doors.iter().filter_map(move |DoorExport { door, disk }| {
            let Door::VhostUserBlk(machine) = door else { return None };
            let name = &*self.disks[*disk].name;
            // Several exports of one disk may share its serial number.
            (disk_of.entry(machine.seen_serial(name)).or_insert(disk) != &disk).then_some(name)
        })
    }

    /// Names of the groups that contain a disk, directly or in a subgroup.
    fn peopled(&self) -> HashSet<&str> {
        let mut peopled: HashSet<&str> = self.disks.iter().filter_map(|disk| disk.group.as_deref()).collect();
        // From the end, because each group follows its parent.
        for group in self.groups.iter().rev().filter(|group| group.group.is_some()) {
            if peopled.contains(group.name.as_str()) {
                peopled.extend(group.group.as_deref());
            }
        }
        peopled
    }
}

const NOTHING_TO_LIFT: &str = "the watermark has no effect, because there are no limits to lift (set some)";

const NOBODY_TAKES_IT: &str = "handover has its image open only while a virtual machine uses it, and it is exported to none, so nobody can use it (add a vhost-user-blk export, or leave handover out)";

const SAME_SERIAL: &str =
    "another disk has the same serial number, of which a guest sees 20 bytes (set serial)";

/// Remark on a share outside of a group.
fn of_share(settings: &Settings) -> Option<&'static str> {
    if settings.iops_reservation > 0 || settings.bps_reservation > 0 {
        return Some("the reservation has no effect, because there is no group to have it from (set group)");
    }
    (settings.weight != DEFAULT_WEIGHT)
        .then_some("the weight has no effect, because there is no group to share in (set group)")
}
