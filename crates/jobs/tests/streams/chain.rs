//! A chain of images on simulated devices, with random content in each image.

use std::sync::Arc;

use image::{
    Image, Qcow2Image, RawImage,
    qcow2::{
        OpenFailure, Qcow2Components,
        create::{CreateOptions, create},
        header::BackingReference,
        read_header,
    },
};
use reactor::{buffer::IoBuffer, sim};
use storage::{
    Durability, Storage, ZeroOptions,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use crate::client::chance;

pub(crate) const BLOCK_BYTES: usize = 512;
/// Longest chain.
const MAX_CHAIN: usize = 5;

/// File of an image.
#[derive(Clone)]
pub(crate) struct Layer {
    pub(crate) content: Vec<u8>,
    pub(crate) is_raw: bool,
}

/// Files by number; that with the highest number is the image of the disk. The header of an image
/// names the number of its backing file.
#[derive(Clone)]
pub(crate) struct Chain(pub(crate) Vec<Layer>);

impl Chain {
    /// Draws a chain.
    pub(crate) async fn draw() -> Self {
        let mut chain = Self(Vec::new());
        let count = sim::random(|random| random.usize(2..=MAX_CHAIN));
        let size = |is_top| match chance(70) {
            true => 40,
            false => sim::random(|random| random.usize(if is_top { 8 } else { 1 }..80)),
        };
        if chance(50) {
            let bytes = size(false) * BLOCK_BYTES;
            let content = sim::random(|random| (0..bytes).map(|_| random.u8(..)).collect());
            chain.0.push(Layer { content, is_raw: true });
        }
        while chain.0.len() < count {
            let is_top = chain.0.len() + 1 == count;
            chain.add(size(is_top) * BLOCK_BYTES).await;
        }
        chain
    }

    /// Adds an overlay of this size over the topmost image, and changes it at random.
    async fn add(&mut self, size_bytes: usize) {
        let extended_l2 = chance(20);
        let cluster_bits = match extended_l2 {
            true => 14,
            false => sim::random(|random| [9, 10, 12, 16][random.usize(..4)]),
        };
        let backing = self.0.last().map(|below| BackingReference {
            name: (self.0.len() - 1).to_string(),
            format: Some(if below.is_raw { "raw" } else { "qcow2" }.to_owned()),
        });
        let options = CreateOptions {
            size_bytes: size_bytes as u64,
            version: if extended_l2 || chance(70) { 3 } else { 2 },
            cluster_bytes: 1 << cluster_bits,
            extended_l2,
            backing,
            ..CreateOptions::default()
        };
        let storage = Storage::with_content(&[]).await;
        create(&storage, None, &options).await.expect("valid");
        self.0.push(Layer { content: storage.read_all().await.expect("memory"), is_raw: false });
        let image = self.open_in_memory(false).await;
        for _ in 0..sim::random(|random| random.usize(..8)) {
            let start = sim::random(|random| random.usize(..size_bytes));
            let end = size_bytes.min(start + sim::random(|random| random.usize(1..4000)));
            let (offset, length) = (start as u64, (end - start) as u64);
            let zeroes =
                |may_unmap| ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached };
            let changed = match sim::random(|random| random.u32(..10)) {
                0..7 => {
                    let bytes: Vec<u8> = sim::random(|random| (start..end).map(|_| random.u8(..)).collect());
                    image.write(offset, IoBuffer::copy_of(&bytes).into(), Durability::Cached).await
                }
                7..9 => image.write_zeroes(offset, length, zeroes(chance(50))).await,
                _ => image.discard(offset, length).await,
            };
            changed.expect("memory");
        }
        image.close().await.expect("memory");
        let mut content = image.storage().read_all().await.expect("memory");
        content.resize(content.len().next_multiple_of(BLOCK_BYTES), 0);
        self.0.last_mut().expect("the overlay").content = content;
    }

    /// Numbers of the files of the chain, the base first.
    pub(crate) async fn numbers(&self) -> Vec<usize> {
        let mut numbers = vec![self.0.len() - 1];
        loop {
            let layer = &self.0[numbers[0]];
            if layer.is_raw {
                return numbers;
            }
            let header = read_header(&Storage::with_content(&layer.content).await).await.expect("valid");
            let Some(backing) = header.backing else { return numbers };
            numbers.insert(0, backing.name.parse().expect("a number"));
        }
    }

    /// Opens the chain on storage that never fails.
    pub(crate) async fn open_in_memory(&self, read_only: bool) -> Image {
        let mut below = None;
        for number in self.numbers().await {
            let Layer { content, is_raw } = &self.0[number];
            let storage = Storage::with_content(content).await;
            let is_top = number + 1 == self.0.len();
            let image = open(storage, *is_raw, below.take(), read_only || !is_top).await;
            below = Some(Arc::new(image.expect("valid")));
        }
        Arc::into_inner(below.expect("an image")).expect("no other owner")
    }

    /// Opens the chain on devices, one for each file.
    ///
    /// # Errors
    /// An injected error.
    pub(crate) async fn open_on_devices(
        &self,
        behaviour: Behaviour,
    ) -> Result<(Image, Vec<SimulatedStorage>), OpenFailure> {
        let device = |layer: &Layer| SimulatedStorage::new(layer.content.clone(), behaviour);
        let devices: Vec<_> = self.0.iter().map(device).collect();
        let mut below = None;
        for number in self.numbers().await {
            let storage = Storage::Simulated(Align::new(devices[number].clone()));
            let is_top = number + 1 == self.0.len();
            let image = open(storage, self.0[number].is_raw, below.take(), !is_top).await?;
            below = Some(Arc::new(image));
        }
        Ok((Arc::into_inner(below.expect("an image")).expect("no other owner"), devices))
    }
}

async fn open(
    storage: Storage,
    is_raw: bool,
    backing: Option<Arc<Image>>,
    read_only: bool,
) -> Result<Image, OpenFailure> {
    if is_raw {
        let raw = RawImage::new(storage);
        return Ok(Image::Raw(if read_only { raw.read_only() } else { raw }));
    }
    let components = Qcow2Components { backing, read_only, ..Qcow2Components::of(storage) };
    Qcow2Image::open(components).await.map(Image::Qcow2)
}
