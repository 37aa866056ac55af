//! A disk in memory that is switched to an overlay or a copy.

use policy::time::Duration;
use policy::{prefetch::PrefetchConfig, prefetch::PrefetchMode, request::Direction, throttle::RequestCost};

use super::*;
use crate::layer::copy_before_write::PointOptions;
use crate::layer::throttle::{BackgroundMember, BackgroundSettings};
use image::{
    Qcow2Image, RawImage,
    qcow2::{
        Qcow2Components,
        bitmap::{BitmapChange, NewBitmap},
        create::{CreateOptions, create},
        header::BackingReference,
    },
};
use reactor::{
    buffer::IoBuffer,
    guest::{GuestMemory, Region},
    sim,
};
use storage::{
    Durability, Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

const SIZE: usize = 1 << 20;

async fn memory(byte: u8) -> Image {
    Image::Raw(RawImage::new(Storage::with_content(&vec![byte; SIZE]).await))
}

fn disk(image: Image) -> Arc<Disk> {
    Arc::new(Disk::new("disk", image, Default::default(), None).expect("no limits"))
}

/// An empty overlay over `below`.
async fn overlay(below: Arc<Image>) -> Arc<Image> {
    let backing = BackingReference { name: "base".into(), format: Some("raw".into()) };
    let options =
        CreateOptions { size_bytes: below.size_bytes(), backing: Some(backing), ..CreateOptions::default() };
    let storage = Storage::with_content(&[]).await;
    create(&storage, None, &options).await.expect("valid");
    let components = Qcow2Components { backing: Some(below), ..Qcow2Components::of(storage) };
    Arc::new(Image::Qcow2(Qcow2Image::open(components).await.expect("new")))
}

async fn quiesce(disk: &Disk) -> QuiescedDisk<'_> {
    disk.quiesce(Duration::from_secs(10)).await.expect("changes complete")
}

async fn write(disk: &Disk, offset: u64, byte: u8) {
    let permit = disk.admit(Direction::Write, RequestCost::one(4096)).await;
    let data = IoBuffer::copy_of(&[byte; 4096]).into();
    disk.write(permit, offset, data, Durability::Cached).await.expect("nothing fails");
}

async fn byte_at(disk: &Disk, offset: u64) -> u8 {
    let permit = disk.admit(Direction::Read, RequestCost::one(1)).await;
    disk.read(permit, offset, 1).await.expect("nothing fails").to_vec()[0]
}

#[test]
fn writes_after_a_switch_go_to_the_overlay() {
    sim::run(1, async {
        let disk = disk(memory(7).await);
        write(&disk, 0, 1).await;
        let quiesced = quiesce(&disk).await;
        disk.flush_quiesced(&quiesced).await.expect("memory");
        let old = disk.switch_image(&quiesced, overlay(disk.image()).await);
        drop(quiesced);
        write(&disk, 4096, 2).await;
        let found = [byte_at(&disk, 0).await, byte_at(&disk, 4096).await, byte_at(&disk, 8192).await];
        assert_eq!(found, [1, 2, 7]);
        let below = old.read(4096, 1).await.expect("memory").to_vec();
        assert_eq!(below, [7], "the old image is unchanged");
    });
}

#[test]
fn a_batch_that_began_before_a_switch_does_not_write_to_the_old_image() {
    sim::run(1, async {
        let disk = disk(memory(7).await);
        let guest = GuestMemory::new(vec![Region::on_heap(0, 0, 4096)]).expect("one region");
        let data = [guest.range(0, 4096).expect("inside")];
        let batch = disk.instant().expect("in memory");
        let quiesced = quiesce(&disk).await;
        disk.flush_quiesced(&quiesced).await.expect("memory");
        let old = disk.switch_image(&quiesced, Arc::new(memory(7).await));
        drop(quiesced);
        let permit = disk.admit(Direction::Write, RequestCost::one(4096)).await;
        assert_eq!(batch.write(&permit, 0, &data), None);
        assert_eq!(old.read(0, 1).await.expect("memory").to_vec(), [7]);
        let batch = disk.instant().expect("in memory");
        let permit = disk.admit(Direction::Write, RequestCost::one(4096)).await;
        assert_eq!(batch.write(&permit, 0, &data), Some(Ok(())));
        assert_eq!(byte_at(&disk, 0).await, 0);
    });
}

