//! Two disks over one file, as in two daemons.

use std::{fs, path::Path, rc::Rc, sync::Arc};

use policy::{request::Direction, throttle::RequestCost};

use super::*;
use crate::layer::{
    copy_before_write::PointOptions,
    throttle::{BackgroundMember, BackgroundSettings},
};
use image::{
    Image, Qcow2Image,
    open::{ImageOptions, open},
    qcow2::{
        check::{Repair, check},
        create::{CreateOptions, create},
    },
};
use reactor::{PollingMode, buffer::IoBuffer, run, spawn_joinable, yield_now};
use storage::{CacheMode, Durability, ImageFormat, OpenOptions, ZeroOptions, open_storage};

const SIZE: u64 = 64 << 20;
const HOLD_TIMEOUT: Duration = Duration::from_secs(60);

fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    run(PollingMode::Off, future).expect("io_uring works on a test machine")
}

fn spec(path: &Path) -> String {
    format!("file:{}", path.to_str().expect("text"))
}

async fn make(path: &Path, format: ImageFormat) {
    fs::write(path, [0; 512]).expect("room for a test");
    match format {
        ImageFormat::Raw => {
            let file = fs::File::options().write(true).open(path).expect("it is there");
            file.set_len(SIZE).expect("sparse");
        }
        ImageFormat::Qcow2 => {
            let storage = open_storage(&spec(path), OpenOptions::default()).expect("opens");
            create(&storage, None, &CreateOptions { size_bytes: SIZE, ..CreateOptions::default() })
                .await
                .expect("made");
        }
    }
}

async fn disk(path: &Path, format: ImageFormat) -> Disk {
    let storage = OpenOptions {
        format: Some(format),
        cache: CacheMode::Writeback,
        handover: true,
        ..OpenOptions::default()
    };
    let image = open(&spec(path), ImageOptions { storage, ..ImageOptions::default() }).await.expect("opens");
    Disk::new("disk", image, Default::default(), None).expect("no limits")
}

async fn write(disk: &Disk, offset: u64, byte: u8) -> Result<()> {
    let permit = disk.admit(Direction::Write, RequestCost::one(4096)).await;
    disk.write(permit, offset, IoBuffer::copy_of(&[byte; 4096]).into(), Durability::Cached).await
}

async fn read(disk: &Disk, offset: u64) -> Result<u8> {
    let permit = disk.admit(Direction::Read, RequestCost::one(4096)).await;
    Ok(disk.read(permit, offset, 4096).await?.to_vec()[4095])
}

/// Runs `test` on two disks over one image of each format.
fn both<F: Future<Output = ()>>(test: impl Fn(Rc<Disk>, Rc<Disk>) -> F + Clone + 'static) {
    for format in [ImageFormat::Raw, ImageFormat::Qcow2] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        let test = test.clone();
        real(async move {
            make(&path, format).await;
            let (one, two) = (disk(&path, format).await, disk(&path, format).await);
            test(Rc::new(one), Rc::new(two)).await;
            if format == ImageFormat::Qcow2 {
                let storage = open_storage(&spec(&path), OpenOptions::default()).expect("it is free");
                let report = check(&storage, Repair::Nothing).await.expect("readable");
                assert!(report.corruptions == 0 && report.leaks == 0, "{report:?}");
            }
        });
    }
}

#[test]
fn each_process_reads_the_writes_of_the_other() {
    both(async |one, two| {
        let disks = [one, two];
        // Clusters written by each disk are overwritten and zeroed by its peer, and new ones are
        // allocated in the same L2 table and in another one.
        for round in 0..6_u8 {
            let disk = &disks[usize::from(round % 2)];
            disk.hold(HOLD_TIMEOUT, || true).await.expect("free");
            for earlier in 0..round {
                let at = u64::from(earlier) << 20;
                // Each turn zeroes the first cluster of the turn before.
                let expected = if earlier + 2 <= round { 0 } else { earlier + 1 };
                assert_eq!(read(disk, at).await, Ok(expected), "turn {round}");
                assert_eq!(read(disk, at + 65536).await, Ok(earlier + 1), "turn {round}");
            }
            if let Some(before) = round.checked_sub(1) {
                let permit = disk.admit(Direction::Write, RequestCost::one(65536)).await;
                let options =
                    ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
                disk.write_zeroes(permit, u64::from(before) << 20, 65536, options).await.expect("zeroed");
            }
            write(disk, u64::from(round) << 20, round + 1).await.expect("written");
            write(disk, (u64::from(round) << 20) + 65536, round + 1).await.expect("written");
            disk.release().await;
        }
        for disk in disks {
            disk.flush().await.expect("nothing is left to write");
            disk.close().await.expect("nor here");
        }
    });
}

