//! A point in time of a disk in memory, changed in each way.

use policy::{request::Direction, throttle::RequestCost};

use super::*;
use crate::{
    disk::{Discards, UpgradeRefusal},
    layer::throttle::BackgroundSettings,
};
use image::{Image, RawImage};
use reactor::{
    buffer::IoBuffer,
    guest::{GuestMemory, Region},
    sim,
};
use storage::{
    Durability, Storage, ZeroOptions,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 8 << 20;
const ZEROES: ZeroOptions =
    ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };

/// A disk whose bytes are 7.
async fn disk() -> Arc<Disk> {
    let image = Image::Raw(RawImage::new(Storage::with_content(&vec![7; SIZE as usize]).await));
    Arc::new(Disk::new("disk", image, Default::default(), None).expect("no limits"))
}

async fn begin(disk: &Arc<Disk>, max_buffer_bytes: u64) -> DiskPoint {
    let member = BackgroundMember::new(BackgroundSettings::default()).expect("valid");
    let options = PointOptions { cluster_bytes: CLUSTER, max_buffer_bytes, copy_bytes: 0 };
    disk.begin_point_in_time(Arc::new(member), options).await.expect("nothing prevents it")
}

async fn admit(disk: &Disk) -> AdmissionPermit {
    disk.admit(Direction::Write, RequestCost::one(1)).await
}

async fn write(disk: &Disk, offset: u64, byte: u8) {
    let data = IoBuffer::copy_of(&[byte; 4096]).into();
    disk.write(admit(disk).await, offset, data, Durability::Cached).await.expect("memory");
}

async fn first_bytes(disk: &Disk) -> Vec<u8> {
    disk.read(admit(disk).await, 0, 4096).await.expect("memory").to_vec()
}

/// Total length of the old data that is buffered, which must have bytes of 7.
async fn old_bytes(point: &DiskPoint) -> u64 {
    let mut length_bytes = 0;
    while point.point().buffered_bytes() > 0 {
        let data = point.point().next_old_data().await.expect("it has not failed").expect("some");
        assert!(data.data().expect("not zeroes").iter().all(|&byte| byte == 7));
        length_bytes += data.length_bytes();
    }
    length_bytes
}

#[test]
fn each_change_keeps_the_old_data_of_its_clusters_once() {
    sim::run(1, async {
        let disk = disk().await;
        let point = begin(&disk, SIZE).await;
        write(&disk, CLUSTER - 512, 1).await;
        assert_eq!(old_bytes(&point).await, 2 * CLUSTER, "it touches two clusters");
        write(&disk, 0, 2).await;
        assert_eq!(old_bytes(&point).await, 0, "they are saved");
        disk.write_zeroes(admit(&disk).await, 2 * CLUSTER, 1, ZEROES).await.expect("memory");
        assert_eq!(old_bytes(&point).await, CLUSTER);
        disk.discard(admit(&disk).await, 3 * CLUSTER, 1, Durability::Cached).await.expect("memory");
        assert_eq!(old_bytes(&point).await, CLUSTER);
        disk.resize(SIZE - 1024).await.expect("memory");
        assert_eq!(old_bytes(&point).await, CLUSTER, "the last one");
        disk.resize(SIZE + CLUSTER).await.expect("memory");
        write(&disk, SIZE, 3).await;
        assert_eq!(old_bytes(&point).await, 0, "beyond the size at the instant");
        assert_eq!(point.point().unsaved_bytes(), SIZE - 5 * CLUSTER);
    });
}

#[test]
fn a_full_buffer_fails_the_point_and_not_the_write() {
    sim::run(1, async {
        let disk = disk().await;
        let point = begin(&disk, CLUSTER).await;
        write(&disk, 0, 1).await;
        write(&disk, CLUSTER, 1).await;
        let failure = point.point().next_old_data().await.expect_err("it has failed");
        assert_eq!(failure, PointFailure::BufferFull { max_buffer_bytes: CLUSTER });
        assert_eq!(point.point().buffered_bytes(), 0, "its memory is free");
        write(&disk, 2 * CLUSTER, 1).await;
        drop(point);
        assert!(!disk.has_job());
        drop(begin(&disk, CLUSTER).await);
    });
}

