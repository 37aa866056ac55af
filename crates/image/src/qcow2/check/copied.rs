//! The COPIED flag, which allows writing a cluster in place: set if and only if the refcount is
//! one.
//!
//! Flags are meaningful only in the active L1 table and its L2 tables.
//!
//! Never checks the flag of a cluster whose stored refcount is unknown.

use std::collections::BTreeSet;

use super::{CheckPass, Repair, metadata_io};
use reactor::error::Result;

use crate::qcow2::{
    big_endian::u64_at,
    entry::{COPIED, ClusterMapping, L1Entry},
};

impl CheckPass<'_> {
    /// Compares the flags with the refcounts that are now in the file.
    pub(super) async fn check_copied(&mut self) -> Result<()> {
        let (offset, length) = (self.header.l1_offset, u64::from(self.header.l1_entries) * 8);
        if length == 0 || !self.is_inside(offset, length) {
            return Ok(());
        }
        // At most 32 MiB, checked with the header.
        let Some(mut l1) = self.read("the L1 table", offset, length).await else { return Ok(()) };
        let mut tables = BTreeSet::new();
        for at in (0..l1.len()).step_by(8) {
            let raw = u64_at(&l1, at);
            let Ok(L1Entry { offset: table, .. }) = L1Entry::decode(raw, self.shape) else { continue };
            if table == 0 || !self.is_inside(table, self.header.cluster_bytes()) {
                continue;
            }
            tables.insert(table);
            let place = offset + at as u64;
            let label = || format!("the L1 entry {} of the L2 table at {table:#x}", at / 8);
            if let Some(corrected) = self.flag(raw, table, place, label) {
                l1[at..at + 8].copy_from_slice(&corrected.to_be_bytes());
                metadata_io::write(self.storage, place, &corrected.to_be_bytes()).await?;
            }
        }
        for table in tables {
            self.check_table(table).await?;
        }
        Ok(())
    }

    async fn check_table(&mut self, offset: u64) -> Result<()> {
        let Some(mut table) = self.read("an L2 table", offset, self.header.cluster_bytes()).await else {
            return Ok(());
        };
        let mut changed = false;
        for at in (0..table.len()).step_by(self.shape.entry_bytes()) {
            let raw = u64_at(&table, at);
            if raw == 0 {
                continue;
            }
            let map = if self.shape.extended { u64_at(&table, at + 8) } else { 0 };
            let Ok(ClusterMapping::Standard(standard)) = self.shape.decode(raw, map) else { continue };
            let Some(host) = standard.host else { continue };
            if !self.shape.data_file && !self.is_inside(host, self.header.cluster_bytes()) {
                continue;
            }
            let place = offset + at as u64;
            let label = || format!("the L2 entry at {place:#x} of the cluster at {host:#x}");
            if let Some(corrected) = self.flag_of_data(raw, host, place, label) {
                table[at..at + 8].copy_from_slice(&corrected.to_be_bytes());
                changed = true;
            }
        }
        if changed {
            metadata_io::write(self.storage, offset, &table).await?;
        }
        Ok(())
    }

    /// Clusters in a data file have no refcount; each belongs to one entry, so its flag must be
    /// set.
    fn flag_of_data(&mut self, raw: u64, host: u64, place: u64, label: impl Fn() -> String) -> Option<u64> {
        if self.shape.data_file {
            return self.compare_flag(raw, true, place, label);
        }
        self.flag(raw, host, place, label)
    }

    /// Corrected value of the entry at `place`; `None` if the entry needs no correction.
    fn flag(&mut self, raw: u64, offset: u64, place: u64, label: impl Fn() -> String) -> Option<u64> {
        let cluster = offset >> self.header.cluster_bits;
        let is_lowered = self.repair == Repair::Leaks && self.lowered_to_one.contains(&cluster);
        if is_lowered && raw & COPIED == 0 && self.may_write(place) {
            // Belongs to the repair that lowered the refcount, so it is not counted as a finding.
            return Some(raw | COPIED);
        }
        self.compare_flag(raw, self.is_used_once(cluster)?, place, label)
    }

    fn compare_flag(
        &mut self,
        raw: u64,
        expected: bool,
        place: u64,
        label: impl Fn() -> String,
    ) -> Option<u64> {
        if (raw & COPIED != 0) == expected {
            return None;
        }
        let state = if expected {
            "is not marked COPIED, but its refcount is 1"
        } else {
            "is marked COPIED, but its refcount is not 1"
        };
        if self.repairs_all() && self.may_write(place) {
            self.report_repair(format!("{} {state}", label()));
            return Some(raw ^ COPIED);
        }
        self.report_corruption(format!("{} {state}", label()));
        None
    }

    /// True if the refcount in the file is now 1; `None` if it is unknown.
    fn is_used_once(&self, cluster: u64) -> Option<bool> {
        let unknown = self.unknown_blocks.as_ref()?;
        if unknown.contains(&(cluster / self.per_block)) {
            return None;
        }
        Some(match self.stored.get(cluster) {
            0 => self.found.counts.get(cluster) == 1,
            other => other == 1,
        })
    }
}
