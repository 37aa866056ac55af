//! From the L1 tables to every guest cluster: who refers to what, and which references point
//! nowhere.
//!
//! Each L2 table is read once, in the order of the file, with the number of L1 entries that refer
//! to it: snapshots share most of theirs.
//!
//! Never follows an entry that does not point to a cluster of the file.

use std::collections::BTreeMap;

use super::{Pass, bytes, others::L1Tables};
use crate::{
    error::Result,
    image::qcow2::{
        MetadataError,
        big_endian::{u64_at, words},
        entry::{COMPRESSED, COPIED, Cluster, L1Entry, Standard},
    },
};

/// Bits 0 to 8 and 56 to 62 of an L1 entry mean nothing.
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Bits 1 to 8 and 56 to 61 of a standard L2 entry mean nothing.
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// Tables are read in pieces of this many bytes.
const PIECE: u64 = 1 << 20;

/// Who refers to an L2 table.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    /// Entries of the active L1 table.
    active: u64,
    /// All entries.
    all: u64,
    /// The disk's byte where the last of them begins.
    guest: u64,
}

impl Pass<'_> {
    /// Counts everything that the active L1 table and those of the snapshots reach.
    pub(super) async fn walk(&mut self, snapshots: L1Tables) -> std::result::Result<(), MetadataError> {
        let mut tables = BTreeMap::new();
        let (offset, entries) = (self.header.l1_offset, self.header.l1_entries);
        if self.count_region("the L1 table", offset, u64::from(entries) * 8, 1) {
            self.read_l1(offset, entries, Uses { active: 1, all: 1, guest: 0 }, &mut tables).await?;
        } else {
            self.is_incomplete = true;
        }
        for ((offset, entries), times) in snapshots {
            self.read_l1(offset, entries, Uses { active: 0, all: times, guest: 0 }, &mut tables).await?;
        }
        for (offset, uses) in tables {
            self.counts.add(offset >> self.header.cluster_bits, uses.all);
            self.walk_l2(offset, uses).await?;
        }
        Ok(())
    }

    async fn read_l1(
        &mut self,
        offset: u64,
        entries: u32,
        uses: Uses,
        tables: &mut BTreeMap<u64, Uses>,
    ) -> Result<()> {
        let end = offset + u64::from(entries) * 8;
        let mut at = offset;
        while at < end {
            let length = PIECE.min(end - at);
            let Some(read) = self.read("an L1 table", at, length).await else { return Ok(()) };
            for (index, raw) in words(&read).enumerate() {
                if raw == 0 {
                    continue;
                }
                let place = at + index as u64 * 8;
                if let Some(table) = self.l2_of(raw, place).await? {
                    let known: &mut Uses = tables.entry(table).or_default();
                    known.active += uses.active;
                    known.all += uses.all;
                    known.guest = ((place - offset) / 8).wrapping_mul(self.table_covers());
                }
            }
            at += length;
        }
        Ok(())
    }

    /// Bytes of the disk that an L2 table describes.
    fn table_covers(&self) -> u64 {
        self.header.cluster_bytes() / self.shape.entry_bytes() as u64 * self.header.cluster_bytes()
    }

    /// The L2 table of an L1 entry that is right, or was made so.
    async fn l2_of(&mut self, raw: u64, place: u64) -> Result<Option<u64>> {
        // What remains of an entry with bits that mean nothing is as good as any.
        let entry = L1Entry::decode(raw & !L1_RESERVED, self.shape);
        let offset = entry.as_ref().map_or(0, |entry| entry.offset);
        let wrong = if entry.is_err() {
            Some("points inside a cluster")
        } else if offset != 0 && !self.is_inside(offset, self.header.cluster_bytes()) {
            Some("points beyond the end of the file")
        } else {
            None
        };
        if let Some(why) = wrong {
            self.put_number(place, 0, format!("the L1 entry {raw:#x} at {place:#x} {why}")).await?;
            self.is_incomplete |= !self.repairs_all();
            return Ok(None);
        }
        if raw & L1_RESERVED != 0 {
            let what = format!("the L1 entry {raw:#x} at {place:#x} has reserved bits");
            self.put_number(place, raw & !L1_RESERVED, what).await?;
        }
        Ok((offset != 0).then_some(offset))
    }

    /// Corrects a number of a table, where everything is repaired.
    async fn put_number(&mut self, place: u64, value: u64, what: String) -> Result<()> {
        if self.repairs_all() {
            bytes::write(self.storage, place, &value.to_be_bytes()).await?;
            self.corrected(what);
        } else {
            self.corrupt(what);
        }
        Ok(())
    }

    async fn walk_l2(&mut self, offset: u64, uses: Uses) -> Result<()> {
        let cluster = self.header.cluster_bytes();
        let Some(mut table) = self.read("an L2 table", offset, cluster).await else { return Ok(()) };
        let entry_bytes = self.shape.entry_bytes();
        let mut expected = None;
        let mut changed = false;
        for at in (0..table.len()).step_by(entry_bytes) {
            let entry = &table[at..at + entry_bytes];
            let raw = u64_at(entry, 0);
            let map = if self.shape.extended { u64_at(entry, 8) } else { 0 };
            if raw == 0 && map == 0 {
                continue;
            }
            if let Some((raw, map)) = self.count_entry(raw, map, uses, (offset, at), &mut expected) {
                table[at..at + 8].copy_from_slice(&raw.to_be_bytes());
                if self.shape.extended {
                    table[at + 8..at + 16].copy_from_slice(&map.to_be_bytes());
                }
                changed = true;
            }
        }
        if changed {
            bytes::write(self.storage, offset, &table).await?;
        }
        Ok(())
    }

    /// Counts what an entry refers to, or says what it is to become.
    fn count_entry(
        &mut self,
        raw: u64,
        map: u64,
        uses: Uses,
        (table, at): (u64, usize),
        expected: &mut Option<u64>,
    ) -> Option<(u64, u64)> {
        let place = table + at as u64;
        let cleared = self.clear_reserved(raw, place);
        let entry = (at / self.shape.entry_bytes()) as u64;
        // Numbers of a broken header may wrap: they are only compared.
        let guest = uses.guest.wrapping_add(entry * self.header.cluster_bytes());
        let changed = self.count_cleared((cleared.unwrap_or(raw), map), guest, uses, place, expected);
        changed.or(cleared.map(|raw| (raw, map)))
    }

    /// What an entry with reserved bits is without them, if it is to be corrected. They are ignored
    /// by who reads it, and count as wrong all the same, as for QEMU: a later version may give them
    /// a meaning.
    fn clear_reserved(&mut self, raw: u64, place: u64) -> Option<u64> {
        if raw & COMPRESSED != 0 || raw & L2_RESERVED == 0 {
            return None;
        }
        let what = format!("the L2 entry {raw:#x} at {place:#x} has reserved bits");
        if self.repairs_all() {
            self.corrected(what);
            return Some(raw & !L2_RESERVED);
        }
        self.corrupt(what);
        None
    }

    fn count_cleared(
        &mut self,
        (raw, map): (u64, u64),
        guest: u64,
        uses: Uses,
        place: u64,
        expected: &mut Option<u64>,
    ) -> Option<(u64, u64)> {
        let wrong = match self.shape.decode(raw, map) {
            Ok(cluster @ Cluster::Standard(standard)) => match self.shape.check_place(cluster, guest) {
                Ok(()) => self.count_standard(standard, uses, expected),
                Err(invalid) => Some(invalid.to_string()),
            },
            Ok(Cluster::Compressed { offset, length }) => {
                return self.count_compressed((raw, map), (offset, length), uses, place);
            }
            Err(invalid) => Some(invalid.to_string()),
        };
        let wrong = wrong?;
        self.drop_entry(format!("the L2 entry at {place:#x}: {wrong}"))
    }

    /// What is to be done with an entry that points nowhere: it becomes unallocated, or stays and
    /// is no sign of what is in use.
    fn drop_entry(&mut self, what: String) -> Option<(u64, u64)> {
        if self.repairs_all() {
            self.corrected(format!("{what}; it is unallocated now"));
            return Some((0, 0));
        }
        self.corrupt(what);
        None
    }

    fn count_standard(
        &mut self,
        standard: Standard,
        uses: Uses,
        expected: &mut Option<u64>,
    ) -> Option<String> {
        let host = standard.host?;
        let cluster = self.header.cluster_bytes();
        if !self.shape.data_file {
            if !self.is_inside(host, cluster) {
                return Some(format!("the cluster at {host:#x} is beyond the end of the file"));
            }
            self.counts.add(host >> self.header.cluster_bits, uses.all);
        }
        self.report.allocated_clusters += uses.active;
        if expected.is_some_and(|expected| expected != host) {
            self.report.fragmented_clusters += uses.active;
        }
        *expected = Some(host.wrapping_add(cluster));
        None
    }

    fn count_compressed(
        &mut self,
        (raw, map): (u64, u64),
        (offset, length): (u64, u64),
        uses: Uses,
        place: u64,
    ) -> Option<(u64, u64)> {
        debug_assert_ne!(raw & COMPRESSED, 0);
        if !self.is_inside(offset, length) {
            let what = format!("the compressed cluster at {offset:#x} is beyond the end of the file");
            return self.drop_entry(format!("the L2 entry at {place:#x}: {what}"));
        }
        let bits = self.header.cluster_bits;
        for cluster in offset >> bits..=(offset + length - 1) >> bits {
            self.counts.add(cluster, uses.all);
        }
        self.report.allocated_clusters += uses.active;
        self.report.compressed_clusters += uses.active;
        // Compressed clusters have no place of their own.
        self.report.fragmented_clusters += uses.active;
        if raw & COPIED == 0 && map == 0 {
            return None;
        }
        let what = format!("the L2 entry at {place:#x} is compressed, and marked as if it were not");
        if self.repairs_all() {
            self.corrected(what);
            return Some((raw & !COPIED, 0));
        }
        self.corrupt(what);
        None
    }
}
