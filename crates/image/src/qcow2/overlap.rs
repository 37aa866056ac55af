//! The set of metadata clusters, which guest data must never overwrite.
//!
//! A valid image maps no guest data there, but one with damaged or forged refcounts or tables may,
//! and a guest that can write to an L2 table can read the whole file. Every allocated cluster, and
//! every write of guest data, is therefore checked against this set.
//!
//! Lookups take no lock. An addition copies the set, which happens once for each table or block
//! that an image gains.

use std::{
    collections::HashSet,
    hash::{BuildHasherDefault, Hasher},
    sync::Arc,
};

use arc_swap::ArcSwap;

use super::{InvalidImage, file::ImageFile};
use reactor::error::Result;

/// Hasher of cluster numbers, by multiplication. Resistance to collisions is not needed: the set
/// is small and its keys are few.
#[derive(Debug, Default)]
pub(super) struct ByMultiplication(u64);

impl Hasher for ByMultiplication {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // 2⁶⁴ divided by the golden ratio (Knuth, volume 3, 6.4). The shift brings its upper bits
        // to where the table takes its index from.
        let product = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ product >> 32;
    }
}

type MetadataClusterSet = HashSet<u64, BuildHasherDefault<ByMultiplication>>;

/// Set of metadata clusters. See the head of this file.
#[derive(Debug)]
pub(super) struct MetadataClusters {
    cluster_bits: u32,
    clusters: ArcSwap<MetadataClusterSet>,
}

impl MetadataClusters {
    pub(super) fn new(cluster_bits: u32, regions: &[(u64, u64)]) -> Self {
        let clusters =
            regions.iter().flat_map(|(offset, length)| clusters_of(cluster_bits, *offset, *length));
        Self { cluster_bits, clusters: ArcSwap::from_pointee(clusters.collect()) }
    }

    /// Replaces the whole set.
    pub(super) fn replace(&self, regions: &[(u64, u64)]) {
        self.clusters.store(Self::new(self.cluster_bits, regions).clusters.into_inner());
    }

    /// Fails if two of the ranges that the set was created from overlap: a change of one would
    /// damage both.
    pub(super) fn check_disjoint(&self, regions: &[(u64, u64)]) -> std::result::Result<(), InvalidImage> {
        let clusters = |(offset, length): &(u64, u64)| clusters_of(self.cluster_bits, *offset, *length);
        // Equal counts prove that no cluster is in two ranges; the search below runs only for the
        // error.
        if regions.iter().map(|place| clusters(place).count()).sum::<usize>() == self.clusters.load().len() {
            return Ok(());
        }
        let mut seen = MetadataClusterSet::default();
        let duplicate = regions.iter().flat_map(clusters).find(|cluster| !seen.insert(*cluster)).unwrap_or(0);
        let offset = duplicate << self.cluster_bits;
        Err(InvalidImage::new(format!("two tables overlap at {offset:#x}")))
    }

    /// True if any of these bytes belong to metadata.
    pub(super) fn contains(&self, offset: u64, length: u64) -> bool {
        let clusters = self.clusters.load();
        clusters_of(self.cluster_bits, offset, length).any(|cluster| clusters.contains(&cluster))
    }

    /// Marks the image corrupt and fails if any of these bytes belong to metadata.
    pub(super) fn check(&self, file: &ImageFile, offset: u64, length: u64) -> Result<()> {
        if self.contains(offset, length) {
            let message = format!("guest data at {offset:#x} would overwrite metadata");
            return Err(file.report_invalid(&InvalidImage::new(message)));
        }
        Ok(())
    }

    pub(super) fn add(&self, offset: u64, length: u64) {
        self.add_all(&[(offset, length)]);
    }

    pub(super) fn add_all(&self, regions: &[(u64, u64)]) {
        self.change(|clusters| {
            let added =
                regions.iter().flat_map(|(offset, length)| clusters_of(self.cluster_bits, *offset, *length));
            clusters.extend(added);
        });
    }

    pub(super) fn remove(&self, offset: u64, length: u64) {
        if !self.contains(offset, length) {
            return;
        }
        self.change(|clusters| {
            for cluster in clusters_of(self.cluster_bits, offset, length) {
                clusters.remove(&cluster);
            }
        });
    }

    fn change(&self, change: impl Fn(&mut MetadataClusterSet)) {
        // Copy-on-write: readers on other threads continue with the old set.
        self.clusters.rcu(|clusters| {
            let mut changed = MetadataClusterSet::clone(clusters);
            change(&mut changed);
            Arc::new(changed)
        });
    }
}

fn clusters_of(cluster_bits: u32, offset: u64, length: u64) -> impl Iterator<Item = u64> {
    let first = offset >> cluster_bits;
    let end = if length == 0 { first } else { ((offset + length - 1) >> cluster_bits) + 1 };
    first..end
}
