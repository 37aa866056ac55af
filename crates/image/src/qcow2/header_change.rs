//! Applies a change to an encoded header without moving anything else in it.
//!
//! The program that created the image chose the header's length, the order of its extensions and
//! the location of the backing file's name. If every change moved them, a power failure could leave
//! a first sector that refers to a name in a second sector that was not written. Numbers are
//! therefore patched in place, in the first sector. Only a changed name or a new extension makes a
//! new layout.

use super::{
    InvalidImage,
    header::{BitmapsExtension, Qcow2Header, bitmaps_extension},
};

// Fields that may change and have a fixed offset: from the disk's size to the snapshot table, and
// in version 3 the feature bits.
const NUMBERS_2: std::ops::Range<usize> = 24..72;
const NUMBERS_3: std::ops::Range<usize> = 24..96;

/// First cluster with the header `new`, given its present bytes and the header they encode.
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
    let is_all = Qcow2Header::parse(&patched).is_ok_and(|header| header == *new);
    Ok(if is_all { patched } else { encoded })
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
