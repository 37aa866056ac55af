//! Structures besides the disk: snapshots, bitmaps, the LUKS header.
//!
//! Never discards a snapshot. An unusable bitmap is dropped by a full repair: bitmaps only save
//! work.

use std::collections::{BTreeMap, HashSet};

use super::{CheckPass, counts::ReferenceCounts, metadata::MetadataKind, write_header};
use crate::qcow2::{
    InvalidImage, MetadataError,
    bitmap::{self, BitmapCluster, BitmapEntry, flag},
    header::{BitmapsExtension, FileRegion, autoclear},
    luks,
    snapshot::SnapshotTable,
};

// Limit on the L1 tables of snapshots that overlap other metadata. Overlaps are damage, and in a
// sparse file they may exceed the size of the file many times.
const MAX_OVERLAPPING: u64 = 64 << 20;

/// A bitmap of the directory.
struct FoundBitmap {
    entry: BitmapEntry,
    /// Its table and its clusters of bits.
    regions: Vec<FileRegion>,
    /// Reason why it cannot be used.
    fault: Option<String>,
}

impl FoundBitmap {
    fn name(&self) -> String {
        format!("bitmap {:?}", self.entry.name())
    }
}

/// L1 tables by offset and number of entries, each with the names of its snapshots.
pub(super) type L1Tables = BTreeMap<(u64, u32), Vec<String>>;

