//! What a storage really is, whatever it was called: for whoever goes on with a disk that another
//! process has, and must not take other bytes for it.
//!
//! Only looks; never opens or locks anything. How fast or how reliable a storage was made on
//! purpose is no part of it.

use super::{CacheMode, Part, Storage, rbd::Rbd};

/// Two that are alike read and write the same bytes in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Which file or device it is, or what it is instead of one: the same for all its names.
    pub what: String,
    /// How it was called, for people.
    pub path: Option<String>,
    /// The part of it, and the part of that: the outermost first.
    pub parts: Vec<Part>,
    /// Of a file, or an image of a cluster.
    pub cache: Option<CacheMode>,
    /// Whether writes fail.
    pub read_only: bool,
}

impl Storage {
    /// See [`Identity`].
    pub fn identity(&self) -> Identity {
        let mut parts = Vec::new();
        let mut bottom = self;
        while let Self::Wrapped(wrapped) = bottom {
            parts.extend(wrapped.cut());
            bottom = wrapped.inner();
        }
        let (file, image) = (bottom.file(), bottom.rbd());
        let what = match (bottom.file_identity(), image) {
            (Some(file), _) => file.to_string(),
            (None, Some(image)) => image.what().to_owned(),
            (None, None) => bottom.description(),
        };
        Identity {
            what,
            path: self.path().or_else(|| image.map(Rbd::name)).map(str::to_owned),
            parts,
            cache: file.map(super::File::cache).or_else(|| image.map(Rbd::cache)),
            read_only: self.read_only(),
        }
    }
}
