//! Rebuilds the refcounts if they cannot be corrected: writes new blocks and a new table after
//! everything in use, then the header.
//!
//! ```text
//!   ... everything in use │ blocks │ table │
//! ```
//!
//! The header refers to a valid table at every moment: the old one until the new one is durable.
//! The old blocks are free afterwards.

use std::collections::{BTreeSet, HashSet};

use super::{CheckPass, metadata_io, refcounts::Structures, write_header};
use crate::qcow2::{
    InvalidImage, MetadataError,
    header::{MAX_REFCOUNT_TABLE, OFFSET_LIMIT},
    refcount_entries,
};

impl CheckPass<'_> {
    /// Writes refcounts that match the counted references.
    pub(super) async fn rebuild(&mut self, old: &Structures) -> Result<(), MetadataError> {
        self.drop_old_refcounts(old);
        // After the end of the file: no existing cluster is overwritten, used or not.
        let first = self.file_clusters.max(self.found.counts.last_used().map_or(0, |cluster| cluster + 1));
        let (blocks, table_clusters) = self.needed_blocks(first)?;
        let bits = self.header.cluster_bits;
        let table_first = first + blocks.len() as u64;
        let end = table_first + table_clusters;
        for cluster in first..end {
            self.found.counts.put(cluster, 1);
        }
        let mut table = vec![0; (table_clusters << bits) as usize];
        for (index, number) in blocks.iter().enumerate() {
            let offset = (first + index as u64) << bits;
            metadata_io::write(self.storage, offset, &self.block(*number)).await?;
            let at = *number as usize * 8;
            table[at..at + 8].copy_from_slice(&offset.to_be_bytes());
        }
        // Everything the header will refer to must be durable first.
        metadata_io::write(self.storage, table_first << bits, &table).await?;
        self.storage.flush().await?;
        self.header.refcount_table_offset = table_first << bits;
        self.header.refcount_table_clusters = table_clusters as u32;
        write_header(self.storage, &self.header).await?;
        self.file_clusters = end;
        self.stored = super::ReferenceCounts::default();
        self.unknown_blocks = Some(HashSet::new());
        self.report.image_end_offset = end << bits;
        self.report.corruptions_fixed += 1;
        self.report.report("Repaired: the refcounts were rebuilt");
        Ok(())
    }

    /// Removes the references to the old table and its blocks. Their clusters stay in use if other
    /// structures overlap them.
    fn drop_old_refcounts(&mut self, old: &Structures) {
        let bits = self.header.cluster_bits;
        let table = self.header.refcount_table_offset >> bits;
        let table_clusters =
            if old.is_table_counted { u64::from(self.header.refcount_table_clusters) } else { 0 };
        let of_table = table..table + table_clusters;
        let of_blocks = old.blocks.iter().filter(|block| **block != 0).map(|block| block >> bits);
        for cluster in of_table.chain(of_blocks) {
            let number = self.found.counts.get(cluster);
            if number > 0 {
                self.found.counts.put(cluster, number - 1);
            }
        }
    }

    /// Returns the indices of the blocks that are needed, including those that cover the new
    /// blocks, and the number of clusters of a table for them.
    fn needed_blocks(&self, first: u64) -> Result<(Vec<u64>, u64), InvalidImage> {
        let per_block = self.per_block;
        let mut numbers: BTreeSet<u64> = BTreeSet::new();
        let mut from = 0;
        while let Some(cluster) = self.found.counts.used(from..u64::MAX).next() {
            let number = cluster / per_block;
            numbers.insert(number);
            from = (number + 1) * per_block;
        }
        // Blocks and table cover themselves too, so their numbers are computed until they are
        // stable.
        let mut table_clusters = 1;
        loop {
            let end = first + numbers.len() as u64 + table_clusters;
            if end > OFFSET_LIMIT >> self.header.cluster_bits {
                return Err(InvalidImage::new(
                    "there is no space for new refcounts below the largest offset",
                ));
            }
            let before = (numbers.len(), table_clusters);
            numbers.extend(first / per_block..=(end - 1) / per_block);
            let last = numbers.last().copied().unwrap_or(0);
            let table_bytes = (last + 1) * 8;
            if table_bytes > MAX_REFCOUNT_TABLE {
                return Err(InvalidImage::new(format!(
                    "new refcounts would need a table of {table_bytes} bytes"
                )));
            }
            table_clusters = table_bytes.div_ceil(self.header.cluster_bytes());
            if (numbers.len(), table_clusters) == before {
                return Ok((numbers.into_iter().collect(), table_clusters));
            }
        }
    }

    fn block(&self, number: u64) -> Vec<u8> {
        let order = self.header.refcount_order;
        let mut block = vec![0; self.header.cluster_bytes() as usize];
        let per_block = refcount_entries::entry_count(block.len() as u64, order);
        let first = number * per_block;
        for cluster in self.found.counts.used(first..first + per_block) {
            let counted = self.found.counts.get(cluster).min(refcount_entries::max_refcount(order));
            refcount_entries::put(&mut block, order, (cluster - first) as usize, counted);
        }
        block
    }
}
