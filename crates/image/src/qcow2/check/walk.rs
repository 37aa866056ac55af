//! The L1 tables: the L2 tables that they refer to, and invalid entries.
//!
//! Each L2 table is read once, in the order of the file, together with all L1 entries that refer
//! to it: snapshots share most of theirs.
//!
//! Never follows an entry that does not refer to a cluster of the file. Such an entry stays unless
//! the user allows the loss of its guest range, since the table may still exist.

use std::collections::BTreeMap;

use super::{
    CheckPass, Repair,
    auxiliary::L1Tables,
    entries::judge_entry,
    metadata::MetadataKind,
    metadata_io,
    ranges::{GuestRange, slots},
};
use reactor::error::Result;

use crate::qcow2::{
    MetadataError,
    big_endian::{u64_at, words},
    entry::{L1Entry, OFFSET, SUBCLUSTERS},
};

// Reserved bits of an L1 entry: 0 to 8 and 56 to 62.
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
// Tables are read in pieces of this many bytes.
const PIECE: u64 = 1 << 20;

/// An L1 table.
#[derive(Clone, Debug)]
pub(super) struct L1Table {
    /// Offset of the table in the file.
    l1_offset: u64,
    /// Names of the snapshots with this table; empty for the active one.
    snapshots: Vec<String>,
    /// Slots of a report that a range in all of these disks takes.
    slots: usize,
}

impl L1Table {
    fn new(l1_offset: u64, snapshots: Vec<String>) -> Self {
        let slots = match &*snapshots {
            [] => slots(None),
            names => names.iter().map(|name| slots(Some(name))).sum(),
        };
        Self { l1_offset, snapshots, slots }
    }
}

/// An entry of an L1 table.
#[derive(Clone, Copy, Debug)]
pub(super) struct L1Location {
    /// Index in [`CheckPass::disks`].
    disk: u32,
    index: u32,
}

/// The L1 entries that refer to an L2 table.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterUses {
    /// Number of entries of the active L1 table.
    pub(super) active: u64,
    /// Number of references.
    pub(super) all: u64,
    pub(super) owners: Vec<L1Location>,
}

