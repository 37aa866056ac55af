//! Applies a change to an encoded header without moving anything else in it.
//!
//! The program that created the image chose the header's length, the order of its extensions and
//! the location of the backing file's name. If every change moved them, a power failure could leave
//! a first sector that refers to a name in a second sector that was not written. Numbers are
//! therefore patched in place, in the first sector. Only a changed name or a new extension makes a
//! new layout.
//!
//! The first sector is written last, after a flush. So a new layout must leave what the old first
//! sector refers to in the other sectors: the new name is written beside the old one, whose bytes
//! stay, and the optional names of features are left out if they are in the way.

use super::{
    InvalidImage,
    header::{BitmapsExtension, Qcow2Header, bitmaps_extension},
};

// Fields that may change and have a fixed offset: from the disk's size to the snapshot table, and
// in version 3 the feature bits.
const NUMBERS_2: std::ops::Range<usize> = 24..72;
const NUMBERS_3: std::ops::Range<usize> = 24..96;

/// Unit that is in the file as a whole, or not at all, after a crash.
pub(super) const SECTOR: usize = 512;
// Number of sectors in which a place for a new name is looked for. A name has two at most.
const NAME_SECTORS: usize = 32;

/// First cluster with the header `new`, given its present bytes and the header they encode. Its
/// first sector must be written last.
///
/// # Errors
/// The header violates a rule, or it has no place for another backing file's name beside the
/// present one, so that a crash could damage it.
pub(super) fn encode_change(
    bytes: &[u8],
    old: &Qcow2Header,
    new: &Qcow2Header,
) -> Result<Vec<u8>, InvalidImage> {
    let encoded = new.encode()?;
    let mut patched = bytes.to_vec();
    patched.resize(encoded.len(), 0);
    let numbers = if new.version >= 3 { NUMBERS_3 } else { NUMBERS_2 };
    patched[numbers.clone()].copy_from_slice(&encoded[numbers]);
    if let (Some(old), Some(new)) = (old.bitmaps, new.bitmaps) {
        patch_bitmaps(&mut patched, old, new);
    }
    // Decoding shows whether the patch was sufficient; anything else needs a new layout.
    if is_header(&patched, new) {
        return Ok(patched);
    }
    if let Some(layout) = safe_layout(bytes, old, new)? {
        return Ok(layout);
    }
    if old.backing != new.backing {
        let why = "the header has no place for the name of another backing file beside the present one";
        return Err(InvalidImage::new(why));
    }
    Ok(encoded)
}

/// The bytes of `new` with the first sector of `old`, if that is the header `expected` too.
pub(super) fn with_first_sector(new: &[u8], old: &[u8], expected: &Qcow2Header) -> Option<Vec<u8>> {
    let mut bytes = new.to_vec();
    bytes[..SECTOR].copy_from_slice(&old[..SECTOR]);
    is_header(&bytes, expected).then_some(bytes)
}

fn is_header(bytes: &[u8], header: &Qcow2Header) -> bool {
    Qcow2Header::parse(bytes).is_ok_and(|parsed| parsed == *header)
}