#[test]
fn disk_without_hold_transfers_no_data() {
    both(async |one, two| {
        assert_eq!(write(&one, 0, 1).await, Err(Error::SHUTDOWN));
        one.hold(HOLD_TIMEOUT, || true).await.expect("free");
        one.hold(HOLD_TIMEOUT, || true).await.expect("twice by two queues");
        write(&one, 0, 1).await.expect("held");
        one.release().await;
        write(&one, 0, 2).await.expect("held by the other process");
        one.release().await;
        assert_eq!(write(&one, 0, 3).await, Err(Error::SHUTDOWN));
        assert_eq!(read(&one, 0).await, Err(Error::SHUTDOWN));
        assert!(one.resize(SIZE * 2).await.is_err());
        two.hold(HOLD_TIMEOUT, || true).await.expect("free");
        assert_eq!(read(&two, 0).await, Ok(2));
        two.release().await;
    });
}

#[test]
fn hold_waits_for_the_current_holder() {
    both(async |one, two| {
        one.hold(HOLD_TIMEOUT, || true).await.expect("free");
        let refusal = two.hold(Duration::ZERO, || true).await;
        let message = refusal.expect_err("the other process holds it").to_string();
        assert!(message.contains("locked for writing by this process"), "{message}");
        assert_eq!(two.hold(HOLD_TIMEOUT, || false).await, Err(HoldError::Cancelled));
        let waiting = spawn_joinable({
            let two = Rc::clone(&two);
            async move {
                two.hold(HOLD_TIMEOUT, || true).await.expect("in time");
                read(&two, 0).await
            }
        });
        write(&one, 0, 7).await.expect("held");
        one.release().await;
        assert_eq!(waiting.await, Ok(7));
        two.release().await;
    });
}

#[test]
fn retained_image_stays_while_suspended() {
    both(async |one, two| {
        assert!(!one.retain().await, "no process holds it");
        one.hold(HOLD_TIMEOUT, || true).await.expect("free");
        assert!(one.retain().await);
        write(&one, 0, 1).await.expect("held");
        one.release().await;
        two.hold(Duration::ZERO, || true).await.expect_err("it is kept");
        one.suspend().await.expect("room");
        one.resume(&[]).await.expect("unchanged in between");
        one.hold(HOLD_TIMEOUT, || true).await.expect("it is here");
        one.release().await;
        two.hold(Duration::ZERO, || true).await.expect_err("it is kept once, not twice");
        one.release().await;
        two.hold(Duration::ZERO, || true).await.expect("it was released");
        assert_eq!(read(&two, 0).await, Ok(1));
        two.release().await;
    });
}

/// An acknowledged write survives a suspend that fails at a flush or at a metadata write.
#[test]
fn failed_suspend_loses_no_metadata() {
    for fault in ["kind=flush,count=1", "kind=write,offset=0-256K,count=1"] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        real(async move {
            make(&path, ImageFormat::Qcow2).await;
            let faults = vec![fault.parse().expect("a rule")];
            let storage = OpenOptions { format: Some(ImageFormat::Qcow2), faults, ..OpenOptions::default() };
            let image = open(&spec(&path), ImageOptions { storage, ..ImageOptions::default() }).await;
            let disk = Disk::new("disk", image.expect("opens"), Default::default(), None).expect("no limits");
            write(&disk, 0, 7).await.expect("written");
            assert_eq!(disk.suspend().await, Err(Error::IO), "{fault}");
            disk.resume(&[]).await.expect("the remaining data can be written now");
            assert_eq!(read(&disk, 0).await, Ok(7), "{fault}");
            write(&disk, 8 << 20, 8).await.expect("written");
            disk.close().await.expect("room");
            drop(disk);
            let storage = open_storage(&spec(&path), OpenOptions::default()).expect("it is free");
            let report = check(&storage, Repair::Nothing).await.expect("readable");
            assert!(report.corruptions == 0 && report.leaks == 0, "{fault}: {report:?}");
        });
    }
}

/// Writes of each disk are marked in the bitmap, which passes to its peer.
#[test]
fn bitmaps_pass_between_processes() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    real(async move {
        make(&path, ImageFormat::Qcow2).await;
        let storage = open_storage(&spec(&path), OpenOptions::default()).expect("no process holds it");
        let image = Qcow2Image::open_for_maintenance(storage).await.expect("valid");
        image.add_bitmap("b", 16).await.expect("new");
        image.close().await.expect("room");
        drop(image);
        let disks = [disk(&path, ImageFormat::Qcow2).await, disk(&path, ImageFormat::Qcow2).await];
        let mut views = Vec::new();
        for disk in &disks {
            let image = disk.image();
            let Image::Qcow2(qcow2) = &*image else { panic!("it is") };
            views.push(qcow2.view_bitmap("b").await.expect("readable in either process"));
        }
        for round in 0..6_u64 {
            let (disk, view) = (&disks[(round % 2) as usize], &views[(round % 2) as usize]);
            disk.hold(HOLD_TIMEOUT, || true).await.expect("free");
            write(disk, round << 17, 1).await.expect("held");
            let runs = view.marked(0, SIZE).await.expect("held");
            let marked = runs.iter().filter(|run| run.dirty).map(|run| run.length);
            assert_eq!(marked.collect::<Vec<_>>(), vec![65536; round as usize + 1]);
            disk.release().await;
            assert_eq!(view.marked(0, SIZE).await, Err(Error::SHUTDOWN));
        }
    });
}

