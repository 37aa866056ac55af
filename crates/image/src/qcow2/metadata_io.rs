//! Reads and writes of metadata as plain bytes, without an open image.
//!
//! Beyond the end of the file everything reads as zeroes: QEMU may leave the last cluster of a new
//! image incomplete and relies on that. Callers bound the length of reads; nothing here trusts a
//! number in an image.

use super::{InvalidImage, header::Qcow2Header};
use reactor::{
    buffer::IoBuffer,
    error::{Error, Result},
};
use storage::{Durability, ResizeError, Storage};

/// Reason why metadata could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// The structure is invalid.
    #[error("{0}")]
    Invalid(#[from] InvalidImage),
    /// The storage failed.
    #[error("cannot be read: {0}")]
    Storage(#[from] Error),
}

/// Reads and decodes the header.
///
/// # Errors
/// The violated rule, or the storage's error.
pub async fn read_header(storage: &Storage) -> std::result::Result<Qcow2Header, MetadataError> {
    Ok(Qcow2Header::parse(&read_start(storage).await?)?)
}

/// First cluster, or the whole file if that is shorter.
pub(super) async fn read_start(storage: &Storage) -> Result<Vec<u8>> {
    let bits_end = 24;
    let start = read(storage, 0, bits_end).await?;
    let mut bits = [0; 4];
    bits.copy_from_slice(&start[20..24]);
    // Clamped for the read only: decoding rejects an invalid size.
    let bits = u32::from_be_bytes(bits).clamp(9, 21);
    let length = (1_u64 << bits).min(storage.size_bytes()) as usize;
    read(storage, 0, length).await
}

/// Reads `length` bytes at `offset`; bytes beyond the end of the file are zeroes.
pub(super) async fn read(storage: &Storage, offset: u64, length: usize) -> Result<Vec<u8>> {
    let available = storage.size_bytes().saturating_sub(offset).min(length as u64) as usize;
    let mut bytes = vec![0; length];
    if available > 0 {
        let buffer = storage.read(offset, IoBuffer::new(available)).await?;
        bytes[..available].copy_from_slice(&buffer);
    }
    Ok(bytes)
}

/// Writes `bytes` at `offset`, and grows the file first if necessary.
pub(super) async fn write(storage: &Storage, offset: u64, bytes: &[u8]) -> Result<()> {
    grow(storage, offset + bytes.len() as u64).await?;
    storage.write(offset, IoBuffer::copy_of(bytes).into(), Durability::Cached).await
}

/// Grows the file to at least `size_bytes`.
pub(super) async fn grow(storage: &Storage, size_bytes: u64) -> Result<()> {
    if storage.size_bytes() >= size_bytes {
        return Ok(());
    }
    set_size(storage, size_bytes).await
}

/// Sets the size of the file, rounded up to whole blocks.
pub(super) async fn set_size(storage: &Storage, size_bytes: u64) -> Result<()> {
    let block = u64::from(storage.block_size().minimum).max(512);
    storage.resize(size_bytes.next_multiple_of(block)).await.map_err(to_io_error)
}

/// Error for the request whose growth of the file failed.
pub(super) fn to_io_error(error: ResizeError) -> Error {
    match error {
        ResizeError::Failed(error) => error,
        ResizeError::ReadOnly
        | ResizeError::Part { .. }
        | ResizeError::NbdExport { .. }
        | ResizeError::SnapshotsWithoutSize => Error::NOT_PERMITTED,
        ResizeError::BlockDevice { .. } | ResizeError::Unaligned { .. } | ResizeError::TooLarge { .. } => {
            Error::NO_SPACE
        }
    }
}
