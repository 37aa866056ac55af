//! The verdict on an L2 entry: sound, flawed with a correction that no reader notices, or
//! ambiguous.
//!
//! ```text
//!   entry ─► flaws      reserved bits, a flag without a cluster, a bad offset of zeroes: corrected
//!         └► ambiguity  data at an impossible offset, contradicting bits: reported, or discarded
//! ```
//!
//! A flaw is corrected only if every byte that the entry describes reads the same afterwards. The
//! zero flag, and the bitmap of an extended entry, therefore survive a bad offset. Everything else
//! is ambiguous: the guest's data may still exist, and only the user may allow its loss.
//! Discarded subclusters read as zeroes, never as old data of the backing file; version 2 has no
//! zero flag, so there the cluster becomes unallocated.
//!
//! Pure: never reads or writes the file.
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Cluster mapping" and "Extended L2 Entries".

use crate::qcow2::entry::{COMPRESSED, COPIED, ClusterMapping, EntryFormat, OFFSET, ZERO};

// Reserved bits of a standard L2 entry: 1 to 8 and 56 to 61.
const RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// An L2 entry as stored: first word, and bitmap of an extended entry (0 otherwise).
pub(super) type RawEntry = (u64, u64);

/// Verdict on an L2 entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EntryVerdict {
    /// The entry without its flaws; every byte reads as before.
    pub(super) corrected: RawEntry,
    /// Descriptions of the flaws.
    pub(super) flaws: Vec<String>,
    /// Reason why the content of some subclusters cannot be determined.
    pub(super) ambiguity: Option<Ambiguity>,
}

/// Subclusters whose content cannot be determined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ambiguity {
    /// Description of the reason.
    pub(super) reason: String,
    /// Bitmap of the subclusters; only bit 0 without extended entries.
    pub(super) subclusters: u32,
    /// The entry after their content was discarded.
    pub(super) given_up: RawEntry,
}

impl EntryVerdict {
    /// True if the entry needs no repair.
    pub(super) fn is_sound(&self) -> bool {
        self.flaws.is_empty() && self.ambiguity.is_none()
    }
}

/// Checks the entry of the guest cluster at `guest`. `fault_at` returns the reason why a region of
/// the file, given as offset and length, cannot contain guest data.
pub(super) fn judge_entry(
    shape: EntryFormat,
    entry: RawEntry,
    guest: u64,
    fault_at: impl Fn(u64, u64) -> Option<String>,
) -> EntryVerdict {
    if entry.0 & COMPRESSED != 0 {
        judge_compressed(shape, entry, fault_at)
    } else {
        judge_standard(shape, entry, guest, fault_at)
    }
}

fn judge_compressed(
    shape: EntryFormat,
    (raw, map): RawEntry,
    fault_at: impl Fn(u64, u64) -> Option<String>,
) -> EntryVerdict {
    let fault = match shape.decode(raw, map) {
        Ok(ClusterMapping::Compressed { offset, length }) => fault_at(offset, length),
        Ok(ClusterMapping::Standard(_)) => None,
        Err(invalid) => Some(invalid.to_string()),
    };
    let ambiguity = fault.map(|reason| Ambiguity {
        reason,
        subclusters: shape.all(),
        given_up: zeroes(shape, (0, 0), shape.all()),
    });
    let mut flaws = Vec::new();
    if raw & COPIED != 0 || map != 0 {
        flaws.push("is compressed, with bits that only standard clusters have".to_owned());
    }
    EntryVerdict { corrected: (raw & !COPIED, 0), flaws, ambiguity }
}

fn judge_standard(
    shape: EntryFormat,
    (raw, map): RawEntry,
    guest: u64,
    fault_at: impl Fn(u64, u64) -> Option<String>,
) -> EntryVerdict {
    let mut flaws = Vec::new();
    let mut corrected = raw & !if shape.extended { RESERVED | ZERO } else { RESERVED };
    if corrected != raw {
        flaws.push("has reserved bits".to_owned());
    }
    let offset = raw & OFFSET;
    // Offset 0 is valid in a data file only.
    let host = (offset != 0 || raw & COPIED != 0 && shape.data_file).then_some(offset);
    if host.is_none() && raw & COPIED != 0 {
        flaws.push("is marked COPIED, and has no cluster".to_owned());
        corrected &= !COPIED;
    }
    if shape.version < 3 && raw & ZERO != 0 {
        let what = "has the zero flag, which version 2 of the format does not define".to_owned();
        let ambiguity = Some(Ambiguity { reason: what, subclusters: shape.all(), given_up: (0, 0) });
        return EntryVerdict { corrected: (corrected, map), flaws, ambiguity };
    }
    let (allocated, zero) = if shape.extended {
        (map as u32, (map >> 32) as u32)
    } else {
        let is_zero = raw & ZERO != 0;
        (u32::from(host.is_some() && !is_zero), u32::from(is_zero))
    };
    let cluster_bytes = 1_u64 << shape.cluster_bits;
    let cluster_start = guest & !(cluster_bytes - 1);
    let fault = host.and_then(|host| {
        if host & (cluster_bytes - 1) != 0 {
            Some(format!("has the offset {host:#x}, which is not aligned to a cluster"))
        } else if shape.data_file {
            // In a data file every guest cluster must lie at its guest offset.
            (host != cluster_start)
                .then(|| format!("points to {host:#x} of the data file instead of {cluster_start:#x}"))
        } else {
            fault_at(host, cluster_bytes)
        }
    });
    let has_host = host.is_some() && fault.is_none();
    // Subclusters with data are in doubt if the offset is bad, and contradictory ones always are.
    let in_doubt = if has_host { allocated & zero } else { allocated };
    if in_doubt == 0 {
        if let Some(fault) = fault {
            flaws.push(format!("{fault}, and holds no data"));
            corrected &= !(OFFSET | COPIED);
        }
        return EntryVerdict { corrected: (corrected, map), flaws, ambiguity: None };
    }
    let what = match fault {
        Some(fault) => fault,
        None if has_host => "has subclusters that are both allocated and zero".to_owned(),
        None => "has allocated subclusters, and no cluster".to_owned(),
    };
    // A standard entry becomes a plain zero entry; an extended one keeps its sound subclusters.
    let left = if has_host && shape.extended { corrected } else { 0 };
    let given_up = zeroes(shape, (left, map), in_doubt);
    EntryVerdict {
        corrected: (corrected, map),
        flaws,
        ambiguity: Some(Ambiguity { reason: what, subclusters: in_doubt, given_up }),
    }
}

