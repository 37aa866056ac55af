//! Length of the file and its allocated space, as far as they differ from those of the disk.
//!
//! ```text
//!   ▕████████████████ file ██████████████▏0000▏
//!   ▕████████████████████ disk ███████████████▏
//!                                        ▲    ▲ multiple of the image's unit
//!                                        └─ file_bytes
//! ```
//!
//! A file ends at any byte, an image possibly only at a sector ([`Image::size_multiple`]). Then the
//! disk has the next possible size of the image, and the file ends before it. Bytes between both
//! ends are zeroed when the file is shrunk, and no request of the file writes there, so a file that
//! grows again reads zeroes. The end is kept in memory only: after a restart the file is as long as
//! the disk.
//!
//! Never calls a file system on a worker's thread.
//!
//! [`Image::size_multiple`]: image::Image::size_multiple

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use block::disk::Disk;
use policy::time::Duration;
use storage::ResizeError;

/// Smallest size of the disk under an empty file: an image of no bytes cannot be opened again.
const MIN_DISK_BYTES: u64 = 512;
/// Value of [`FileEnd`] if the file ends with the disk. No file is that long.
const WITH_DISK: u64 = u64::MAX;
/// Time that a reply waits for a file system to count the image's space. After it, the last known
/// number is used until the file system answers.
pub(super) const COUNT_TIMEOUT: Duration = Duration::from_secs(1);

/// End of the file.
#[derive(Debug)]
pub(super) struct FileEnd(AtomicU64);

impl Default for FileEnd {
    fn default() -> Self {
        Self(AtomicU64::new(WITH_DISK))
    }
}

impl FileEnd {
    /// Length of the file over `disk`. An end that does not match the disk's size is out of date:
    /// another client has resized the disk.
    pub(super) fn file_bytes(&self, disk: &Disk) -> u64 {
        let disk_bytes = disk.size_bytes();
        match self.0.load(SeqCst) {
            WITH_DISK => disk_bytes,
            // Valid only for the disk size that the end was set for.
            end if disk_bytes_for(disk, end) == Some(disk_bytes) => end,
            _ => disk_bytes,
        }
    }

    /// End of the file, if it differs from the disk's.
    pub(super) fn before_disk(&self, disk: &Disk) -> Option<u64> {
        let file_bytes = self.file_bytes(disk);
        (file_bytes != disk.size_bytes()).then_some(file_bytes)
    }

    /// Resets an end that is out of date, so that it does not return with the disk's former size:
    /// bytes that were written behind it meanwhile would be cut off. The caller holds `size_lock`
    /// of the device, so that clients of the file cannot change the size.
    pub(super) fn forget_stale(&self, disk: &Disk) {
        let end = self.0.load(SeqCst);
        if end != WITH_DISK && disk_bytes_for(disk, end) != Some(disk.size_bytes()) {
            // Compared, so that an end that was set meanwhile is kept.
            let _ = self.0.compare_exchange(end, WITH_DISK, SeqCst, SeqCst);
        }
    }

    /// Sets the end of the file, over a disk of the size that [`disk_bytes_for`] returns.
    pub(super) fn set(&self, file_bytes: Option<u64>) {
        self.0.store(file_bytes.unwrap_or(WITH_DISK), SeqCst);
    }
}

/// Size of the disk under a file of `file_bytes`; `None` if it exceeds 64 bits.
pub(super) fn disk_bytes_for(disk: &Disk, file_bytes: u64) -> Option<u64> {
    let multiple = disk.image().size_multiple();
    match file_bytes {
        0 => Some(MIN_DISK_BYTES.next_multiple_of(multiple)),
        file_bytes => file_bytes.checked_next_multiple_of(multiple),
    }
}

/// Error number of a size that the disk refused.
pub(super) fn errno_of(refused: &ResizeError) -> i32 {
    match refused {
        ResizeError::ReadOnly => libc::EROFS,
        ResizeError::TooLarge { .. } => libc::EFBIG,
        ResizeError::Failed(error) => error.errno(),
        ResizeError::BlockDevice { .. }
        | ResizeError::Part { .. }
        | ResizeError::NbdExport { .. }
        | ResizeError::SnapshotsWithoutSize
        | ResizeError::Unaligned { .. } => libc::EINVAL,
    }
}