#[test]
fn a_write_that_waits_for_the_gate_reaches_the_new_image() {
    sim::run(1, async {
        let disk = disk(memory(7).await);
        let quiesced = quiesce(&disk).await;
        let writing = reactor::spawn_joinable({
            let disk = Arc::clone(&disk);
            async move { write(&disk, 0, 1).await }
        });
        reactor::sleep_until(reactor::now() + Duration::from_secs(1)).await;
        let old = disk.switch_image(&quiesced, overlay(disk.image()).await);
        drop(quiesced);
        writing.await;
        assert_eq!(byte_at(&disk, 0).await, 1);
        assert_eq!(old.read(0, 1).await.expect("memory").to_vec(), [7]);
    });
}

#[test]
fn reads_in_flight_keep_the_old_image_until_they_end() {
    sim::run(1, async {
        let behaviour = Behaviour { latency: Duration::from_secs(1), ..Behaviour::default() };
        let device = SimulatedStorage::new(vec![7; SIZE], behaviour);
        let disk = disk(Image::Raw(RawImage::new(Storage::Simulated(Align::new(device)))));
        let reading = reactor::spawn_joinable({
            let disk = Arc::clone(&disk);
            async move { byte_at(&disk, 0).await }
        });
        reactor::sleep_until(reactor::now() + Duration::from_nanos(1)).await;
        let quiesced = quiesce(&disk).await;
        let old = disk.switch_image(&quiesced, Arc::new(memory(7).await));
        drop(quiesced);
        assert!(Arc::strong_count(&old) > 1, "the read holds it");
        assert_eq!(reading.await, 7);
        assert_eq!(Arc::strong_count(&old), 1);
    });
}

#[test]
fn data_that_was_read_ahead_stays_valid_and_changes_invalidate_it() {
    sim::run(1, async {
        let device = SimulatedStorage::new(vec![7; SIZE], Behaviour::default());
        let disk = disk(Image::Raw(RawImage::new(Storage::Simulated(Align::new(device)))));
        let on = PrefetchConfig { mode: PrefetchMode::On, ..PrefetchConfig::off() };
        disk.prefetch().set(on).expect("valid");
        for at in 0..32 {
            assert_eq!(byte_at(&disk, at * 4096).await, 7);
        }
        let before = disk.prefetch().stats().used_bytes;
        assert!(before > 0, "it reads ahead");
        let quiesced = quiesce(&disk).await;
        disk.flush_quiesced(&quiesced).await.expect("no errors");
        let _old = disk.switch_image(&quiesced, overlay(disk.image()).await);
        drop(quiesced);
        write(&disk, 33 * 4096, 1).await;
        assert_eq!([byte_at(&disk, 32 * 4096).await, byte_at(&disk, 33 * 4096).await], [7, 1]);
        assert!(disk.prefetch().stats().used_bytes > before, "from memory");
    });
}

#[test]
fn a_point_in_time_goes_on_after_a_switch() {
    sim::run(1, async {
        let disk = disk(memory(7).await);
        let options = PointOptions { cluster_bytes: 64 << 10, max_buffer_bytes: 1 << 20, copy_bytes: 0 };
        let member = Arc::new(BackgroundMember::new(BackgroundSettings::default()).expect("valid"));
        let point = disk.begin_point_in_time(member, options).await.expect("nothing prevents it");
        let quiesced = quiesce(&disk).await;
        let _old = disk.switch_image(&quiesced, overlay(disk.image()).await);
        drop(quiesced);
        write(&disk, 0, 1).await;
        let saved = point.point().next_old_data().await.expect("it has not failed").expect("one cluster");
        assert!(saved.data().expect("data").iter().all(|&byte| byte == 7));
        assert_eq!(byte_at(&disk, 0).await, 1);
    });
}