impl CheckPass<'_> {
    /// Counts the snapshot table and the L1 tables that it refers to, and returns the latter.
    pub(super) async fn count_snapshots(&mut self) -> Result<L1Tables, MetadataError> {
        let mut tables = L1Tables::new();
        if self.header.snapshots == 0 {
            return Ok(tables);
        }
        let table = match SnapshotTable::read(self.storage, &self.header).await {
            Ok(table) => table,
            Err(error) => {
                self.report_unreadable(format!("the snapshot table cannot be read: {error}"));
                return Ok(tables);
            }
        };
        let faults: Vec<_> = table.decode_errors(&self.header).collect();
        let SnapshotTable { mut snapshots, length_bytes, .. } = table;
        let offset = self.header.snapshots_offset;
        let length = length_bytes as u64;
        self.count_metadata(MetadataKind::SnapshotTable, "the snapshot table", offset, length, 1);
        self.plan_snapshot_table(&snapshots, faults.is_empty()).await?;
        faults.into_iter().for_each(|fault| self.report_hiding_damage(fault.to_string()));
        snapshots.retain(|snapshot| snapshot.check(&self.header).is_ok());
        // Without overlaps the tables together are no longer than the file.
        let mut bytes = 0;
        let mut ids = HashSet::new();
        for snapshot in snapshots {
            let length = u64::from(snapshot.l1_entries) * 8;
            let label = format!("the L1 table of snapshot {:?}", snapshot.name());
            if !ids.insert(snapshot.id.clone()) {
                self.report_corruption(format!("two snapshots have the id {:?}", snapshot.id()));
            }
            let needed = self.header.l1_entries_for(snapshot.disk_bytes.unwrap_or(0));
            if u64::from(snapshot.l1_entries) < needed {
                self.report_corruption(format!("{label} has {} of {needed} entries", snapshot.l1_entries));
            }
            let names: &mut Vec<String> =
                tables.entry((snapshot.l1_offset, snapshot.l1_entries)).or_default();
            names.push(snapshot.name().into_owned());
            if names.len() == 1 {
                bytes += length;
            }
            if bytes > self.storage.size_bytes().next_multiple_of(self.header.cluster_bytes()) {
                self.report_hiding_damage("the L1 tables of the snapshots overlap");
                return Ok(L1Tables::new());
            }
        }
        let mut overlapping = 0;
        // Several snapshots may share a table, whose refcount is then their number.
        tables.retain(|(offset, entries), names| {
            let label = format!("the L1 table of snapshot {:?}", names[0]);
            let length = u64::from(*entries) * 8;
            if self.fault_at(*offset, length).is_some() {
                overlapping += length;
            }
            if overlapping > MAX_OVERLAPPING {
                self.report_hiding_damage(format!("{label} is not read: too many tables overlap"));
                return false;
            }
            let is_inside =
                self.count_metadata(MetadataKind::L1, &label, *offset, length, names.len() as u64);
            if !is_inside {
                self.miss_references(format!("{label} lies beyond the end of the file"));
            }
            is_inside
        });
        Ok(tables)
    }

    /// Counts the clusters of the LUKS header. If its location is invalid nothing is freed:
    /// clusters with keys would look unused.
    pub(super) async fn count_luks(&mut self) {
        let Some(place) = self.header.encryption else { return };
        if !self.count_metadata(MetadataKind::Luks, "the LUKS header", place.offset, place.length, 1) {
            self.miss_references("the LUKS header lies beyond the end of the file");
            return;
        }
        let length = place.length.min(luks::HEADER_BYTES as u64);
        let Some(bytes) = self.read("the LUKS header", place.offset, length).await else { return };
        if let Err(invalid) = luks::check_slots(&bytes, place.length) {
            self.report_hiding_damage(format!("the LUKS header at {:#x}: {invalid}", place.offset));
        }
    }

    /// Counts directory, tables and clusters of the bitmaps. Without the autoclear bit they count
    /// as unused, as in QEMU.
    pub(super) async fn count_bitmaps(&mut self) -> Result<(), MetadataError> {
        let Some(bitmaps) = self.header.bitmaps else { return Ok(()) };
        if self.header.autoclear & autoclear::BITMAPS == 0 {
            if self.repair != super::Repair::Nothing {
                self.drop_bitmaps().await?;
            }
            return Ok(());
        }
        match self.find_bitmaps(bitmaps).await {
            Ok(found) => self.settle_bitmaps(bitmaps, found).await?,
            Err(MetadataError::Invalid(invalid)) if self.repairs_all() => {
                self.drop_bitmaps().await?;
                self.report_repair(format!("the bitmaps are dropped: {invalid}"));
            }
            Err(MetadataError::Invalid(invalid)) => self.report_hiding_damage(invalid.to_string()),
            Err(MetadataError::Storage(error)) => {
                self.report_unreadable(format!("the bitmaps cannot be read: {error}"));
            }
        }
        Ok(())
    }

    /// Reports a structure that the storage failed to read.
    fn report_unreadable(&mut self, message: String) {
        self.report.check_errors += 1;
        self.report.report(format!("ERROR: {message}"));
        self.miss_references(message);
    }

    /// Counts the sound bitmaps, and drops the damaged ones in a full repair.
    async fn settle_bitmaps(
        &mut self,
        bitmaps: BitmapsExtension,
        found: Vec<FoundBitmap>,
    ) -> Result<(), MetadataError> {
        let (sound, damaged): (Vec<_>, Vec<_>) = found.into_iter().partition(|bitmap| bitmap.fault.is_none());
        let mut directory = bitmaps.directory;
        if !damaged.is_empty() {
            let is_dropped = self.repairs_all();
            if is_dropped && self.is_exclusive(directory) && !sound.is_empty() {
                directory = self.keep_bitmaps(directory.offset, &sound).await?;
            } else if is_dropped {
                self.drop_bitmaps().await?;
                if !sound.is_empty() {
                    // A directory that shares its cluster must not be written.
                    self.report_repair("the bitmaps are dropped: their directory shares a cluster");
                }
            }
            for fault in damaged.into_iter().filter_map(|bitmap| bitmap.fault) {
                if is_dropped {
                    self.report_repair(format!("{fault}; this bitmap is dropped"));
                } else {
                    self.report_hiding_damage(fault);
                }
            }
            if self.header.bitmaps.is_none() {
                return Ok(());
            }
        }
        for FileRegion { offset, length } in
            sound.iter().flat_map(|bitmap| &bitmap.regions).chain([&directory])
        {
            self.count_region("a bitmap", *offset, *length, 1);
        }
        Ok(())
    }

    /// True if the survey found exactly one reference to each cluster of a region.
    fn is_exclusive(&self, FileRegion { offset, length }: FileRegion) -> bool {
        let bits = self.header.cluster_bits;
        let mut clusters = offset >> bits..(offset + length).div_ceil(1 << bits);
        self.survey.as_ref().is_some_and(|survey| clusters.all(|cluster| survey.counts.get(cluster) == 1))
    }

    async fn drop_bitmaps(&mut self) -> Result<(), MetadataError> {
        self.header.bitmaps = None;
        self.header.autoclear &= !autoclear::BITMAPS;
        write_header(self.storage, &self.header).await
    }

    /// Overwrites the directory with these bitmaps. Until it is complete the header marks all
    /// bitmaps as invalid, so that a crash loses bitmaps only. Returns the location of the new
    /// directory.
    async fn keep_bitmaps(
        &mut self,
        offset: u64,
        bitmaps: &[FoundBitmap],
    ) -> Result<FileRegion, MetadataError> {
        let entries: Vec<BitmapEntry> = bitmaps.iter().map(|bitmap| bitmap.entry.clone()).collect();
        let encoded = bitmap::encode(&entries);
        self.header.autoclear &= !autoclear::BITMAPS;
        write_header(self.storage, &self.header).await?;
        super::metadata_io::write(self.storage, offset, &encoded).await?;
        self.storage.flush().await?;
        let directory = FileRegion { offset, length: encoded.len() as u64 };
        self.header.bitmaps = Some(BitmapsExtension { count: entries.len() as u32, directory });
        self.header.autoclear |= autoclear::BITMAPS;
        write_header(self.storage, &self.header).await?;
        Ok(directory)
    }

    /// Reads the bitmaps of the directory and the regions that belong to them, which are not
    /// counted yet.
    async fn find_bitmaps(&mut self, bitmaps: BitmapsExtension) -> Result<Vec<FoundBitmap>, MetadataError> {
        let directory = bitmap::read_entries(self.storage, &self.header, bitmaps).await?;
        let mut found = Vec::new();
        // Bounded as for snapshots; eight bytes of a table refer to a cluster of bits.
        let mut bytes = 0;
        for (entry, fault) in directory {
            if !entry.extra.is_empty() {
                // The program that wrote the extra data may understand it, so the bitmap is not
                // dropped.
                let name = entry.name();
                self.report_corruption(format!("bitmap {name:?} has extra data of an unknown kind"));
            }
            let regions = match fault {
                Some(fault) => Err(fault),
                None => self.bitmap_regions(&entry, &mut bytes).await?,
            };
            found.push(match regions {
                Ok(regions) => FoundBitmap { entry, regions, fault: None },
                Err(fault) => FoundBitmap { entry, regions: Vec::new(), fault: Some(fault.to_string()) },
            });
        }
        let mut counts = ReferenceCounts::default();
        let bits = self.header.cluster_bits;
        let clusters = |FileRegion { offset, length }: &FileRegion| {
            offset >> bits..(offset + length).div_ceil(1 << bits)
        };
        for place in found.iter().flat_map(|bitmap| &bitmap.regions).chain([&bitmaps.directory]) {
            clusters(place).for_each(|cluster| counts.add(cluster, 1));
        }
        let is_shared = |cluster: &u64| counts.get(*cluster) + self.found.counts.get(*cluster) > 1;
        if let Some(cluster) = clusters(&bitmaps.directory).find(is_shared) {
            let message = format!("cluster {cluster} holds the bitmap directory and other data");
            return Err(InvalidImage::new(message).into());
        }
        for bitmap in &mut found {
            if let Some(cluster) = bitmap.regions.iter().flat_map(clusters).find(is_shared) {
                bitmap.fault = Some(format!("cluster {cluster} holds {} and other data", bitmap.name()));
            }
        }
        Ok(found)
    }

    /// Returns the table of a bitmap and its clusters of bits, or its fault. `bytes` is the total
    /// length of all tables so far.
    async fn bitmap_regions(
        &self,
        entry: &BitmapEntry,
        bytes: &mut u64,
    ) -> Result<Result<Vec<FileRegion>, InvalidImage>, MetadataError> {
        let label = format!("bitmap {:?}", entry.name());
        let invalid = |fault: String| Ok(Err(InvalidImage::new(fault)));
        let table = entry.table();
        // QEMU opens no image with such a bitmap. A bitmap in use may differ, because the disk may
        // have been resized.
        let needed = BitmapEntry::entries_for(
            self.header.size_bytes,
            entry.granularity_bits,
            self.header.cluster_bits,
        );
        if entry.flags & flag::IN_USE == 0 && u64::from(entry.table_entries) != needed {
            let entries = entry.table_entries;
            return invalid(format!("the table of {label} has {entries} entries instead of {needed}"));
        }
        if !self.is_inside(table.offset, table.length) || *bytes + table.length > self.storage.size_bytes() {
            return invalid(format!("the table of {label} at {:#x} is not in the file", table.offset));
        }
        *bytes += table.length;
        let read = super::metadata_io::read(self.storage, table.offset, table.length as usize).await?;
        let cluster = self.header.cluster_bytes();
        let bits = match bitmap::decode_table(&read, cluster) {
            Ok(bits) => bits,
            Err(fault) => return invalid(format!("{label}: {fault}")),
        };
        let mut regions = vec![table];
        for bits in bits {
            let BitmapCluster::Stored(offset) = bits else { continue };
            if !self.is_inside(offset, cluster) {
                return invalid(format!("bits of {label} at {offset:#x} are not in the file"));
            }
            regions.push(FileRegion { offset, length: cluster });
        }
        Ok(Ok(regions))
    }
}
