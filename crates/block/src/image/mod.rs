//! Formats over storage: where the bytes that a guest sees are among those that are stored.
//!
//! One enum, for the reason that [`Storage`](crate::storage::Storage) is one. The methods and their contract are Storage's, with the
//! guest's offsets.

pub mod qcow2;
mod raw;
pub mod secret;

pub use self::{raw::Raw, secret::Secret};
use crate::{
    buffer::{Buffer, Segments},
    error::Result,
    storage::{BlockSize, Durability, Extent, ResizeError, ZeroOptions},
};

/// An image of any format.
#[derive(Debug)]
pub enum Image {
    /// The bytes are the disk.
    Raw(Raw),
}

impl Image {
    /// See [`Storage::size_bytes`](crate::storage::Storage::size_bytes).
    pub fn size_bytes(&self) -> u64 {
        let Self::Raw(raw) = self;
        raw.storage().size_bytes()
    }

    /// See [`Storage::refresh_size`](crate::storage::Storage::refresh_size).
    ///
    /// # Errors
    /// What the file system says.
    pub fn refresh_size(&self) -> Result<u64> {
        let Self::Raw(raw) = self;
        raw.storage().refresh_size()
    }

    /// See [`Storage::resize`](crate::storage::Storage::resize).
    ///
    /// # Errors
    /// As there; also where the image was opened read-only.
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        let Self::Raw(raw) = self;
        if raw.is_read_only() {
            return Err(ResizeError::ReadOnly);
        }
        raw.storage().resize(size_bytes).await
    }

    /// Format and storage, for people.
    pub fn description(&self) -> String {
        let Self::Raw(raw) = self;
        format!("raw, {}", raw.storage().description())
    }

    /// Whether writes fail with [`Error::NOT_PERMITTED`](crate::error::Error::NOT_PERMITTED).
    pub fn is_read_only(&self) -> bool {
        let Self::Raw(raw) = self;
        raw.is_read_only()
    }

    /// See [`Storage::block_size`](crate::storage::Storage::block_size).
    pub fn block_size(&self) -> BlockSize {
        let Self::Raw(raw) = self;
        raw.storage().block_size()
    }

    /// See [`Storage::can_zero_fast`](crate::storage::Storage::can_zero_fast).
    pub fn can_zero_fast(&self) -> bool {
        let Self::Raw(raw) = self;
        raw.storage().can_zero_fast()
    }

    /// See [`Storage::read`](crate::storage::Storage::read).
    ///
    /// # Errors
    /// As there.
    pub async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer> {
        let Self::Raw(raw) = self;
        raw.storage().read(offset, buffer).await
    }

    /// See [`Storage::lend`](crate::storage::Storage::lend).
    pub fn lend(&self, offset: u64, length: usize) -> Option<Segments> {
        let Self::Raw(raw) = self;
        raw.storage().lend(offset, length)
    }

    /// See [`Storage::write`](crate::storage::Storage::write).
    ///
    /// # Errors
    /// As there; [`Error::NOT_PERMITTED`](crate::error::Error::NOT_PERMITTED) also for a header that would change what the image is.
    pub async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let Self::Raw(raw) = self;
        raw.write(offset, data, durability).await
    }

    /// See [`Storage::will_need`](crate::storage::Storage::will_need).
    pub async fn will_need(&self, offset: u64, length: u64) {
        let Self::Raw(raw) = self;
        raw.storage().will_need(offset, length).await;
    }

    /// See [`Storage::flush`](crate::storage::Storage::flush).
    ///
    /// # Errors
    /// As there.
    pub async fn flush(&self) -> Result<()> {
        let Self::Raw(raw) = self;
        raw.storage().flush().await
    }

    /// See [`Storage::write_zeroes`](crate::storage::Storage::write_zeroes).
    ///
    /// # Errors
    /// As there, and as for [`Image::write`].
    pub async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let Self::Raw(raw) = self;
        raw.write_zeroes(offset, length, options).await
    }

    /// See [`Storage::discard`](crate::storage::Storage::discard).
    ///
    /// # Errors
    /// As there.
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let Self::Raw(raw) = self;
        raw.discard(offset, length).await
    }

    /// See [`Storage::block_status`](crate::storage::Storage::block_status).
    ///
    /// # Errors
    /// As there.
    pub async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        let Self::Raw(raw) = self;
        raw.storage().block_status(offset, length).await
    }
}
