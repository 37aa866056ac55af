//! Remarks on settings that are valid but have no effect, and are probably mistakes. They are not
//! errors, because later changes can give them an effect: a disk joins an empty group, or a disk
//! with a weight joins a group.

use std::collections::{HashMap, HashSet};

use crate::{DesiredState, ExportSpec, ExportTarget, ThrottleConfig, throttle::DEFAULT_WEIGHT};

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
            if group.settings.watermark > 0 && group.settings.limits.is_unlimited() {
                add(WATERMARK_WITHOUT_LIMITS);
            }
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let mut add = |remark| remarks.push(ConfigRemark { name: &disk.name, remark });
            if disk.group.is_none() {
                share_remark(&disk.settings).into_iter().for_each(&mut add);
            }
            if disk.settings.watermark > 0 && disk.settings.limits.is_unlimited() {
                add(WATERMARK_WITHOUT_LIMITS);
            }
            let is_guest_export = |export: &ExportSpec| {
                export.disk == index && matches!(export.target, ExportTarget::VhostUserBlk(_))
            };
            if disk.handover && !self.exports.iter().any(is_guest_export) {
                add(HANDOVER_WITHOUT_GUEST);
            }
        }
        remarks.extend(self.duplicate_serials().map(|name| ConfigRemark { name, remark: DUPLICATE_SERIAL }));
        remarks
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

const WATERMARK_WITHOUT_LIMITS: &str =
    "the watermark has no effect, because there are no limits to lift (set some)";

const HANDOVER_WITHOUT_GUEST: &str = "handover opens the image only for a virtual machine, and the \
                                      disk has no vhost-user-blk export (add one, or remove \
                                      handover)";

const DUPLICATE_SERIAL: &str =
    "another disk has the same serial number, of which a guest sees 20 bytes (set serial)";

/// Remark on a share outside of a group.
fn share_remark(settings: &ThrottleConfig) -> Option<&'static str> {
    if settings.iops_reservation > 0 || settings.bps_reservation > 0 {
        return Some("the reservation has no effect, because the disk is in no group (set group)");
    }
    (settings.weight != DEFAULT_WEIGHT)
        .then_some("the weight has no effect, because the disk is in no group (set group)")
}
