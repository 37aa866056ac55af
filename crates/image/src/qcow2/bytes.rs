//! Pieces of the file that hold metadata, read and written as plain bytes.
//!
//! Beyond the end of the file everything reads as zeroes: QEMU leaves the last cluster of a new
//! image half written, and expects that. The caller bounds how much is read; nothing here trusts a
//! number in an image.

use super::{Invalid, header::Header};
use reactor::{
    buffer::Buffer,
    error::{Error, Result},
};
use storage::{Durability, ResizeError, Storage};

/// Why metadata could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// It is wrong.
    #[error("{0}")]
    Invalid(#[from] Invalid),
    /// The storage failed.
    #[error("cannot be read: {0}")]
    Storage(#[from] Error),
}

/// The image's header.
///
/// # Errors
/// What is wrong with it, or the storage's error.
pub async fn read_header(storage: &Storage) -> std::result::Result<Header, MetadataError> {
    Ok(Header::parse(&read_start(storage).await?)?)
}

/// The first cluster, or the file where that is shorter.
pub(super) async fn read_start(storage: &Storage) -> Result<Vec<u8>> {
    let bits_end = 24;
    let start = read(storage, 0, bits_end).await?;
    let mut bits = [0; 4];
    bits.copy_from_slice(&start[20..24]);
    // Where that is no possible size, parsing finds it again and says so.
    let bits = u32::from_be_bytes(bits).clamp(9, 21);
    let length = (1_u64 << bits).min(storage.size_bytes()) as usize;
    read(storage, 0, length).await
}

/// `length` bytes at `offset`; zeroes where there is no file.
pub(super) async fn read(storage: &Storage, offset: u64, length: usize) -> Result<Vec<u8>> {
    let there = storage.size_bytes().saturating_sub(offset).min(length as u64) as usize;
    let mut bytes = vec![0; length];
    if there > 0 {
        let buffer = storage.read(offset, Buffer::new(there)).await?;
        bytes[..there].copy_from_slice(&buffer);
    }
    Ok(bytes)
}

/// Writes `bytes` at `offset`, making the file longer where it ends before.
pub(super) async fn write(storage: &Storage, offset: u64, bytes: &[u8]) -> Result<()> {
    grow(storage, offset + bytes.len() as u64).await?;
    storage.write(offset, Buffer::copy_of(bytes).into(), Durability::Cached).await
}

/// Makes the file at least `size_bytes` long.
pub(super) async fn grow(storage: &Storage, size_bytes: u64) -> Result<()> {
    if storage.size_bytes() >= size_bytes {
        return Ok(());
    }
    set_size(storage, size_bytes).await
}

/// Gives the file this size, rounded up to whole blocks.
pub(super) async fn set_size(storage: &Storage, size_bytes: u64) -> Result<()> {
    let block = u64::from(storage.block_size().minimum).max(512);
    storage.resize(size_bytes.next_multiple_of(block)).await.map_err(error_of)
}

/// What a request is told.
pub(super) fn error_of(error: ResizeError) -> Error {
    match error {
        ResizeError::Failed(error) => error,
        ResizeError::ReadOnly
        | ResizeError::Part { .. }
        | ResizeError::Remote { .. }
        | ResizeError::Snapshots => Error::NOT_PERMITTED,
        ResizeError::Device { .. } | ResizeError::Unaligned { .. } | ResizeError::TooLarge { .. } => {
            Error::NO_SPACE
        }
    }
}
