//! Applies the verdict on every entry of the L2 tables.
//!
//! A full repair corrects flaws. An ambiguous entry stays, and then no cluster of the image is
//! reported as leaked or freed: the cluster that the entry refers to may look unused.

use super::{
    CheckPass, Repair,
    entries::{EntryVerdict, RawEntry, judge_entry},
    metadata_io,
    walk::ClusterUses,
};
use reactor::error::Result;

use crate::qcow2::{
    big_endian::u64_at,
    entry::{COMPRESSED, COPIED, ClusterMapping, OFFSET},
};

impl CheckPass<'_> {
    pub(super) async fn walk_l2(&mut self, offset: u64, uses: &ClusterUses) -> Result<()> {
        let cluster = self.header.cluster_bytes();
        let Some(mut table) = self.read("an L2 table", offset, cluster).await else { return Ok(()) };
        let base = uses.owners.last().map_or(0, |owner| self.guest_of(*owner));
        let entry_bytes = self.shape.entry_bytes();
        let mut expected = None;
        let mut changed = false;
        for (number, at) in (0_u64..).zip((0..table.len()).step_by(entry_bytes)) {
            let map = if self.shape.extended { u64_at(&table, at + 8) } else { 0 };
            let entry = (u64_at(&table, at), map);
            if entry == (0, 0) {
                continue;
            }
            let guest = base.wrapping_add(number * cluster);
            // Checked before it is counted: only the references of the repaired entry count.
            let verdict =
                judge_entry(self.shape, entry, guest, |offset, length| self.fault_at(offset, length));
            let updated = self.apply_verdict(entry, verdict, offset, at, uses);
            self.count_entry(updated, uses, &mut expected);
            if updated != entry {
                table[at..at + 8].copy_from_slice(&updated.0.to_be_bytes());
                if self.shape.extended {
                    table[at + 8..at + 16].copy_from_slice(&updated.1.to_be_bytes());
                }
                changed = true;
            }
        }
        if changed {
            metadata_io::write(self.storage, offset, &table).await?;
        }
        Ok(())
    }

    /// Reports the verdict on the entry at byte `at` of a table, and returns its new value.
    fn apply_verdict(
        &mut self,
        entry: RawEntry,
        verdict: EntryVerdict,
        table: u64,
        at: usize,
        uses: &ClusterUses,
    ) -> RawEntry {
        if verdict.is_sound() {
            return entry;
        }
        let label = |why: &str| format!("the L2 entry {:#x} at {:#x} {why}", entry.0, table + at as u64);
        let may_write = self.repairs_all() && self.may_write(table);
        let is_ambiguous = verdict.ambiguity.is_some();
        if let Some(ambiguity) = verdict.ambiguity {
            let is_lost = may_write && self.repair == Repair::Forced && self.fits_in_report(&uses.owners);
            let cluster = self.header.cluster_bytes();
            let first = (at / self.shape.entry_bytes()) as u64 * cluster;
            let part = cluster / u64::from(self.shape.subclusters());
            for number in 0..self.shape.subclusters() {
                if ambiguity.subclusters >> number & 1 == 1 {
                    let start = first + u64::from(number) * part;
                    self.add_ranges(&uses.owners, start..start + part, is_lost);
                }
            }
            if is_lost {
                self.report_repair(format!("{}; its content is discarded", label(&ambiguity.reason)));
                return ambiguity.given_up;
            }
            self.report_hiding_damage(label(&ambiguity.reason));
        }
        // An ambiguous entry keeps its flaws as evidence.
        let is_corrected = may_write && !is_ambiguous;
        for flaw in verdict.flaws {
            if is_corrected {
                self.report_repair(label(&flaw));
            } else {
                self.report_corruption(label(&flaw));
            }
        }
        if is_corrected { verdict.corrected } else { entry }
    }

    /// Counts the clusters that an entry refers to, as far as they exist in the file.
    fn count_entry(&mut self, (raw, map): RawEntry, uses: &ClusterUses, expected: &mut Option<u64>) {
        if raw & COMPRESSED != 0 {
            if let Ok(ClusterMapping::Compressed { offset, length }) = self.shape.decode(raw, map) {
                self.count_compressed(offset, length, uses);
            }
            return;
        }
        let host = raw & OFFSET;
        if host == 0 && !(raw & COPIED != 0 && self.shape.data_file) {
            return;
        }
        let cluster = self.header.cluster_bytes();
        if !host.is_multiple_of(cluster) {
            return;
        }
        if !self.shape.data_file {
            if !self.is_inside(host, cluster) {
                return;
            }
            self.found.counts.add(host >> self.header.cluster_bits, uses.all);
        }
        self.report.allocated_clusters += uses.active;
        if expected.is_some_and(|expected| expected != host) {
            self.report.fragmented_clusters += uses.active;
        }
        *expected = Some(host.wrapping_add(cluster));
    }

    fn count_compressed(&mut self, offset: u64, length: u64, uses: &ClusterUses) {
        if !self.is_inside(offset, length) {
            return;
        }
        let bits = self.header.cluster_bits;
        for cluster in offset >> bits..=(offset + length - 1) >> bits {
            self.found.counts.add(cluster, uses.all);
        }
        self.report.allocated_clusters += uses.active;
        self.report.compressed_clusters += uses.active;
        // Compressed clusters share host clusters; QEMU counts all of them as fragmented.
        self.report.fragmented_clusters += uses.active;
    }
}
