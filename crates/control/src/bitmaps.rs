//! Which bitmaps of a disk's image, or of what is behind it, an export offers: found when the
//! export is made.

use std::sync::Arc;

use export::nbd::MAX_BITMAPS;
use image::{
    Image,
    qcow2::bitmap::{BitmapView, BitmapViewError},
};

use super::registry::RunningDisk;

/// The bitmaps of these names, in their order.
pub(crate) async fn of_image(running: &RunningDisk, names: &[String]) -> anyhow::Result<Arc<[BitmapView]>> {
    if names.len() > MAX_BITMAPS {
        anyhow::bail!("{} bitmaps for one export; {MAX_BITMAPS} is the most", names.len());
    }
    let mut views = Vec::with_capacity(names.len());
    for name in names {
        if let Image::Raw(_) = running.disk.image() {
            anyhow::bail!(
                "bitmap {name:?}: the image is raw, and only qcow2 images have bitmaps (leave it out)"
            );
        }
        let view = topmost(running.disk.image(), name).await;
        let disk = running.disk.name();
        views.push(
            view.map_err(|error| anyhow::anyhow!("disk {disk}: {error} (`weir image info` lists them)"))?,
        );
    }
    Ok(views.into())
}

/// The first bitmap of this name down the chain: a new overlay has none yet.
async fn topmost(image: &Image, name: &str) -> Result<BitmapView, BitmapViewError> {
    for image in image.chain() {
        let Image::Qcow2(qcow2) = image else { continue };
        match qcow2.view_bitmap(name).await {
            Err(BitmapViewError::NotThere(_)) => {}
            found => return found,
        }
    }
    Err(BitmapViewError::NotThere(name.to_owned()))
}
