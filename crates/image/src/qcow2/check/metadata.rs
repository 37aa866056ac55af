//! Clusters with metadata, and the metadata that a repair may change in place.
//!
//! ```text
//!   first pass, which writes nothing ─► survey ─► second pass, which repairs
//! ```
//!
//! A wrong reference may make a guest's cluster, or another table, look like an L1 or L2 table. A
//! repair therefore writes to a table only if the survey found no other reference to its cluster:
//! the "reserved bits" of such a table may be guest data.
//!
//! Refcount structures and bitmaps do not count as metadata here: if they overlap other
//! structures, they are rebuilt or dropped.

use super::{CheckPass, counts::ReferenceCounts};

/// Kind of metadata in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetadataKind {
    Header = 1,
    L1,
    L2,
    SnapshotTable,
    Luks,
    /// More than one kind.
    Several,
}

impl MetadataKind {
    const ALL: [Self; 6] = [Self::Header, Self::L1, Self::L2, Self::SnapshotTable, Self::Luks, Self::Several];

    fn name(self) -> &'static str {
        match self {
            Self::Header => "the header",
            Self::L1 => "an L1 table",
            Self::L2 => "an L2 table",
            Self::SnapshotTable => "the snapshot table",
            Self::Luks => "the LUKS header",
            Self::Several => "several tables",
        }
    }
}

/// References to clusters, as found by a pass over the whole image.
#[derive(Debug, Default)]
pub(super) struct ReferenceSurvey {
    /// All references.
    pub(super) counts: ReferenceCounts,
    /// References that make the cluster metadata.
    metadata: ReferenceCounts,
    /// [`MetadataKind`] of each cluster as a number; 0 for none.
    kinds: ReferenceCounts,
}

impl ReferenceSurvey {
    fn kind(&self, cluster: u64) -> Option<MetadataKind> {
        let number = self.kinds.get(cluster);
        MetadataKind::ALL.into_iter().find(|kind| *kind as u64 == number)
    }

    /// True if all references to the cluster make it the same kind of metadata.
    fn is_exclusive(&self, cluster: u64) -> bool {
        let is_one_kind = self.kind(cluster).is_some_and(|kind| kind != MetadataKind::Several);
        is_one_kind && self.metadata.get(cluster) == self.counts.get(cluster)
    }
}

impl CheckPass<'_> {
    /// Counts the clusters of a region of metadata with `times` references. Reports a region
    /// beyond the end of the file, for which it returns false, and one that overlaps other
    /// metadata.
    pub(super) fn count_metadata(
        &mut self,
        kind: MetadataKind,
        structure: &str,
        offset: u64,
        length: u64,
        times: u64,
    ) -> bool {
        if !self.count_region(structure, offset, length, times) {
            return false;
        }
        let bits = self.header.cluster_bits;
        let mut overlapped = None;
        for cluster in offset >> bits..(offset + length).div_ceil(1 << bits) {
            let number = match self.found.kind(cluster) {
                None => kind,
                Some(other) => {
                    overlapped.get_or_insert((cluster, other));
                    MetadataKind::Several
                }
            };
            self.found.kinds.put(cluster, number as u64);
            self.found.metadata.add(cluster, times);
        }
        if let Some((cluster, other)) = overlapped {
            self.report_hiding_damage(format!(
                "{structure} at {offset:#x} overlaps {} in cluster {cluster}",
                other.name()
            ));
        }
        true
    }

    /// Reason why a region of the file cannot contain guest data.
    pub(super) fn fault_at(&self, offset: u64, length: u64) -> Option<String> {
        if !self.is_inside(offset, length) {
            return Some(format!("points to {offset:#x}, beyond the end of the file"));
        }
        let bits = self.header.cluster_bits;
        let mut clusters = offset >> bits..(offset + length).div_ceil(1 << bits);
        let kind = clusters.find_map(|cluster| self.found.kind(cluster))?;
        Some(format!("points to {offset:#x}, which holds {}", kind.name()))
    }

    /// True if a repair may change the table at this offset of the file.
    pub(super) fn may_write(&self, offset: u64) -> bool {
        let cluster = offset >> self.header.cluster_bits;
        self.survey.as_ref().is_some_and(|survey| survey.is_exclusive(cluster))
    }
}
