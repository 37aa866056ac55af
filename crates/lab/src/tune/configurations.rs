//! The measured configurations of a virtual disk, and the measured patterns of requests.
//!
//! ```text
//!   cache mode × cluster size × L2 cache × prefetch     the default, one factor changed at a time, combinations
//!        ×
//!   random, sequential × read, write × 4K, 1M × depth 1, 32; in addition synchronous writes, first writes, cached reads
//! ```
//!
//! The default is that of `weir serve`: writeback, clusters of 64 KiB, an L2 cache for the whole
//! disk (up to 256 GiB of it), `--prefetch auto`. Other configurations are described as changes to
//! it.

use std::{
    collections::HashSet,
    fmt,
    hash::{Hash, Hasher},
};

use policy::prefetch::{PrefetchConfig, PrefetchMode};
use storage::CacheMode;

/// Default cluster size, the same as QEMU's.
pub(super) const DEFAULT_CLUSTER: u64 = 64 << 10;
pub(super) const CLUSTERS: [u64; 6] = [DEFAULT_CLUSTER, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20];
/// Length of an L2 entry, which maps one cluster (QEMU's docs/interop/qcow2.rst).
const L2_ENTRY_BYTES: u64 = 8;
/// Length of the smallest and of the default slice of an L2 table in the cache (QEMU's
/// docs/qcow2-cache.txt).
const SLICE_BYTES: std::ops::RangeInclusive<u64> = 512..=4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum L2Share {
    Full,
    Part(u64),
}

impl L2Share {
    /// Measured shares; 1/128 is that of the published measurement.
    pub(super) const ALL: [Self; 4] = [Self::Full, Self::Part(4), Self::Part(16), Self::Part(128)];

    /// Cache size in bytes, at least two of the smallest slices.
    ///
    /// Source: QEMU's docs/qcow2-cache.txt, `disk_size = l2_cache_size * cluster_size / 8`.
    pub(super) fn bytes(self, size_bytes: u64, cluster_bytes: u64) -> u64 {
        let all = size_bytes.div_ceil(cluster_bytes) * L2_ENTRY_BYTES;
        let part = match self {
            Self::Full => all,
            Self::Part(parts) => all / parts,
        };
        part.max(2 * SLICE_BYTES.start())
    }

    /// The default slice, or a smaller one if fewer than two would fit.
    pub(super) fn slice_bytes(l2_bytes: u64) -> u64 {
        // A power of two, as QEMU requires.
        let largest = (l2_bytes / 2).max(1);
        (1 << largest.ilog2()).clamp(*SLICE_BYTES.start(), *SLICE_BYTES.end())
    }
}

impl fmt::Display for L2Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Part(parts) => write!(f, "1/{parts}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Qcow2Choice {
    /// Cluster size: a power of two, from 64 KiB to 2 MiB in images that weir creates.
    pub(super) cluster_bytes: u64,
    pub(super) l2: L2Share,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskConfiguration {
    pub(super) cache: CacheMode,
    pub(super) qcow2: Option<Qcow2Choice>,
    pub(super) prefetch: PrefetchMode,
}

impl DiskConfiguration {
    /// Memory of the caches, without the page cache, which the kernel reclaims on demand.
    pub(super) fn memory_bytes(&self, size_bytes: u64) -> u64 {
        let l2 =
            self.qcow2.map_or(0, |Qcow2Choice { cluster_bytes, l2 }| l2.bytes(size_bytes, cluster_bytes));
        l2 + if self.prefetch == PrefetchMode::Off { 0 } else { PrefetchConfig::default().memory_bytes }
    }
}

/// Hashes the cache mode's name, because the mode itself has no hash.
impl Hash for DiskConfiguration {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.cache.name(), self.qcow2, self.prefetch.name()).hash(state);
    }
}

