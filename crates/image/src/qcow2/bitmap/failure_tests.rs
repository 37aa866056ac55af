//! Changes of bitmaps whose writes and flushes fail: a bitmap has all marks afterwards, or is in
//! use.

use super::{
    BitmapChange, BitmapError, DirtyBits, NewBitmap,
    tests::{copied, open},
};
use reactor::{buffer::IoBuffer, sim};
use storage::{Durability, Storage};

use crate::qcow2::{
    Qcow2Image,
    create::{CreateOptions, create},
};

const SIZE: u64 = 1 << 20;
const GRANULE: u64 = 4096;

/// File of an image with the bitmap `a`, which marks its first granules.
async fn file() -> Storage {
    let storage = Storage::memory(512);
    let options = CreateOptions { size_bytes: SIZE, cluster_bytes: 512, ..CreateOptions::default() };
    create(&storage, None, &options).await.expect("valid");
    let maintenance = Qcow2Image::open_for_maintenance(storage).await.expect("valid");
    // The writes below then change no metadata but bitmaps.
    maintenance.write(0, IoBuffer::copy_of(&[1; 16384]).into(), Durability::Cached).await.expect("room");
    maintenance.add_bitmap("a", GRANULE.trailing_zeros()).await.expect("new");
    let mut bits = DirtyBits::new(SIZE, GRANULE.trailing_zeros());
    bits.mark(0..3 * GRANULE);
    maintenance.store_bitmap("a", &bits).await.expect("there");
    maintenance.close().await.expect("memory");
    copied(maintenance.storage()).await
}

async fn write(image: &Qcow2Image) {
    loop {
        let data = IoBuffer::copy_of(&[2; 512]).into();
        if image.write(GRANULE, data, Durability::Cached).await.is_ok() {
            return;
        }
    }
}

/// Panics unless the bitmap has the marks of the last write, or is in use.
async fn check(image: &Qcow2Image, context: &str) {
    let file = copied(image.storage()).await;
    match open(file, true).await.bitmap_bits("a").await {
        Ok(bits) => {
            assert!(bits.marked().any(|range| range.contains(&GRANULE)), "{context}: the mark is lost");
        }
        Err(BitmapError::InUse(_)) => {}
        Err(error) => panic!("{context}: {error}"),
    }
}

#[test]
fn failed_change_loses_no_mark() {
    let disable = BitmapChange::Enable { name: "a".to_owned(), is_enabled: false };
    let clear = BitmapChange::Clear("a".to_owned());
    let mut failures = 0;
    for seed in 0..400 {
        let change = if seed % 2 == 0 { &clear } else { &disable };
        let kind = if seed % 4 < 2 { "write" } else { "flush" };
        let (change, mut failed) = (change.clone(), false);
        failures += sim::run(seed, async move {
            let rule = format!("kind={kind},count=1,probability=0.1,seed={seed},error=EIO");
            let image = open(file().await.with_faults(vec![rule.parse().expect("a rule")]), false).await;
            let context = format!("seed {seed}: {change:?}");
            if image.drain().await.change_bitmap(&change).await.is_err() {
                failed = true;
                write(&image).await;
                check(&image, &format!("{context}, crash")).await;
                let _ = image.close().await;
                check(&image, &format!("{context}, closed")).await;
            }
            usize::from(failed)
        });
    }
    assert!(failures > 40, "too little happened: {failures}");
}

#[test]
fn failed_addition_can_be_repeated() {
    let mut failures = 0;
    for seed in 0..200 {
        let kind = if seed % 2 == 0 { "write" } else { "flush" };
        failures += sim::run(seed, async move {
            let rule = format!("kind={kind},count=1,probability=0.1,seed={seed},error=EIO");
            let image = open(file().await.with_faults(vec![rule.parse().expect("a rule")]), false).await;
            let new = NewBitmap {
                name: "b".to_owned(),
                granularity_bits: GRANULE.trailing_zeros(),
                is_persistent: true,
                is_enabled: true,
                is_marked: false,
            };
            let change = BitmapChange::Add(new);
            let failed = image.drain().await.change_bitmap(&change).await.is_err();
            if failed {
                image.drain().await.change_bitmap(&change).await.expect("the first one has changed nothing");
            }
            usize::from(failed)
        });
    }
    assert!(failures > 20, "too little happened: {failures}");
}
