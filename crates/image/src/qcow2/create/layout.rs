//! Layout of a new image: the offset of each structure.
//!
//! Refcounts also cover the clusters of the refcounts, so the number of blocks is computed
//! iteratively until it is stable.
//!
//! Never checks the rules of the header: that happens when it is encoded.

use super::{
    CreateOptions, Preallocation,
    rules::{InvalidImageOption, invalid_option},
};
use crate::qcow2::{
    header::{MAX_L1, MAX_REFCOUNT_TABLE, OFFSET_LIMIT},
    refcount_entries,
};

/// Offsets and counts, in the order of the drawing in [`create`](super).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageLayout {
    pub(super) cluster_bits: u32,
    pub(super) refcount_table_offset: u64,
    pub(super) refcount_table_clusters: u64,
    pub(super) refcount_blocks: u64,
    /// Offset of the L1 table; 0 if it has no entries.
    pub(super) l1_offset: u64,
    pub(super) l1_entries: u64,
    pub(super) l1_clusters: u64,
    pub(super) luks_offset: u64,
    /// Number of L2 tables; 0 without preallocation.
    pub(super) l2_tables: u64,
    l2_first: u64,
    /// Offset of the first guest cluster in the file that holds guest data.
    pub(super) data_offset: u64,
    /// Bytes of guest data in the image itself.
    pub(super) data_bytes: u64,
    pub(super) guest_clusters: u64,
    /// Number of clusters in use.
    pub(super) clusters: u64,
}

impl ImageLayout {
    /// Computes the layout for valid options.
    pub(super) fn of(options: &CreateOptions) -> Result<Self, InvalidImageOption> {
        let layout = Self::of_any_size(options)?;
        let table_bytes = layout.refcount_table_clusters * options.cluster_bytes;
        if table_bytes > MAX_REFCOUNT_TABLE.max(options.cluster_bytes)
            || layout.clusters > OFFSET_LIMIT >> layout.cluster_bits
        {
            return Err(too_large(options));
        }
        Ok(layout)
    }

    /// Like [`Self::of`], without the limits of the refcount table and of offsets: a disk within
    /// the limit of the L1 table can be created, although not all of its clusters can be
    /// allocated.
    pub(super) fn of_any_size(options: &CreateOptions) -> Result<Self, InvalidImageOption> {
        let cluster_bits = options.cluster_bytes.trailing_zeros();
        let entry_bytes = if options.extended_l2 { 16 } else { 8 };
        let guest_clusters = options.size_bytes.div_ceil(options.cluster_bytes);
        let l1_entries = guest_clusters.div_ceil(options.cluster_bytes / entry_bytes);
        if l1_entries * 8 > MAX_L1 {
            return Err(too_large(options));
        }
        let in_clusters = |bytes: u64| bytes.div_ceil(options.cluster_bytes);
        let l1_clusters = in_clusters(l1_entries * 8);
        let luks_clusters = in_clusters(options.luks.as_ref().map_or(0, |luks| luks.len() as u64));
        let is_preallocated = options.preallocation != Preallocation::Off;
        let l2_tables = if is_preallocated { l1_entries } else { 0 };
        let is_inside = is_preallocated && options.data_file.is_none();
        let data_clusters = if is_inside { guest_clusters } else { 0 };
        let other_clusters = 1 + l1_clusters + luks_clusters + l2_tables + data_clusters;
        let (table, blocks) = refcounts(options, other_clusters);
        let l1_first = 1 + table + blocks;
        let luks_first = l1_first + l1_clusters;
        let l2_first = luks_first + luks_clusters;
        let data_first = l2_first + l2_tables;
        let clusters = data_first + data_clusters;
        Ok(Self {
            cluster_bits,
            refcount_table_offset: options.cluster_bytes,
            refcount_table_clusters: table,
            refcount_blocks: blocks,
            l1_offset: if l1_entries == 0 { 0 } else { l1_first << cluster_bits },
            l1_entries,
            l1_clusters,
            luks_offset: luks_first << cluster_bits,
            l2_tables,
            l2_first,
            data_offset: if options.data_file.is_some() { 0 } else { data_first << cluster_bits },
            data_bytes: data_clusters << cluster_bits,
            guest_clusters,
            clusters,
        })
    }

    pub(super) fn cluster_bytes(&self) -> usize {
        1 << self.cluster_bits
    }

    pub(super) fn refcount_block_offset(&self, block: u64) -> u64 {
        (1 + self.refcount_table_clusters + block) << self.cluster_bits
    }

    /// Offset of an L2 table; `None` if it is not preallocated.
    pub(super) fn l2_offset(&self, table: u64) -> Option<u64> {
        (table < self.l2_tables).then(|| (self.l2_first + table) << self.cluster_bits)
    }
}

/// Number of clusters of the refcount table, and of refcount blocks, if the image has
/// `other_clusters` other clusters.
fn refcounts(options: &CreateOptions, other_clusters: u64) -> (u64, u64) {
    let per_block =
        refcount_entries::entry_count(options.cluster_bytes, options.refcount_bits.trailing_zeros());
    let (mut table, mut blocks) = (1, 1);
    loop {
        let more_blocks = (other_clusters + table + blocks).div_ceil(per_block);
        let more_table = (more_blocks * 8).div_ceil(options.cluster_bytes);
        // Terminates: both numbers only grow, and each step adds less than the previous one.
        if (more_table, more_blocks) == (table, blocks) {
            return (table, blocks);
        }
        (table, blocks) = (more_table, more_blocks);
    }
}

fn too_large(options: &CreateOptions) -> InvalidImageOption {
    let CreateOptions { size_bytes, cluster_bytes, .. } = options;
    invalid_option(
        format!("size={size_bytes}"),
        format!("is too large for clusters of {cluster_bytes} bytes (try a larger cluster_size)"),
    )
}
