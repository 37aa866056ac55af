//! The image of a seed, and its files.

use std::sync::Arc;

use image::{
    Image, Qcow2Image, RawImage,
    qcow2::{
        CacheSettings, L2CacheSize, Qcow2Components,
        create::{CreateOptions, create},
        header::BackingReference,
        luks::{CipherKind, SectorCipher},
        snapshot::NewSnapshot,
    },
};
use reactor::{buffer::IoBuffer, sim};
use storage::{Durability, Storage};

use crate::client::chance;

/// Properties of an image; constant through all crashes.
#[derive(Clone, Debug)]
pub(crate) struct ImageKind {
    pub(crate) options: CreateOptions,
    pub(crate) block_bytes: usize,
    caches: CacheSettings,
    /// Content of the backing file.
    backing: Option<Vec<u8>>,
    /// True if snapshots are created and deleted; there is one from the beginning.
    pub(crate) snapshots: bool,
    /// True if compressed clusters are written.
    pub(crate) compressed: bool,
}

/// Content of the files: the image's own, and the data file's if there is one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Files {
    pub(crate) image: Vec<u8>,
    pub(crate) data: Option<Vec<u8>>,
}

impl ImageKind {
    pub(crate) fn draw() -> Self {
        let mut options = draw_options();
        let block_bytes =
            if options.cluster_bytes >= 4096 && !options.extended_l2 && chance(50) { 4096 } else { 512 };
        options.size_bytes = (sim::random(|random| random.usize(8..100)) * block_bytes) as u64;
        if options.version >= 3 {
            match sim::random(|random| random.u8(..100)) {
                0..12 => options.data_file = Some("data".into()),
                12..20 => {
                    options.data_file = Some("data".into());
                    options.data_file_raw = true;
                }
                20..35 => options.luks = Some(vec![7; 2000]),
                _ => {}
            }
        }
        let has_backing = !options.data_file_raw && chance(30);
        if has_backing {
            options.backing = Some(BackingReference { name: "base".into(), format: Some("raw".into()) });
        }
        let backing_bytes = sim::random(|random| random.usize(1..=options.size_bytes as usize + 5000));
        // Minimal caches, so that entries are evicted all the time.
        let small = CacheSettings {
            l2: Some(L2CacheSize::Bytes(0)),
            entry_bytes: Some(512),
            ..CacheSettings::default()
        };
        let has_data_file = options.data_file.is_some();
        Self {
            block_bytes,
            caches: if chance(50) { small } else { CacheSettings::default() },
            backing: has_backing.then(|| (0..backing_bytes).map(|at| (at % 251) as u8 | 1).collect()),
            snapshots: !has_data_file && options.refcount_bits > 1 && chance(40),
            compressed: !has_data_file && options.luks.is_none() && chance(30),
            options,
        }
    }

    /// Creates an image, with some data unless it has a data file; returns its files and the
    /// content of the disk.
    pub(crate) async fn create(&self) -> (Files, Vec<u8>) {
        let storage = Storage::with_content(&[]).await;
        let data = match self.options.data_file {
            Some(_) => Some(Storage::with_content(&vec![0; self.options.size_bytes as usize]).await),
            None => None,
        };
        create(&storage, data.as_ref(), &self.options).await.expect("drawn valid");
        let mut files = Files {
            image: storage.read_all().await.expect("memory"),
            data: match &data {
                Some(data) => Some(data.read_all().await.expect("memory")),
                None => None,
            },
        };
        let image = Qcow2Image::open(self.in_memory(&files, false).await).await.expect("new");
        if files.data.is_none() {
            if chance(60) {
                let written = sim::random(|random| random.usize(1..=self.options.size_bytes as usize));
                let mut data = IoBuffer::new(written);
                data.fill(0x77);
                image.write(0, data.into(), Durability::Cached).await.expect("memory");
            }
            if self.snapshots {
                let first = NewSnapshot { name: "first", date_s: 1, date_ns: 2 };
                image.create_snapshot(first).await.expect("refcounts have room for two");
            }
            image.close().await.expect("memory");
            files.image = image.storage().read_all().await.expect("memory");
        }
        files.image.resize(files.image.len().next_multiple_of(self.block_bytes), 0);
        (files, disk(&image).await)
    }

    /// The parts from which an image is opened.
    pub(crate) async fn parts(
        &self,
        storage: Storage,
        data: Option<Storage>,
        read_only: bool,
    ) -> Qcow2Components {
        let backing = match &self.backing {
            Some(content) => {
                Some(Arc::new(Image::Raw(RawImage::new(Storage::with_content(content).await).read_only())))
            }
            None => None,
        };
        let key: [u8; 64] = std::array::from_fn(|index| index as u8);
        let cipher = self.options.luks.as_ref();
        Qcow2Components {
            storage,
            backing,
            data,
            cipher: cipher.map(|_| SectorCipher::new(CipherKind::DEFAULT, &key).expect("a key")),
            read_only,
            caches: self.caches,
        }
    }

    pub(crate) async fn in_memory(&self, files: &Files, read_only: bool) -> Qcow2Components {
        let data = match &files.data {
            Some(data) => Some(Storage::with_content(data).await),
            None => None,
        };
        self.parts(Storage::with_content(&files.image).await, data, read_only).await
    }
}

/// Reads the whole disk.
pub(crate) async fn disk(image: &Qcow2Image) -> Vec<u8> {
    let mut disk = vec![0; image.size_bytes() as usize];
    image.read(0, disk.len()).await.expect("valid").copy_to(&mut disk);
    disk
}

fn draw_options() -> CreateOptions {
    let extended_l2 = chance(25);
    let version = if !extended_l2 && chance(25) { 2 } else { 3 };
    let bits = if extended_l2 { 14 } else { sim::random(|random| [9, 9, 10, 12, 16][random.usize(..5)]) };
    let refcount_bits = if version == 2 { 16 } else { sim::random(|random| 1 << random.u32(..7)) };
    CreateOptions {
        version,
        extended_l2,
        cluster_bytes: 1 << bits,
        refcount_bits,
        ..CreateOptions::default()
    }
}
