//! Creates, applies and deletes snapshots.
//!
//! Order of writes: refcounts are raised before a further reference is written; the header changes
//! in one sector; refcounts are lowered after the last reference is gone. A crash therefore leaves
//! the image from before or after the change, and at worst leaks.
//!
//! Between the change of refcounts and that of the COPIED flags, a check finds inconsistent flags;
//! their effect is limited to copies or leaks. A cluster that may have two owners never has the
//! flag. If it is unknown which header the file contains, clusters of either are never freed,
//! which may leak them.
//!
//! Never changes guest data, nor clusters that a snapshot refers to.

use std::sync::atomic::Ordering::Release;

use super::{
    InternalSnapshot, SnapshotError, encode, read,
    refcount_change::{CopiedFlags, L1TableCopy},
};
use crate::qcow2::{
    InvalidImage, Qcow2Image,
    header::{MAX_L1, MAX_SNAPSHOTS, Qcow2Header},
    l1::{L1, padded},
};

/// Name and date of a new snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewSnapshot<'a> {
    /// Name; at most 65,535 bytes, not necessarily unique.
    pub name: &'a str,
    /// Date in seconds since 1970.
    pub date_s: u32,
    /// Nanoseconds of the date.
    pub date_ns: u32,
}

type Result<T> = std::result::Result<T, SnapshotError>;

impl Qcow2Image {
    /// Reads the snapshots from the file.
    ///
    /// # Errors
    /// [`SnapshotError::Invalid`] and [`SnapshotError::Failed`].
    pub async fn snapshots(&self) -> Result<Vec<InternalSnapshot>> {
        Ok(self.snapshot_table().await?.0)
    }

    async fn snapshot_table(&self) -> Result<(Vec<InternalSnapshot>, u64)> {
        let (snapshots, length) = read(self.file.storage(), &self.header()).await?;
        Ok((snapshots, length as u64))
    }

    /// Creates a snapshot of the disk's present content. Requests wait meanwhile; all completed
    /// writes are part of the snapshot.
    ///
    /// # Errors
    /// [`SnapshotError`]; the disk is unchanged.
    pub async fn create_snapshot(&self, new: NewSnapshot<'_>) -> Result<InternalSnapshot> {
        self.check_snapshots()?;
        let _quiesced = self.quiesce().await?;
        let header = self.header();
        let (mut snapshots, old_length) = self.snapshot_table().await?;
        if header.snapshots >= MAX_SNAPSHOTS {
            return Err(SnapshotError::TooMany);
        }
        let L1TableCopy { bytes, tables } = self.read_l1(header.l1_offset, header.l1_entries).await?;
        let l1 = self.with_copied_flags(&bytes, CopiedFlags::Clear).await?;
        let mut snapshot = InternalSnapshot {
            l1_entries: header.l1_entries,
            id: next_id(&snapshots),
            name: new.name.as_bytes().to_vec(),
            date_s: new.date_s,
            date_ns: new.date_ns,
            disk_bytes: Some(header.size_bytes),
            instructions: Some(u64::MAX),
            ..InternalSnapshot::default()
        };
        // First: no reference may exist before it is counted.
        self.change_refcounts_of_snapshot(&tables, 1).await?;
        let created = async {
            snapshot.l1_offset = self.store(&l1).await?;
            snapshots.push(snapshot.clone());
            let result = self.publish_snapshot(&header, &snapshots, old_length).await;
            self.undo_on_error(&result, snapshot.l1_offset, l1.len()).await?;
            result
        };
        let created = created.await;
        // If the header could be neither written nor restored, both states must stay intact: at
        // worst a leak.
        if created.is_err() && !self.is_read_only() {
            // The disk is the only owner again, as before.
            self.change_refcounts_of_snapshot(&tables, -1).await?;
            self.set_active_flags(CopiedFlags::Recount).await?;
            self.flush_metadata().await?;
            self.reload().await?;
        }
        created.map(|()| snapshot)
    }

