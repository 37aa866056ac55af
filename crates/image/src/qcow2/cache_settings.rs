//! How large the two metadata caches are: the settings with QEMU's names, and the sizes that follow
//! for an image.
//!
//! Source of defaults and rules: QEMU's docs/qcow2-cache.txt.

use policy::time::Duration;

use super::header::Header;

/// What the L2 cache may take unless told otherwise.
const DEFAULT_L2_BYTES: u64 = 32 << 20;
/// How much of an L2 table is loaded at a time where the cache cannot hold all of them.
const SMALL_ENTRY_BYTES: u64 = 4096;
/// The least that a slice may have.
const LEAST_ENTRY_BYTES: u64 = 512;
/// Clusters of the refcount cache, at least and by default.
const REFCOUNT_CLUSTERS: u64 = 4;
/// What is not used for so long is dropped.
const DEFAULT_CLEAN_INTERVAL: Duration = Duration::from_secs(600);

/// A size of the L2 cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Size {
    /// In bytes. More than the disk needs is not taken.
    Bytes(u64),
    /// Enough for the whole disk.
    Full,
}

/// Settings of the caches; `None` is the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSettings {
    /// `l2-cache-size`: what the disk needs, but 32 MiB at most.
    pub l2: Option<L2Size>,
    /// `l2-cache-entry-size`, in bytes: a power of two from 512 to the cluster.
    pub entry_bytes: Option<u64>,
    /// `refcount-cache-size`, in bytes; four clusters.
    pub refcount_bytes: Option<u64>,
    /// `cache-size`, in bytes: both together.
    pub total_bytes: Option<u64>,
    /// `cache-clean-interval`: L2 slices that were not used for so long are dropped; zero keeps
    /// them. 600 s.
    pub clean_interval: Duration,
}

impl Default for CacheSettings {
    fn default() -> Self {
        Self {
            l2: None,
            entry_bytes: None,
            refcount_bytes: None,
            total_bytes: None,
            clean_interval: DEFAULT_CLEAN_INTERVAL,
        }
    }
}

/// What settings come to for one image, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSizes {
    /// Of the L2 cache.
    pub l2_bytes: u64,
    /// Of one of its slices.
    pub entry_bytes: u64,
    /// Of the refcount cache.
    pub refcount_bytes: u64,
}

/// Settings that contradict each other or the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCache {
    /// Two are enough to know the third.
    #[error("cache-size, l2-cache-size and refcount-cache-size may not be set together (leave one out)")]
    AllThree,
    /// The parts would be larger than the whole.
    #[error("{part} ({part_bytes}) is larger than cache-size ({total_bytes})")]
    PartAboveTotal {
        /// Which part.
        part: &'static str,
        /// Its size.
        part_bytes: u64,
        /// The whole.
        total_bytes: u64,
    },
    /// Not a size that a slice can have.
    #[error(
        "l2-cache-entry-size ({entry_bytes}) is not a power of two from 512 to the cluster's {cluster_bytes} bytes"
    )]
    EntrySize {
        /// What was asked.
        entry_bytes: u64,
        /// The image's clusters.
        cluster_bytes: u64,
    },
}

impl CacheSettings {
    /// What the settings come to for the image of this header.
    ///
    /// # Errors
    /// [`InvalidCache`].
    pub fn sizes(&self, header: &Header) -> Result<CacheSizes, InvalidCache> {
        let cluster_bytes = header.cluster_bytes();
        let covers = 1_u64 << (header.cluster_bits + header.l2_bits());
        let needed = header.size_bytes.div_ceil(covers).max(1) * cluster_bytes;
        let l2 = self.l2.map(|size| match size {
            L2Size::Bytes(bytes) => bytes,
            L2Size::Full => needed,
        });
        let least_refcounts = REFCOUNT_CLUSTERS * cluster_bytes;
        let (l2_bytes, refcount_bytes) = match (self.total_bytes, l2, self.refcount_bytes) {
            (Some(_), Some(_), Some(_)) => return Err(InvalidCache::AllThree),
            (Some(total), Some(l2), None) => {
                let rest = total.checked_sub(l2);
                let above = InvalidCache::PartAboveTotal {
                    part: "l2-cache-size",
                    part_bytes: l2,
                    total_bytes: total,
                };
                (l2, rest.ok_or(above)?)
            }
            (Some(total), None, Some(refcounts)) => {
                let rest = total.checked_sub(refcounts);
                let part = "refcount-cache-size";
                let above = InvalidCache::PartAboveTotal { part, part_bytes: refcounts, total_bytes: total };
                (rest.ok_or(above)?, refcounts)
            }
            // The L2 cache first: it is the one that is used all the time.
            (Some(total), None, None) => {
                let l2 = total.saturating_sub(least_refcounts).min(needed);
                (l2, total - l2)
            }
            (None, l2, refcounts) => (l2.unwrap_or(DEFAULT_L2_BYTES), refcounts.unwrap_or(least_refcounts)),
        };
        let l2_bytes = l2_bytes.min(needed);
        let default_entry =
            if l2_bytes < needed { cluster_bytes.min(SMALL_ENTRY_BYTES) } else { cluster_bytes };
        let entry_bytes = self.entry_bytes.unwrap_or(default_entry);
        if !entry_bytes.is_power_of_two() || !(LEAST_ENTRY_BYTES..=cluster_bytes).contains(&entry_bytes) {
            return Err(InvalidCache::EntrySize { entry_bytes, cluster_bytes });
        }
        Ok(CacheSizes {
            l2_bytes: l2_bytes.max(2 * entry_bytes),
            entry_bytes,
            refcount_bytes: refcount_bytes.max(least_refcounts),
        })
    }
}
