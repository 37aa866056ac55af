//! Compares the stored refcounts with the counted references.
//!
//! Each block is read once, for the first table entry that refers to it. If a block is at an
//! impossible offset, the whole structure is rebuilt ([`rebuild`](super::rebuild)), because
//! clusters that look free may be in use.

use std::{collections::HashSet, ops::Range};

use super::{CheckPass, Repair, metadata_io};
use crate::qcow2::{MetadataError, big_endian::words, refcount_entries};

// Bits 0 to 8 of a table entry are reserved, and so are those above the offset limit.
const RESERVED: u64 = 0xff00_0000_0000_01ff;

/// The usable part of the refcount table.
#[derive(Debug, Default)]
pub(super) struct Structures {
    /// Offsets of blocks by index; 0 for a missing or unusable block.
    pub(super) blocks: Vec<u64>,
    /// True if the clusters of the table were counted.
    pub(super) is_table_counted: bool,
    /// True if the structure has damage beyond wrong numbers. A block may overlap another
    /// structure, so no block may be written.
    pub(super) is_damaged: bool,
}

impl CheckPass<'_> {
    /// Reads the refcount table and counts its clusters and its blocks. `None` if it cannot be
    /// read.
    pub(super) async fn count_refcounts(&mut self) -> Option<Structures> {
        let offset = self.header.refcount_table_offset;
        let length = u64::from(self.header.refcount_table_clusters) << self.header.cluster_bits;
        let mut structures = Structures::default();
        if !self.is_inside(offset, length) {
            let what = format!("the refcount table at {offset:#x} is not inside the file");
            self.report_refcount_damage(&mut structures, what);
            self.unknown_blocks = None;
            return Some(structures);
        }
        let Some(table) = self.read("the refcount table", offset, length).await else {
            self.unknown_blocks = None;
            return None;
        };
        structures.is_table_counted = self.count_region("the refcount table", offset, length, 1);
        let mut seen = HashSet::new();
        for (index, block) in words(&table).enumerate() {
            let repeated = "points to the block of an earlier entry";
            let is_repeated = block != 0 && !seen.insert(block);
            let fault = self.block_fault(block).or(is_repeated.then_some(repeated));
            if let Some(fault) = fault {
                let message = format!("entry {index} of the refcount table, {block:#x}, {fault}");
                self.report_refcount_damage(&mut structures, message);
                self.mark_block_unknown(index as u64);
            } else if block != 0 {
                self.found.counts.add(block >> self.header.cluster_bits, 1);
            }
            structures.blocks.push(if fault.is_none() { block } else { 0 });
        }
        // A consistent image has no other structure on these clusters.
        let table_clusters =
            offset >> self.header.cluster_bits..(offset + length) >> self.header.cluster_bits;
        let block_clusters = structures
            .blocks
            .iter()
            .filter(|block| **block != 0)
            .map(|block| block >> self.header.cluster_bits);
        let shared: Vec<u64> = table_clusters
            .chain(block_clusters)
            .filter(|cluster| self.found.counts.get(*cluster) != 1)
            .collect();
        for cluster in shared {
            self.report_refcount_damage(
                &mut structures,
                format!("cluster {cluster} holds refcounts and other data"),
            );
        }
        Some(structures)
    }

    /// Records that the content of a refcount block is unknown.
    fn mark_block_unknown(&mut self, index: u64) {
        if let Some(unknown) = &mut self.unknown_blocks {
            unknown.insert(index);
        }
    }

    fn report_refcount_damage(&mut self, structures: &mut Structures, message: String) {
        structures.is_damaged = true;
        if self.can_rebuild() {
            self.report_repair(message);
        } else {
            self.report_corruption(message);
        }
    }

    pub(super) fn can_rebuild(&self) -> bool {
        self.repairs_all() && !self.is_incomplete()
    }

    /// Fault of an entry of the refcount table.
    fn block_fault(&self, entry: u64) -> Option<&'static str> {
        let cluster = self.header.cluster_bytes();
        if entry & RESERVED != 0 {
            Some("has reserved bits")
        } else if !entry.is_multiple_of(cluster) {
            Some("has an offset that is not aligned to a cluster")
        } else if entry != 0 && !self.is_inside(entry, cluster) {
            Some("points beyond the end of the file")
        } else {
            None
        }
    }

    /// Compares the refcounts and repairs them as far as allowed.
    pub(super) async fn compare(&mut self, structures: Structures) -> Result<(), MetadataError> {
        self.is_frozen = structures.is_damaged;
        if structures.is_damaged && self.can_rebuild() {
            return self.rebuild(&structures).await;
        }
        let per_block = self.per_block;
        // All increments first, made durable, then the decrements.
        for lowering in [false, true] {
            for (index, block) in structures.blocks.iter().enumerate() {
                let first = (index as u64).saturating_mul(per_block);
                let clusters = first..first.saturating_add(per_block).min(self.file_clusters);
                if *block != 0 && !clusters.is_empty() {
                    self.compare_block(*block, clusters, lowering).await?;
                }
            }
            self.flush_repairs().await?;
        }
        let mut is_uncounted = false;
        for clusters in without_block(&structures.blocks, per_block, self.file_clusters) {
            is_uncounted |= self.find_uncounted(clusters);
        }
        if is_uncounted && self.can_rebuild() {
            self.rebuild(&structures).await?;
        }
        let end =
            self.found.counts.last_used().map_or(0, |cluster| (cluster + 1) << self.header.cluster_bits);
        self.report.image_end_offset = self.report.image_end_offset.max(end);
        Ok(())
    }

    /// Finds clusters in use that no refcount block covers.
    fn find_uncounted(&mut self, clusters: Range<u64>) -> bool {
        let uncounted: Vec<u64> = self.found.counts.used(clusters).collect();
        for cluster in &uncounted {
            let message =
                format!("cluster {cluster} refcount=0 reference={}", self.found.counts.get(*cluster));
            if self.can_rebuild() {
                self.report_repair(message);
            } else {
                self.report_corruption(message);
                self.stored.put(*cluster, 2);
            }
        }
        !uncounted.is_empty()
    }

    /// Compares one block: in the first phase refcounts that are too low, in the second
    /// (`lowering`) all others.
    async fn compare_block(
        &mut self,
        offset: u64,
        clusters: Range<u64>,
        lowering: bool,
    ) -> Result<(), MetadataError> {
        let Some(mut block) = self.read("a refcount block", offset, self.header.cluster_bytes()).await else {
            self.mark_block_unknown(clusters.start / self.per_block);
            return Ok(());
        };
        let order = self.header.refcount_order;
        let mut changed = false;
        for cluster in clusters.clone() {
            let index = (cluster - clusters.start) as usize;
            let (stored, counted) =
                (refcount_entries::get(&block, order, index), self.found.counts.get(cluster));
            if stored > 0 && lowering {
                let end = (cluster + 1) << self.header.cluster_bits;
                self.report.image_end_offset = self.report.image_end_offset.max(end);
            }
            if stored == counted || (stored > counted) != lowering {
                continue;
            }
            if self.report_wrong_refcount(cluster, stored, counted) {
                if lowering && counted == 1 {
                    self.lowered_to_one.insert(cluster);
                }
                refcount_entries::put(&mut block, order, index, counted);
                changed = true;
            } else {
                self.stored.put(cluster, if stored == 1 { 1 } else { 2 });
            }
        }
        if changed {
            metadata_io::write(self.storage, offset, &block).await?;
        }
        Ok(())
    }

    /// Reports a wrong refcount; true if it is to be corrected.
    fn report_wrong_refcount(&mut self, cluster: u64, stored: u64, counted: u64) -> bool {
        let numbers = format!("cluster {cluster} refcount={stored} reference={counted}");
        let is_leak = stored > counted;
        let fits = counted <= refcount_entries::max_refcount(self.header.refcount_order);
        if (stored, counted) == (0, 1) && !self.is_frozen && self.is_planned(cluster) {
            // The cluster of a planned table; nothing was wrong.
            return true;
        }
        let is_repaired = match self.repair {
            _ if self.is_frozen => false,
            Repair::Nothing => false,
            Repair::Leaks => is_leak && !self.is_incomplete(),
            Repair::All | Repair::Forced => fits && !(is_leak && self.is_incomplete()),
        };
        match (is_repaired, is_leak) {
            (true, true) => self.report.leaks_fixed += 1,
            (true, false) => self.report.corruptions_fixed += 1,
            (false, true) if self.is_incomplete() => self.report.possible_leaks += 1,
            (false, true) => self.report.leaks += 1,
            (false, false) => self.report.corruptions += 1,
        }
        let prefix = match (is_repaired, is_leak) {
            (true, _) => "Repaired:",
            // Not a finding: the report contains their number and the reason.
            (false, true) if self.is_incomplete() => return false,
            (false, true) => "Leaked",
            (false, false) => "ERROR",
        };
        self.report.report(format!("{prefix} {numbers}"));
        is_repaired
    }
}

/// Ranges of clusters that no block covers.
fn without_block(blocks: &[u64], per_block: u64, file_clusters: u64) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    for (index, _) in blocks.iter().enumerate().filter(|(_, block)| **block == 0) {
        let first = (index as u64).saturating_mul(per_block);
        ranges.push(first..first.saturating_add(per_block).min(file_clusters));
    }
    ranges.push((blocks.len() as u64).saturating_mul(per_block)..file_clusters);
    ranges.retain(|range| !range.is_empty());
    ranges
}
