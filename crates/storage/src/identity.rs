//! Identity of a storage, independent of its name. A process that continues another process's disk
//! compares identities, so that it never serves other bytes.
//!
//! Never opens or locks anything. Delay, rate and fault wrappers are not part of the identity.

use super::{CacheMode, Storage, StoragePart, rbd::RbdStorage};

/// Identity of a storage. Two storages with equal identities read and write the same bytes in the
/// same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageIdentity {
    /// The file or device by its numbers, the RBD image, or else the description: the same for all
    /// names of a storage.
    pub key: String,
    /// The name that it was opened by, for display.
    pub path: Option<String>,
    /// The parts cut from it, the outermost first.
    pub parts: Vec<StoragePart>,
    /// Cache mode of a file or an RBD image.
    pub cache: Option<CacheMode>,
    /// True if writes fail.
    pub read_only: bool,
}

impl Storage {
    /// Returns the [`StorageIdentity`].
    pub fn identity(&self) -> StorageIdentity {
        let mut parts = Vec::new();
        let mut bottom = self;
        while let Self::Wrapped(wrapped) = bottom {
            parts.extend(wrapped.as_part());
            bottom = wrapped.inner();
        }
        let (file, image) = (bottom.bottom_file(), bottom.bottom_rbd());
        let key = match (bottom.file_identity(), image) {
            (Some(file), _) => file.to_string(),
            (None, Some(image)) => image.key().to_owned(),
            (None, None) => bottom.description(),
        };
        StorageIdentity {
            key,
            path: self.path().or_else(|| image.map(RbdStorage::name)).map(str::to_owned),
            parts,
            cache: file.map(super::FileStorage::cache).or_else(|| image.map(RbdStorage::cache)),
            read_only: self.read_only(),
        }
    }
}
