//! Options of a qcow2 image: sizes of its metadata caches, and sources of its passphrases.
//!
//! Names, defaults and rules of the caches are QEMU's (docs/qcow2-cache.txt); effective sizes
//! depend on the image. Passphrases are read when the daemon starts, so that the config can be
//! checked and printed without them.

use std::{fmt, path::PathBuf};

use image::qcow2::CacheSettings;

/// Settings of a qcow2 image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Qcow2Settings {
    /// Sizes of the metadata caches.
    pub caches: CacheSettings,
    /// Passphrases: one for each encrypted image of the backing chain, or one for all.
    pub secrets: Vec<SecretSource>,
    /// Names of the dirty bitmaps that clients may read.
    pub bitmaps: Vec<String>,
}

/// Source of a passphrase.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SecretSource {
    /// The whole content of a file.
    File(PathBuf),
    /// The content of a file descriptor, up to its end.
    Descriptor(u32),
}

impl fmt::Display for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Descriptor(number) => write!(f, "descriptor {number}"),
        }
    }
}
