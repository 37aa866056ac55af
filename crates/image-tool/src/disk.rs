//! From a file's name to the disk that a guest would see in it; [`opening`] is for commands that
//! look at the bytes.

use std::{path::Path, sync::Arc};

use image::{
    Image, Qcow2,
    open::{BackingChoice, ImageOptions},
    qcow2::{Piece, What},
};
use reactor::{
    buffer::Segments,
    error::{Error, Result},
};
use storage::{Format, OpenOptions};

use super::{
    keys::Keys,
    opening::{self, How},
    pick::Pick,
};

/// With what lies below it. An image whose format is guessed may name no other file.
pub(super) async fn open(
    path: &Path,
    format: Option<Format>,
    how: How,
    keys: &mut Keys,
) -> anyhow::Result<Arc<Image>> {
    open_at(path, format, how, keys, None).await
}

/// The same, or an internal snapshot of it.
pub(super) async fn open_at(
    path: &Path,
    format: Option<Format>,
    how: How,
    keys: &mut Keys,
    pick: Option<&Pick>,
) -> anyhow::Result<Arc<Image>> {
    opening::warn_if_container(path);
    let snapshot = match pick {
        Some(pick) => Some(pick.id(path, format, how).await?),
        None => None,
    };
    let secrets = keys.of(path, format, how.alone).await?;
    let options = ImageOptions {
        storage: OpenOptions { format, ..opening::options(how)? },
        backing: if how.alone { BackingChoice::Nothing } else { BackingChoice::AsInImage },
        secrets,
        snapshot,
        caches: how.of_user.caches,
    };
    let opened = image::open::open(&opening::spec(path)?, options).await;
    Ok(Arc::new(opened.map_err(|error| how.refused(error))?))
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    /// What is allocated at once.
    pub(super) cluster: u64,
    /// What may be there or not by itself.
    pub(super) subcluster: u64,
}

impl Blocks {
    pub(super) fn of(image: &Qcow2) -> Self {
        let header = image.header();
        let cluster = header.cluster_bytes();
        let subcluster = if header.has_subclusters() { cluster / 32 } else { cluster };
        Self { cluster, subcluster }
    }
}

pub(super) fn blocks(image: &Image) -> Option<Blocks> {
    match image {
        Image::Raw(_) => None,
        Image::Qcow2(qcow2) => Some(Blocks::of(qcow2)),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    Zero,
    /// It is not in this layer, and may be in what lies below.
    Below,
}

/// Pieces that follow each other from `offset` on, at least one, of at most `length` bytes in all.
/// What lies below has `below_bytes`; past them, what is not in the layer reads as zeroes.
pub(super) async fn layer(
    image: &Image,
    offset: u64,
    length: u64,
    below_bytes: u64,
) -> Result<Vec<(u64, Kind)>> {
    let Image::Qcow2(qcow2) = image else {
        // There is nothing below it.
        return Ok(vec![(length, Kind::Data)]);
    };
    let (mut at, mut kinds) = (offset, Vec::new());
    for Piece { length, what } in qcow2.map(offset, length).await? {
        let below = below_bytes.saturating_sub(at).min(length);
        match what {
            What::Unallocated => kinds.extend([(below, Kind::Below), (length - below, Kind::Zero)]),
            What::Zero { .. } => kinds.push((length, Kind::Zero)),
            What::Data { .. } | What::Compressed { .. } => kinds.push((length, Kind::Data)),
        }
        at += length;
    }
    kinds.retain(|(length, _)| *length > 0);
    Ok(kinds)
}

pub(super) async fn write_compressed(image: &Image, offset: u64, data: Segments) -> Result<()> {
    match image {
        Image::Raw(_) => Err(Error::UNSUPPORTED),
        Image::Qcow2(qcow2) => qcow2.write_compressed(offset, data).await,
    }
}

/// The file that an image is in: of a qcow2 image with an external data file, the latter.
pub(super) fn data_file(image: &Image) -> String {
    let storage = image.storage();
    storage.path().map_or_else(|| storage.description(), str::to_owned)
}