    /// Stores the disk's size in every snapshot without one, as version 3 requires. In version 2 a
    /// disk with snapshots cannot be resized, so it is the present size.
    ///
    /// # Errors
    /// [`SnapshotError`]; disk and snapshots are unchanged.
    pub async fn complete_snapshots(&self) -> Result<()> {
        self.check_snapshots()?;
        let _quiesced = self.quiesce().await?;
        let header = self.header();
        let (mut snapshots, old_length) = self.snapshot_table().await?;
        if snapshots.iter().all(|snapshot| snapshot.disk_bytes.is_some()) {
            return Ok(());
        }
        for snapshot in &mut snapshots {
            snapshot.disk_bytes.get_or_insert(header.size_bytes);
        }
        self.replace_snapshots(&header, &snapshots, old_length).await
    }

    /// Writes the table of `snapshots`, the last of which shares all clusters with the disk, and
    /// clears the COPIED flags of the disk.
    async fn publish_snapshot(
        &self,
        header: &Qcow2Header,
        snapshots: &[InternalSnapshot],
        old_length: u64,
    ) -> Result<()> {
        self.flush_metadata().await?;
        // From here on the first write to a cluster copies it, even if the snapshot fails later.
        // This precedes the change of the header: no failure may leave a snapshot whose clusters
        // are written in place.
        self.set_active_flags(CopiedFlags::Clear).await?;
        self.clear_copied_flags();
        self.replace_snapshots(header, snapshots, old_length).await
    }

    /// After a failure, frees an L1 table that the header certainly does not refer to.
    async fn undo_on_error(&self, done: &Result<()>, l1_offset: u64, l1_bytes: usize) -> Result<()> {
        if done.is_err() && !self.is_read_only() {
            self.change_refcount(l1_offset, l1_bytes.max(1) as u64, -1).await?;
        }
        Ok(())
    }

    /// Reverts the disk to a snapshot, including its size. The present content is lost unless
    /// another snapshot refers to it.
    ///
    /// # Errors
    /// [`SnapshotError`]; the disk is either unchanged or that of the snapshot.
    pub async fn apply_snapshot(&self, name: &str) -> Result<()> {
        self.check_snapshots()?;
        let _quiesced = self.quiesce().await?;
        let header = self.header();
        let (snapshots, _) = self.snapshot_table().await?;
        let snapshot = &snapshots[find(&snapshots, name)?];
        let size_bytes = snapshot.disk_bytes.unwrap_or(header.size_bytes);
        let entries = u64::from(snapshot.l1_entries).max(header.l1_entries_for(size_bytes));
        if entries > MAX_L1 / 8 {
            let message = format!("snapshot {name:?} is of a disk of {size_bytes} bytes, which is too large");
            return Err(InvalidImage::new(message).into());
        }
        let old = self.read_l1(header.l1_offset, header.l1_entries).await?;
        let new = self.read_l1(snapshot.l1_offset, snapshot.l1_entries).await?;
        // The new active table shares everything with the snapshot, so no entry may have the
        // COPIED flag.
        let mut l1 = self.with_copied_flags(&new.bytes, CopiedFlags::Clear).await?;
        l1.resize(entries as usize * 8, 0);
        Qcow2Header { size_bytes, l1_entries: entries as u32, ..header.clone() }.encode()?;
        self.change_refcounts_of_snapshot(&new.tables, 1).await?;
        let changed = async {
            let l1_offset = self.store(&l1).await?;
            let changed = self.switch_l1(l1_offset, &l1, &new.tables, size_bytes).await;
            self.undo_on_error(&changed, l1_offset, l1.len()).await?;
            changed
        };
        let changed = changed.await;
        if changed.is_err() && !self.is_read_only() {
            self.change_refcounts_of_snapshot(&new.tables, -1).await?;
        }
        changed?;
        // The difference is unknown, so everything is marked dirty. Bitmaps that do not record
        // stay in use.
        self.resize_bitmaps(header.size_bytes, size_bytes, &[]).await;
        self.mark_recorded(0, size_bytes);
        // After the header: the old table is unreachable now.
        self.change_refcounts_of_snapshot(&old.tables, -1).await?;
        if !old.bytes.is_empty() {
            self.change_refcount(header.l1_offset, old.bytes.len() as u64, -1).await?;
        }
        Ok(self.flush_metadata().await?)
    }

