//! The mark that identifies a device after its maker has ended: a number that the driver stores
//! with it, which shows that weir made it, and for which image.
//!
//! The image is identified by its inode, not its name. So another image under the same name never
//! gets the requests of this one, and a renamed one still does.

use std::os::unix::fs::MetadataExt;

use block::disk::Disk;

/// Upper sixteen bits: `we`.
const OURS: u64 = 0x7765 << 48;
const KEPT: u64 = (1 << 48) - 1;

/// Mark of a device for this disk; `None` if the disk ends with this process, so that no process
/// could take the device over.
pub(super) fn mark_of_disk(disk: &Disk) -> Option<u64> {
    let status = std::fs::metadata(disk.image().storage().path()?).ok()?;
    Some(mark([status.dev(), status.ino(), status.rdev()]))
}

/// Mark of a device that cannot be taken over.
pub(super) fn mark_without_image() -> u64 {
    OURS
}

/// Mark of a zero-copy device for the same disk. It differs, so that an older weir without zero
/// copy does not take the device over and lend it memory.
pub(super) fn zero_copy(mark: u64) -> u64 {
    mark ^ 1
}

/// True if weir made a device with this mark.
pub fn is_ours(mark: u64) -> bool {
    mark & !KEPT == OURS
}

/// Upper bits of an FNV-1a hash, which is equal in all versions of this program.
fn mark(numbers: [u64; 3]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in numbers.iter().flat_map(|number| number.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    // 0 and 1 are reserved for devices without an image, see `mark_without_image` and `zero_copy`.
    OURS | (hash >> 16).max(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mark_identifies_weir_and_the_image() {
        let one = mark([8, 1234, 0]);
        assert!(is_ours(one) && is_ours(mark_without_image()) && !is_ours(0) && !is_ours(1234));
        assert!([[8, 1235, 0], [9, 1234, 0], [8, 1234, 1]].iter().all(|other| mark(*other) != one));
        // Devices outlive this program, so its next version must compute equal marks.
        assert_eq!(one, 0x7765_0000_0000_0000 | (one & KEPT));
        assert_ne!(one, mark_without_image());
        assert!(is_ours(zero_copy(one)) && zero_copy(one) != one);
    }
}
