//! Consistency check and repair of an image, as by `qemu-img check`.
//!
//! ```text
//!   count all references ─► compare with the refcounts ─► compare the COPIED flags
//!     correct entries             correct, or rebuild            correct
//! ```
//!
//! - `counts`: number of references to each cluster.
//! - `header`: reserved fields and names. `walk`: L1 tables; `tables`: L2 tables; `entries`: the
//!   verdict on an L2 entry.
//! - `metadata`: the tables that a repair may change; `ranges`: guest ranges in reports.
//! - `auxiliary`: snapshots, bitmaps, the LUKS header; `snapshot_completion`: completes the
//!   snapshot table.
//! - `refcounts`: compares stored with counted refcounts; `rebuild`: writes new ones.
//! - `copied`: the flags that allow writing a cluster in place.
//!
//! Works on the storage without opening the image; nothing else may use it meanwhile. Trusts none
//! of its content. Memory and time grow with the size of the file, not with the numbers in it:
//! a table is read once, regardless of the number of entries that refer to it.
//!
//! Order of repairs: entries are corrected and refcounts raised before anything is lowered, with a
//! flush in between. An interrupted repair therefore leaves at most the damage that it found, and
//! leaks.
//!
//! Never changes a readable guest byte, zeroes included. An entry with ambiguous content stays
//! unless the user allows its loss ([`Repair::Forced`]).
//!
//! Never frees a cluster, or reports it as leaked, if part of the image could not be read or is
//! ambiguous: the missing part may refer to the cluster.

mod auxiliary;
mod copied;
mod counts;
mod entries;
mod header;
mod metadata;
mod ranges;
mod rebuild;
mod refcounts;
mod snapshot_completion;
mod tables;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::HashSet;

use super::{
    MetadataError,
    entry::EntryFormat,
    header::{Qcow2Header, autoclear, incompatible},
    metadata_io, read_header, refcount_entries,
};
use counts::ReferenceCounts;
use metadata::{MetadataKind, ReferenceSurvey};
pub use ranges::GuestRange;
use ranges::GuestRanges;
use reactor::error::Result as IoResult;
use snapshot_completion::PlannedSnapshotTable;
use storage::Storage;
use walk::L1Table;

/// Limit of findings that are reported as text; further ones are only counted.
pub const MAX_FINDINGS: usize = 1000;

const MAX_CLUSTER: u64 = 2 << 20;

/// Extent of a repair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repair {
    /// No repair; the storage may be read-only.
    #[default]
    Nothing,
    /// Frees clusters without references.
    Leaks,
    /// Repairs damage that has exactly one correct repair. Ambiguous content is reported and
    /// unchanged.
    All,
    /// Also discards ambiguous content: its guest ranges then read as zeroes, or as the backing
    /// file if a whole L2 table is lost or the image has version 2.
    Forced,
}

/// Result of a check. Counters have the names of `qemu-img check`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Remaining corruptions.
    pub corruptions: u64,
    /// Remaining clusters whose refcount is higher than the number of references.
    pub leaks: u64,
    /// Like `leaks`, in an image in which references may have been missed: the clusters may be in
    /// use, and a repair keeps them.
    pub possible_leaks: u64,
    /// Reason why references may have been missed.
    pub missed_references: Option<String>,
    /// Number of structures that could not be read.
    pub check_errors: u64,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
    /// Clusters of the virtual disk.
    pub total_clusters: u64,
    /// Clusters that are mapped to the file.
    pub allocated_clusters: u64,
    /// Clusters that are not adjacent to their predecessor in the file.
    pub fragmented_clusters: u64,
    /// Compressed clusters.
    pub compressed_clusters: u64,
    /// End of the last cluster in use, in bytes.
    pub image_end_offset: u64,
    /// Guest ranges with ambiguous content, which was not changed. Sorted; incomplete if there are
    /// very many.
    pub ambiguous: Vec<GuestRange>,
    /// All guest ranges that a forced repair discarded, sorted. A range that does not fit into this
    /// list is not discarded.
    pub lost: Vec<GuestRange>,
    /// Findings and repairs as text for users; at most [`MAX_FINDINGS`].
    pub findings: Vec<String>,
    /// Number of findings beyond the limit.
    pub unreported: u64,
}

