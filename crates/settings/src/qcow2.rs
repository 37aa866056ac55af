//! What a qcow2 image is opened with: the sizes of its metadata caches, and where its passphrases
//! are. The caches' names, defaults and rules are QEMU's (docs/qcow2-cache.txt); what they come to
//! depends on the image. Passphrases are read when the daemon starts: a plan can be printed.

use std::{fmt, path::PathBuf};

use image::qcow2::CacheSettings;

/// Settings of a qcow2 image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Qcow2Settings {
    /// Of the caches.
    pub caches: CacheSettings,
    /// One for each encrypted image of the chain, or one for all.
    pub secrets: Vec<SecretSource>,
    /// Names of those that clients may look at.
    pub bitmaps: Vec<String>,
}

/// Where a passphrase is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SecretSource {
    /// It is all of this file.
    File(PathBuf),
    /// It is what can be read from this descriptor.
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