#[test]
fn another_image_under_the_same_name_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    real(async move {
        make(&path, ImageFormat::Qcow2).await;
        let disk = Arc::new(disk(&path, ImageFormat::Qcow2).await);
        let storage = open_storage(&spec(&path), OpenOptions::default()).expect("no process holds it");
        let other = CreateOptions { size_bytes: SIZE, cluster_bytes: 4096, ..CreateOptions::default() };
        create(&storage, None, &other).await.expect("made");
        drop(storage);
        let message = disk.hold(HOLD_TIMEOUT, || true).await.expect_err("other clusters").to_string();
        assert!(message.contains("was replaced, or has another backing file"), "{message}");
        open_storage(&spec(&path), OpenOptions::default()).expect("and it is not kept");
    });
}

#[test]
fn a_release_ends_the_point_in_time() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    real(async move {
        make(&path, ImageFormat::Raw).await;
        let disk = Arc::new(disk(&path, ImageFormat::Raw).await);
        let member = BackgroundMember::new(BackgroundSettings::default()).expect("valid");
        let member = Arc::new(member);
        let options = PointOptions { cluster_bytes: 65536, max_buffer_bytes: 65536, copy_bytes: 0 };
        let released = disk.begin_point_in_time(Arc::clone(&member), options).await;
        assert_eq!(released.expect_err("no client"), PointFailure::Released);
        disk.hold(HOLD_TIMEOUT, || true).await.expect("free");
        let point = disk.begin_point_in_time(member, options).await.expect("it is held");
        disk.release().await;
        assert!(disk.is_released());
        let failure = point.point().next_old_data().await.expect_err("it has failed");
        assert_eq!(failure, PointFailure::HandedOver);
    });
}

/// A point in time's options, and a member for it.
fn point() -> (Arc<BackgroundMember>, PointOptions) {
    let member = BackgroundMember::new(BackgroundSettings::default()).expect("valid");
    (Arc::new(member), PointOptions { cluster_bytes: 65536, max_buffer_bytes: 1 << 20, copy_bytes: 0 })
}

/// Runs other tasks until they wait.
async fn run_others() {
    for _ in 0..20 {
        yield_now().await;
    }
}

#[test]
fn a_release_during_the_begin_of_a_point_in_time_completes() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    real(async move {
        make(&path, ImageFormat::Raw).await;
        let disk = Arc::new(disk(&path, ImageFormat::Raw).await);
        disk.hold(HOLD_TIMEOUT, || true).await.expect("free");
        let change = disk.begin_change(0, 1).await;
        let tasks = [
            spawn_joinable({
                let disk = Arc::clone(&disk);
                async move { drop(disk.begin_point_in_time(point().0, point().1).await) }
            }),
            spawn_joinable({
                let disk = Arc::clone(&disk);
                async move {
                    run_others().await;
                    write(&disk, 0, 1).await.expect("it arrived before the release");
                }
            }),
            spawn_joinable({
                let disk = Arc::clone(&disk);
                async move {
                    run_others().await;
                    run_others().await;
                    disk.release().await;
                }
            }),
        ];
        for _ in 0..4 {
            run_others().await;
        }
        drop(change);
        let all = async {
            for task in tasks {
                task.await;
            }
        };
        reactor::timeout(HOLD_TIMEOUT, all).await.expect("none waits for another one for ever");
        assert!(disk.is_released());
    });
}

#[test]
fn a_release_ends_the_point_in_time_before_it_waits_for_requests() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    real(async move {
        make(&path, ImageFormat::Raw).await;
        let disk = Arc::new(disk(&path, ImageFormat::Raw).await);
        disk.hold(HOLD_TIMEOUT, || true).await.expect("free");
        let point = disk.begin_point_in_time(point().0, point().1).await.expect("it is held");
        let request = disk.enter().await.expect("it is held");
        let releasing = spawn_joinable({
            let disk = Arc::clone(&disk);
            async move { disk.release().await }
        });
        let failing = reactor::timeout(HOLD_TIMEOUT, point.point().next_old_data()).await;
        let failure = failing.expect("while the request is in flight").expect_err("it fails");
        assert_eq!(failure, PointFailure::HandedOver);
        assert!(!disk.is_released());
        drop(request);
        releasing.await;
    });
}
