//! Utilization of the disks with watermarks, and the enforcement that follows from it.

use std::{collections::HashMap, sync::Arc};

use block::device::{Device, Identity, Number, Observed};
use policy::{
    throttle::Enforcement,
    time::Instant,
    watermark::{Consumed, Watermark},
};
use settings::state::Store;

use crate::{hierarchy::Hierarchy, limit::kept::Kept};

/// Utilization, in thousandths, from which a disk's members are read before a watermark is reached.
const BUSY: u64 = 250;

pub(super) struct Disks {
    store: Store,
    observed: HashMap<Number, Observed>,
    /// True if a disk could not be opened and is to be retried.
    is_one_missing: bool,
}

impl Disks {
    pub(super) fn new(store: Store) -> Self {
        Self { store, observed: HashMap::new(), is_one_missing: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.observed.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.observed.len()
    }

    pub(super) fn adopt(&mut self, hierarchy: &Hierarchy, kept: &Kept) -> anyhow::Result<()> {
        self.look_for(hierarchy, kept, true)
    }

    pub(super) fn look_for_missing(&mut self, hierarchy: &Hierarchy, kept: &Kept) {
        if self.is_one_missing {
            // The error has been logged before.
            let _ = self.look_for(hierarchy, kept, false);
        }
    }

    fn look_for(&mut self, hierarchy: &Hierarchy, kept: &Kept, say: bool) -> anyhow::Result<()> {
        let mut before = std::mem::take(&mut self.observed);
        self.is_one_missing = false;
        for entry in &kept.limits {
            let number = entry.device()?;
            let has_watermark = kept.shared(entry).watermark()? != Watermark::ALWAYS;
            if !has_watermark || self.observed.contains_key(&number) {
                continue;
            }
            match before.remove(&number).map_or_else(|| self.observed(hierarchy, number), Ok) {
                Ok(observed) => drop(self.observed.insert(number, observed)),
                Err(error) => {
                    self.is_one_missing = true;
                    if say {
                        tracing::warn!(
                            "device {number}: {error:#}; limits with a watermark always hold there meanwhile"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    fn observed(&self, hierarchy: &Hierarchy, number: Number) -> anyhow::Result<Observed> {
        let identity = Identity::resolve(number, &hierarchy.roots.of_devices())?;
        let capacity = self.store.capacity(identity.key());
        let device = Device::physical(identity, capacity)?;
        Ok(Observed::new(Arc::new(device)))
    }

    /// Samples all disks, given the consumption by members with a watermark; returns the disks that
    /// became busy.
    pub(super) fn observe(&mut self, now: Instant, consumed: &HashMap<Number, Consumed>) -> Vec<Number> {
        let nothing = Consumed::default();
        let mut busy = Vec::new();
        for (number, observed) in &mut self.observed {
            let before = observed.used();
            observed.observe(now, consumed.get(number).unwrap_or(&nothing));
            if before < BUSY && observed.used() >= BUSY {
                busy.push(*number);
            }
        }
        busy
    }

    /// Strictest enforcement over these disks; unknown disks count as enforced.
    pub(super) fn enforcement(
        &mut self,
        of: impl Iterator<Item = Number>,
        watermark: Watermark,
    ) -> Enforcement {
        let of_one = |number| {
            self.observed
                .get_mut(&number)
                .and_then(|observed| observed.enforcement(watermark))
                .unwrap_or_default()
        };
        of.map(of_one).reduce(Enforcement::stricter).unwrap_or_default()
    }
}
