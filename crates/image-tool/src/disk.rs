//! Opens the disk inside an image by its file name; [`opening`] is for commands that access the
//! bytes of the file.

use std::{path::Path, sync::Arc};

use image::{
    Image, Qcow2Image,
    open::{BackingChoice, ImageOptions},
    qcow2::{GuestMapping, MappedRun},
};
use reactor::{
    buffer::Segments,
    error::{Error, Result},
};
use storage::{ImageFormat, OpenOptions};

use super::{
    keys::PassphraseSet,
    opening::{self, OpenMode},
    snapshot_selector::SnapshotSelector,
};

/// Opens an image with its backing chain. An image whose format is probed must not name other
/// files.
pub(super) async fn open(
    path: &Path,
    format: Option<ImageFormat>,
    mode: OpenMode,
    keys: &mut PassphraseSet,
) -> anyhow::Result<Arc<Image>> {
    open_at(path, format, mode, keys, None).await
}

/// Opens an image like [`open`], or one of its internal snapshots.
pub(super) async fn open_at(
    path: &Path,
    format: Option<ImageFormat>,
    mode: OpenMode,
    keys: &mut PassphraseSet,
    selector: Option<&SnapshotSelector>,
) -> anyhow::Result<Arc<Image>> {
    opening::warn_if_container(path);
    let snapshot = match selector {
        Some(selector) => Some(selector.id(path, format, mode).await?),
        None => None,
    };
    let secrets = keys.assign_to(path, format, mode.without_backing).await?;
    let options = ImageOptions {
        storage: OpenOptions { format, ..opening::options(mode)? },
        backing: if mode.without_backing { BackingChoice::Nothing } else { BackingChoice::AsInImage },
        secrets,
        snapshot,
        caches: mode.described.caches,
    };
    let opened = image::open::open(&opening::spec(path)?, options).await;
    Ok(Arc::new(opened.map_err(|error| mode.adapt_remedy(error))?))
}

#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationUnits {
    /// Unit of allocation in bytes.
    pub(super) cluster: u64,
    /// Unit that is allocated or zero separately, in bytes.
    pub(super) subcluster: u64,
}

impl AllocationUnits {
    pub(super) fn of(image: &Qcow2Image) -> Self {
        let header = image.header();
        let cluster = header.cluster_bytes();
        let subcluster = if header.has_subclusters() { cluster / 32 } else { cluster };
        Self { cluster, subcluster }
    }
}

pub(super) fn blocks(image: &Image) -> Option<AllocationUnits> {
    match image {
        Image::Raw(_) => None,
        Image::Qcow2(qcow2) => Some(AllocationUnits::of(qcow2)),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExtentKind {
    Data,
    Zero,
    /// Not allocated in this layer; read from the layers below.
    Below,
}

/// Returns pieces from `offset` on, at least one, of at most `length` bytes in total. The layers
/// below have `below_bytes`; beyond that, unallocated ranges read as zeroes.
pub(super) async fn layer(
    image: &Image,
    offset: u64,
    length: u64,
    below_bytes: u64,
) -> Result<Vec<(u64, ExtentKind)>> {
    let Image::Qcow2(qcow2) = image else {
        // A raw image has no layer below it.
        return Ok(vec![(length, ExtentKind::Data)]);
    };
    let (mut at, mut kinds) = (offset, Vec::new());
    for MappedRun { length, mapping } in qcow2.map(offset, length).await? {
        let below = below_bytes.saturating_sub(at).min(length);
        match mapping {
            // Beyond the end of the layers below there is nothing to read: zeroes.
            GuestMapping::Unallocated => {
                kinds.extend([(below, ExtentKind::Below), (length - below, ExtentKind::Zero)]);
            }
            GuestMapping::Zero { .. } => kinds.push((length, ExtentKind::Zero)),
            GuestMapping::Data { .. } | GuestMapping::Compressed { .. } => {
                kinds.push((length, ExtentKind::Data));
            }
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

/// Name of the file that holds guest data: the external data file, if the image has one.
pub(super) fn data_file(image: &Image) -> String {
    let storage = image.storage();
    storage.path().map_or_else(|| storage.description(), str::to_owned)
}
