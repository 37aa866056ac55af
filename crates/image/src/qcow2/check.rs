//! Whether an image is consistent, and how to repair one that is not: `qemu-img check`.
//!
//! ```text
//!   count all references ─► compare with the refcounts ─► compare the COPIED flags
//!     correct entries              correct, or make anew         correct
//! ```
//!
//! - `counts`: how often each cluster is referred to.
//! - `header`: reserved fields and names. `walk`: L1 tables; `tables`: L2 tables; `entries`: the
//!   verdict on an L2 entry.
//! - `metadata`: which tables a repair may change; `ranges`: guest ranges in reports.
//! - `others`: snapshots, bitmaps, the LUKS header; `completing`: a complete snapshot table.
//! - `refcounts`: the refcounts in the file against those counted; `rebuild`: new ones.
//! - `copied`: the flags by which a cluster may be written in place.
//!
//! Works on the storage itself, without opening the image: nothing else may use it meanwhile.
//! Nothing in it is trusted. Memory and time grow with what is in the file, not with what its
//! numbers claim: a table is read once, however many entries refer to it.
//!
//! Order of repairs: entries are corrected and refcounts are raised before anything is lowered,
//! with a flush between. So an interrupted repair leaves at most the damage that it found, and
//! leaks.
//!
//! Never changes a guest byte that can be read, zeroes included. An entry with an ambiguous content
//! stays unless the user gives it up ([`Repair::Forced`]).
//!
//! Never frees a cluster in an image with a part that could not be read or is ambiguous, and calls
//! none leaked there: what could not be read may refer to it.

mod completing;
mod copied;
mod counts;
mod entries;
mod header;
mod metadata;
mod others;
mod ranges;
mod rebuild;
mod refcounts;
mod tables;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::HashSet;

use super::{
    MetadataError, bytes,
    entry::Shape,
    header::{Header, autoclear, incompatible},
    numbers, read_header,
};
use completing::Planned;
use counts::Counts;
use metadata::{MetadataKind, ReferenceSurvey};
pub use ranges::GuestRange;
use ranges::GuestRanges;
use reactor::error::Result as IoResult;
use storage::Storage;
use walk::L1Table;

/// Findings are told up to so many; the others are counted.
pub const MOST_FINDINGS: usize = 1000;

const LARGEST_CLUSTER: u64 = 2 << 20;

/// What is to be repaired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repair {
    /// Nothing: the storage may be read-only.
    #[default]
    Nothing,
    /// Clusters that nothing refers to are freed.
    Leaks,
    /// Repairs damage that has exactly one correct repair. Ambiguous content is reported and
    /// unchanged.
    All,
    /// Also gives up ambiguous content: its guest ranges then read as zeroes, or as the backing
    /// file where a whole L2 table is lost or the image has version 2.
    Forced,
}

/// What was found. Numbers have the names of `qemu-img check`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// What is wrong, and still is.
    pub corruptions: u64,
    /// Clusters that count as used, or as used more often than they are.
    pub leaks: u64,
    /// The same in an image in which references may have been missed: they may be leaked or in use,
    /// and a repair keeps them.
    pub possible_leaks: u64,
    /// The reason why references may have been missed.
    pub missed_references: Option<String>,
    /// What could not be read.
    pub check_errors: u64,
    /// What was wrong and is right now.
    pub corruptions_fixed: u64,
    /// Leaks that are none any more.
    pub leaks_fixed: u64,
    /// Of the virtual disk.
    pub total_clusters: u64,
    /// Those that have a place.
    pub allocated_clusters: u64,
    /// Those that do not follow the one before.
    pub fragmented_clusters: u64,
    /// Those that are compressed.
    pub compressed_clusters: u64,
    /// Where the last cluster in use ends, in bytes.
    pub image_end_offset: u64,
    /// Guest ranges whose content is ambiguous, and was left unchanged. Sorted; not all of them
    /// where there are very many.
    pub ambiguous: Vec<GuestRange>,
    /// All guest ranges that a forced repair gave up, sorted. A range that does not fit in this
    /// list is not given up.
    pub lost: Vec<GuestRange>,
    /// What is wrong and what was done, for people; [`MOST_FINDINGS`] at most.
    pub findings: Vec<String>,
    /// How many findings there were beyond that.
    pub unsaid: u64,
}

impl Report {
    fn say(&mut self, what: impl Into<String>) {
        if self.findings.len() < MOST_FINDINGS {
            self.findings.push(what.into());
        } else {
            self.unsaid += 1;
        }
    }

    fn is_consistent(&self) -> bool {
        self.corruptions == 0 && self.check_errors == 0
    }
}