#[test]
fn a_discard_that_does_not_fit_is_not_executed() {
    sim::run(1, async {
        let disk = disk().await;
        let point = begin(&disk, 4 << 20).await;
        disk.discard(admit(&disk).await, 0, SIZE, Durability::Cached).await.expect("a hint");
        assert_eq!(first_bytes(&disk).await, [7; 4096]);
        assert_eq!(point.point().buffered_bytes(), 1 << 20, "a quarter");
        write(&disk, 4 << 20, 1).await;
        assert_eq!(old_bytes(&point).await, (1 << 20) + CLUSTER, "and a write finds room");
        drop(point);
        disk.discard(admit(&disk).await, 0, SIZE, Durability::Cached).await.expect("memory");
        assert_eq!(first_bytes(&disk).await, [0; 4096]);
    });
}

#[test]
fn holes_need_no_room() {
    sim::run(1, async {
        let image = Image::Raw(RawImage::new(Storage::memory(1 << 30)));
        let disk = Arc::new(Disk::new("disk", image, Default::default(), None).expect("no limits"));
        let point = begin(&disk, CLUSTER).await;
        disk.write_zeroes(admit(&disk).await, 0, 1 << 30, ZEROES).await.expect("memory");
        let mut zeroes = 0;
        while let Some(data) = point.point().next_old_data().await.expect("it has not failed") {
            assert_eq!(data.data(), None);
            zeroes += data.length_bytes();
        }
        assert_eq!(zeroes, 1 << 30);
    });
}

#[test]
fn ignored_discards_and_reads_save_nothing() {
    sim::run(1, async {
        let image = Image::Raw(RawImage::new(Storage::with_content(&[7; 4096]).await));
        let disk = Disk::new("disk", image, Default::default(), None).expect("no limits");
        let disk = Arc::new(disk.with_discards(Discards::Ignore));
        let point = begin(&disk, CLUSTER).await;
        disk.discard(admit(&disk).await, 0, 4096, Durability::Cached).await.expect("a hint");
        assert_eq!(first_bytes(&disk).await, [7; 4096]);
        disk.flush().await.expect("memory");
        assert_eq!(point.point().unsaved_bytes(), 4096);
    });
}

#[test]
fn a_synchronous_write_saves_nothing_and_is_not_executed() {
    sim::run(1, async {
        let disk = disk().await;
        let memory = GuestMemory::new(vec![Region::on_heap(0, 0, 4096)]).expect("one region");
        let data = [memory.range(0, 4096).expect("inside")];
        let batch = disk.instant().expect("in memory");
        let point = begin(&disk, CLUSTER).await;
        assert!(disk.instant().is_none());
        assert_eq!(batch.write(&admit(&disk).await, 0, &data), None);
        assert_eq!(first_bytes(&disk).await, [7; 4096]);
        drop(point);
        assert_eq!(batch.write(&admit(&disk).await, 0, &data), Some(Ok(())));
    });
}

#[test]
fn one_point_in_time_prevents_another_and_ends_with_the_disk() {
    sim::run(1, async {
        let disk = disk().await;
        let point = begin(&disk, CLUSTER).await;
        let options = PointOptions { cluster_bytes: CLUSTER, max_buffer_bytes: 0, copy_bytes: 0 };
        let second = disk.begin_point_in_time(Arc::clone(point.point().member()), options).await;
        assert_eq!(second.expect_err("there is one"), PointFailure::Busy);
        disk.close().await.expect("memory");
        let failure = point.point().next_old_data().await.expect_err("it has failed");
        assert_eq!(failure, PointFailure::Closed);
    });
}

#[test]
fn changes_wait_while_the_disk_is_quiesced() {
    sim::run(1, async {
        let disk = disk().await;
        let quiesced = disk.quiesce(Duration::from_secs(1)).await.expect("no change is in flight");
        let writing = reactor::spawn_joinable({
            let disk = Arc::clone(&disk);
            async move { write(&disk, 0, 1).await }
        });
        assert_eq!(first_bytes(&disk).await, [7; 4096], "reads do not wait");
        reactor::sleep_until(reactor::now() + Duration::from_secs(1)).await;
        assert_eq!(first_bytes(&disk).await, [7; 4096]);
        drop(quiesced);
        writing.await;
        assert_eq!(first_bytes(&disk).await, [1; 4096]);
    });
}

#[test]
fn a_point_in_time_prevents_an_upgrade() {
    sim::run(1, async {
        let device = SimulatedStorage::new(vec![7; SIZE as usize], Behaviour::default());
        let image = Image::Raw(RawImage::new(Storage::Simulated(Align::new(device))));
        let disk = Arc::new(Disk::new("disk", image, Default::default(), None).expect("no limits"));
        assert_eq!(disk.check_upgrade(), Ok(()));
        let point = begin(&disk, CLUSTER).await;
        assert_eq!(disk.check_upgrade(), Err(UpgradeRefusal::Job));
        drop(point);
        assert_eq!(disk.check_upgrade(), Ok(()));
    });
}

