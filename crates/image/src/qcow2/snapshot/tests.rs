//! A disk, its snapshots and a plain copy of each: reads and checks, after a close and after a
//! crash.

use policy::time::Duration;

use super::*;
use reactor::{buffer::IoBuffer, sim};
use storage::{
    Durability, ZeroOptions,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use crate::qcow2::{
    CacheSettings, Qcow2Components, Qcow2Image,
    check::{Repair, check},
    create::{CreateOptions, create},
};

const SIZE: u64 = 256 << 10;

fn parts(storage: Storage) -> Qcow2Components {
    let caches = CacheSettings { clean_interval: Duration::ZERO, ..CacheSettings::default() };
    Qcow2Components { caches, ..Qcow2Components::of(storage) }
}

async fn new_image(options: CreateOptions) -> Qcow2Image {
    let storage = Storage::memory(512);
    create(&storage, None, &CreateOptions { size_bytes: SIZE, ..options }).await.expect("valid");
    Qcow2Image::open(parts(storage)).await.expect("an image")
}

async fn write(image: &Qcow2Image, at: u64, length: usize, byte: u8) {
    let mut data = IoBuffer::new(length);
    data.fill(byte);
    image.write(at, data.into(), Durability::Cached).await.expect("inside");
}

async fn disk(image: &Qcow2Image) -> Vec<u8> {
    let mut disk = vec![0; image.size_bytes() as usize];
    image.read(0, disk.len()).await.expect("readable").copy_to(&mut disk);
    disk
}

fn new_snapshot(name: &str) -> NewSnapshot<'_> {
    NewSnapshot { name, date_s: 1, date_ns: 2 }
}