const RAW_WITHOUT_DATA_FILE: &str = "the header says that the external data file is raw, and there is none";

/// Checks the image in `storage`, which nothing else changes meanwhile, and repairs it as far as
/// asked. What was repaired is on stable storage.
///
/// # Errors
/// If the header cannot be read or is wrong, so that nothing can be said; if a repair cannot be
/// written.
pub async fn check(storage: &Storage, repair: Repair) -> Result<Report, MetadataError> {
    let mut header = read_repairable(storage).await?;
    if repair != Repair::Nothing && header.autoclear & !autoclear::KNOWN != 0 {
        // Nobody knows what they promise, and it may not be so afterwards.
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
    let (mut report, survey, _) = Pass::new(storage, header, Repair::Nothing, None).run().await?;
    let is_intact = report.is_consistent() && report.leaks == 0 && !has_stale_bitmaps;
    if repair != Repair::Nothing && !is_intact {
        report = repair_surveyed(storage, repair, survey).await?;
    }
    if clears_raw {
        report.corruptions_fixed += 1;
        report.say(format!("Repaired: {RAW_WITHOUT_DATA_FILE}"));
    } else if is_raw_without_data_file {
        report.corruptions += 1;
        report.say(format!("ERROR {RAW_WITHOUT_DATA_FILE}"));
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
) -> Result<Report, MetadataError> {
    let header = read_repairable(storage).await?;
    let (mut report, _, has_moved) = Pass::new(storage, header, repair, Some(survey)).run().await?;
    if has_moved {
        // The old location of a moved structure is not a finding.
        let header = read_repairable(storage).await?;
        let (_, survey, _) = Pass::new(storage, header.clone(), Repair::Nothing, None).run().await?;
        Pass::new(storage, header, Repair::Leaks, Some(survey)).run().await?;
    }
    if has_moved || report.corruptions_fixed + report.leaks_fixed > 0 {
        let header = read_repairable(storage).await?;
        let (mut second, ..) = Pass::new(storage, header, Repair::Nothing, None).run().await?;
        second.corruptions_fixed = report.corruptions_fixed;
        second.leaks_fixed = report.leaks_fixed;
        second.lost = std::mem::take(&mut report.lost);
        for finding in std::mem::take(&mut second.findings) {
            report.say(format!("Still: {finding}"));
        }
        second.findings = report.findings;
        second.unsaid += report.unsaid;
        report = second;
    }
    Ok(report)
}

/// The header, also where nothing is wrong with it but where the refcount table is: that is then
/// behind the end of the file, so that the refcounts count as lost and can be made anew.
async fn read_repairable(storage: &Storage) -> Result<Header, MetadataError> {
    let mut start = bytes::read_start(storage).await?;
    let invalid = match Header::parse(&start) {
        Ok(header) => return Ok(header),
        Err(invalid) => invalid,
    };
    let behind = storage.size_bytes().next_multiple_of(LARGEST_CLUSTER);
    let Some(place) = start.get_mut(48..60) else { return Err(invalid.into()) };
    place[..8].copy_from_slice(&behind.to_be_bytes());
    place[8..].copy_from_slice(&1_u32.to_be_bytes());
    Header::parse(&start).map_err(|_| invalid.into())
}

/// Clears the marks of a dirty or corrupt image, and reports that.
async fn mark_clean(storage: &Storage, report: &mut Report) -> Result<(), MetadataError> {
    let mut header = read_header(storage).await?;
    let marks = incompatible::DIRTY | incompatible::CORRUPT;
    if header.incompatible & marks != 0 {
        storage.flush().await?;
        let found = header.incompatible;
        header.incompatible &= !marks;
        write_header(storage, &header).await?;
        for (mark, name) in [(incompatible::DIRTY, "dirty"), (incompatible::CORRUPT, "corrupt")] {
            if found & mark != 0 {
                report.say(format!("The image is consistent and no longer marked {name}"));
            }
        }
    }
    Ok(())
}

/// Writes the header, sector by sector where it changed, and flushes.
async fn write_header(storage: &Storage, header: &Header) -> Result<(), MetadataError> {
    let encoded = header.encode()?;
    let old = bytes::read(storage, 0, encoded.len()).await?;
    for (number, sector) in encoded.chunks(512).enumerate() {
        let at = number * 512;
        if old[at..at + sector.len()] != *sector {
            bytes::write(storage, at as u64, sector).await?;
        }
    }
    storage.flush().await?;
    Ok(())
}

/// One look at the whole image.
struct Pass<'a> {
    storage: &'a Storage,
    header: Header,
    repair: Repair,
    shape: Shape,
    /// Clusters of the file; the last may be incomplete.
    file_clusters: u64,
    found: ReferenceSurvey,
    /// References that an earlier pass over the same image found; without them no table is written.
    survey: Option<ReferenceSurvey>,
    /// L1 tables that were read.
    disks: Vec<L1Table>,
    /// Clusters whose refcount in the file is another than what was counted: 1 if it is 1,
    /// otherwise 2.
    stored: Counts,
    /// Clusters whose refcount was too high and is 1 now: what they are referred to by lacks
    /// COPIED.
    lowered_to_one: HashSet<u64>,
    /// Number of clusters with a refcount in one block.
    per_block: u64,
    /// Refcount blocks whose numbers in the file are unknown, by index in the table; `None` if the
    /// table is unknown.
    unknown_blocks: Option<HashSet<u64>>,
    /// Refcount blocks are not written, because they may be something else too.
    is_frozen: bool,
    /// A snapshot table that is to take the place of the one in the file.
    planned: Option<Planned>,
    ambiguous: GuestRanges,
    lost: GuestRanges,
    report: Report,
}

impl<'a> Pass<'a> {
    fn new(storage: &'a Storage, header: Header, repair: Repair, survey: Option<ReferenceSurvey>) -> Self {
        let shape = Shape {
            cluster_bits: header.cluster_bits,
            extended: header.has_subclusters(),
            data_file: header.has_data_file(),
            version: header.version,
        };
        let per_block = numbers::count(header.cluster_bytes(), header.refcount_order);
        let report = Report {
            total_clusters: header.size_bytes.div_ceil(header.cluster_bytes()),
            ..Report::default()
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
            stored: Counts::default(),
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

    /// The report, the references that were found, and whether a structure was moved, or was to be.
    async fn run(mut self) -> Result<(Report, ReferenceSurvey, bool), MetadataError> {
        self.check_header().await?;
        self.count_metadata(MetadataKind::Header, "the header", (0, self.header.cluster_bytes()), 1);
        let tables = self.count_snapshots().await?;
        self.count_luks().await;
        self.walk(tables).await?;
        self.count_bitmaps().await?;
        // Before anything is freed that was referred to until now.
        self.flush_repairs().await?;
        if let Some(structures) = self.count_refcounts().await {
            self.compare(structures).await?;
        }
        let has_moved = self.planned.is_some();
        self.put_snapshot_table().await?;
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

    /// Notes that references may be missing from the count. Nothing is freed then.
    fn miss_references(&mut self, why: impl Into<String>) {
        self.report.missed_references.get_or_insert_with(|| why.into());
    }

    /// True if references may be missing from the count.
    fn is_incomplete(&self) -> bool {
        self.report.missed_references.is_some()
    }

    /// Damage that stays and may hide references.
    fn hidden(&mut self, what: impl Into<String>) {
        let what = what.into();
        self.miss_references(&*what);
        self.corrupt(what);
    }

    /// Something is wrong, and stays so.
    fn corrupt(&mut self, what: impl Into<String>) {
        self.report.corruptions += 1;
        self.report.say(format!("ERROR: {}", what.into()));
    }

    /// Something was wrong, and is right now.
    fn corrected(&mut self, what: impl Into<String>) {
        self.report.corruptions_fixed += 1;
        self.report.say(format!("Repaired: {}", what.into()));
    }

    /// Metadata of a bounded length. What cannot be read is noted, and gives nothing.
    async fn read(&mut self, what: &str, offset: u64, length: u64) -> Option<Vec<u8>> {
        match bytes::read(self.storage, offset, length as usize).await {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                let what = format!("{what} at {offset:#x} cannot be read: {error}");
                self.report.check_errors += 1;
                self.report.say(format!("ERROR: {what}"));
                self.miss_references(what);
                None
            }
        }
    }

    /// Whether clusters from `offset` on have a place in the file; the last may be incomplete.
    fn is_inside(&self, offset: u64, length: u64) -> bool {
        let Some(last) = offset.checked_add(length.max(1) - 1) else { return false };
        last >> self.header.cluster_bits < self.file_clusters
    }

    /// Counts the clusters of a region that is referred to `times` times.
    fn count_region(&mut self, what: &str, offset: u64, length: u64, times: u64) -> bool {
        if length == 0 {
            return true;
        }
        if !self.is_inside(offset, length) {
            self.corrupt(format!("{what} at {offset:#x} ({length} bytes) lies beyond the end of the file"));
            return false;
        }
        let bits = self.header.cluster_bits;
        for cluster in offset >> bits..=(offset + length - 1) >> bits {
            self.found.counts.add(cluster, times);
        }
        true
    }
}
