//! Settings after a change that is not made, of all disks and groups that the change can affect.
//!
//! ```text
//!   changed disk or group ─► its disks ─► with a latency target on a device of these: all disks there
//!                                     └─► the outermost groups of all of them, and all disks inside
//! ```
//!
//! Disks that share a limit compete for it, and disks on a device with a latency target are
//! throttled for it. Limits are those in force now, by the entry of a schedule that holds and by
//! the size of the disk. Never changes a setting.

use std::{collections::BTreeMap, iter, rc::Rc, sync::Arc};

use block::{
    device::SharedDevice,
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use control::{
    latency_targets, qmp,
    registry::{Registry, RunningDisk},
};
use policy::schedule::ConfiguredLimits;
use settings::QuotaSetting;
use simulator::limit_preview::{PreviewDisk, PreviewGroup};

use super::main_thread::{ChangeError, ObjectKind, PreviewInput, SettingsRequest};

/// Computes the settings after a change, on the main thread.
///
/// # Errors
/// Returns the errors of the change itself.
pub(super) fn preview_input(
    registry: &Registry,
    request: SettingsRequest,
) -> Result<PreviewInput, ChangeError> {
    let SettingsRequest { kind, name, settings, .. } = request;
    if let Some(quota) = QuotaSetting::ALL.into_iter().find(|quota| settings.contains_key(quota.name())) {
        return Err(ChangeError::Rejected(format!(
            "{}: a preview replays recent requests, and counts no bytes of a calendar period (preview the \
             limit while the quota is used up as bps-total)",
            quota.name()
        )));
    }
    let unknown = |refused: control::registry::RegistryError| ChangeError::Unknown(refused.to_string());
    let changed = |before| qmp::settings_after(before, settings).map_err(ChangeError::Rejected);
    let disks = registry.disks.all();
    // The rules of the change itself, so that a preview shows nothing that would be rejected.
    let of_latency = |rule| ChangeError::Rejected(format!("latency-target {rule}"));
    let (settings, subjects, group) = match kind {
        ObjectKind::Disk => {
            let disk = registry.disks.get(&name).map_err(unknown)?;
            let throttle = disk.disk.throttle();
            let before = throttle.settings();
            let after = DiskSettings::from(changed(before.into())?);
            let group = throttle.group();
            if after.latency != before.latency {
                latency_targets::check_above(&after.latency, group.as_ref()).map_err(of_latency)?;
            }
            let DiskSettings { limits, quota, share, .. } = after;
            let size_bytes = Some(disk.disk.size_bytes());
            let configured = ConfiguredLimits { limits, quota, share, size_bytes };
            let limits = throttle.scheduled().in_force(&configured);
            let limits = limits.map_err(|error| ChangeError::Rejected(error.to_string()))?;
            (DiskSettings { limits, ..after }, vec![disk], group)
        }
        ObjectKind::Group => {
            let group = registry.groups.get(&name).map_err(unknown)?;
            let after = changed(group.settings())?;
            latency_targets::check_above(&after.latency, group.parent())
                .and_then(|()| latency_targets::check_below(registry, &after.latency, &group))
                .map_err(of_latency)?;
            let GroupSettings { limits, quota, share, .. } = after;
            // The limit of a used-up quota follows the reservations, also those inside.
            let [_, inside_bps] = group.reserved();
            let bps = share.bps_reservation().max(inside_bps);
            let share = share.with_reservation(share.iops_reservation(), bps);
            let configured = ConfiguredLimits { limits, quota, share, size_bytes: None };
            let limits = group.scheduled().in_force(&configured);
            let limits = limits.map_err(|error| ChangeError::Rejected(error.to_string()))?;
            let is_inside = |disk: &&Rc<RunningDisk>| above(disk).any(|of| Arc::ptr_eq(&of, &group));
            let subjects = disks.iter().filter(is_inside).cloned().collect();
            (DiskSettings { limits, ..after.into() }, subjects, Some(group))
        }
    };
    let after = SettingsAfter { name, settings };
    let devices = devices_with_target(registry, &after, &disks, &subjects);
    let roots = subjects.iter().chain(devices.disks.iter()).filter_map(|disk| above(disk).last());
    let families = GroupForest::of(&registry.groups.all(), roots.chain(group.map(|group| outermost(&group))));
    Ok(input(&after, &disks, &subjects, &devices, &families))
}

/// Settings of all objects after the change.
struct SettingsAfter {
    /// The changed disk or group. They share one namespace.
    name: String,
    settings: DiskSettings,
}

impl SettingsAfter {
    fn of_disk(&self, running: &RunningDisk) -> DiskSettings {
        if **running.disk.name() == *self.name {
            return self.settings;
        }
        let throttle = running.disk.throttle();
        DiskSettings { limits: throttle.limits(), ..throttle.settings() }
    }

    fn of_group(&self, group: &ThrottleGroup) -> DiskSettings {
        if group.name() == self.name {
            return self.settings;
        }
        DiskSettings { limits: group.limits(), ..group.settings().into() }
    }

    /// True if the disk or a group around it has a target. Reads no limits, because that locks the
    /// tree which admits requests.
    fn has_target(&self, disk: &RunningDisk) -> bool {
        let is_changed = |name: &str| name == self.name;
        let of_change = self.settings.latency.target;
        let own = match is_changed(disk.disk.name()) {
            true => of_change,
            false => disk.disk.throttle().settings().latency.target,
        };
        own.is_some()
            || above(disk).any(|group| match is_changed(group.name()) {
                true => of_change.is_some(),
                false => group.settings().latency.target.is_some(),
            })
    }
}

/// Devices with a latency target after the change.
#[derive(Default)]
struct DevicesWithTarget {
    /// Their numbers, by the names of the disks on them.
    number_of: BTreeMap<String, usize>,
    disks: Vec<Rc<RunningDisk>>,
}

/// The devices of the `subjects` that have a latency target after the change.
fn devices_with_target(
    registry: &Registry,
    after: &SettingsAfter,
    disks: &[Rc<RunningDisk>],
    subjects: &[Rc<RunningDisk>],
) -> DevicesWithTarget {
    let mut found = DevicesWithTarget::default();
    let device_of = |disk: &Rc<RunningDisk>| registry.shared_device(&disk.disk);
    let with_target = disks.iter().filter(|disk| after.has_target(disk));
    // Each device is judged once: a host may have thousands of disks on one.
    let mut numbers: BTreeMap<SharedDevice, Option<usize>> =
        with_target.filter_map(device_of).map(|device| (device, None)).collect();
    if numbers.is_empty() {
        return found;
    }
    let mut count = 0;
    for device in subjects.iter().filter_map(device_of) {
        if let Some(number @ None) = numbers.get_mut(&device) {
            *number = Some(count);
            count += 1;
        }
    }
    for disk in disks {
        if let Some(number) = device_of(disk).and_then(|device| numbers.get(&device).copied().flatten()) {
            found.number_of.insert(disk.disk.name().to_string(), number);
            found.disks.push(Rc::clone(disk));
        }
    }
    found
}

/// All groups around a disk, innermost first.
fn above(disk: &RunningDisk) -> impl Iterator<Item = Arc<ThrottleGroup>> + use<> {
    iter::successors(disk.disk.throttle().group(), |group| group.parent().cloned())
}

fn outermost(group: &Arc<ThrottleGroup>) -> Arc<ThrottleGroup> {
    let above = iter::successors(Some(group), |group| group.parent());
    above.last().cloned().unwrap_or_else(|| Arc::clone(group))
}

/// Groups of some trees, each after its parent, with the parent's index.
struct GroupForest(Vec<(Arc<ThrottleGroup>, Option<usize>)>);

impl GroupForest {
    fn of(groups: &[Arc<ThrottleGroup>], outermost: impl Iterator<Item = Arc<ThrottleGroup>>) -> Self {
        let mut families: Vec<(Arc<ThrottleGroup>, Option<usize>)> = Vec::new();
        for root in outermost {
            if !families.iter().any(|(known, _)| Arc::ptr_eq(known, &root)) {
                families.push((root, None));
            }
        }
        let mut at = 0;
        while let Some((parent, _)) = families.get(at).cloned() {
            let is_inside =
                |group: &&Arc<ThrottleGroup>| group.parent().is_some_and(|above| Arc::ptr_eq(above, &parent));
            // Breadth first, so that parents precede their children.
            families.extend(groups.iter().filter(is_inside).map(|group| (Arc::clone(group), Some(at))));
            at += 1;
        }
        Self(families)
    }

    fn place(&self, group: &Arc<ThrottleGroup>) -> Option<usize> {
        self.0.iter().position(|(known, _)| Arc::ptr_eq(known, group))
    }
}

/// The disks in the groups, and those without a group that are subjects or on a device with a
/// target.
fn input(
    after: &SettingsAfter,
    disks: &[Rc<RunningDisk>],
    subjects: &[Rc<RunningDisk>],
    devices: &DevicesWithTarget,
    families: &GroupForest,
) -> PreviewInput {
    let mut of = Vec::new();
    let mut replayed = Vec::new();
    for running in disks {
        let name = running.disk.name().to_string();
        let is_subject = subjects.iter().any(|subject| Rc::ptr_eq(subject, running));
        let device = devices.number_of.get(&name).copied();
        let group = running.disk.throttle().group();
        let place = group.as_ref().and_then(|group| families.place(group));
        let is_replayed = if group.is_some() { place.is_some() } else { is_subject || device.is_some() };
        if !is_replayed {
            continue;
        }
        if is_subject {
            of.push(replayed.len());
        }
        let settings = after.of_disk(running);
        replayed.push(PreviewDisk { name, settings, group: place, device, recording: Vec::new() });
    }
    let groups = families.0.iter().map(|(group, parent)| PreviewGroup {
        name: group.name().to_owned(),
        settings: after.of_group(group),
        parent: *parent,
    });
    PreviewInput { groups: groups.collect(), of, disks: replayed }
}
