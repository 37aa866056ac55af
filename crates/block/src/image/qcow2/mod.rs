//! qcow2, QEMU's copy-on-write format: written from its specification (QEMU's docs/interop/qcow2.rst).
//!
//! - `header`: the first cluster, from bytes to meaning and back.
//! - `entry`: the numbers of the mapping tables, likewise.
//! - `compress`: one compressed cluster, unpacked and packed.
//! - `luks`: encryption.
//! - `bytes`: reading and writing pieces of the file that hold metadata.
//! - `numbers`: the numbers of a refcount block.
//! - `create`: the metadata of a new image.
//!
//! An image is hostile input: every offset, size and count is checked before it is used, and what is wrong is said with its place.

mod bytes;
pub mod compress;
pub mod create;
pub mod entry;
pub mod header;
pub mod luks;
mod numbers;

pub use bytes::{MetadataError, read_header};

/// What is wrong with an image, and where: for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

impl Invalid {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}