/// Content of a closed, consistent image.
async fn closed(image: Qcow2Image) -> Vec<u8> {
    image.close().await.expect("memory");
    let content = image.storage().read_all().await.expect("memory");
    let report = check(&Storage::with_content(&content).await, Repair::Nothing).await.expect("a header");
    assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{report:#?}");
    content
}

fn kinds() -> Vec<CreateOptions> {
    let small = CreateOptions { cluster_bytes: 4096, ..CreateOptions::default() };
    vec![
        small.clone(),
        CreateOptions { cluster_bytes: 512, refcount_bits: 64, ..small.clone() },
        CreateOptions { version: 2, ..small.clone() },
        CreateOptions { cluster_bytes: 16 << 10, extended_l2: true, ..small.clone() },
        CreateOptions { refcount_bits: 4, ..small },
    ]
}

#[test]
fn snapshots_keep_the_disk_content() {
    for options in kinds() {
        sim::run(1, async move {
            let image = new_image(options.clone()).await;
            write(&image, 0, 100_000, 1).await;
            let cluster = options.cluster_bytes as usize;
            let mut data = IoBuffer::new(cluster);
            data.fill(9);
            image.write_compressed(128 << 10, data.into()).await.expect("compressible");
            let first = disk(&image).await;
            assert_eq!(image.create_snapshot(new_snapshot("one")).await.expect("room").id(), "1");
            write(&image, 50_000, 100_000, 2).await;
            let zeroes = ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
            image.write_zeroes(0, 20_000, zeroes).await.expect("inside");
            let second = disk(&image).await;
            assert_eq!(image.create_snapshot(new_snapshot("two")).await.expect("room").id(), "2");
            image.discard(60_000, 60_000).await.expect("inside");
            write(&image, 200_000, 20_000, 3).await;

            let content = closed(image).await;
            for (name, expect) in [("1", &first), ("two", &second)] {
                let snapshot = Qcow2Image::open_snapshot(parts(Storage::with_content(&content).await), name)
                    .await
                    .expect("there");
                assert!(disk(&snapshot).await == *expect && snapshot.is_read_only(), "{name}");
            }
            let image =
                Qcow2Image::open(parts(Storage::with_content(&content).await)).await.expect("an image");
            image.apply_snapshot("one").await.expect("there");
            assert!(disk(&image).await == first);
            write(&image, 10_000, 30_000, 4).await;
            image.apply_snapshot("two").await.expect("there");
            assert!(disk(&image).await == second);
            image.delete_snapshot("1").await.expect("there");
            assert!(disk(&image).await == second);
            write(&image, 0, 70_000, 5).await;
            let third = disk(&image).await;
            image.delete_snapshot("two").await.expect("there");
            assert_eq!(image.snapshots().await, Ok(Vec::new()));
            assert_eq!(image.apply_snapshot("two").await, Err(SnapshotError::NotFound("two".into())));
            assert!(disk(&image).await == third);
            closed(image).await;
        });
    }
}

#[test]
fn revert_restores_the_size() {
    sim::run(1, async {
        let image = new_image(CreateOptions { cluster_bytes: 512, ..CreateOptions::default() }).await;
        write(&image, 0, 10_000, 1).await;
        let before = disk(&image).await;
        image.create_snapshot(new_snapshot("small")).await.expect("room");
        image.resize(1 << 20).await.expect("larger");
        write(&image, 500_000, 10_000, 2).await;
        image.create_snapshot(new_snapshot("large")).await.expect("room");
        image.apply_snapshot("small").await.expect("there");
        assert!(disk(&image).await == before);
        image.apply_snapshot("large").await.expect("there");
        assert_eq!((image.size_bytes(), disk(&image).await[505_000]), (1 << 20, 2));
        closed(image).await;
    });
}

#[test]
fn saturated_refcount_fails_without_a_change() {
    sim::run(1, async {
        let options = CreateOptions { cluster_bytes: 4096, refcount_bits: 1, ..CreateOptions::default() };
        let image = new_image(options).await;
        write(&image, 0, 100_000, 1).await;
        let refused = image.create_snapshot(new_snapshot("one")).await;
        assert!(matches!(refused, Err(SnapshotError::Refcount { .. })), "{refused:?}");
        write(&image, 0, 50_000, 2).await;
        closed(image).await;
    });
}

/// An image with two snapshots, and the disks of both snapshots and of the image.
fn seasoned() -> (Vec<u8>, [Vec<u8>; 3]) {
    sim::run(1, async {
        let image = new_image(CreateOptions { cluster_bytes: 4096, ..CreateOptions::default() }).await;
        write(&image, 0, 100_000, 1).await;
        let first = disk(&image).await;
        image.create_snapshot(new_snapshot("one")).await.expect("room");
        write(&image, 50_000, 100_000, 2).await;
        let second = disk(&image).await;
        image.create_snapshot(new_snapshot("two")).await.expect("room");
        write(&image, 10_000, 30_000, 3).await;
        let now = disk(&image).await;
        (closed(image).await, [first, second, now])
    })
}

async fn change(image: &Qcow2Image, kind: u64) {
    match kind {
        0 => drop(image.create_snapshot(new_snapshot("three")).await),
        1 => drop(image.apply_snapshot("one").await),
        _ => drop(image.delete_snapshot("two").await),
    }
}

#[test]
fn a_crash_leaves_the_image_before_or_after() {
    let (content, [first, second, now]) = seasoned();
    for seed in 0..240 {
        let mut start = content.clone();
        start.resize(1 << 20, 0);
        let left = sim::run(seed, async move {
            let disk = SimulatedStorage::new(start, Behaviour { block_bytes: 512, ..Behaviour::default() });
            let image = Qcow2Image::open(parts(Storage::Simulated(Align::new(disk.clone()))))
                .await
                .expect("an image");
            let changing = reactor::spawn_joinable(async move { change(&image, seed % 3).await });
            let instant = sim::random(|random| random.u64(..60_000_000));
            reactor::sleep_until(reactor::now() + Duration::from_nanos(instant)).await;
            let left = disk.crash();
            drop(changing);
            left
        });
        let (first, second, now) = (first.clone(), second.clone(), now.clone());
        sim::run(seed, async move {
            let storage = Storage::with_content(&left).await;
            let found = check(&storage, Repair::Nothing).await.expect("a header");
            let flags = found.findings.iter().filter(|finding| finding.contains("COPIED")).count() as u64;
            assert_eq!(found.corruptions, flags, "seed {seed}: {found:#?}");
            let repaired = check(&storage, Repair::All).await.expect("a header");
            assert_eq!((repaired.corruptions, repaired.leaks), (0, 0), "seed {seed}: {repaired:#?}");
            let left = storage.read_all().await.expect("memory");
            let image = Qcow2Image::open(parts(storage)).await.expect("an image");
            let is_now = disk(&image).await;
            assert!(is_now == now || seed % 3 == 1 && is_now == first, "seed {seed}: the disk");
            for (name, expect) in [("one", first), ("two", second)] {
                let snapshot =
                    Qcow2Image::open_snapshot(parts(Storage::with_content(&left).await), name).await;
                match snapshot {
                    Ok(snapshot) => assert!(disk(&snapshot).await == expect, "seed {seed}: {name}"),
                    Err(_) => assert!(seed % 3 == 2 && name == "two", "seed {seed}: {name} is lost"),
                }
            }
        });
    }
}