impl CheckPass<'_> {
    /// Counts everything that the active L1 table and those of the snapshots refer to.
    pub(super) async fn walk(&mut self, snapshots: L1Tables) -> std::result::Result<(), MetadataError> {
        let mut tables = BTreeMap::new();
        let (offset, entries) = (self.header.l1_offset, self.header.l1_entries);
        let length = u64::from(entries) * 8;
        if self.count_metadata(MetadataKind::L1, "the L1 table", offset, length, 1) {
            self.disks.push(L1Table::new(offset, Vec::new()));
            self.read_l1(offset, entries, 1, &mut tables).await?;
        } else {
            self.miss_references("the L1 table lies beyond the end of the file");
        }
        for ((offset, entries), names) in snapshots {
            let times = names.len() as u64;
            self.disks.push(L1Table::new(offset, names));
            self.read_l1(offset, entries, times, &mut tables).await?;
        }
        let cluster = self.header.cluster_bytes();
        // All tables are counted before any is read, so that `fault_at` detects data that points
        // to a table.
        let mut known = BTreeMap::new();
        for (offset, uses) in tables {
            if self.must_be_discarded(offset).await {
                self.discard_table(offset, &uses).await?;
                continue;
            }
            self.count_metadata(MetadataKind::L2, "an L2 table", offset, cluster, uses.all);
            known.insert(offset, uses);
        }
        for (offset, uses) in known {
            self.walk_l2(offset, &uses).await?;
        }
        Ok(())
    }

    /// Reads the last table of `disks`, which has `times` references.
    async fn read_l1(
        &mut self,
        offset: u64,
        entries: u32,
        times: u64,
        tables: &mut BTreeMap<u64, ClusterUses>,
    ) -> Result<()> {
        let disk = self.disks.len() as u32 - 1;
        let is_active = self.disks.last().is_some_and(|disk| disk.snapshots.is_empty());
        let end = offset + u64::from(entries) * 8;
        let mut at = offset;
        while at < end {
            let length = PIECE.min(end - at);
            let Some(read) = self.read("an L1 table", at, length).await else { return Ok(()) };
            for (position, raw) in words(&read).enumerate() {
                if raw == 0 {
                    continue;
                }
                let place = at + position as u64 * 8;
                let owner = L1Location { disk, index: ((place - offset) / 8) as u32 };
                if let Some(table) = self.l2_of(raw, place, owner).await? {
                    let known: &mut ClusterUses = tables.entry(table).or_default();
                    known.active += u64::from(is_active);
                    known.all += times;
                    known.owners.push(owner);
                }
            }
            at += length;
        }
        Ok(())
    }

    /// Offset of the L2 table of a valid or corrected L1 entry; `None` without one.
    async fn l2_of(&mut self, raw: u64, place: u64, owner: L1Location) -> Result<Option<u64>> {
        let offset = raw & OFFSET;
        let label = |why: &str| format!("the L1 entry {raw:#x} at {place:#x} {why}");
        let fault = if L1Entry::decode(raw & !L1_RESERVED, self.shape).is_err() {
            Some("has an offset that is not aligned to a cluster")
        } else if offset != 0 && !self.is_inside(offset, self.header.cluster_bytes()) {
            Some("points beyond the end of the file")
        } else {
            None
        };
        if let Some(fault) = fault {
            self.discard_l1(place, owner, label(fault)).await?;
            return Ok(None);
        }
        if offset == 0 {
            self.correct_entry(place, 0, label("has flags, but no L2 table")).await?;
            return Ok(None);
        }
        if raw & L1_RESERVED != 0 {
            self.correct_entry(place, raw & !L1_RESERVED, label("has reserved bits")).await?;
        }
        Ok(Some(offset))
    }

    /// Clears an L1 entry with ambiguous content in a forced repair; otherwise reports it.
    async fn discard_l1(&mut self, place: u64, owner: L1Location, message: String) -> Result<()> {
        let coverage = self.table_coverage();
        if self.repair == Repair::Forced && self.may_write(place) && self.fits_in_report(&[owner]) {
            metadata_io::write(self.storage, place, &0_u64.to_be_bytes()).await?;
            self.report_repair(format!("{message}; its guest range is discarded"));
            self.add_ranges(&[owner], 0..coverage, true);
        } else {
            self.report_hiding_damage(message);
            self.add_ranges(&[owner], 0..coverage, false);
        }
        Ok(())
    }

    /// Corrects an entry of a table in a full repair, if nothing else refers to its cluster.
    async fn correct_entry(&mut self, place: u64, value: u64, message: String) -> Result<()> {
        if self.repairs_all() && self.may_write(place) {
            metadata_io::write(self.storage, place, &value.to_be_bytes()).await?;
            self.report_repair(message);
        } else {
            self.report_corruption(message);
        }
        Ok(())
    }

    /// True in a forced repair, if this L2 table shares its cluster with another structure and is
    /// not plausible as a table.
    async fn must_be_discarded(&mut self, offset: u64) -> bool {
        if self.repair != Repair::Forced || self.may_write(offset) {
            return false;
        }
        let Some(table) = self.read("an L2 table", offset, self.header.cluster_bytes()).await else {
            return false;
        };
        let sound = |entry: &[u8]| {
            let map = if self.shape.extended { u64_at(entry, 8) } else { 0 };
            judge_entry(self.shape, (u64_at(entry, 0), map), 0, |offset, length| {
                self.fault_at(offset, length)
            })
            .is_sound()
        };
        // In a data file every entry must equal its guest offset, so nothing is shared there.
        !self.shape.data_file && !table.chunks_exact(self.shape.entry_bytes()).all(sound)
    }

    async fn discard_table(&mut self, offset: u64, uses: &ClusterUses) -> Result<()> {
        for owner in &uses.owners {
            let place = self.disks[owner.disk as usize].l1_offset + u64::from(owner.index) * 8;
            let message =
                format!("the L1 entry at {place:#x} points to {offset:#x}, which is not an L2 table");
            self.discard_l1(place, *owner, message).await?;
        }
        Ok(())
    }

    /// Number of guest bytes that an L2 table maps.
    pub(super) fn table_coverage(&self) -> u64 {
        self.header.cluster_bytes() / self.shape.entry_bytes() as u64 * self.header.cluster_bytes()
    }

    /// Offset of the first guest byte of an L1 entry. Wraps for a damaged header; the result is
    /// only compared and reported.
    pub(super) fn guest_of(&self, owner: L1Location) -> u64 {
        u64::from(owner.index).wrapping_mul(self.table_coverage())
    }

    /// True if the report has space for all guest ranges of an entry of their table.
    pub(super) fn fits_in_report(&mut self, owners: &[L1Location]) -> bool {
        // A hostile image may have millions of owners: avoid visiting each of them.
        if !self.lost.has_room(owners.len()) {
            return false;
        }
        let slots: usize = owners.iter().map(|owner| self.disks[owner.disk as usize].slots).sum();
        self.lost.has_room(slots.saturating_mul(SUBCLUSTERS as usize))
    }

    /// Records a part of the guest range of L1 entries as lost or ambiguous.
    pub(super) fn add_ranges(&mut self, owners: &[L1Location], part: std::ops::Range<u64>, is_lost: bool) {
        for owner in owners {
            let offset = self.guest_of(*owner).wrapping_add(part.start);
            let mut length = part.end - part.start;
            let names = &self.disks[owner.disk as usize].snapshots;
            let list = if is_lost { &mut self.lost } else { &mut self.ambiguous };
            if !list.has_room(1) {
                return;
            }
            if names.is_empty() {
                // Beyond the end of the disk there are no guest bytes.
                length = length.min(self.header.size_bytes.saturating_sub(offset));
                if length > 0 {
                    list.add(GuestRange { snapshot: None, offset, length });
                }
            }
            for name in names {
                list.add(GuestRange { snapshot: Some(name.clone()), offset, length });
            }
        }
    }
}