#[test]
fn a_failed_flush_is_reported_before_the_switch() {
    sim::run(1, async {
        let behaviour = Behaviour { error_probability: 1.0, ..Behaviour::default() };
        let device = SimulatedStorage::new(vec![7; SIZE], behaviour);
        let disk = disk(Image::Raw(RawImage::new(Storage::Simulated(Align::new(device)))));
        let quiesced = quiesce(&disk).await;
        assert_eq!(disk.flush_quiesced(&quiesced).await, Err(Error::IO));
    });
}

#[test]
fn an_image_is_settled_although_the_caller_has_stopped_waiting() {
    sim::run(1, async {
        let content = {
            let storage = Storage::with_content(&[]).await;
            let options = CreateOptions { size_bytes: SIZE as u64, ..CreateOptions::default() };
            create(&storage, None, &options).await.expect("valid");
            let mut content = storage.read_all().await.expect("memory");
            content.resize(content.len().next_multiple_of(4096), 0);
            content
        };
        let device = Storage::Simulated(Align::new(SimulatedStorage::new(content, Behaviour::default())));
        let image = Qcow2Image::open(Qcow2Components::of(device)).await.expect("new");
        let disk = disk(Image::Qcow2(image));
        write(&disk, 0, 1).await;
        assert!(disk.image().has_volatile_writes(), "its metadata is in memory");
        let quiesced = quiesce(&disk).await;
        let limit = Duration::from_micros(1);
        assert!(reactor::timeout(limit, disk.flush_quiesced(&quiesced)).await.is_err(), "it takes longer");
        drop(quiesced);
        // Waits for the gate of the image.
        let began = reactor::now();
        assert_eq!(byte_at(&disk, 0).await, 1);
        assert!(reactor::now() > began, "requests wait until it is settled");
        assert!(!disk.image().has_volatile_writes());
    });
}

#[test]
#[should_panic(expected = "of another disk")]
fn the_guard_must_be_of_the_disk() {
    sim::run(1, async {
        let (one, other) = (disk(memory(7).await), disk(memory(7).await));
        let quiesced = quiesce(&other).await;
        let _ = one.switch_image(&quiesced, Arc::new(memory(7).await));
    });
}

#[test]
fn a_bitmap_is_not_changed_in_an_image_that_is_being_replaced() {
    sim::run(1, async {
        let first = overlay(Arc::new(memory(7).await)).await;
        let disk = disk(Arc::into_inner(first).expect("the only reference"));
        let new = NewBitmap {
            name: "b".to_owned(),
            granularity_bits: 16,
            is_persistent: true,
            is_enabled: true,
            is_marked: false,
        };
        let quiesced = quiesce(&disk).await;
        disk.flush_quiesced(&quiesced).await.expect("memory");
        let change = {
            let disk = Arc::clone(&disk);
            reactor::spawn_joinable(async move { disk.change_bitmap(&BitmapChange::Add(new)).await })
        };
        // The change is as far as it can be before the switch.
        reactor::sleep_until(reactor::now() + Duration::from_millis(100)).await;
        let old = disk.switch_image(&quiesced, overlay(disk.image()).await);
        let Image::Qcow2(old) = &*old else { panic!("it is an overlay") };
        assert_eq!(old.bitmap_statuses().await.expect("readable"), []);
        drop(quiesced);
        change.await.expect("it waits for the switch");
        let names = disk.bitmap_statuses().await.expect("readable").into_iter().map(|status| status.name);
        assert_eq!(names.collect::<Vec<_>>(), ["b"]);
        assert_eq!(old.bitmap_statuses().await.expect("readable"), []);
    });
}