/// A layout of `new` whose sectors other than the first one do not change what the old first sector
/// refers to.
fn safe_layout(bytes: &[u8], old: &Qcow2Header, new: &Qcow2Header) -> Result<Option<Vec<u8>>, InvalidImage> {
    let cluster_bytes = new.cluster_bytes() as usize;
    let name = new.backing.as_ref().map(|backing| backing.name.as_bytes()).unwrap_or_default();
    let mut present = bytes.to_vec();
    present.resize(cluster_bytes, 0);
    for has_feature_names in [true, false] {
        let front = new.encode_front(has_feature_names)?;
        let sectors = (1..NAME_SECTORS).map(|sector| front.len().next_multiple_of(SECTOR) + sector * SECTOR);
        for at in std::iter::once(front.len()).chain(sectors) {
            let end = at + name.len();
            if end > cluster_bytes {
                break;
            }
            // What the old first sector refers to is kept; the new one does not refer to it.
            let mut layout = present.clone();
            layout[..SECTOR].fill(0);
            layout[..front.len()].copy_from_slice(&front);
            layout[at..end].copy_from_slice(name);
            if !name.is_empty() {
                layout[8..16].copy_from_slice(&(at as u64).to_be_bytes());
                layout[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
            }
            if is_header(&layout, new) && with_first_sector(&layout, &present, old).is_some() {
                return Ok(Some(layout));
            }
            if name.is_empty() {
                break;
            }
        }
    }
    Ok(None)
}

fn patch_bitmaps(bytes: &mut [u8], old: BitmapsExtension, new: BitmapsExtension) {
    let (old, new) = (bitmaps_extension(old), bitmaps_extension(new));
    if let Some(at) = bytes.windows(old.len()).position(|window| window == old) {
        bytes[at..at + new.len()].copy_from_slice(&new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::header::{BackingReference, FileRegion, autoclear, tests::header};

    /// An image with the shortest header of version 3 and the backing file's name directly after
    /// the extensions, as written by older programs.
    fn old_header() -> (Qcow2Header, Vec<u8>) {
        let encoded = header().encode().expect("valid");
        let mut bytes = encoded.clone();
        bytes.truncate(104);
        bytes[100..104].copy_from_slice(&104_u32.to_be_bytes());
        let bitmaps = BitmapsExtension { count: 1, directory: FileRegion { offset: 0x50000, length: 32 } };
        bytes.extend(bitmaps_extension(bitmaps));
        bytes.extend([0; 8]);
        let name = bytes.len() as u64;
        bytes[8..16].copy_from_slice(&name.to_be_bytes());
        bytes[16..20].copy_from_slice(&8_u32.to_be_bytes());
        bytes[95] |= autoclear::BITMAPS as u8;
        bytes.extend(b"base.raw");
        bytes.resize(encoded.len(), 0);
        (Qcow2Header::parse(&bytes).expect("valid"), bytes)
    }

    #[test]
    fn patch_changes_fields_in_place() {
        let (old, bytes) = old_header();
        let directory = FileRegion { offset: 0x70000, length: 64 };
        let new = Qcow2Header {
            size_bytes: 1 << 21,
            l1_offset: 0x90000,
            bitmaps: Some(BitmapsExtension { count: 2, directory }),
            ..old.clone()
        };
        let after = encode_change(&bytes, &old, &new).expect("valid");
        assert_eq!(Qcow2Header::parse(&after), Ok(new));
        let moved = (0..bytes.len()).filter(|at| bytes[*at] != after[*at]).collect::<Vec<_>>();
        assert!(moved.len() < 16 && moved.iter().all(|at| (24..512).contains(at)), "{moved:?}");
        assert_eq!(&after[144..152], b"base.raw");
    }

    #[test]
    fn a_crash_between_the_sectors_of_a_new_layout_leaves_the_old_header() {
        let reference = |name: &str, format: &str| {
            Some(BackingReference { name: name.into(), format: Some(format.into()) })
        };
        let long = "x".repeat(1000);
        let references = [None, reference("a", "raw"), reference("b", "qcow2"), reference(&long, "raw")];
        for cluster_bits in [12, 16] {
            for first in &references {
                let mut old = Qcow2Header { cluster_bits, size_bytes: 1 << 20, bitmaps: None, ..header() };
                old.autoclear &= !autoclear::BITMAPS;
                old.backing.clone_from(first);
                let mut bytes = old.encode().expect("valid");
                // Again and again: the names before do not fill the cluster up.
                for next in references.iter().cycle().take(20) {
                    let new = Qcow2Header { backing: next.clone(), ..old.clone() };
                    let after = encode_change(&bytes, &old, &new).expect("it has a place");
                    assert_eq!(Qcow2Header::parse(&after).as_ref(), Ok(&new));
                    assert!(with_first_sector(&after, &bytes, &old).is_some());
                    (old, bytes) = (new, after);
                }
            }
        }
    }

    #[test]
    fn changed_backing_name_moves_extensions() {
        let (old, bytes) = old_header();
        let new = Qcow2Header {
            backing: Some(BackingReference { name: "other".into(), format: None }),
            ..old.clone()
        };
        let after = encode_change(&bytes, &old, &new).expect("valid");
        assert_eq!(after, new.encode().expect("valid"));
    }
}
