//! What a device is recognised by when the process that made it has gone: a number that the driver
//! keeps with it, which says that weir made it, and which image it shows.
//!
//! The image is known by its file, not by its name. So another image under the same name never gets
//! the requests of this one, and one that was renamed still does.

use std::os::unix::fs::MetadataExt;

use block::disk::Disk;

/// In the upper sixteen bits: `we`.
const OURS: u64 = 0x7765 << 48;
const KEPT: u64 = (1 << 48) - 1;

/// The mark of a device that shows this disk. `None`: what it shows ends with this process, so that
/// nobody could take it over.
pub(super) fn of(disk: &Disk) -> Option<u64> {
    let status = std::fs::metadata(disk.image().storage().path()?).ok()?;
    Some(mark([status.dev(), status.ino(), status.rdev()]))
}

/// The mark of a device that nobody can take over.
pub(super) fn none() -> u64 {
    OURS
}

/// The mark of a device that shows the same disk, and whose data is not copied: another, so that a
/// weir from before there were any, which would lend memory to it, does not take it over.
pub(super) fn zero_copy(mark: u64) -> u64 {
    mark ^ 1
}

/// Whether weir made a device with this mark.
pub fn is_ours(mark: u64) -> bool {
    mark & !KEPT == OURS
}

/// The first bits of FNV-1a, which is the same in each version of this program.
fn mark(numbers: [u64; 3]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in numbers.iter().flat_map(|number| number.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    // Never that of no image.
    OURS | (hash >> 16).max(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_ours_and_its_images_alone() {
        let one = mark([8, 1234, 0]);
        assert!(is_ours(one) && is_ours(none()) && !is_ours(0) && !is_ours(1234));
        assert!([[8, 1235, 0], [9, 1234, 0], [8, 1234, 1]].iter().all(|other| mark(*other) != one));
        // Devices outlive this program: its next version has to find them.
        assert_eq!(one, 0x7765_0000_0000_0000 | (one & KEPT));
        assert_ne!(one, none());
        assert!(is_ours(zero_copy(one)) && zero_copy(one) != one);
    }
}
