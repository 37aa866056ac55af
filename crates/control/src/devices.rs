//! The devices under the running disks: resolved once for each disk, and sampled if a disk or group
//! has a watermark, or a latency target.
//!
//! ```text
//!   Registry ─┬─ change of one object ─► DiskDevices::update ─┬─► block's Sampler: disks, groups
//!             └─ start, reload ────────► ::refresh ───────────┼─► block's LatencySampler: all
//!                                                             └─► bounds of groups' reservations
//! ```
//!
//! A change of one disk or group examines only that object and its ancestors, so that adding
//! thousands one by one takes linear time.
//!
//! Belongs to the main thread. A device that cannot be resolved is logged; limits are then enforced
//! unconditionally.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    iter,
    path::Path,
    sync::{Arc, Weak},
};

use anyhow::Context as _;
use block::{
    device::{
        Device, DeviceId, LatencySampler, SampledTarget, Sampler, SamplerTarget, SharedDevice, SysfsRoots,
        TargetReport, id_of,
    },
    disk::Disk,
    layer::throttle::ThrottleGroup,
};
use policy::{throttle::ReservableCapacity, watermark::Watermark};
use settings::state::CapacityStore;

type ResolvedDevice = (Weak<Disk>, Option<Arc<Device>>);

#[derive(Debug)]
pub(crate) struct DiskDevices {
    roots: SysfsRoots,
    store: CapacityStore,
    /// By the disk's name. The weak reference detects a new disk with the same name.
    of_disks: RefCell<HashMap<String, ResolvedDevice>>,
    /// Devices that disks are stored on.
    known: RefCell<HashMap<DeviceId, Weak<Device>>>,
    placements: RefCell<DevicePlacements>,
    sampler: Sampler,
    latency: LatencySampler,
}

/// Device and groups of each disk, as of its last update.
#[derive(Debug, Default)]
struct DevicePlacements {
    /// Placements by the disk's name.
    disks: HashMap<String, DiskPlacement>,
    /// Devices below a group, by its address, with the number of its disks on each. Groups stay
    /// alive by their members alone; a [`Weak`] keeps the address.
    on: HashMap<*const ThrottleGroup, HashMap<DeviceId, (Arc<Device>, usize)>>,
    /// Targets in the sampler, by the name of the disk or the group.
    targets: HashMap<String, Weak<dyn SamplerTarget>>,
}

/// Device of one disk, and the groups that contain it, innermost first.
#[derive(Debug)]
struct DiskPlacement {
    device: Option<Arc<Device>>,
    groups: Vec<Weak<ThrottleGroup>>,
}

impl DevicePlacements {
    /// Counts a disk; adds the groups that gained a device to `changed`.
    fn count_disk(
        &mut self,
        disk: &Disk,
        device: Option<Arc<Device>>,
        changed: &mut Vec<Weak<ThrottleGroup>>,
    ) {
        let above = iter::successors(disk.throttle().group(), |group| group.parent().cloned());
        let groups: Vec<_> = above.map(|group| Arc::downgrade(&group)).collect();
        if let Some(device) = &device {
            for group in &groups {
                let on = self.on.entry(group.as_ptr()).or_default();
                let (_, disks) = on.entry(device.id()).or_insert_with(|| {
                    changed.push(Weak::clone(group));
                    (Arc::clone(device), 0)
                });
                *disks += 1;
            }
        }
        self.disks.insert(disk.name().to_string(), DiskPlacement { device, groups });
    }

    /// Removes a disk from the counts; adds the groups that lost a device to `changed`.
    fn uncount_disk(&mut self, disk: &str, changed: &mut Vec<Weak<ThrottleGroup>>) -> Option<Arc<Device>> {
        let DiskPlacement { device, groups } = self.disks.remove(disk)?;
        let device = device?;
        for group in groups {
            let Some(on) = self.on.get_mut(&group.as_ptr()) else { continue };
            if let Some((_, disks)) = on.get_mut(&device.id()) {
                *disks -= 1;
                if *disks == 0 {
                    on.remove(&device.id());
                    changed.push(Weak::clone(&group));
                }
            }
            if on.is_empty() {
                self.on.remove(&group.as_ptr());
            }
        }
        Some(device)
    }

    fn devices_under(&self, group: &Arc<ThrottleGroup>) -> Vec<Arc<Device>> {
        let on = self.on.get(&Arc::as_ptr(group));
        on.into_iter().flat_map(HashMap::values).map(|(device, _)| Arc::clone(device)).collect()
    }

