//! The devices under the disks that run: found once for each disk, and sampled where something has
//! a watermark.
//!
//! ```text
//!   Inventory ── a change ──► Devices::refresh ──► which groups have disks on which device
//!                                    │                     └──► block's Sampler
//!                                    └──► what a probe measured bounds what groups can promise
//! ```
//!
//! Belongs to the main thread. A device that cannot be found is logged, and limits are enforced as
//! they are set.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::{Arc, Weak},
};

use anyhow::Context as _;
use block::{
    device::{Device, DeviceId, Roots, Sampler, Subject, id_of},
    disk::Disk,
    layer::throttle::Group,
};
use policy::throttle::Reservable;
use settings::state::Store;

type Found = (Weak<Disk>, Option<Arc<Device>>);

#[derive(Debug)]
pub(crate) struct Devices {
    roots: Roots,
    store: Store,
    /// By the disk's name; the disk tells whether it is still the one of that name.
    of_disks: RefCell<HashMap<String, Found>>,
    sampler: Sampler,
}

#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) device: Arc<Device>,
    /// In the order of their names.
    pub(crate) disks: Vec<String>,
}

impl Devices {
    /// None yet. What was measured is in the state directory, or the usual one.
    pub(crate) fn new(state: Option<&Path>) -> Self {
        Self {
            roots: Roots::default(),
            store: Store::new(state),
            of_disks: RefCell::default(),
            sampler: Sampler::default(),
        }
    }

    pub(crate) fn list(&self, disks: impl IntoIterator<Item = Arc<Disk>>) -> Vec<Listed> {
        let mut found: BTreeMap<String, Listed> = BTreeMap::new();
        for disk in disks {
            let Some(device) = self.under(&disk) else { continue };
            let name = device.name().to_owned();
            let listed = found.entry(name).or_insert_with(|| Listed { device, disks: Vec::new() });
            listed.disks.push(disk.name().to_string());
        }
        found.into_values().collect()
    }

    /// The device under a disk; `None` for one in memory, or where it cannot be found.
    fn under(&self, disk: &Arc<Disk>) -> Option<Arc<Device>> {
        if let Some((known, device)) = self.of_disks.borrow().get(&**disk.name())
            && std::ptr::eq(known.as_ptr(), Arc::as_ptr(disk))
        {
            return device.clone();
        }
        let device = self.find(disk).unwrap_or_else(|error| {
            // Whoever sets a watermark that it makes useless is warned by the sampler.
            tracing::debug!(disk = %disk.name(), %error, "the device below is not known");
            None
        });
        let mut of_disks = self.of_disks.borrow_mut();
        of_disks.retain(|_, (disk, _)| disk.strong_count() > 0);
        of_disks.insert(disk.name().to_string(), (Arc::downgrade(disk), device.clone()));
        device
    }

    fn find(&self, disk: &Disk) -> std::io::Result<Option<Arc<Device>>> {
        let Some(id) = id_of(disk, &self.roots)? else { return Ok(None) };
        if let Some(known) = self.known(&id) {
            return Ok(Some(known));
        }
        let measured = |identity: &block::device::Identity| self.store.measured(identity.key());
        Device::under(disk, &self.roots, measured).map(|device| device.map(Arc::new))
    }

    fn known(&self, id: &DeviceId) -> Option<Arc<Device>> {
        let of_disks = self.of_disks.borrow();
        of_disks.values().filter_map(|(_, device)| device.as_ref()).find(|device| device.id() == *id).cloned()
    }

    /// Looks again at which of these disks and groups are on which device.
    /// Fails if more is reserved than a device was measured to do.
    pub(crate) fn refresh(
        &self,
        disks: impl IntoIterator<Item = Arc<Disk>>,
        groups: impl IntoIterator<Item = Arc<Group>>,
    ) -> anyhow::Result<()> {
        let mut on: HashMap<*const Group, Vec<Arc<Device>>> = HashMap::new();
        let mut subjects = Vec::new();
        for disk in disks {
            let device = self.under(&disk);
            let mut group = disk.throttle().group();
            if group.is_none() {
                let disk: Weak<Disk> = Arc::downgrade(&disk);
                subjects.push(Subject { target: disk, devices: device.iter().cloned().collect() });
            }
            while let Some(here) = group {
                let devices = on.entry(Arc::as_ptr(&here)).or_default();
                if let Some(device) =
                    device.as_ref().filter(|device| !devices.iter().any(|one| one.id() == device.id()))
                {
                    devices.push(Arc::clone(device));
                }
                group = here.parent().cloned();
            }
        }
        for group in groups {
            let devices = on.remove(&Arc::as_ptr(&group)).unwrap_or_default();
            if group.parent().is_none() {
                bound(&group, &devices)?;
            }
            let group: Weak<Group> = Arc::downgrade(&group);
            subjects.push(Subject { target: group, devices });
        }
        self.sampler.watch(subjects);
        Ok(())
    }
}

/// A group can promise what its device can do; one on several, or on one that was not measured,
/// what its limits say.
fn bound(group: &Group, devices: &[Arc<Device>]) -> anyhow::Result<()> {
    let reservable = match devices {
        [device] => device.reservable(),
        _ => Reservable::default(),
    };
    group.set_device(reservable).with_context(|| format!("group {}", group.name()))
}
