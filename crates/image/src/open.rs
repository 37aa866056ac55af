//! Opens an image by name: its format, its backing chain, and the keys of encrypted images.
//!
//! ```text
//!   vm1.qcow2 ──backing──► base.qcow2 ──backing──► golden.raw
//!       └──data file──► vm1.data
//! ```
//!
//! Files are opened and locked and headers are read from the top of the chain down. Images are then
//! opened from the bottom up, each over its backing image.
//!
//! An image names its backing and data files, and its author is not trusted:
//! - the format of a backing file is never probed, so that a guest cannot make a host file
//!   part of its disk (see [`probe`](storage::probe)); an image whose own format was probed
//!   must not name other files;
//! - a name is a path and nothing else; with an [image root](storage::Root) it must stay
//!   inside the root;
//! - a chain that contains a file twice, or is longer than `MAX_CHAIN`, is rejected.
//!
//! Backing files are opened read-only and locked as by QEMU: shared with readers, exclusive
//! of writers.

mod chain;
mod names;
mod overlay;
mod secrets;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::chain::ChainLevel;
pub use self::{
    chain::MAX_CHAIN,
    names::{check_base, resolve},
    overlay::{backing_name, check_overlay, is_encrypted},
};
use super::{
    Image, RawImage, Secret,
    qcow2::{CacheSettings, OpenFailure, Qcow2Components, Qcow2Image, luks::SectorCipher},
};
use storage::OpenError;

/// Options for [`open`].
#[derive(Clone, Debug, Default)]
pub struct ImageOptions {
    /// Options of its storage, and its format. Cache mode, sharing and root also apply to its
    /// backing and data files; delay, rate and faults apply to the topmost file only.
    pub storage: storage::OpenOptions,
    /// Metadata caches of each qcow2 image in the chain.
    pub caches: CacheSettings,
    /// One secret for each encrypted image of the chain, from the top, or a single one for
    /// all of them.
    pub secrets: Vec<Secret>,
    /// Source of unallocated clusters.
    pub backing: BackingChoice,
    /// Opens this internal snapshot of the topmost image, by id or name, instead of the
    /// disk. The result is read-only.
    pub snapshot: Option<String>,
}

/// Choice of the backing file.
#[derive(Clone, Debug, Default)]
pub enum BackingChoice {
    /// The backing file that the image names.
    #[default]
    AsInImage,
    /// No backing file, even if the image names one.
    Nothing,
}

/// Opens the image that `spec` names: a path, `memory:SIZE`, `null:SIZE`, or a remote
/// image.
///
/// # Errors
/// The cause, in the image or in a file behind it, as a message for users.
///
/// # Panics
/// Panics outside a reactor.
pub async fn open(spec: &str, options: ImageOptions) -> Result<Image, OpenError> {
    let mut levels = chain::find(spec, &options).await?;
    let mut ciphers = secrets::unlock(&levels, &options.secrets).await?;
    // From the bottom up: an image is opened over a complete backing chain.
    let mut below = None;
    while levels.len() > 1
        && let (Some(level), Some(cipher)) = (levels.pop(), ciphers.pop())
    {
        below = Some(Arc::new(assemble(level, below, cipher, options.caches, OpenPurpose::Disk).await?));
    }
    let (top, cipher) = (levels.pop(), ciphers.pop());
    let top = top.expect("a chain has a beginning");
    let purpose = match options.snapshot.as_deref() {
        Some(snapshot) => OpenPurpose::Snapshot(snapshot),
        None if options.storage.handover || top.storage.is_passed() => OpenPurpose::Handover,
        None => OpenPurpose::Disk,
    };
    assemble(top, below, cipher.flatten(), options.caches, purpose).await
}

/// Purpose that an image is opened for.
enum OpenPurpose<'a> {
    Disk,
    /// Another process may still use it.
    Handover,
    Snapshot(&'a str),
}

async fn assemble(
    level: ChainLevel,
    below: Option<Arc<Image>>,
    cipher: Option<SectorCipher>,
    caches: CacheSettings,
    purpose: OpenPurpose<'_>,
) -> Result<Image, OpenError> {
    let ChainLevel { name, storage, read_only, is_probed: guessed, qcow2, .. } = level;
    let Some(parts) = qcow2 else {
        if let OpenPurpose::Snapshot(_) = purpose {
            let remedy = "only qcow2 images have snapshots";
            return Err(OpenError::new(&name, "is raw and has no snapshots", remedy));
        }
        return Ok(Image::Raw(RawImage::of(storage, guessed, read_only)));
    };
    let parts = Qcow2Components { storage, backing: below, data: parts.data, cipher, read_only, caches };
    let opened = match purpose {
        OpenPurpose::Snapshot(snapshot) => Qcow2Image::open_snapshot(parts, snapshot).await,
        OpenPurpose::Disk => Qcow2Image::open(parts).await,
        OpenPurpose::Handover => Qcow2Image::open_for_handover(parts).await,
    };
    opened.map(Image::Qcow2).map_err(|failure| open_error(&name, &failure))
}

pub(super) fn open_error(name: &str, failure: &OpenFailure) -> OpenError {
    let (why, remedy) = match failure {
        OpenFailure::Invalid(invalid) => (invalid.to_string(), "`weir image check` shows the damage"),
        OpenFailure::Failed(error) => (format!("cannot be read or written: {error}"), "check the device"),
        OpenFailure::Corrupt => (
            "is marked corrupt".to_owned(),
            "`weir image check --repair` repairs it as far as possible; --read-only opens it unchanged",
        ),
        OpenFailure::Dirty => (
            "its refcounts were not written when it was last in use".to_owned(),
            "`weir image check --repair` recomputes them; --read-only opens it unchanged",
        ),
        OpenFailure::NoSnapshot(wanted) => {
            (format!("has no snapshot {wanted:?}"), "`weir image snapshot -l` lists all")
        }
        OpenFailure::Changed => ("was replaced, or has another backing file".to_owned(), "serve it again"),
        OpenFailure::Bitmaps(error) => (
            format!("cannot be opened: {}", error.describe()),
            "raise --memory, or use bitmaps of a larger granularity: `weir image bitmap`",
        ),
        OpenFailure::Caches(invalid) => {
            (invalid.to_string(), "change the cache options: their limits depend on the cluster size")
        }
        // `chain` and `secrets` report these before an image is opened.
        OpenFailure::LegacyAes | OpenFailure::NoKey | OpenFailure::NoDataFile => {
            (failure.to_string(), "see docs/reference")
        }
    };
    OpenError::new(name, why, remedy)
}