    /// The device below a group, if it is exactly one.
    fn only_device_under(&self, group: &Arc<ThrottleGroup>) -> Option<&Arc<Device>> {
        let on = self.on.get(&Arc::as_ptr(group)).filter(|on| on.len() == 1)?;
        on.values().next().map(|(device, _)| device)
    }
}

/// Device with the disks that are stored on it.
#[derive(Debug)]
pub struct DeviceWithDisks {
    /// The device.
    pub device: Arc<Device>,
    /// Names of the disks, sorted.
    pub disks: Vec<String>,
}

impl DiskDevices {
    /// Empty set. Measured capacities are read from `state`, or from the default state directory.
    pub(crate) fn new(state: Option<&Path>) -> Self {
        Self {
            roots: SysfsRoots::default(),
            store: CapacityStore::new(state),
            of_disks: RefCell::default(),
            known: RefCell::default(),
            placements: RefCell::default(),
            sampler: Sampler::default(),
            latency: LatencySampler::default(),
        }
    }

    pub(crate) fn list(&self, disks: impl IntoIterator<Item = Arc<Disk>>) -> Vec<DeviceWithDisks> {
        let mut found: BTreeMap<String, DeviceWithDisks> = BTreeMap::new();
        for disk in disks {
            let Some(device) = self.device_under(&disk) else { continue };
            let name = device.name().to_owned();
            let listed = found.entry(name).or_insert_with(|| DeviceWithDisks { device, disks: Vec::new() });
            listed.disks.push(disk.name().to_string());
        }
        found.into_values().collect()
    }

    /// State of the latency target of a disk or group.
    pub(crate) fn latency_report(&self, name: &str) -> Option<TargetReport> {
        self.latency.report(name)
    }

    /// True if a disk or group has a latency target.
    pub(crate) fn has_latency_targets(&self) -> bool {
        self.latency.has_targets()
    }

    /// The device or server whose performance this disk shares with others.
    pub(crate) fn shared_device(&self, disk: &Arc<Disk>) -> SharedDevice {
        SharedDevice::below_disk(disk, self.device_under(disk).as_deref())
    }

    /// Device under a disk; `None` for a disk in memory, or if the device cannot be resolved.
    fn device_under(&self, disk: &Arc<Disk>) -> Option<Arc<Device>> {
        if let Some((known, device)) = self.of_disks.borrow().get(&**disk.name())
            // A removed disk's address cannot be reused while the map holds a weak reference to it.
            && std::ptr::eq(known.as_ptr(), Arc::as_ptr(disk))
        {
            return device.clone();
        }
        let device = self.resolve(disk).unwrap_or_else(|error| {
            // Debug level: the sampler warns if this makes a watermark ineffective.
            tracing::debug!(disk = %disk.name(), %error, "the device below is not known");
            None
        });
        let found = (Arc::downgrade(disk), device.clone());
        self.of_disks.borrow_mut().insert(disk.name().to_string(), found);
        device
    }

    fn resolve(&self, disk: &Disk) -> std::io::Result<Option<Arc<Device>>> {
        let Some(id) = id_of(disk, &self.roots)? else { return Ok(None) };
        if let Some(known) = self.known.borrow().get(&id).and_then(Weak::upgrade) {
            return Ok(Some(known));
        }
        let measured = |identity: &block::device::DeviceIdentity| self.store.measured(identity.key());
        // One `Device` per id, shared by all disks on it.
        let device = Device::below_disk(disk, &self.roots, measured)?.map(Arc::new);
        if let Some(device) = &device {
            self.known.borrow_mut().insert(id, Arc::downgrade(device));
        }
        Ok(device)
    }

    /// Resolves the devices of all these disks and groups again.
    /// Fails if a reservation exceeds the measured capacity of a device.
    pub(crate) fn refresh(
        &self,
        disks: impl IntoIterator<Item = Arc<Disk>>,
        groups: impl IntoIterator<Item = Arc<ThrottleGroup>>,
    ) -> anyhow::Result<()> {
        // Drops entries of removed disks, and of devices without disks.
        self.of_disks.borrow_mut().retain(|_, (disk, _)| disk.strong_count() > 0);
        self.known.borrow_mut().retain(|_, device| device.strong_count() > 0);
        let mut placements = DevicePlacements::default();
        let (mut subjects, mut shared) = (Vec::new(), Vec::new());
        for disk in disks {
            let device = self.device_under(&disk);
            shared.push((Arc::clone(&disk), self.shared_device(&disk)));
            subjects.extend(placements.disk_target(&disk, device.as_ref()));
            placements.count_disk(&disk, device, &mut Vec::new());
        }
        let groups: Vec<_> = groups.into_iter().collect();
        self.latency.watch(shared, groups.iter().cloned());
        for group in groups {
            placements.limit_reservations(&group)?;
            subjects.push(placements.group_target(&group));
        }
        *self.placements.borrow_mut() = placements;
        self.sampler.watch(subjects);
        Ok(())
    }

