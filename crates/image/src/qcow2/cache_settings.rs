//! Sizes of the two metadata caches: settings with QEMU's names, and the sizes that they yield for
//! an image.
//!
//! Source of defaults and rules: QEMU's docs/qcow2-cache.txt.

use policy::time::Duration;

use super::header::Qcow2Header;

/// Default limit of the L2 cache.
const DEFAULT_L2_BYTES: u64 = 32 << 20;
/// Default slice size if the cache cannot hold all L2 tables.
const SMALL_ENTRY_BYTES: u64 = 4096;
/// Minimum of `l2-cache-entry-size`.
const MIN_ENTRY_BYTES: u64 = 512;
/// Minimum and default of the refcount cache, in clusters.
const REFCOUNT_CLUSTERS: u64 = 4;
/// Default of `cache-clean-interval`.
const DEFAULT_CLEAN_INTERVAL: Duration = Duration::from_secs(600);

/// Size of the L2 cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2CacheSize {
    /// Size in bytes, at most the size that maps the whole disk.
    Bytes(u64),
    /// Enough to map the whole disk.
    Full,
}

/// Settings of the caches; `None` selects the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSettings {
    /// `l2-cache-size`. Default: the size that maps the whole disk, at most 32 MiB.
    pub l2: Option<L2CacheSize>,
    /// `l2-cache-entry-size` in bytes: a power of two from 512 to the cluster size.
    pub entry_bytes: Option<u64>,
    /// `refcount-cache-size` in bytes. Default: four clusters.
    pub refcount_bytes: Option<u64>,
    /// `cache-size` in bytes: sum of both caches.
    pub total_bytes: Option<u64>,
    /// `cache-clean-interval`: L2 slices unused for this time are evicted; zero disables it.
    /// Default: 600 s.
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

/// Cache sizes for one image, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSizes {
    /// Size of the L2 cache.
    pub l2_bytes: u64,
    /// Size of a slice.
    pub entry_bytes: u64,
    /// Size of the refcount cache.
    pub refcount_bytes: u64,
}

/// Settings that contradict each other or do not suit the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCache {
    /// All three sizes are set; two determine the third.
    #[error("cache-size, l2-cache-size and refcount-cache-size may not be set together (leave one out)")]
    AllThree,
    /// One cache is larger than the sum of both.
    #[error("{part} ({part_bytes}) is larger than cache-size ({total_bytes})")]
    PartAboveTotal {
        /// Key of the cache's size.
        part: &'static str,
        /// Size of the cache.
        part_bytes: u64,
        /// Value of `cache-size`.
        total_bytes: u64,
    },
    /// Invalid size of a slice.
    #[error(
        "l2-cache-entry-size ({entry_bytes}) is not a power of two from 512 to the cluster's \
         {cluster_bytes} bytes"
    )]
    EntrySize {
        /// Configured value.
        entry_bytes: u64,
        /// Cluster size of the image.
        cluster_bytes: u64,
    },
}

impl CacheSettings {
    /// Computes the cache sizes for the image with this header.
    ///
    /// # Errors
    /// [`InvalidCache`].
    pub fn sizes(&self, header: &Qcow2Header) -> Result<CacheSizes, InvalidCache> {
        let cluster_bytes = header.cluster_bytes();
        let coverage = 1_u64 << (header.cluster_bits + header.l2_bits());
        let needed = header.size_bytes.div_ceil(coverage).max(1) * cluster_bytes;
        let l2 = self.l2.map(|size| match size {
            L2CacheSize::Bytes(bytes) => bytes,
            L2CacheSize::Full => needed,
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
            // The L2 cache has priority, since every request uses it.
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
        if !entry_bytes.is_power_of_two() || !(MIN_ENTRY_BYTES..=cluster_bytes).contains(&entry_bytes) {
            return Err(InvalidCache::EntrySize { entry_bytes, cluster_bytes });
        }
        Ok(CacheSizes {
            l2_bytes: l2_bytes.max(2 * entry_bytes),
            entry_bytes,
            refcount_bytes: refcount_bytes.max(least_refcounts),
        })
    }
}
