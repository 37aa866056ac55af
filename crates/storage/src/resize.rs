//! Errors of resizing a storage.
//!
//! Every storage guarantees: requests inside both the old and the new size are not disturbed; bytes
//! beyond the new end are lost, and read as zeroes if the storage grows again; requests beyond the
//! new end fail, those in flight included, and never extend it.

use reactor::error::Error;

/// Granularity of sizes of a storage that cannot have any number of bytes: the sector of guests
/// and QEMU.
pub(super) const SECTOR: u64 = 512;

/// A rejected resize. The storage keeps its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// The storage is read-only.
    #[error("it is read-only (open it for writing)")]
    ReadOnly,
    /// The size of a block device cannot be changed here.
    #[error(
        "it is a block device of {size_bytes} bytes (resize the device itself first, then give its \
         new size here)"
    )]
    BlockDevice {
        /// Current size of the device, which is in force now.
        size_bytes: u64,
    },
    /// The storage is an NBD export, and the protocol has no resize command.
    #[error(
        "its size at the NBD server is {size_bytes} bytes (resize the export there first, then \
         give its new size here)"
    )]
    NbdExport {
        /// Current size of the export, which is in force now.
        size_bytes: u64,
    },
    /// The storage is a part, of a fixed size, of a file.
    #[error(
        "it is a part of {size_bytes} bytes of a file (serve the file without `size` so that it can grow)"
    )]
    Part {
        /// Size of the part.
        size_bytes: u64,
    },
    /// The size is not a multiple of the block size.
    #[error("the size must be a multiple of {multiple} bytes, and not 0 (round it)")]
    Unaligned {
        /// Block size.
        multiple: u64,
    },
    /// The size exceeds the maximum of this storage type.
    #[error("the largest size is {largest} bytes (choose a smaller one)")]
    TooLarge {
        /// Maximum size.
        largest: u64,
    },
    /// The image has internal snapshots that do not record the disk's size (qcow2 version 2).
    #[error(
        "its snapshots do not record the size of the disk, because version 2 of qcow2 has no place \
         for it (delete them with `weir image snapshot -d`, or make it version 3 with `qemu-img \
         amend -o compat=1.1`)"
    )]
    SnapshotsWithoutSize,
    /// The system rejected it.
    #[error("{0} (the size is unchanged)")]
    Failed(Error),
}

impl From<Error> for ResizeError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Checks that `size_bytes` is a non-zero multiple of `multiple`.
pub(super) fn check_size(size_bytes: u64, multiple: u64) -> Result<(), ResizeError> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(multiple) {
        return Err(ResizeError::Unaligned { multiple });
    }
    Ok(())
}
