//! Changes of the refcounts and COPIED flags of all clusters that an L1 table refers to, directly
//! or through its L2 tables.
//!
//! Requires that no request is in flight: tables are read from the file, which then contains all
//! metadata.
//!
//! Never follows an L2 table twice or beyond the end of the file: such an image is corrupt, which
//! is reported before anything is changed.

use std::collections::HashSet;

use super::SnapshotError;
use crate::qcow2::{
    InvalidImage, Qcow2Image,
    big_endian::{u64_at, words},
    entry::{COPIED, ClusterMapping, L1Entry},
};

/// New value of the COPIED flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopiedFlags {
    /// Cleared: everything is shared with a snapshot.
    Clear,
    /// Set where the refcount is 1.
    Recount,
}

/// An L1 table as in the file.
#[derive(Clone, Debug)]
pub(super) struct L1TableCopy {
    pub(super) bytes: Vec<u8>,
    /// Offsets of its L2 tables, without duplicates.
    pub(super) tables: Vec<u64>,
}

impl Qcow2Image {
    /// Reads and checks an L1 table.
    pub(super) async fn read_l1(&self, offset: u64, entries: u32) -> Result<L1TableCopy, SnapshotError> {
        let bytes = self.read_metadata(offset, u64::from(entries) * 8).await?;
        let mut seen = HashSet::new();
        let mut tables = Vec::new();
        for raw in words(&bytes) {
            let table = L1Entry::decode(raw, self.shape)?.offset;
            if table == 0 {
                continue;
            }
            if !seen.insert(table) {
                return Err(
                    InvalidImage::new(format!("two L1 entries refer to the L2 table at {table:#x}")).into()
                );
            }
            tables.push(table);
        }
        Ok(L1TableCopy { bytes, tables })
    }

    /// Adds `by` (1 or -1) to the refcounts of all L2 tables and of everything they refer to. An
    /// increment that fails is undone.
    pub(super) async fn change_refcounts_of_snapshot(
        &self,
        tables: &[u64],
        by: i64,
    ) -> Result<(), SnapshotError> {
        for (done, table) in tables.iter().enumerate() {
            let changed = self.change_table(*table, by).await;
            if let Err(error) = changed {
                // A refcount may overflow after others were incremented: undo those increments.
                if by > 0 {
                    for table in &tables[..done] {
                        self.change_table(*table, -by).await?;
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    async fn change_table(&self, table: u64, by: i64) -> Result<(), SnapshotError> {
        let cluster = 1 << self.shape.cluster_bits;
        // Read before the table is freed and possibly reused.
        let mut runs = self.runs_of(table).await?;
        runs.push((table, cluster));
        for (done, (offset, length)) in runs.iter().enumerate() {
            if let Err(error) = self.change_refcount(*offset, *length, by).await {
                if by > 0 {
                    for (offset, length) in &runs[..done] {
                        self.change_refcount(*offset, *length, -by).await?;
                    }
                }
                return Err(SnapshotError::refcount_error(error, *offset));
            }
        }
        Ok(())
    }

    /// Ranges of the file that an L2 table refers to; adjacent clusters are merged.
    async fn runs_of(&self, table: u64) -> Result<Vec<(u64, u64)>, SnapshotError> {
        let cluster = 1 << self.shape.cluster_bits;
        let bytes = self.read_metadata(table, cluster).await?;
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let mut merges = false;
        for entry in bytes.chunks_exact(self.shape.entry_bytes()) {
            match self.decode(entry)? {
                ClusterMapping::Standard(standard) => {
                    let Some(host) = standard.host.filter(|_| !self.shape.data_file) else { continue };
                    match runs.last_mut() {
                        Some((offset, length)) if merges && *offset + *length == host => *length += cluster,
                        _ => runs.push((host, cluster)),
                    }
                    merges = true;
                }
                ClusterMapping::Compressed { offset, length } => {
                    // Each compressed cluster counts as a reference to its host cluster, even if
                    // several share one, so they are not merged.
                    runs.push((offset, length));
                    merges = false;
                }
            }
        }
        Ok(runs)
    }

    fn decode(&self, entry: &[u8]) -> Result<ClusterMapping, InvalidImage> {
        let map = entry.get(8..16).map_or(0, |map| u64_at(map, 0));
        self.shape.decode(u64_at(entry, 0), map)
    }

    /// Sets the flags of the active L1 table and of its L2 tables, in the file.
    pub(super) async fn set_active_flags(&self, flags: CopiedFlags) -> Result<(), SnapshotError> {
        let header = self.header();
        let L1TableCopy { bytes, tables } = self.read_l1(header.l1_offset, header.l1_entries).await?;
        self.set_flags(&tables, flags).await?;
        let l1 = self.with_copied_flags(&bytes, flags).await?;
        if l1 != bytes {
            self.write_metadata(header.l1_offset, &l1).await?;
        }
        Ok(())
    }

    /// Returns an encoded L1 table with its flags set according to `flags`.
    pub(super) async fn with_copied_flags(
        &self,
        l1: &[u8],
        flags: CopiedFlags,
    ) -> Result<Vec<u8>, SnapshotError> {
        let mut bytes = Vec::with_capacity(l1.len());
        for raw in words(l1) {
            let entry = L1Entry::decode(raw, self.shape)?;
            let copied = entry.offset != 0 && self.is_copied(entry.offset, flags).await?;
            bytes.extend(L1Entry { copied, ..entry }.encode().to_be_bytes());
        }
        Ok(bytes)
    }

    /// Sets the flags in these L2 tables, in the file.
    pub(super) async fn set_flags(&self, tables: &[u64], flags: CopiedFlags) -> Result<(), SnapshotError> {
        for table in tables {
            let mut bytes = self.read_metadata(*table, 1 << self.shape.cluster_bits).await?;
            let mut changed = false;
            for at in (0..bytes.len()).step_by(self.shape.entry_bytes()) {
                let entry = &bytes[at..at + self.shape.entry_bytes()];
                let ClusterMapping::Standard(standard) = self.decode(entry)? else { continue };
                let Some(host) = standard.host.filter(|_| !self.shape.data_file) else { continue };
                let raw = u64_at(entry, 0);
                let right = raw & !COPIED | if self.is_copied(host, flags).await? { COPIED } else { 0 };
                if raw != right {
                    bytes[at..at + 8].copy_from_slice(&right.to_be_bytes());
                    changed = true;
                }
            }
            // Unchanged tables are not written; in a large image these are most of them.
            if changed {
                self.write_metadata(*table, &bytes).await?;
            }
        }
        Ok(())
    }

    async fn is_copied(&self, offset: u64, flags: CopiedFlags) -> Result<bool, SnapshotError> {
        Ok(flags == CopiedFlags::Recount && self.refcount(offset).await? == 1)
    }
}
