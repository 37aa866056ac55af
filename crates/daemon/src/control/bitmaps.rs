//! Which bitmaps of a disk's image an export offers, found when the export is made.

use std::sync::Arc;

use block::image::{Image, qcow2::bitmap::BitmapView};
use export::nbd::MOST_BITMAPS;

use super::inventory::RunningDisk;

/// The bitmaps of these names, in their order.
pub(crate) async fn of_image(running: &RunningDisk, names: &[String]) -> anyhow::Result<Arc<[BitmapView]>> {
    if names.len() > MOST_BITMAPS {
        anyhow::bail!("{} bitmaps for one export; {MOST_BITMAPS} is the most", names.len());
    }
    let mut views = Vec::with_capacity(names.len());
    for name in names {
        let Image::Qcow2(qcow2) = running.disk.image() else {
            anyhow::bail!(
                "bitmap {name:?}: the image is raw, and only qcow2 images have bitmaps (leave it out)"
            );
        };
        let view = qcow2.view_bitmap(name).await;
        let disk = running.disk.name();
        views.push(
            view.map_err(|error| anyhow::anyhow!("disk {disk}: {error} (`weir image info` lists them)"))?,
        );
    }
    Ok(views.into())
}
