//! From a file's name to the disk that a guest would see in it, for commands that read and write as one would.
//!
//! Never looks at where a format keeps what: [`opening`](super::opening) is for commands that do.

use std::{path::Path, sync::Arc};

use anyhow::bail;
use block::{
    buffer::Segments,
    error::{Error, Result},
    image::{Image, Raw, qcow2::What},
};

use super::{
    copy::Kind,
    opening::{self, Format, How},
};

/// Opens the image at `path`.
///
/// # Errors
/// What keeps it from being opened.
pub(super) async fn open(path: &Path, format: Option<Format>, how: How) -> anyhow::Result<Arc<Image>> {
    let image = match opening::format(path, format)? {
        Format::Raw => {
            let raw = Raw::new(opening::storage(path, how)?);
            Image::Raw(if format.is_none() && how.write { raw.guarding_header() } else { raw })
        }
        Format::Qcow2 => bail!("{}: qcow2 cannot be opened", path.display()),
    };
    Ok(Arc::new(image))
}

/// Ends the use of an image that was written to: everything is where it belongs, and on stable storage as far as the cache mode cares.
///
/// # Errors
/// What the storage says.
pub(super) async fn close(image: &Image) -> Result<()> {
    image.flush().await?;
    image.close().await
}

/// In what sizes a format keeps data, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    /// What is allocated at once.
    pub(super) cluster: u64,
    /// What may be there or not by itself.
    pub(super) subcluster: u64,
}

/// Those of the image's format; `None` for raw images.
pub(super) fn blocks(image: &Image) -> Option<Blocks> {
    match image {
        Image::Raw(_) => None,
        Image::Qcow2(qcow2) => {
            let header = qcow2.header();
            let cluster = header.cluster_bytes();
            let subcluster = if header.has_subclusters() { cluster / 32 } else { cluster };
            Some(Blocks { cluster, subcluster })
        }
    }
}

/// What the image has itself, from `offset` on, for at most `length` bytes: pieces that follow each other; at least one.
///
/// # Errors
/// What the storage says.
pub(super) async fn layer(image: &Image, offset: u64, length: u64) -> Result<Vec<(u64, Kind)>> {
    match image {
        // There is nothing below it.
        Image::Raw(_) => Ok(vec![(length, Kind::Data)]),
        Image::Qcow2(qcow2) => {
            let pieces = qcow2.map(offset, length).await?;
            let kind = |what: What| match what {
                What::Unallocated => Kind::Below,
                What::Zero { .. } => Kind::Zero,
                What::Data { .. } | What::Compressed { .. } => Kind::Data,
            };
            Ok(pieces.into_iter().map(|piece| (piece.length, kind(piece.what))).collect())
        }
    }
}

/// Writes one cluster compressed.
///
/// # Errors
/// As for [`Image::write`], and where the format has no compression.
pub(super) async fn write_compressed(image: &Image, offset: u64, data: Segments) -> Result<()> {
    match image {
        Image::Raw(_) => Err(Error::UNSUPPORTED),
        Image::Qcow2(qcow2) => qcow2.write_compressed(offset, data).await,
    }
}
