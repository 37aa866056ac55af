//! Dirty bitmaps of a disk in use.
//!
//! Never blocks clients for long: a change of bitmaps waits for the requests in flight for a
//! limited time.

use image::{
    Image, Qcow2Image,
    qcow2::bitmap::{BitmapChange, BitmapError, BitmapStatus, DirtyBits},
};

use super::{Disk, changes::QUIESCE_TIMEOUT};
use reactor::error::Error;

impl Disk {
    /// Changes bitmaps of the image at an instant during the call, durably.
    ///
    /// # Errors
    /// [`BitmapError`]; nothing has changed. [`Error::TIMED_OUT`] if requests in flight do not
    /// complete within [`QUIESCE_TIMEOUT`], [`Error::SHUTDOWN`] while another process may have the
    /// image.
    pub async fn change_bitmap(&self, change: &BitmapChange) -> Result<(), BitmapError> {
        // Excludes the release of the image.
        let _guard = self.enter().await?;
        // Excludes a switch of the image over the whole change, as for a change of the content.
        let entered = reactor::timeout(QUIESCE_TIMEOUT, self.copy_before_write.enter()).await;
        let _change = entered.map_err(|_| Error::TIMED_OUT)?;
        let current = self.image.shared();
        let image = bitmap_image(&current)?;
        let exclusive = reactor::timeout(QUIESCE_TIMEOUT, image.drain()).await;
        let exclusive = exclusive.map_err(|_| Error::TIMED_OUT)?;
        // With exclusive access: an upgrade suspends the disk first, and then waits for it.
        if self.copy_before_write.is_suspended() {
            return Err(Error::SHUTDOWN.into());
        }
        exclusive.change_bitmap(change).await
    }

    /// States of the bitmaps of the image; none if its format has no bitmaps, or another process
    /// may have it.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn bitmap_statuses(&self) -> Result<Vec<BitmapStatus>, BitmapError> {
        match (&*self.image.shared(), self.enter().await) {
            (Image::Qcow2(image), Ok(_guard)) => image.bitmap_statuses().await,
            _ => Ok(Vec::new()),
        }
    }

    /// Marks of a bitmap of the image.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn bitmap_bits(&self, name: &str) -> Result<DirtyBits, BitmapError> {
        let _guard = self.enter().await?;
        bitmap_image(&self.image.shared())?.live_bitmap_bits(name).await
    }
}

fn bitmap_image(image: &Image) -> Result<&Qcow2Image, BitmapError> {
    match image {
        Image::Qcow2(image) => Ok(image),
        Image::Raw(_) => Err(BitmapError::InvalidValue(
            "its image is raw, which has no bitmaps (convert it with `weir image convert -O qcow2`)"
                .to_owned(),
        )),
    }
}