    /// Updates the devices of the disk or group with this name, if one exists. Fails if a
    /// reservation exceeds the measured capacity of a device.
    pub(crate) fn update(
        &self,
        name: &str,
        disk: Option<&Arc<Disk>>,
        group: Option<&Arc<ThrottleGroup>>,
    ) -> anyhow::Result<()> {
        let device = disk.and_then(|disk| self.device_under(disk));
        match (disk, group) {
            (Some(disk), _) => {
                self.latency.update_disk(disk, SharedDevice::below_disk(disk, device.as_deref()));
            }
            (None, Some(group)) => self.latency.update_group(group),
            (None, None) => self.latency.forget(name),
        }
        let mut placements = self.placements.borrow_mut();
        let mut changed: Vec<_> = group.map(Arc::downgrade).into_iter().collect();
        // Removed before it is added below: the name may now belong to another object.
        let before = placements.targets.remove(name);
        let left = placements.uncount_disk(name, &mut changed);
        let mut subjects = Vec::new();
        if let Some(disk) = disk {
            subjects.extend(placements.disk_target(disk, device.as_ref()));
            placements.count_disk(disk, device, &mut changed);
        } else if self.of_disks.borrow_mut().remove(name).is_some()
            && let Some(left) = left
        {
            // Dropped before the count below, which would otherwise include this reference.
            let (id, mut known) = (left.id(), self.known.borrow_mut());
            drop(left);
            if known.get(&id).is_some_and(|device| device.strong_count() == 0) {
                known.remove(&id);
            }
        }
        let now = placements.targets.get(name);
        if let Some(before) = before.filter(|before| now.is_none_or(|now| !now.ptr_eq(before))) {
            self.sampler.forget(&before);
        }
        // All groups are updated even if one exceeds its bound; the first error is returned.
        let mut bounds = Ok(());
        for group in changed.iter().filter_map(Weak::upgrade) {
            bounds = bounds.and(placements.limit_reservations(&group));
            subjects.push(placements.group_target(&group));
        }
        subjects.into_iter().for_each(|subject| self.sampler.update(subject));
        bounds
    }
}

impl DevicePlacements {
    /// Registers a disk without a group as a separate target; disks in groups are covered by their
    /// group.
    fn disk_target(&mut self, disk: &Arc<Disk>, device: Option<&Arc<Device>>) -> Option<SampledTarget> {
        if disk.throttle().group().is_some() {
            return None;
        }
        let target: Weak<Disk> = Arc::downgrade(disk);
        let target: Weak<dyn SamplerTarget> = target;
        self.targets.insert(disk.name().to_string(), Weak::clone(&target));
        Some(SampledTarget { target, devices: device.into_iter().cloned().collect() })
    }

    fn group_target(&mut self, group: &Arc<ThrottleGroup>) -> SampledTarget {
        let target: Weak<ThrottleGroup> = Arc::downgrade(group);
        let target: Weak<dyn SamplerTarget> = target;
        self.targets.insert(group.name().to_owned(), Weak::clone(&target));
        // A target without a watermark is not watched and needs no list of devices.
        let is_watched = group.watermark() != Watermark::ALWAYS;
        SampledTarget { target, devices: if is_watched { self.devices_under(group) } else { Vec::new() } }
    }

    /// An outermost group can reserve up to the capacity of its device; a group on several devices,
    /// or on one without a measured capacity, up to its limits.
    fn limit_reservations(&self, group: &Arc<ThrottleGroup>) -> anyhow::Result<()> {
        if group.parent().is_some() {
            return Ok(());
        }
        let device = self.only_device_under(group);
        let reservable = device.map_or_else(ReservableCapacity::default, |device| device.reservable());
        group.set_device(reservable).with_context(|| format!("group {}", group.name()))
    }
}
