//! Resolves the dirty bitmaps that an NBD export offers, in the disk's image or its backing chain.
//! The lookup happens once, when the export is added.

use std::sync::Arc;

use export::nbd::MAX_BITMAPS;
use image::{
    Image,
    qcow2::bitmap::{BitmapView, BitmapViewError},
};

use super::registry::RunningDisk;

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