#[test]
fn a_large_removal_fails_the_point_and_is_not_delayed_by_its_copy() {
    sim::run(1, async {
        let disk = disk().await;
        let point = begin(&disk, SIZE).await;
        disk.write_zeroes(admit(&disk).await, 0, SIZE / 2, ZEROES).await.expect("memory");
        assert_eq!(old_bytes(&point).await, SIZE / 2, "one half fits");
        drop(point);
        let disk = self::disk().await;
        let point = begin(&disk, SIZE).await;
        disk.resize(SIZE / 4).await.expect("memory");
        let failure = point.point().next_old_data().await.expect_err("it has failed");
        assert_eq!(failure, PointFailure::LargeRemoval { max_bytes: SIZE / 2 });
    });
}

#[test]
fn zeroes_that_are_allocated_leave_room_in_the_buffer() {
    sim::run(1, async {
        let image = Image::Raw(RawImage::new(Storage::with_content(&vec![0; SIZE as usize]).await));
        let disk = Arc::new(Disk::new("disk", image, Default::default(), None).expect("no limits"));
        let point = begin(&disk, 2 * CLUSTER).await;
        for cluster in 0..4 {
            write(&disk, cluster * CLUSTER, 1).await;
        }
        assert!(point.point().buffered_bytes() < 4096);
        let data = point.point().next_old_data().await.expect("it has not failed").expect("some");
        assert_eq!(data.data(), None);
    });
}

/// A disk whose requests take up to a second.
fn slow_disk() -> Arc<Disk> {
    let behaviour = Behaviour { latency: Duration::from_secs(1), ..Behaviour::default() };
    let device = SimulatedStorage::new(vec![7; SIZE as usize], behaviour);
    let image = Image::Raw(RawImage::new(Storage::Simulated(Align::new(device))));
    Arc::new(Disk::new("disk", image, Default::default(), None).expect("no limits"))
}

#[test]
fn changes_do_not_wait_for_a_begin_that_is_refused() {
    sim::run(1, async {
        let disk = slow_disk();
        let options = PointOptions { cluster_bytes: CLUSTER, max_buffer_bytes: SIZE, copy_bytes: 0 };
        let point = begin(&disk, SIZE).await;
        let started = reactor::now();
        let writing = reactor::spawn_joinable({
            let disk = Arc::clone(&disk);
            async move { write(&disk, 0, 1).await }
        });
        reactor::sleep_until(reactor::now() + Duration::from_nanos(1)).await;
        let second = disk.begin_point_in_time(Arc::clone(point.point().member()), options).await;
        assert_eq!(second.err(), Some(PointFailure::Busy));
        assert!(reactor::now().nanos_since(started) < 1_000_000, "it did not wait for the write");
        writing.await;
    });
}

#[test]
fn a_resize_during_the_begin_counts() {
    sim::run(1, async {
        let disk = slow_disk();
        let resizing = reactor::spawn_joinable({
            let disk = Arc::clone(&disk);
            async move { disk.resize(SIZE / 2).await }
        });
        reactor::sleep_until(reactor::now() + Duration::from_nanos(1)).await;
        assert_eq!(disk.size_bytes(), SIZE);
        let point = begin(&disk, SIZE).await;
        assert_eq!(point.point().size_bytes(), SIZE / 2);
        resizing.await.expect("simulated");
    });
}

#[test]
fn no_point_in_time_begins_while_the_disk_is_suspended() {
    sim::run(1, async {
        let disk = disk().await;
        let point = begin(&disk, CLUSTER).await;
        disk.suspend().await.expect("memory");
        let failure = point.point().next_old_data().await.expect_err("it has failed");
        assert_eq!(failure, PointFailure::HandedOver);
        drop(point);
        let member = Arc::new(BackgroundMember::new(BackgroundSettings::default()).expect("valid"));
        let options = PointOptions { cluster_bytes: CLUSTER, max_buffer_bytes: 0, copy_bytes: 0 };
        let refused = disk.begin_point_in_time(member, options).await.expect_err("it is suspended");
        assert_eq!(refused, PointFailure::Suspended);
        disk.resume(&[]).await.expect("memory");
        drop(begin(&disk, CLUSTER).await);
    });
}
