//! Dirty bitmaps of disks: those that an NBD export offers, and changes of those of a disk in use.
//!
//! An export offers bitmaps of the disk's image or its backing chain. The lookup happens once, when
//! the export is added. Never changes a bitmap that an export offers: its clients read it.

use std::sync::Arc;

use anyhow::{anyhow, ensure};
use export::nbd::MAX_BITMAPS;
use image::{
    Image,
    qcow2::bitmap::{BitmapChange, BitmapError, BitmapView, BitmapViewError, NewBitmap},
};
use jobs::backup::BackupBitmap;

use super::registry::{Registry, RunningDisk};

/// Smallest default granularity in bytes, as in QEMU.
const MIN_DEFAULT_GRANULARITY: u64 = 4096;

/// Changes a bitmap of a disk.
///
/// # Errors
/// Reason why it cannot be changed; nothing has changed.
pub(crate) async fn change_bitmap(
    registry: &Registry,
    running: &RunningDisk,
    change: &BitmapChange,
) -> anyhow::Result<()> {
    let disk = running.disk.name();
    registry.disks.check_unchanging(disk)?;
    let (name, action) = match change {
        BitmapChange::Add(NewBitmap { name, .. }) => (name, "added"),
        BitmapChange::Remove(name) => (name, "removed"),
        BitmapChange::Clear(name) => (name, "cleared"),
        BitmapChange::Enable { name, is_enabled: true } => (name, "enabled"),
        BitmapChange::Enable { name, is_enabled: false } => (name, "disabled"),
        BitmapChange::Merge { name, .. } => (name, "merged"),
    };
    check_not_exported(registry, running, name)?;
    running.disk.change_bitmap(change).await.map_err(|error| explain(disk, error))?;
    tracing::info!(%disk, bitmap = name, "a bitmap was {action}");
    Ok(())
}

/// Bits of the granularity of a new bitmap: the cluster size, at least [`MIN_DEFAULT_GRANULARITY`].
pub(crate) fn default_granularity_bits(image: &Image) -> u32 {
    let cluster_bytes = match image {
        Image::Qcow2(image) => image.header().cluster_bytes(),
        Image::Raw(_) => 0,
    };
    cluster_bytes.max(MIN_DEFAULT_GRANULARITY).trailing_zeros()
}

/// Prepares the bitmap of a backup; returns true if it was added for it, which `may_add` permits
/// for a full backup. An added bitmap marks everything: until the backup has succeeded, no data is
/// in it.
///
/// # Errors
/// Reason why the backup cannot use it.
pub(crate) async fn prepare_for_backup(
    registry: &Registry,
    running: &RunningDisk,
    bitmap: &BackupBitmap,
    may_add: bool,
) -> anyhow::Result<bool> {
    let (disk, name) = (running.disk.name(), &bitmap.name);
    let statuses = running.disk.bitmap_statuses().await.map_err(|error| explain(disk, error))?;
    let Some(status) = statuses.into_iter().find(|status| status.name == *name) else {
        if bitmap.is_incremental {
            check_not_below(running, name).await?;
        }
        if bitmap.is_incremental || !may_add {
            return Err(explain(disk, BitmapError::NotFound(name.clone())));
        }
        let new = NewBitmap {
            name: name.clone(),
            granularity_bits: default_granularity_bits(&running.disk.image()),
            is_persistent: true,
            is_enabled: true,
            is_marked: true,
        };
        change_bitmap(registry, running, &BitmapChange::Add(new)).await?;
        return Ok(true);
    };
    if status.is_inconsistent {
        return Err(explain(disk, BitmapError::InUse(name.clone())));
    }
    ensure!(
        status.is_recording || !status.is_persistent,
        "disk {disk}: the bitmap {name:?} does not record writes (enable it with `weir bitmap {disk} \
         enable {name}`, and make a full backup)"
    );
    check_not_exported(registry, running, name)?;
    Ok(false)
}

