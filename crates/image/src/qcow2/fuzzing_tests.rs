//! Short runs of the fuzz targets: images of every kind with changed bytes in their metadata.

use std::sync::LazyLock;

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::qcow2::{
    create::{CreateOptions, Preallocation, create},
    header::BackingReference,
    metadata_io,
};

/// Small, undamaged images.
static IMAGES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| kinds().into_iter().map(image).collect());

fn kinds() -> Vec<CreateOptions> {
    let plain = CreateOptions { size_bytes: 64 << 10, cluster_bytes: 512, ..CreateOptions::default() };
    vec![
        plain.clone(),
        CreateOptions { version: 2, ..plain.clone() },
        CreateOptions { refcount_bits: 1, ..plain.clone() },
        CreateOptions { refcount_bits: 64, lazy_refcounts: true, ..plain.clone() },
        CreateOptions { cluster_bytes: 16 << 10, extended_l2: true, ..plain.clone() },
        CreateOptions { preallocation: Preallocation::Metadata, ..plain.clone() },
        CreateOptions { data_file: Some("data".into()), ..plain.clone() },
        CreateOptions { luks: Some([&b"LUKS\xba\xbe"[..], &[0; 1994]].concat()), ..plain.clone() },
        CreateOptions {
            backing: Some(BackingReference { name: "base".into(), format: Some("raw".into()) }),
            ..plain
        },
    ]
}

/// An image with data of all kinds, and with snapshots and bitmaps if it may have them.
fn image(options: CreateOptions) -> Vec<u8> {
    sim::run(1, async move {
        let storage = Storage::memory(512);
        let data = options.data_file.as_ref().map(|_| Storage::memory(options.size_bytes));
        let header = create(&storage, data.as_ref(), &options).await.expect("valid");
        let content = metadata_io::read(&storage, 0, storage.size_bytes() as usize).await.expect("memory");
        let image = Qcow2Image::open(parts(&content, &header, false).await).await.expect("an image");
        let request =
            |kind, offset, length| FuzzRequest { kind, from_end: false, offset, length, byte: kind };
        request(1, 0, 9000).execute(&image, true).await;
        request(10, 32 << 10, 1).execute(&image, false).await;
        request(5, 4096, 2048).execute(&image, false).await;
        request(12, 0, 0).execute(&image, false).await;
        request(2, 6000, 3000).execute(&image, true).await;
        let _ = image.add_bitmap("one", 9).await;
        image.close().await.expect("memory");
        let file = image.file.storage();
        metadata_io::read(file, 0, file.size_bytes() as usize).await.expect("memory")
    })
}

/// One of the images, with some bytes replaced.
#[derive(Clone, Debug)]
struct FuzzedImage {
    number: usize,
    changes: Vec<(usize, u8)>,
}

impl FuzzedImage {
    fn content(&self) -> Vec<u8> {
        let mut content = IMAGES[self.number].clone();
        for (place, value) in &self.changes {
            let place = place % content.len();
            content[place] = *value;
        }
        content
    }
}

/// Most of the replaced bytes are at the front, in the header and the tables.
fn damaged() -> impl Strategy<Value = FuzzedImage> {
    let place = prop_oneof![0..120_usize, 512..4096_usize, any::<usize>()];
    let value = prop_oneof![any::<u8>(), (0..8_u32).prop_map(|bit| 1 << bit), Just(0), Just(0xff)];
    (0..IMAGES.len(), vec((place, value), 0..6)).prop_map(|(number, changes)| FuzzedImage { number, changes })
}

proptest! {
    #[test]
    fn any_image_is_checked(image in damaged()) {
        check(&image.content());
    }

    #[test]
    fn any_image_is_opened(image in damaged()) {
        open(&image.content());
    }

    #[test]
    fn any_image_survives_use(image in damaged(), requests in vec(any::<[u8; REQUEST_BYTES]>(), 0..MAX_REQUESTS)) {
        let count = requests.len() as u8;
        lookup(&[&image.content()[..], &requests.concat(), &[count]].concat());
    }
}

#[test]
fn valid_images_are_usable() {
    for image in IMAGES.iter() {
        sim::run(1, {
            let image = image.clone();
            async move { assert!(is_consistent(&Storage::with_content(&image).await).await) }
        });
        let requests: Vec<u8> =
            (0..31 * REQUEST_BYTES as u32).map(|number| (number * 37 % 251) as u8).collect();
        lookup(&[&image[..], &requests, &[31]].concat());
    }
}

#[test]
fn clusters_that_share_a_place_in_the_data_file_are_not_written() {
    let image = FuzzedImage { number: 6, changes: vec![(2118, 2)] };
    lookup(&[&image.content()[..], &[225, 2, 0, 0, 237, 1], &[1]].concat());
}