impl CheckReport {
    fn report(&mut self, finding: impl Into<String>) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding.into());
        } else {
            self.unreported += 1;
        }
    }

    fn is_consistent(&self) -> bool {
        self.corruptions == 0 && self.check_errors == 0
    }
}

const RAW_WITHOUT_DATA_FILE: &str = "the header marks the external data file as raw, but the image has none";

/// Checks the image in `storage`, which must not change meanwhile, and repairs it as far as
/// `repair` allows. Repairs are durable on return.
///
/// # Errors
/// The header is unreadable or invalid, so that a check is impossible; or a repair cannot be
/// written.
pub async fn check(storage: &Storage, repair: Repair) -> Result<CheckReport, MetadataError> {
    let mut header = read_repairable(storage).await?;
    if repair != Repair::Nothing && header.autoclear & !autoclear::KNOWN != 0 {
        // Unknown autoclear bits must be cleared before a write: their features may become
        // inconsistent.
        header.autoclear &= autoclear::KNOWN;
        write_header(storage, &header).await?;
    }
    // QEMU does not open such an image.
    let is_raw_without_data_file =
        header.autoclear & autoclear::RAW_DATA_FILE != 0 && !header.has_data_file();
    let clears_raw = is_raw_without_data_file && matches!(repair, Repair::All | Repair::Forced);
    if clears_raw {
        header.autoclear &= !autoclear::RAW_DATA_FILE;
        write_header(storage, &header).await?;
    }
    let has_stale_bitmaps = header.bitmaps.is_some() && header.autoclear & autoclear::BITMAPS == 0;
    // The first pass never writes: its survey shows the second one which tables are safe to
    // change.
    let (mut report, survey, _) = CheckPass::new(storage, header, Repair::Nothing, None).run().await?;
    let is_intact = report.is_consistent() && report.leaks == 0 && !has_stale_bitmaps;
    // A repair invalidates the first report, so it is replaced.
    if repair != Repair::Nothing && !is_intact {
        report = repair_surveyed(storage, repair, survey).await?;
    }
    if clears_raw {
        report.corruptions_fixed += 1;
        report.report(format!("Repaired: {RAW_WITHOUT_DATA_FILE}"));
    } else if is_raw_without_data_file {
        report.corruptions += 1;
        report.report(format!("ERROR {RAW_WITHOUT_DATA_FILE}"));
    }
    if repair != Repair::Nothing && report.is_consistent() {
        mark_clean(storage, &mut report).await?;
    }
    Ok(report)
}

/// Repairs an image, using an earlier survey of it. Reports the repairs, and the damage that a
/// second pass still finds.
async fn repair_surveyed(
    storage: &Storage,
    repair: Repair,
    survey: ReferenceSurvey,
) -> Result<CheckReport, MetadataError> {
    let header = read_repairable(storage).await?;
    let (mut report, _, has_moved) = CheckPass::new(storage, header, repair, Some(survey)).run().await?;
    if has_moved {
        // The old location of a moved structure is an expected leak and not a finding.
        let header = read_repairable(storage).await?;
        let (_, survey, _) = CheckPass::new(storage, header.clone(), Repair::Nothing, None).run().await?;
        CheckPass::new(storage, header, Repair::Leaks, Some(survey)).run().await?;
    }
    // The second pass reports the repaired image, and verifies the repairs.
    if has_moved || report.corruptions_fixed + report.leaks_fixed > 0 {
        let header = read_repairable(storage).await?;
        let (mut second, ..) = CheckPass::new(storage, header, Repair::Nothing, None).run().await?;
        second.corruptions_fixed = report.corruptions_fixed;
        second.leaks_fixed = report.leaks_fixed;
        second.lost = std::mem::take(&mut report.lost);
        for finding in std::mem::take(&mut second.findings) {
            report.report(format!("Still: {finding}"));
        }
        second.findings = report.findings;
        second.unreported += report.unreported;
        report = second;
    }
    Ok(report)
}

