//! Why a storage cannot have another size.
//!
//! Every storage promises this of a resize: requests inside both sizes are not disturbed; what is
//! cut off is gone, and reads as zeroes if the storage grows again; requests beyond the new end
//! fail, those in flight included, and never make it longer.

use reactor::error::Error;

/// Multiple of the sizes of every storage that does not keep a size to the byte: the sector that
/// guests and QEMU count in.
pub(super) const SECTOR: u64 = 512;

/// A size that was refused. The storage has the one it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// It is not to be written to.
    #[error("it is read-only (open it for writing)")]
    ReadOnly,
    /// Block devices have the size they have.
    #[error(
        "it is a block device of {size_bytes} bytes (resize the device itself first, then give its new size here)"
    )]
    Device {
        /// The device's own size, now in force here too.
        size_bytes: u64,
    },
    /// Another server has it, and NBD has no word to resize it.
    #[error(
        "its NBD server has it with {size_bytes} bytes (resize it there first, then give its new size here)"
    )]
    Remote {
        /// The server's size, now in force here too.
        size_bytes: u64,
    },
    /// It is a part of a file, of a size that was given.
    #[error("it is a part of {size_bytes} bytes of a file (serve it without `size` to have it grow)")]
    Part {
        /// Its size.
        size_bytes: u64,
    },
    /// The end would lie inside a block.
    #[error("a size is a multiple of {multiple} bytes, and not 0 (round it)")]
    Unaligned {
        /// The block.
        multiple: u64,
    },
    /// More than this kind of storage can hold.
    #[error("the largest size is {largest} bytes (choose a smaller one)")]
    TooLarge {
        /// The most it can hold.
        largest: u64,
    },
    /// Internal snapshots do not record the disk's size, as in version 2 of qcow2.
    #[error(
        "its snapshots do not record the size of the disk, because version 2 of qcow2 has no place for it (delete \
         them with `weir image snapshot -d`, or make it version 3 with `qemu-img amend -o compat=1.1`)"
    )]
    Snapshots,
    /// The system refused.
    #[error("{0} (the size is as it was)")]
    Failed(Error),
}

impl From<Error> for ResizeError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Checks that a storage whose sizes are multiples of `multiple` can have this one.
pub(super) fn check(size_bytes: u64, multiple: u64) -> Result<(), ResizeError> {
    if size_bytes == 0 || !size_bytes.is_multiple_of(multiple) {
        return Err(ResizeError::Unaligned { multiple });
    }
    Ok(())
}
