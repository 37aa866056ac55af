//! `--bitmaps`: copies the persistent bitmaps of the source into the new image.
//!
//! They are stored after the disk was copied, and keep their flag whether to record. An
//! inconsistent bitmap fails the command before copying begins, unless such bitmaps are to be
//! skipped. Never changes the source.

use std::{path::Path, sync::Arc};

use anyhow::{Context as _, anyhow, bail};
use image::{
    Image,
    qcow2::{
        Qcow2Image,
        bitmap::{BitmapEntry, flag},
    },
};

use super::opening::{self, OpenMode};

#[derive(Debug)]
pub(super) struct BitmapCopier {
    source: Arc<Image>,
    bitmaps: Vec<BitmapEntry>,
}

impl BitmapCopier {
    /// Fails if the format of `source`, opened read-only, has no bitmaps, or if one of them cannot
    /// be copied.
    pub(super) async fn of(source: &Arc<Image>, name: &str, skip_broken: bool) -> anyhow::Result<Self> {
        let Image::Qcow2(qcow2) = &**source else {
            bail!("--bitmaps: {name}: raw images have no bitmaps (leave the option out)");
        };
        let mut bitmaps = Vec::new();
        for entry in qcow2.bitmaps().await.with_context(|| name.to_owned())? {
            let bitmap = entry.name();
            if entry.flags & flag::IN_USE == 0 {
                check(&entry).with_context(|| format!("{name}: bitmap {bitmap:?}"))?;
                bitmaps.push(entry);
            } else if skip_broken {
                console::print_error(&anyhow!(
                    "{name}: bitmap {bitmap:?} may be inconsistent, and is skipped"
                ));
            } else {
                bail!(
                    "{name}: bitmap {bitmap:?} is marked in-use and may be inconsistent \
                     (--skip-broken-bitmaps skips it, `weir image bitmap --remove` removes it)"
                );
            }
        }
        Ok(Self { source: Arc::clone(source), bitmaps })
    }

    /// Checks before the copy that the new image can hold the bitmaps.
    pub(super) async fn check_target(&self, target: &Image) -> anyhow::Result<()> {
        let Image::Qcow2(qcow2) = target else {
            bail!("--bitmaps: raw images have no bitmaps (use -O qcow2)");
        };
        if qcow2.header().version < 3 {
            bail!("--bitmaps: images of version 2 have no bitmaps (use compat=1.1)");
        }
        let (target_bytes, source_bytes) = (qcow2.size_bytes(), self.source.size_bytes());
        // A bitmap covers a disk from its start to its end, so the sizes must be equal.
        if target_bytes != source_bytes {
            bail!(
                "--bitmaps: the new disk has {target_bytes} bytes, and the bitmaps of the source cover {source_bytes}"
            );
        }
        // With `-n` the target may have bitmaps already.
        let existing = qcow2.bitmaps().await?;
        match self.bitmaps.iter().find(|entry| existing.iter().any(|other| other.name == entry.name)) {
            Some(entry) => {
                bail!("--bitmaps: the new image already has a bitmap {:?} (remove it)", entry.name())
            }
            None => Ok(()),
        }
    }

    pub(super) async fn store(&self, path: &Path) -> anyhow::Result<()> {
        if self.bitmaps.is_empty() {
            return Ok(());
        }
        let image =
            // Opened again without its chain: only metadata is written.
            Qcow2Image::open_for_maintenance(opening::storage(path, OpenMode { write: true, ..OpenMode::default() })?).await?;
        let stored = self.store_all(&image).await;
        let closed = image.close().await;
        stored?;
        Ok(closed?)
    }

    async fn store_all(&self, image: &Qcow2Image) -> anyhow::Result<()> {
        let Image::Qcow2(source) = &*self.source else { unreachable!("others have no bitmaps") };
        for entry in &self.bitmaps {
            let name = &*entry.name();
            let context = || format!("bitmap {name:?}");
            // Adding it first bounds the memory: it rejects a bitmap that is too large.
            image.add_bitmap(name, entry.granularity_bits).await.with_context(context)?;
            let bits = source.bitmap_bits(name).await.with_context(context)?;
            image.merge_bitmap(name, &bits).await.with_context(context)?;
            // New bitmaps record; the flag is removed to match the source.
            if entry.flags & flag::AUTO == 0 {
                image.enable_bitmap(name, false).await.with_context(context)?;
            }
        }
        Ok(())
    }
}

fn check(entry: &BitmapEntry) -> anyhow::Result<()> {
    if std::str::from_utf8(&entry.name).is_err() {
        bail!("the name is not UTF-8");
    }
    // qcow2 specification, "Bitmap directory": without that flag unknown extra data forbids any
    // use.
    if !entry.extra.is_empty() && entry.flags & flag::EXTRA_COMPATIBLE == 0 {
        bail!("has extra data of an unknown kind");
    }
    Ok(())
}