    /// Switches header and memory to another L1 table, everything below which is shared with a
    /// snapshot.
    async fn switch_l1(&self, l1_offset: u64, l1: &[u8], tables: &[u64], size_bytes: u64) -> Result<()> {
        // Everything that can fail precedes the change of the header.
        let table = L1::parse(l1_offset, l1, self.shape, self.file.size_bytes())?;
        self.flush_metadata().await?;
        self.set_flags(tables, CopiedFlags::Clear).await?;
        // Marked before the switch: a crash must not leave bitmaps that seem valid for another
        // content.
        self.mark_bitmaps_in_use().await?;
        self.flush_metadata().await?;
        self.update_header(|header| {
            header.size_bytes = size_bytes;
            (header.l1_offset, header.l1_entries) = (l1_offset, (l1.len() / 8) as u32);
        })
        .await?;
        self.replace_l1(table);
        self.size.store(size_bytes, Release);
        Ok(())
    }

    /// Deletes a snapshot and frees the clusters that only it uses.
    ///
    /// # Errors
    /// [`SnapshotError`]; the snapshot may have been deleted, and the disk is unchanged.
    pub async fn delete_snapshot(&self, name: &str) -> Result<()> {
        self.check_snapshots()?;
        let _quiesced = self.quiesce().await?;
        let header = self.header();
        let (mut snapshots, old_length) = self.snapshot_table().await?;
        let snapshot = snapshots.remove(find(&snapshots, name)?);
        let L1TableCopy { bytes, tables } = self.read_l1(snapshot.l1_offset, snapshot.l1_entries).await?;
        // The header drops the snapshot before its references are released.
        self.replace_snapshots(&header, &snapshots, old_length).await?;
        self.change_refcounts_of_snapshot(&tables, -1).await?;
        if !bytes.is_empty() {
            self.change_refcount(snapshot.l1_offset, bytes.len() as u64, -1).await?;
        }
        self.flush_metadata().await?;
        // Clusters whose refcount fell to one belong to the disk alone again.
        self.set_active_flags(CopiedFlags::Recount).await?;
        self.flush_metadata().await?;
        Ok(self.reload().await?)
    }

    fn check_snapshots(&self) -> Result<()> {
        if self.is_read_only() {
            return Err(SnapshotError::ReadOnly);
        }
        if self.shape.data_file { Err(SnapshotError::DataFile) } else { Ok(()) }
    }

    /// Writes metadata to newly allocated clusters, at least one even for no bytes.
    async fn store(&self, bytes: &[u8]) -> Result<u64> {
        let length = bytes.len().max(1) as u64;
        let offset = self.allocate(length.div_ceil(1 << self.shape.cluster_bits)).await?;
        if let Err(error) = self.write_metadata(offset, &padded(bytes.to_vec())).await {
            self.change_refcount(offset, length, -1).await?;
            return Err(error.into());
        }
        Ok(offset)
    }

    /// Writes another snapshot table, switches the header to it and frees the old one.
    async fn replace_snapshots(
        &self,
        old: &Qcow2Header,
        snapshots: &[InternalSnapshot],
        old_length: u64,
    ) -> Result<()> {
        let table = encode(snapshots)?;
        let offset = if snapshots.is_empty() { 0 } else { self.store(&table).await? };
        let changed = async {
            self.flush_metadata().await?;
            let count = snapshots.len() as u32;
            self.update_header(|header| (header.snapshots, header.snapshots_offset) = (count, offset)).await
        };
        let changed = changed.await;
        let (place, length) = match changed {
            Ok(()) => (old.snapshots_offset, old_length),
            // The header may refer to the new table.
            Err(_) if self.is_read_only() => (0, 0),
            Err(_) => (offset, table.len() as u64),
        };
        if place != 0
            && length > 0
            && let Err(error) = self.change_refcount(place, length, -1).await
        {
            // Only a leak, and the header is already changed.
            tracing::warn!(
                image = self.description(),
                "the clusters of a snapshot table could not be freed: {error}"
            );
        }
        Ok(changed?)
    }
}

fn find(snapshots: &[InternalSnapshot], name: &str) -> Result<usize> {
    InternalSnapshot::find(snapshots, name).ok_or_else(|| SnapshotError::NotFound(name.to_owned()))
}

/// Returns the next id: the highest numeric one plus 1, as in QEMU.
fn next_id(snapshots: &[InternalSnapshot]) -> Vec<u8> {
    let ids = snapshots.iter().filter_map(|snapshot| snapshot.id().parse::<u64>().ok());
    ids.max().unwrap_or(0).saturating_add(1).to_string().into_bytes()
}
