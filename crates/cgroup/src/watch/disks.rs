//! How busy the disks are on which something has a watermark, and what that makes of limits there.

use std::{collections::HashMap, sync::Arc};

use block::device::{Device, Identity, Number, Observed};
use policy::{
    throttle::Enforcement,
    time::Instant,
    watermark::{Consumed, Watermark},
};
use settings::state::Store;

use crate::{hierarchy::Hierarchy, limit::kept::Kept};

/// From so much use on, in thousandths, a disk is worth a look at who uses it: before any watermark
/// is likely to be reached.
const BUSY: u64 = 250;

/// The disks that are looked at.
pub(super) struct Disks {
    store: Store,
    observed: HashMap<Number, Observed>,
    /// One could not be looked at, and is tried again.
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

    /// Looks from now on at those on which something that is kept has a watermark.
    pub(super) fn adopt(&mut self, hierarchy: &Hierarchy, kept: &Kept) -> anyhow::Result<()> {
        self.look_for(hierarchy, kept, true)
    }

    /// Tries those again that were not there.
    pub(super) fn look_for_missing(&mut self, hierarchy: &Hierarchy, kept: &Kept) {
        if self.is_one_missing {
            // That it still is not there has been said.
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

    /// Looks at all of them, beside what those with a watermark took there. Returns those that have
    /// become busy.
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

    /// How limits with this watermark are applied to those who use all of these disks: as on the
    /// one with the least room. One that cannot be looked at has them enforced.
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