/// Reads the header. If only its refcount table is invalid, the table is assumed beyond the end of
/// the file, so that the refcounts count as lost and can be rebuilt.
async fn read_repairable(storage: &Storage) -> Result<Qcow2Header, MetadataError> {
    let mut start = metadata_io::read_start(storage).await?;
    let invalid = match Qcow2Header::parse(&start) {
        Ok(header) => return Ok(header),
        Err(invalid) => invalid,
    };
    let beyond_end = storage.size_bytes().next_multiple_of(MAX_CLUSTER);
    let Some(place) = start.get_mut(48..60) else { return Err(invalid.into()) };
    place[..8].copy_from_slice(&beyond_end.to_be_bytes());
    place[8..].copy_from_slice(&1_u32.to_be_bytes());
    Qcow2Header::parse(&start).map_err(|_| invalid.into())
}

/// Clears the dirty and corrupt marks of a consistent image, and reports that.
async fn mark_clean(storage: &Storage, report: &mut CheckReport) -> Result<(), MetadataError> {
    let mut header = read_header(storage).await?;
    let marks = incompatible::DIRTY | incompatible::CORRUPT;
    if header.incompatible & marks != 0 {
        storage.flush().await?;
        let found = header.incompatible;
        header.incompatible &= !marks;
        write_header(storage, &header).await?;
        for (mark, name) in [(incompatible::DIRTY, "dirty"), (incompatible::CORRUPT, "corrupt")] {
            if found & mark != 0 {
                report.report(format!("The image is consistent and no longer marked {name}"));
            }
        }
    }
    Ok(())
}

/// Writes the changed sectors of the header and flushes.
async fn write_header(storage: &Storage, header: &Qcow2Header) -> Result<(), MetadataError> {
    let encoded = header.encode()?;
    let old = metadata_io::read(storage, 0, encoded.len()).await?;
    for (number, sector) in encoded.chunks(512).enumerate() {
        let at = number * 512;
        if old[at..at + sector.len()] != *sector {
            metadata_io::write(storage, at as u64, sector).await?;
        }
    }
    storage.flush().await?;
    Ok(())
}

/// One pass over the whole image.
struct CheckPass<'a> {
    storage: &'a Storage,
    header: Qcow2Header,
    repair: Repair,
    shape: EntryFormat,
    /// Clusters in the file; the last may be incomplete.
    file_clusters: u64,
    found: ReferenceSurvey,
    /// References found by an earlier pass over the same image; without them no table is written.
    survey: Option<ReferenceSurvey>,
    /// L1 tables that were read.
    disks: Vec<L1Table>,
    /// Clusters whose stored refcount differs from the counted one: 1 if it is 1, otherwise 2.
    stored: ReferenceCounts,
    /// Clusters whose refcount was lowered to 1, and whose referring entry therefore lacks COPIED.
    lowered_to_one: HashSet<u64>,
    /// Clusters per refcount block.
    per_block: u64,
    /// Indices of refcount blocks with unknown content; `None` if the table is unknown.
    unknown_blocks: Option<HashSet<u64>>,
    /// True if refcount blocks must not be written because they may overlap other structures.
    is_frozen: bool,
    /// New snapshot table that is to replace the one in the file.
    planned: Option<PlannedSnapshotTable>,
    ambiguous: GuestRanges,
    lost: GuestRanges,
    report: CheckReport,
}

impl<'a> CheckPass<'a> {
    fn new(
        storage: &'a Storage,
        header: Qcow2Header,
        repair: Repair,
        survey: Option<ReferenceSurvey>,
    ) -> Self {
        let shape = EntryFormat {
            cluster_bits: header.cluster_bits,
            extended: header.has_subclusters(),
            data_file: header.has_data_file(),
            version: header.version,
        };
        let per_block = refcount_entries::entry_count(header.cluster_bytes(), header.refcount_order);
        let report = CheckReport {
            total_clusters: header.size_bytes.div_ceil(header.cluster_bytes()),
            ..CheckReport::default()
        };
        Self {
            storage,
            repair,
            shape,
            file_clusters: storage.size_bytes().div_ceil(header.cluster_bytes()),
            header,
            found: ReferenceSurvey::default(),
            survey,
            disks: Vec::new(),
            stored: ReferenceCounts::default(),
            lowered_to_one: HashSet::new(),
            per_block,
            unknown_blocks: Some(HashSet::new()),
            is_frozen: false,
            planned: None,
            ambiguous: GuestRanges::default(),
            lost: GuestRanges::default(),
            report,
        }
    }

