//! Utilization of the disks with watermarks, and the enforcement that follows from it.

use std::{collections::HashMap, sync::Arc};

use block::device::{Device, DeviceIdentity, DeviceNumber, DeviceObserver};
use policy::{
    throttle::Enforcement,
    time::Instant,
    watermark::{DeviceConsumption, Watermark},
};
use settings::state::CapacityStore;

use crate::{hierarchy::CgroupHierarchy, limit::limits_file::LimitsFile};

/// Utilization, in thousandths, from which a disk's members are read before a watermark is reached.
const BUSY_THOUSANDTHS: u64 = 250;

pub(super) struct WatermarkDisks {
    store: CapacityStore,
    observed: HashMap<DeviceNumber, DeviceObserver>,
    /// True if a disk could not be opened and is to be retried.
    is_one_missing: bool,
}

impl WatermarkDisks {
    pub(super) fn new(store: CapacityStore) -> Self {
        Self { store, observed: HashMap::new(), is_one_missing: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.observed.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.observed.len()
    }

    pub(super) fn adopt(
        &mut self,
        hierarchy: &CgroupHierarchy,
        limits_file: &LimitsFile,
    ) -> anyhow::Result<()> {
        self.open_disks(hierarchy, limits_file, true)
    }

    pub(super) fn retry_missing(&mut self, hierarchy: &CgroupHierarchy, limits_file: &LimitsFile) {
        if self.is_one_missing {
            // The error has been logged before.
            let _ = self.open_disks(hierarchy, limits_file, false);
        }
    }

    fn open_disks(
        &mut self,
        hierarchy: &CgroupHierarchy,
        limits_file: &LimitsFile,
        logs_errors: bool,
    ) -> anyhow::Result<()> {
        let mut before = std::mem::take(&mut self.observed);
        self.is_one_missing = false;
        for entry in &limits_file.limits {
            let number = entry.device()?;
            let has_watermark = limits_file.limits_of(entry).watermark()? != Watermark::ALWAYS;
            if !has_watermark || self.observed.contains_key(&number) {
                continue;
            }
            match before.remove(&number).map_or_else(|| self.observed(hierarchy, number), Ok) {
                Ok(observed) => drop(self.observed.insert(number, observed)),
                Err(error) => {
                    self.is_one_missing = true;
                    if logs_errors {
                        tracing::warn!(
                            "device {number}: {error:#}; limits with a watermark are always \
                             enforced there meanwhile"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    fn observed(&self, hierarchy: &CgroupHierarchy, number: DeviceNumber) -> anyhow::Result<DeviceObserver> {
        let identity = DeviceIdentity::resolve(number, &hierarchy.roots.device_roots())?;
        let capacity = self.store.capacity(identity.key());
        let device = Device::physical(identity, capacity)?;
        Ok(DeviceObserver::new(Arc::new(device)))
    }

    /// Samples all disks, given the consumption by members with a watermark; returns the disks that
    /// became busy.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        consumed: &HashMap<DeviceNumber, DeviceConsumption>,
    ) -> Vec<DeviceNumber> {
        let idle = DeviceConsumption::default();
        let mut busy = Vec::new();
        for (number, observed) in &mut self.observed {
            let before = observed.used();
            observed.observe(now, consumed.get(number).unwrap_or(&idle));
            if before < BUSY_THOUSANDTHS && observed.used() >= BUSY_THOUSANDTHS {
                busy.push(*number);
            }
        }
        busy
    }

    /// Strictest enforcement over these disks; unknown disks count as enforced.
    pub(super) fn enforcement(
        &mut self,
        devices: impl Iterator<Item = DeviceNumber>,
        watermark: Watermark,
    ) -> Enforcement {
        let of_one = |number| {
            self.observed
                .get_mut(&number)
                .and_then(|observed| observed.enforcement(watermark))
                .unwrap_or_default()
        };
        devices.map(of_one).reduce(Enforcement::stricter).unwrap_or_default()
    }
}
