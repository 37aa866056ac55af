//! Source of a copy: an image, several concatenated images, or one layer of a chain. Never writes.

use std::sync::Arc;

use anyhow::Context as _;
use image::Image;
use reactor::buffer::IoBuffer;

use super::disk::{self, ExtentKind};

/// Images that are concatenated to one disk.
#[derive(Clone, Debug)]
pub(super) struct CopySource {
    parts: Vec<ConcatenatedImage>,
    size_bytes: u64,
    /// Size in bytes of the layers below, if only one layer is read.
    layer_on: Option<u64>,
}

#[derive(Clone, Debug)]
struct ConcatenatedImage {
    name: Arc<str>,
    image: Arc<Image>,
    start: u64,
}

impl CopySource {
    pub(super) fn new(images: impl IntoIterator<Item = (String, Arc<Image>)>) -> Self {
        let mut source = Self { parts: Vec::new(), size_bytes: 0, layer_on: None };
        for (name, image) in images {
            let start = source.size_bytes;
            source.size_bytes += image.size_bytes();
            source.parts.push(ConcatenatedImage { name: name.into(), image, start });
        }
        source
    }

    /// Restricts the source to one layer: ranges of its backing chain, which has `below_bytes`,
    /// have the kind [`ExtentKind::Below`].
    pub(super) fn layer_on(self, below_bytes: u64) -> Self {
        Self { layer_on: Some(below_bytes), ..self }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Size of the layers below, if only one layer is read: see [`CopySource::layer_on`].
    pub(super) fn below_bytes(&self) -> Option<u64> {
        self.layer_on
    }

    fn at(&self, offset: u64) -> (&ConcatenatedImage, u64, u64) {
        // The last part that begins at or before `offset`; empty images are skipped.
        let next_index = self.parts.partition_point(|part| part.start <= offset);
        let part = &self.parts[next_index - 1];
        let end = self.parts.get(next_index).map_or(self.size_bytes, |next| next.start);
        (part, offset - part.start, end - offset)
    }

    /// Returns the kinds of contiguous pieces from `offset` on, at least one.
    pub(super) async fn status(&self, offset: u64, length: u64) -> anyhow::Result<Vec<(u64, ExtentKind)>> {
        let (part, at, left) = self.at(offset);
        let length = length.min(left);
        let status = if let Some(below_bytes) = self.layer_on {
            disk::layer(&part.image, at, length, below_bytes).await
        } else {
            let extents = part.image.block_status(at, length).await;
            let kind = |zero| if zero { ExtentKind::Zero } else { ExtentKind::Data };
            extents
                .map(|extents| extents.into_iter().map(|extent| (extent.length, kind(extent.zero))).collect())
        };
        status.with_context(|| format!("{}: the allocation at {at} cannot be read", part.name))
    }

    pub(super) async fn read(&self, offset: u64, length: usize) -> anyhow::Result<IoBuffer> {
        let (part, at, left) = self.at(offset);
        if length as u64 <= left {
            return part.read(at, length).await;
        }
        let mut data = IoBuffer::new(length);
        let mut done = 0;
        // A read across the boundary of two images.
        while done < length {
            let (part, at, left) = self.at(offset + done as u64);
            let next = length.min(done + usize::try_from(left).unwrap_or(usize::MAX));
            data[done..next].copy_from_slice(&part.read(at, next - done).await?);
            done = next;
        }
        Ok(data)
    }
}

impl ConcatenatedImage {
    async fn read(&self, offset: u64, length: usize) -> anyhow::Result<IoBuffer> {
        let context = || format!("{}: reading {length} bytes at {offset}", self.name);
        Ok(self.image.read(offset, length).await.with_context(context)?.joined())
    }
}
