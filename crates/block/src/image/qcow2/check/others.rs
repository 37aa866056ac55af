//! What an image has besides its disk: snapshots, bitmaps, the LUKS header.
//!
//! Never gives up a snapshot. Bitmaps that cannot be read are dropped when everything is repaired:
//! they only save work.

use std::collections::{BTreeMap, HashSet};

use super::{Pass, counts::Counts, metadata::MetadataKind, write_header};
use crate::image::qcow2::{
    Invalid, MetadataError,
    bitmap::{self, Bits, Entry, flag},
    header::{Bitmaps, Place, autoclear},
    luks, snapshot,
};

/// Bytes of L1 tables of snapshots on other metadata that are looked at. Overlapping tables are
/// damage, and in a sparse file they may be far longer together than what the file holds.
const MOST_OVERLAPPING: u64 = 64 << 20;

/// L1 tables by offset and number of entries, each with the names of its snapshots.
pub(super) type L1Tables = BTreeMap<(u64, u32), Vec<String>>;

impl Pass<'_> {
    /// Counts the snapshot table and the L1 tables that it names, and says which they are.
    pub(super) async fn count_snapshots(&mut self) -> Result<L1Tables, MetadataError> {
        let mut tables = L1Tables::new();
        if self.header.snapshots == 0 {
            return Ok(tables);
        }
        let (snapshots, length) = match snapshot::read(self.storage, &self.header).await {
            Ok(read) => read,
            Err(MetadataError::Invalid(invalid)) => {
                self.is_incomplete = true;
                self.corrupt(invalid.to_string());
                return Ok(tables);
            }
            Err(MetadataError::Storage(error)) => {
                self.is_incomplete = true;
                self.report.check_errors += 1;
                self.report.say(format!("ERROR: the snapshot table cannot be read: {error}"));
                return Ok(tables);
            }
        };
        let place = (self.header.snapshots_offset, length as u64);
        self.count_metadata(MetadataKind::SnapshotTable, "the snapshot table", place, 1);
        self.plan_snapshot_table(&snapshots).await?;
        // Tables that do not overlap are together no longer than the file.
        let mut bytes = 0;
        let mut ids = HashSet::new();
        for snapshot in snapshots {
            let length = u64::from(snapshot.l1_entries) * 8;
            let what = format!("the L1 table of snapshot {:?}", snapshot.name());
            if !ids.insert(snapshot.id.clone()) {
                self.corrupt(format!("two snapshots have the id {:?}", snapshot.id()));
            }
            let needed = self.header.l1_entries_for(snapshot.disk_bytes.unwrap_or(0));
            if u64::from(snapshot.l1_entries) < needed {
                self.corrupt(format!("{what} has {} of {needed} entries", snapshot.l1_entries));
            }
            let names: &mut Vec<String> =
                tables.entry((snapshot.l1_offset, snapshot.l1_entries)).or_default();
            names.push(snapshot.name().into_owned());
            if names.len() == 1 {
                bytes += length;
            }
            if bytes > self.storage.size_bytes().next_multiple_of(self.header.cluster_bytes()) {
                self.is_incomplete = true;
                self.corrupt("the L1 tables of the snapshots lie on each other");
                return Ok(L1Tables::new());
            }
        }
        let mut overlapping = 0;
        // Snapshots may share a whole table, as its refcount says.
        tables.retain(|(offset, entries), names| {
            let what = format!("the L1 table of snapshot {:?}", names[0]);
            let region = (*offset, u64::from(*entries) * 8);
            if self.fault_at(region.0, region.1).is_some() {
                overlapping += region.1;
            }
            if overlapping > MOST_OVERLAPPING {
                self.is_incomplete = true;
                self.corrupt(format!("{what} is not looked at: too many tables lie on each other"));
                return false;
            }
            let is_inside = self.count_metadata(MetadataKind::L1, &what, region, names.len() as u64);
            self.is_incomplete |= !is_inside;
            is_inside
        });
        Ok(tables)
    }

    /// Counts the clusters of the LUKS header. If its place cannot be right, nothing is freed:
    /// clusters with keys would look unused.
    pub(super) async fn count_luks(&mut self) {
        let Some(place) = self.header.encryption else { return };
        let region = (place.offset, place.length);
        if !self.count_metadata(MetadataKind::Luks, "the LUKS header", region, 1) {
            self.is_incomplete = true;
            return;
        }
        let length = place.length.min(luks::HEADER_BYTES as u64);
        let Some(bytes) = self.read("the LUKS header", place.offset, length).await else { return };
        if let Err(invalid) = luks::check_slots(&bytes, place.length) {
            self.is_incomplete = true;
            self.corrupt(format!("the LUKS header at {:#x}: {invalid}", place.offset));
        }
    }

    /// Counts directory, tables and clusters of the bitmaps. Those that are not marked right count
    /// as none, as for QEMU.
    pub(super) async fn count_bitmaps(&mut self) -> Result<(), MetadataError> {
        let Some(bitmaps) = self.header.bitmaps else { return Ok(()) };
        if self.header.autoclear & autoclear::BITMAPS == 0 {
            if self.repair != super::Repair::Nothing {
                self.drop_bitmaps().await?;
            }
            return Ok(());
        }
        match self.find_bitmaps(bitmaps).await {
            Ok(places) => {
                for Place { offset, length } in places {
                    self.count_region("a bitmap", offset, length, 1);
                }
            }
            Err(MetadataError::Invalid(invalid)) if self.repairs_all() => {
                self.drop_bitmaps().await?;
                self.corrected(format!("the bitmaps are dropped: {invalid}"));
            }
            Err(MetadataError::Invalid(invalid)) => {
                self.is_incomplete = true;
                self.corrupt(invalid.to_string());
            }
            Err(MetadataError::Storage(error)) => {
                self.is_incomplete = true;
                self.report.check_errors += 1;
                self.report.say(format!("ERROR: the bitmaps cannot be read: {error}"));
            }
        }
        Ok(())
    }

    async fn drop_bitmaps(&mut self) -> Result<(), MetadataError> {
        self.header.bitmaps = None;
        self.header.autoclear &= !autoclear::BITMAPS;
        write_header(self.storage, &self.header).await
    }

    /// All regions that belong to bitmaps, none of which has been counted yet: bitmaps that are
    /// half right are wrong.
    async fn find_bitmaps(&mut self, bitmaps: Bitmaps) -> Result<Vec<Place>, MetadataError> {
        let invalid = |what: String| MetadataError::Invalid(Invalid::new(what));
        let entries = bitmap::read(self.storage, &self.header, bitmaps).await?;
        let mut places = vec![bitmaps.directory];
        // As for snapshots; a cluster of bits is named by eight bytes of a table.
        let mut bytes = 0;
        for entry in entries {
            let table = entry.table();
            let what = format!("bitmap {:?}", entry.name());
            if !entry.extra.is_empty() {
                // The program that wrote the extra data may understand it, so the bitmap is not
                // dropped.
                self.corrupt(format!("{what} has extra data of an unknown kind"));
            }
            // QEMU opens no image with such a bitmap. While one is in use, the disk may change.
            let needed =
                Entry::entries_for(self.header.size_bytes, entry.granularity_bits, self.header.cluster_bits);
            if entry.flags & flag::IN_USE == 0 && u64::from(entry.table_entries) != needed {
                return Err(invalid(format!(
                    "the table of {what} has {} entries instead of {needed}",
                    entry.table_entries
                )));
            }
            bytes += table.length;
            if !self.is_inside(table.offset, table.length) || bytes > self.storage.size_bytes() {
                return Err(invalid(format!(
                    "the table of {what} at {:#x} is not in the file",
                    table.offset
                )));
            }
            let read = super::bytes::read(self.storage, table.offset, table.length as usize).await?;
            let cluster = self.header.cluster_bytes();
            for bits in bitmap::decode_table(&read, cluster)? {
                let Bits::Stored(offset) = bits else { continue };
                if !self.is_inside(offset, cluster) {
                    return Err(invalid(format!("bits of {what} at {offset:#x} are not in the file")));
                }
                places.push(Place { offset, length: cluster });
            }
            places.push(table);
        }
        let bits = self.header.cluster_bits;
        let mut own = Counts::default();
        for Place { offset, length } in &places {
            for cluster in offset >> bits..(offset + length).div_ceil(1 << bits) {
                if own.get(cluster) + self.found.counts.get(cluster) > 0 {
                    return Err(invalid(format!("cluster {cluster} holds a bitmap, and something else")));
                }
                own.add(cluster, 1);
            }
        }
        Ok(places)
    }
}