/// Fails if the bitmap is in an image below that of the disk, where it stays at a snapshot.
async fn check_not_below(running: &RunningDisk, name: &str) -> anyhow::Result<()> {
    let disk = running.disk.name();
    for image in running.disk.image().chain().skip(1) {
        let Image::Qcow2(below) = image else { continue };
        let entries = below.bitmaps().await.map_err(|error| explain(disk, error))?;
        ensure!(
            !entries.iter().any(|entry| entry.name() == name),
            "disk {disk}: the bitmap {name:?} is in {}, a file below the image of the disk, and does not \
             mark its changes (make a full backup with the bitmap, and then incremental ones)",
            image.storage().description()
        );
    }
    Ok(())
}

/// Fails if clients of an export read the bitmap.
pub(crate) fn check_not_exported(
    registry: &Registry,
    running: &RunningDisk,
    bitmap: &str,
) -> anyhow::Result<()> {
    let current = running.disk.image();
    let Image::Qcow2(image) = &*current else { return Ok(()) };
    let disk = running.disk.name();
    for export in registry.exports.of_disk(disk) {
        let views = export.nbd_parameters.iter().flat_map(|parameters| parameters.bitmaps.iter());
        let is_exported = views.into_iter().any(|view| &**view.name() == bitmap && view.is_of(image));
        ensure!(
            !is_exported,
            "disk {disk}: the export {} offers the bitmap {bitmap:?} to clients (remove the export first)",
            export.id
        );
    }
    Ok(())
}

/// Error of a bitmap of a disk in use.
pub(crate) fn explain(disk: &str, error: BitmapError) -> anyhow::Error {
    match error {
        BitmapError::NotFound(name) => {
            anyhow!("disk {disk}: there is no bitmap {name:?} (`weir bitmap {disk} list` lists all)")
        }
        BitmapError::InUse(name) => anyhow!(
            "disk {disk}: the bitmap {name:?} is inconsistent: after a crash it may lack marks (remove \
             it with `weir bitmap {disk} remove {name}`)"
        ),
        error => anyhow!("disk {disk}: {error}"),
    }
}

/// Returns the bitmaps with these names, in this order.
pub(crate) async fn find_bitmaps(
    running: &RunningDisk,
    names: &[String],
) -> anyhow::Result<Arc<[BitmapView]>> {
    if names.len() > MAX_BITMAPS {
        anyhow::bail!("{} bitmaps for one export; {MAX_BITMAPS} is the most", names.len());
    }
    let mut views = Vec::with_capacity(names.len());
    for name in names {
        let image = running.disk.image();
        if let Image::Raw(_) = &*image {
            anyhow::bail!(
                "bitmap {name:?}: the image is raw, and only qcow2 images have bitmaps (leave it out)"
            );
        }
        let view = find_topmost(&image, name).await;
        let disk = running.disk.name();
        if let (Ok(view), Image::Qcow2(top)) = (&view, &*image) {
            // It does not record the writes to the images above it.
            ensure!(
                top.is_read_only() || view.is_of(top),
                "disk {disk}: bitmap {name:?}: it is in a backing file, and does not mark changes of the \
                 disk (serve the disk with --read-only, or add a bitmap to its image)"
            );
        }
        views.push(
            view.map_err(|error| anyhow::anyhow!("disk {disk}: {error} (`weir image info` lists them)"))?,
        );
    }
    Ok(views.into())
}

/// Returns the first bitmap with this name along the backing chain: a new overlay has none yet.
async fn find_topmost(image: &Image, name: &str) -> Result<BitmapView, BitmapViewError> {
    for image in image.chain() {
        let Image::Qcow2(qcow2) = image else { continue };
        match qcow2.view_bitmap(name).await {
            Err(BitmapViewError::NotFound(_)) => {}
            found => return found,
        }
    }
    Err(BitmapViewError::NotFound(name.to_owned()))
}