/// Unique name, under which results are stored.
impl fmt::Display for DiskConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.cache.name())?;
        if let Some(Qcow2Choice { cluster_bytes, l2 }) = self.qcow2 {
            write!(f, ", {}", settings::exact_size(cluster_bytes))?;
            if l2 != L2Share::Full {
                write!(f, ", L2 {l2}")?;
            }
        }
        match self.prefetch {
            // The default is not named.
            PrefetchMode::Auto => Ok(()),
            mode => write!(f, ", prefetch {mode}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConfigurationSpace {
    /// Cache modes. The first of each list is the default.
    pub(super) caches: Vec<CacheMode>,
    /// Cluster sizes; empty for a raw disk.
    pub(super) clusters: Vec<u64>,
    pub(super) l2: Vec<L2Share>,
    pub(super) prefetch: Vec<PrefetchMode>,
    /// Size of the disk, to find shares that result in the same number of bytes.
    pub(super) size_bytes: u64,
}

impl ConfigurationSpace {
    pub(super) fn of_made_images(size_bytes: u64) -> Self {
        Self {
            caches: CacheMode::ALL.to_vec(),
            clusters: CLUSTERS.to_vec(),
            l2: L2Share::ALL.to_vec(),
            prefetch: vec![PrefetchConfig::default().mode, PrefetchMode::Off, PrefetchMode::On],
            size_bytes,
        }
    }

    /// Space for an existing image, which has a fixed cluster size, or none if it is raw.
    pub(super) fn of_image(size_bytes: u64, cluster_bytes: Option<u64>) -> Self {
        Self { clusters: cluster_bytes.into_iter().collect(), ..Self::of_made_images(size_bytes) }
    }

    pub(super) fn default_configuration(&self) -> DiskConfiguration {
        DiskConfiguration {
            cache: self.caches[0],
            qcow2: self.clusters.first().map(|&cluster_bytes| Qcow2Choice { cluster_bytes, l2: self.l2[0] }),
            prefetch: self.prefetch[0],
        }
    }

    pub(super) fn one_at_a_time(&self) -> Vec<DiskConfiguration> {
        let default = self.default_configuration();
        let mut list: Vec<_> =
            self.caches.iter().map(|&cache| DiskConfiguration { cache, ..default }).collect();
        // A raw disk has neither clusters nor L2 tables.
        if let Some(qcow2) = default.qcow2 {
            let with = |qcow2| DiskConfiguration { qcow2: Some(qcow2), ..default };
            list.extend(
                self.clusters.iter().map(|&cluster_bytes| with(Qcow2Choice { cluster_bytes, ..qcow2 })),
            );
            list.extend(self.l2.iter().map(|&l2| with(Qcow2Choice { l2, ..qcow2 })));
        }
        list.extend(self.prefetch.iter().map(|&prefetch| DiskConfiguration { prefetch, ..default }));
        self.distinct(list)
    }

    /// Every combination, by number of changes.
    pub(super) fn all(&self) -> Vec<DiskConfiguration> {
        let mut images: Vec<_> = self
            .clusters
            .iter()
            .flat_map(|&cluster_bytes| self.l2.iter().map(move |&l2| Some(Qcow2Choice { cluster_bytes, l2 })))
            .collect();
        if images.is_empty() {
            images.push(None);
        }
        let mut list = Vec::new();
        for &cache in &self.caches {
            for &qcow2 in &images {
                list.extend(self.prefetch.iter().map(|&prefetch| DiskConfiguration {
                    cache,
                    qcow2,
                    prefetch,
                }));
            }
        }
        let mut list = self.distinct(list);
        // The sort is stable, so the order within the same number of changes is fixed.
        list.sort_by_key(|configuration| self.changes(configuration));
        list
    }

    pub(super) fn changes(&self, configuration: &DiskConfiguration) -> usize {
        let default = self.default_configuration();
        let l2 = |qcow2: Option<Qcow2Choice>| qcow2.map(|qcow2| qcow2.l2);
        let cluster = |qcow2: Option<Qcow2Choice>| qcow2.map(|qcow2| qcow2.cluster_bytes);
        [
            configuration.cache != default.cache,
            cluster(configuration.qcow2) != cluster(default.qcow2),
            l2(configuration.qcow2) != l2(default.qcow2),
            configuration.prefetch != default.prefetch,
        ]
        .into_iter()
        .filter(|&differs| differs)
        .count()
    }

    /// Removes duplicates: a small disk's whole mapping may fit into the smallest cache.
    fn distinct(&self, list: Vec<DiskConfiguration>) -> Vec<DiskConfiguration> {
        // By the size in bytes, not by the share.
        let key = |configuration: &DiskConfiguration| {
            let DiskConfiguration { cache, qcow2, prefetch } = *configuration;
            let sizes = qcow2.map(|Qcow2Choice { cluster_bytes, l2 }| {
                (cluster_bytes, l2.bytes(self.size_bytes, cluster_bytes))
            });
            (cache.name(), sizes, prefetch.name())
        };
        let mut seen = HashSet::new();
        list.into_iter().filter(|configuration| seen.insert(key(configuration))).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AccessOrder {
    Random,
    Sequential,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum PatternOperation {
    /// Read from the disk, bypassing the page cache as far as possible.
    Read,
    /// Read from the page cache, if the configuration uses it.
    Reread,
    /// Write to allocated clusters, including a flush at the end.
    Write,
    SyncWrite,
    /// Write to an empty overlay: allocates clusters and copies the rest of each.
    FirstWrite,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RequestPattern {
    pub(super) order: AccessOrder,
    pub(super) operation: PatternOperation,
    pub(super) block_bytes: u64,
    pub(super) depth: u32,
}

const SMALL: u64 = 4 << 10;
const LARGE: u64 = 1 << 20;

impl RequestPattern {
    pub(super) fn all() -> Vec<Self> {
        let mut list = Vec::new();
        // The full grid of order, size and depth for the two common operations.
        for operation in [PatternOperation::Read, PatternOperation::Write] {
            for order in [AccessOrder::Random, AccessOrder::Sequential] {
                for block_bytes in [SMALL, LARGE] {
                    list.extend([1, 32].map(|depth| Self { order, operation, block_bytes, depth }));
                }
            }
        }
        // The remaining operations with one small and one large pattern each.
        for operation in [PatternOperation::SyncWrite, PatternOperation::FirstWrite, PatternOperation::Reread]
        {
            list.push(Self { order: AccessOrder::Random, operation, block_bytes: SMALL, depth: 1 });
            list.push(Self { order: AccessOrder::Sequential, operation, block_bytes: LARGE, depth: 1 });
        }
        list
    }

    pub(super) fn writes(&self) -> bool {
        !matches!(self.operation, PatternOperation::Read | PatternOperation::Reread)
    }
}

/// Unique name, under which results are stored.
impl fmt::Display for RequestPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            AccessOrder::Random => "random",
            AccessOrder::Sequential => "sequential",
        };
        let operation = match self.operation {
            PatternOperation::Read => "read",
            PatternOperation::Reread => "reread",
            PatternOperation::Write => "write",
            PatternOperation::SyncWrite => "sync write",
            PatternOperation::FirstWrite => "first write",
        };
        write!(f, "{order} {operation} {}", settings::exact_size(self.block_bytes))?;
        write!(f, " ×{}", self.depth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let space = ConfigurationSpace::of_made_images(16 << 30);
        let all = space.all();
        assert_eq!(all.len(), 5 * 6 * 4 * 3);
        let names: HashSet<_> = all.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), all.len());
        assert!(names.contains("none, 2M, L2 1/128, prefetch on"), "{names:?}");
        let patterns = RequestPattern::all();
        let names: HashSet<_> = patterns.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), 22);
        assert!(names.contains("random sync write 4K ×1"), "{names:?}");
    }

    #[test]
    fn default_is_first_and_one_factor_changes_at_a_time() {
        let space = ConfigurationSpace::of_made_images(16 << 30);
        let list = space.one_at_a_time();
        assert_eq!(list.len(), 1 + 4 + 5 + 3 + 2);
        assert_eq!(list[0].prefetch, PrefetchConfig::default().mode, "the default of `weir serve`");
        assert_eq!(list[0], space.default_configuration());
        assert_eq!(list[0].to_string(), "writeback, 64K");
        assert!(list[1..].iter().all(|configuration| space.changes(configuration) == 1), "{list:?}");
        assert_eq!(space.all()[0], list[0]);
    }

    #[test]
    fn l2_cache_size_follows_qemu_s_formula() {
        // As published: 16 GiB with clusters of 64 KiB, 2 MiB, and 16 KiB for 128 MiB.
        assert_eq!(L2Share::Full.bytes(16 << 30, 64 << 10), 2_097_152);
        assert_eq!(L2Share::Part(128).bytes(16 << 30, 64 << 10), 16_384);
        assert_eq!(L2Share::Part(128).bytes(64 << 20, 64 << 10), 1024, "never less than two slices");
        assert_eq!([1024, 3000, 16_384].map(L2Share::slice_bytes), [512, 1024, 4096]);
    }

    #[test]
    fn equal_cache_sizes_are_measured_once() {
        let space = ConfigurationSpace::of_made_images(64 << 20);
        // 8 KiB of mapping: 1/16 and 1/128 are both the minimum.
        let l2 = |configuration: &&DiskConfiguration| {
            configuration.qcow2.is_some_and(|qcow2| qcow2.l2 != L2Share::Full)
        };
        assert_eq!(space.one_at_a_time().iter().filter(l2).count(), 2);
    }

    #[test]
    fn raw_disk_varies_cache_mode_and_prefetch_only() {
        let space = ConfigurationSpace::of_image(1 << 30, None);
        assert_eq!(space.one_at_a_time().len(), 7);
        assert_eq!(space.all().len(), 15);
        assert_eq!(space.all()[14].qcow2, None);
    }
}