/// The entry with these subclusters reading as zeroes; unallocated in version 2, which cannot
/// express that.
fn zeroes(shape: EntryFormat, (raw, map): RawEntry, subclusters: u32) -> RawEntry {
    if shape.extended {
        let allocated = map & u64::from(u32::MAX) & !u64::from(subclusters);
        (raw, allocated | (map >> 32 | u64::from(subclusters)) << 32)
    } else if shape.version >= 3 {
        (ZERO, 0)
    } else {
        (0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: EntryFormat =
        EntryFormat { cluster_bits: 16, extended: false, data_file: false, version: 3 };
    const EXTENDED: EntryFormat = EntryFormat { extended: true, ..PLAIN };
    const DATA_FILE: EntryFormat = EntryFormat { data_file: true, ..PLAIN };
    const VERSION_2: EntryFormat = EntryFormat { version: 2, ..PLAIN };

    /// Verdict if guest data may lie anywhere below 1 MiB.
    fn verdict(shape: EntryFormat, raw: u64, map: u64) -> EntryVerdict {
        judge_entry(shape, (raw, map), 0x3_0000, |offset, _| {
            (offset >= 1 << 20).then(|| "lies beyond the end".to_owned())
        })
    }

    #[test]
    fn sound_entries_stay() {
        for (shape, raw, map) in [
            (PLAIN, 0x8000_0000_0005_0000, 0),
            (PLAIN, 0x8000_0000_0005_0001, 0),
            (PLAIN, 1, 0),
            (PLAIN, COMPRESSED | 0x5_1234, 0),
            (EXTENDED, 0x8000_0000_0005_0000, 0xff_0000_ff00),
            (EXTENDED, 0, 0xff_0000_0000),
            (DATA_FILE, 0x8000_0000_0003_0000, 0),
            (VERSION_2, 0x8000_0000_0005_0000, 0),
        ] {
            let verdict = verdict(shape, raw, map);
            assert!(verdict.is_sound() && verdict.corrected == (raw, map), "{raw:#x}: {verdict:?}");
        }
    }

    #[test]
    fn zero_flag_survives_invalid_offset() {
        for (shape, raw, map, corrected) in [
            (PLAIN, 0x8000_0000_0005_0201, 0, 1),
            (PLAIN, 0x8000_0000_0010_0001, 0, 1),
            (DATA_FILE, 0x8000_0000_0005_0001, 0, 1),
            (EXTENDED, 0x8000_0000_0005_0200, 0xffff_0000_0000, 0),
            (EXTENDED, 0x8000_0000_0005_0200, 0, 0),
        ] {
            let verdict = verdict(shape, raw, map);
            assert_eq!((verdict.corrected, &verdict.ambiguity), ((corrected, map), &None), "{raw:#x}");
            assert_eq!(verdict.flaws.len(), 1);
        }
    }

    #[test]
    fn meaningless_bits_are_cleared() {
        for (shape, raw, corrected) in [
            (PLAIN, 0xbf00_0000_0005_01fe, 0x8000_0000_0005_0000),
            (PLAIN, COPIED, 0),
            (PLAIN, 1 << 56, 0),
            (EXTENDED, 0x5_0001, 0x5_0000),
            (PLAIN, COMPRESSED | COPIED | 0x5_1234, COMPRESSED | 0x5_1234),
        ] {
            let verdict = verdict(shape, raw, 0);
            assert_eq!((verdict.corrected, &verdict.ambiguity), ((corrected, 0), &None), "{raw:#x}");
            assert!(!verdict.flaws.is_empty());
        }
    }

    #[test]
    fn ambiguous_data_is_zeroed_only_by_force() {
        for (shape, raw, map, subclusters, given_up) in [
            (PLAIN, 0x8000_0000_0005_0200, 0, 1, (1, 0)),
            (PLAIN, 0x10_0000, 0, 1, (1, 0)),
            (VERSION_2, 0x10_0000, 0, 1, (0, 0)),
            (VERSION_2, 0x5_0001, 0, 1, (0, 0)),
            (DATA_FILE, 0x8000_0000_0005_0000, 0, 1, (1, 0)),
            (DATA_FILE, COMPRESSED | 0x5_0000, 0, 1, (1, 0)),
            (EXTENDED, 0x5_0200, 0x30_0000_000c, 0xc, (0, 0x3c_0000_0000)),
            (EXTENDED, 0, 3, 3, (0, 3 << 32)),
            (EXTENDED, 0x5_0000, 6 << 32 | 3, 2, (0x5_0000, 6 << 32 | 1)),
            (EXTENDED, COMPRESSED | 0x10_0000, 0, u32::MAX, (0, 0xffff_ffff << 32)),
        ] {
            let verdict = verdict(shape, raw, map);
            let ambiguity = verdict.ambiguity.expect("in doubt");
            assert_eq!((ambiguity.subclusters, ambiguity.given_up), (subclusters, given_up), "{raw:#x}");
        }
    }
}
