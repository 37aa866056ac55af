//! Snapshots that do not state the size of their disk, which version 3 requires: the table is
//! written again, complete.
//!
//! ```text
//!   plan: space behind the end of the file, counted ─► refcounts are corrected
//!         ─► put: the table, then the header ─► the old table is a leak
//! ```
//!
//! The missing size is what QEMU and weir assume anyway: the size that the disk has now. Version 2
//! does not require it, so old images may have such entries.
//!
//! Never overwrites the table that the header leads to.

use super::{Pass, bytes, write_header};
use reactor::error::Result;

use crate::qcow2::{
    MetadataError,
    snapshot::{self, Snapshot},
};

/// A table that the header does not lead to yet.
#[derive(Debug)]
pub(super) struct Planned {
    offset: u64,
    bytes: Vec<u8>,
    /// What is wrong with the old one.
    incomplete: Vec<String>,
    /// Of the file before there was room for it.
    file_bytes: u64,
}

impl Pass<'_> {
    /// Says which entries are incomplete, or makes room for a table in which they are not.
    ///
    /// A table with entries that cannot be used stays unless `is_sound`: it could only be written
    /// without them.
    pub(super) async fn plan_snapshot_table(&mut self, snapshots: &[Snapshot], is_sound: bool) -> Result<()> {
        let is_incomplete = |snapshot: &Snapshot| self.header.version >= 3 && snapshot.disk_bytes.is_none();
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
        let complete: Vec<Snapshot> = snapshots.iter().map(|snapshot| self.complete(snapshot)).collect();
        // A table that would be too large stays as it is.
        let (true, Ok(bytes)) = (self.repairs_all() && is_sound, snapshot::encode(&complete)) else {
            incomplete.into_iter().for_each(|what| self.corrupt(what));
            return Ok(());
        };
        let file_bytes = self.storage.size_bytes();
        let offset = self.file_clusters << self.header.cluster_bits;
        let end = (offset + bytes.len() as u64).next_multiple_of(self.header.cluster_bytes());
        bytes::grow(self.storage, end).await?;
        self.file_clusters = end >> self.header.cluster_bits;
        self.count_region("the new snapshot table", offset, bytes.len() as u64, 1);
        self.planned = Some(Planned { offset, bytes, incomplete, file_bytes });
        Ok(())
    }

    /// Whether the cluster was free until it was planned for a table.
    pub(super) fn is_planned(&self, cluster: u64) -> bool {
        let bits = self.header.cluster_bits;
        let places = self.planned.as_ref().map(|planned| (planned.offset, planned.bytes.len() as u64));
        places.is_some_and(|(offset, length)| {
            (offset >> bits..(offset + length).div_ceil(1 << bits)).contains(&cluster)
        })
    }

    fn complete(&self, snapshot: &Snapshot) -> Snapshot {
        let mut complete = snapshot.clone();
        if snapshot.disk_bytes.is_none() {
            complete.disk_bytes = Some(self.header.size_bytes);
            complete.instructions = Some(u64::MAX);
        }
        complete
    }

    /// Writes the planned table and has the header lead to it, where the refcounts allow that.
    pub(super) async fn put_snapshot_table(&mut self) -> std::result::Result<(), MetadataError> {
        let Some(Planned { offset, bytes, incomplete, file_bytes }) = self.planned.take() else {
            return Ok(());
        };
        let bits = self.header.cluster_bits;
        let mut clusters = offset >> bits..(offset + bytes.len() as u64).div_ceil(1 << bits);
        if clusters.any(|cluster| self.stored.get(cluster) != 0) {
            incomplete.into_iter().for_each(|what| self.corrupt(what));
            return Ok(bytes::set_size(self.storage, file_bytes).await?);
        }
        bytes::write(self.storage, offset, &bytes).await?;
        self.storage.flush().await?;
        self.header.snapshots_offset = offset;
        write_header(self.storage, &self.header).await?;
        incomplete.into_iter().for_each(|what| self.corrected(what));
        Ok(())
    }
}
