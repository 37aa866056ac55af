//! Completes snapshot entries that lack the size of their disk, which version 3 requires.
//!
//! ```text
//!   plan: space after the end of the file, counted ─► refcounts are corrected
//!         ─► write: the table, then the header ─► the old table is a leak
//! ```
//!
//! QEMU and weir assume the present size of the disk for such an entry, so this size is written.
//! Version 2 does not require it, so old images may have such entries.
//!
//! Never overwrites the table that the header refers to.

use super::{CheckPass, metadata_io, write_header};
use reactor::error::Result;

use crate::qcow2::{
    MetadataError,
    snapshot::{self, InternalSnapshot},
};

/// A new table that the header does not refer to yet.
#[derive(Debug)]
pub(super) struct PlannedSnapshotTable {
    offset: u64,
    bytes: Vec<u8>,
    /// Faults of the old table.
    incomplete: Vec<String>,
    /// Size of the file before it grew for the table.
    file_bytes: u64,
}

impl CheckPass<'_> {
    /// Reports incomplete entries, or plans a table in which they are complete and grows the file
    /// for it.
    ///
    /// A table with unusable entries (`is_sound` is false) is not replaced: a new table could not
    /// contain them.
    pub(super) async fn plan_snapshot_table(
        &mut self,
        snapshots: &[InternalSnapshot],
        is_sound: bool,
    ) -> Result<()> {
        let is_incomplete =
            |snapshot: &InternalSnapshot| self.header.version >= 3 && snapshot.disk_bytes.is_none();
        let incomplete: Vec<String> = (0..)
            .zip(snapshots)
            .filter(|(_, snapshot)| is_incomplete(snapshot))
            .map(|(number, snapshot)| {
                format!("snapshot table entry {number} ({:?}) is incomplete", snapshot.name())
            })
            .collect();
        if incomplete.is_empty() {
            return Ok(());
        }
        let complete: Vec<InternalSnapshot> =
            snapshots.iter().map(|snapshot| self.complete(snapshot)).collect();
        // A table that would exceed the size limit stays.
        let (true, Ok(bytes)) = (self.repairs_all() && is_sound, snapshot::encode(&complete)) else {
            incomplete.into_iter().for_each(|finding| self.report_corruption(finding));
            return Ok(());
        };
        let file_bytes = self.storage.size_bytes();
        let offset = self.file_clusters << self.header.cluster_bits;
        let end = (offset + bytes.len() as u64).next_multiple_of(self.header.cluster_bytes());
        metadata_io::grow(self.storage, end).await?;
        self.file_clusters = end >> self.header.cluster_bits;
        self.count_region("the new snapshot table", offset, bytes.len() as u64, 1);
        self.planned = Some(PlannedSnapshotTable { offset, bytes, incomplete, file_bytes });
        Ok(())
    }

    /// True if the cluster belongs to the planned table. It was unused before.
    pub(super) fn is_planned(&self, cluster: u64) -> bool {
        let bits = self.header.cluster_bits;
        let region = self.planned.as_ref().map(|planned| (planned.offset, planned.bytes.len() as u64));
        region.is_some_and(|(offset, length)| {
            (offset >> bits..(offset + length).div_ceil(1 << bits)).contains(&cluster)
        })
    }

    fn complete(&self, snapshot: &InternalSnapshot) -> InternalSnapshot {
        let mut complete = snapshot.clone();
        if snapshot.disk_bytes.is_none() {
            complete.disk_bytes = Some(self.header.size_bytes);
            complete.instructions = Some(u64::MAX);
        }
        complete
    }

    /// Writes the planned table and switches the header to it, if its clusters have their
    /// refcounts.
    pub(super) async fn write_snapshot_table(&mut self) -> std::result::Result<(), MetadataError> {
        let Some(PlannedSnapshotTable { offset, bytes, incomplete, file_bytes }) = self.planned.take() else {
            return Ok(());
        };
        let bits = self.header.cluster_bits;
        let mut clusters = offset >> bits..(offset + bytes.len() as u64).div_ceil(1 << bits);
        if clusters.any(|cluster| self.stored.get(cluster) != 0) {
            // Clusters of the table that could not get their refcount could be allocated again,
            // which would overwrite the table: undo the growth of the file.
            incomplete.into_iter().for_each(|finding| self.report_corruption(finding));
            return Ok(metadata_io::set_size(self.storage, file_bytes).await?);
        }
        metadata_io::write(self.storage, offset, &bytes).await?;
        self.storage.flush().await?;
        self.header.snapshots_offset = offset;
        write_header(self.storage, &self.header).await?;
        incomplete.into_iter().for_each(|finding| self.report_repair(finding));
        Ok(())
    }
}