    /// Runs the pass. Returns the report, the references, and true if a structure was to be moved.
    async fn run(mut self) -> Result<(CheckReport, ReferenceSurvey, bool), MetadataError> {
        self.check_header().await?;
        self.count_metadata(MetadataKind::Header, "the header", 0, self.header.cluster_bytes(), 1);
        let tables = self.count_snapshots().await?;
        self.count_luks().await;
        self.walk(tables).await?;
        self.count_bitmaps().await?;
        // Corrected entries must be durable before the clusters they referred to are freed.
        self.flush_repairs().await?;
        if let Some(structures) = self.count_refcounts().await {
            self.compare(structures).await?;
        }
        let has_moved = self.planned.is_some();
        self.write_snapshot_table().await?;
        self.check_copied().await?;
        self.flush_repairs().await?;
        self.report.ambiguous = self.ambiguous.finish();
        self.report.lost = self.lost.finish();
        Ok((self.report, self.found, has_moved))
    }

    async fn flush_repairs(&self) -> IoResult<()> {
        if self.repair == Repair::Nothing { Ok(()) } else { self.storage.flush().await }
    }

    fn repairs_all(&self) -> bool {
        matches!(self.repair, Repair::All | Repair::Forced)
    }

    /// Records that references may be missing from the count. Nothing is freed then.
    fn miss_references(&mut self, why: impl Into<String>) {
        self.report.missed_references.get_or_insert_with(|| why.into());
    }

    /// True if references may be missing from the count.
    fn is_incomplete(&self) -> bool {
        self.report.missed_references.is_some()
    }

    /// Reports unrepaired damage that may hide references.
    fn report_hiding_damage(&mut self, damage: impl Into<String>) {
        let damage = damage.into();
        self.miss_references(&*damage);
        self.report_corruption(damage);
    }

    /// Reports unrepaired damage.
    fn report_corruption(&mut self, damage: impl Into<String>) {
        self.report.corruptions += 1;
        self.report.report(format!("ERROR: {}", damage.into()));
    }

    /// Reports repaired damage.
    fn report_repair(&mut self, damage: impl Into<String>) {
        self.report.corruptions_fixed += 1;
        self.report.report(format!("Repaired: {}", damage.into()));
    }

    /// Reads metadata of bounded length. A failure is reported and returns `None`.
    async fn read(&mut self, structure: &str, offset: u64, length: u64) -> Option<Vec<u8>> {
        match metadata_io::read(self.storage, offset, length as usize).await {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                let message = format!("{structure} at {offset:#x} cannot be read: {error}");
                self.report.check_errors += 1;
                self.report.report(format!("ERROR: {message}"));
                self.miss_references(message);
                None
            }
        }
    }

    /// True if the clusters of the range exist in the file; the last may be incomplete.
    fn is_inside(&self, offset: u64, length: u64) -> bool {
        let Some(last) = offset.checked_add(length.max(1) - 1) else { return false };
        last >> self.header.cluster_bits < self.file_clusters
    }

    /// Counts the clusters of a region with `times` references. Returns false, and reports it, if
    /// the region is beyond the end of the file.
    fn count_region(&mut self, structure: &str, offset: u64, length: u64, times: u64) -> bool {
        if length == 0 {
            return true;
        }
        if !self.is_inside(offset, length) {
            self.report_corruption(format!(
                "{structure} at {offset:#x} ({length} bytes) lies beyond the end of the file"
            ));
            return false;
        }
        let bits = self.header.cluster_bits;
        for cluster in offset >> bits..=(offset + length - 1) >> bits {
            self.found.counts.add(cluster, times);
        }
        true
    }
}
