//! How much one front end may have mapped here.
//!
//! It counts what is mapped, not what the front end has lent at the moment: requests keep a region
//! mapped that has been taken back. Without a bound one front end would use up the addresses or the
//! mappings of this process, and every other disk with them.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

use super::RegionError;

/// What one front end has mapped: memory, logs of writes and in-flight areas. Clones count
/// together.
#[derive(Clone, Debug)]
pub struct Quota(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    most_mappings: usize,
    most_bytes: u64,
    mappings: AtomicUsize,
    bytes: AtomicU64,
}

/// The part of one mapping. Given back when dropped.
#[derive(Debug)]
pub(super) struct Share {
    quota: Quota,
    bytes: u64,
}

impl Quota {
    /// For so many mappings at a time, of so many bytes together.
    pub fn new(most_mappings: usize, most_bytes: u64) -> Self {
        let (mappings, bytes) = Default::default();
        Self(Arc::new(Inner { most_mappings, most_bytes, mappings, bytes }))
    }

    pub(super) fn take(&self, bytes: u64) -> Result<Share, RegionError> {
        let &Inner { most_mappings, most_bytes, .. } = &*self.0;
        if bytes > most_bytes {
            return Err(RegionError::TooManyBytes(most_bytes));
        }
        let mappings = self.0.mappings.fetch_add(1, Relaxed) + 1;
        let sum = self.0.bytes.fetch_add(bytes, Relaxed) + bytes;
        // Gives back what is refused.
        let share = Share { quota: self.clone(), bytes };
        if mappings > most_mappings {
            return Err(RegionError::TooManyMappings(most_mappings));
        }
        if sum > most_bytes {
            return Err(RegionError::TooManyBytes(most_bytes));
        }
        Ok(share)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.quota.0.mappings.fetch_sub(1, Relaxed);
        self.quota.0.bytes.fetch_sub(self.bytes, Relaxed);
    }
}
