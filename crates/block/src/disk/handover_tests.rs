//! Two disks over one file, as in two daemons.

use std::{fs, path::Path, rc::Rc, sync::Arc};

use policy::{request::Direction, throttle::Cost};

use super::*;
use image::{
    Image, Qcow2,
    open::{ImageOptions, open},
    qcow2::{
        check::{Repair, check},
        create::{CreateOptions, create},
    },
};
use reactor::{Polling, buffer::Buffer, run, spawn_joinable};
use storage::{CacheMode, Durability, Format, OpenOptions, ZeroOptions, open_storage};

const SIZE: u64 = 64 << 20;
const PATIENT: Duration = Duration::from_secs(60);

fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    run(Polling::Off, future).expect("io_uring works on a test machine")
}

fn spec(path: &Path) -> String {
    format!("file:{}", path.to_str().expect("text"))
}

async fn make(path: &Path, format: Format) {
    fs::write(path, [0; 512]).expect("room for a test");
    match format {
        Format::Raw => {
            let file = fs::File::options().write(true).open(path).expect("it is there");
            file.set_len(SIZE).expect("sparse");
        }
        Format::Qcow2 => {
            let storage = open_storage(&spec(path), OpenOptions::default()).expect("opens");
            create(&storage, None, &CreateOptions { size_bytes: SIZE, ..CreateOptions::default() })
                .await
                .expect("made");
        }
    }
}

async fn disk(path: &Path, format: Format) -> Disk {
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
    let pass = disk.admit(Direction::Write, Cost::one(4096)).await;
    disk.write(pass, offset, Buffer::copy_of(&[byte; 4096]).into(), Durability::Cached).await
}

async fn read(disk: &Disk, offset: u64) -> Result<u8> {
    let pass = disk.admit(Direction::Read, Cost::one(4096)).await;
    Ok(disk.read(pass, offset, 4096).await?.to_vec()[4095])
}

/// Runs `test` on two disks over one image of each format.
fn both<F: Future<Output = ()>>(test: impl Fn(Rc<Disk>, Rc<Disk>) -> F + Clone + 'static) {
    for format in [Format::Raw, Format::Qcow2] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        let test = test.clone();
        real(async move {
            make(&path, format).await;
            let (one, two) = (disk(&path, format).await, disk(&path, format).await);
            test(Rc::new(one), Rc::new(two)).await;
            if format == Format::Qcow2 {
                let storage = open_storage(&spec(&path), OpenOptions::default()).expect("it is free");
                let report = check(&storage, Repair::Nothing).await.expect("readable");
                assert!(report.corruptions == 0 && report.leaks == 0, "{report:?}");
            }
        });
    }
}

#[test]
fn what_one_has_written_the_other_reads_and_back_again() {
    both(async |one, two| {
        let disks = [one, two];
        // Clusters written by each disk are overwritten and zeroed by its peer, and new ones are
        // allocated in the same L2 table and in another one.
        for turn in 0..6_u8 {
            let disk = &disks[usize::from(turn % 2)];
            disk.hold(PATIENT, || true).await.expect("free");
            for earlier in 0..turn {
                let at = u64::from(earlier) << 20;
                // Each turn zeroes the first cluster of the turn before.
                let expected = if earlier + 2 <= turn { 0 } else { earlier + 1 };
                assert_eq!(read(disk, at).await, Ok(expected), "turn {turn}");
                assert_eq!(read(disk, at + 65536).await, Ok(earlier + 1), "turn {turn}");
            }
            if let Some(before) = turn.checked_sub(1) {
                let pass = disk.admit(Direction::Write, Cost::one(65536)).await;
                let options =
                    ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
                disk.write_zeroes(pass, u64::from(before) << 20, 65536, options).await.expect("zeroed");
            }
            write(disk, u64::from(turn) << 20, turn + 1).await.expect("written");
            write(disk, (u64::from(turn) << 20) + 65536, turn + 1).await.expect("written");
            disk.let_go().await;
        }
        for disk in disks {
            disk.flush().await.expect("nothing is left to write");
            disk.close().await.expect("nor here");
        }
    });
}

#[test]
fn a_disk_that_is_not_held_moves_no_data() {
    both(async |one, two| {
        assert_eq!(write(&one, 0, 1).await, Err(Error::SHUTDOWN));
        one.hold(PATIENT, || true).await.expect("free");
        one.hold(PATIENT, || true).await.expect("twice by two queues");
        write(&one, 0, 1).await.expect("held");
        one.let_go().await;
        write(&one, 0, 2).await.expect("held by the other");
        one.let_go().await;
        assert_eq!(write(&one, 0, 3).await, Err(Error::SHUTDOWN));
        assert_eq!(read(&one, 0).await, Err(Error::SHUTDOWN));
        assert!(one.resize(SIZE * 2).await.is_err());
        two.hold(PATIENT, || true).await.expect("free");
        assert_eq!(read(&two, 0).await, Ok(2));
        two.let_go().await;
    });
}

#[test]
fn who_comes_early_waits_for_whoever_has_it() {
    both(async |one, two| {
        one.hold(PATIENT, || true).await.expect("free");
        let no_patience = two.hold(Duration::ZERO, || true).await;
        let said = no_patience.expect_err("the other has it").to_string();
        assert!(said.contains("locked for writing by this process"), "{said}");
        assert_eq!(two.hold(PATIENT, || false).await, Err(NotHeld::GivenUp));
        let waiting = spawn_joinable({
            let two = Rc::clone(&two);
            async move {
                two.hold(PATIENT, || true).await.expect("in time");
                read(&two, 0).await
            }
        });
        write(&one, 0, 7).await.expect("held");
        one.let_go().await;
        assert_eq!(waiting.await, Ok(7));
        two.let_go().await;
    });
}

#[test]
fn it_stays_while_its_rings_stand_still() {
    both(async |one, two| {
        assert!(!one.keep_held().await, "nobody holds it");
        one.hold(PATIENT, || true).await.expect("free");
        assert!(one.keep_held().await);
        write(&one, 0, 1).await.expect("held");
        one.let_go().await;
        two.hold(Duration::ZERO, || true).await.expect_err("it is kept");
        one.lay_down().await.expect("room");
        one.take_up(&[]).await.expect("nobody has changed it");
        one.hold(PATIENT, || true).await.expect("it is here");
        one.let_go().await;
        two.hold(Duration::ZERO, || true).await.expect_err("it is kept once, not twice");
        one.let_go().await;
        two.hold(Duration::ZERO, || true).await.expect("it was let go");
        assert_eq!(read(&two, 0).await, Ok(1));
        two.let_go().await;
    });
}

/// The write was acknowledged, so it must survive: its metadata's first write fails, or the last.
#[test]
fn what_could_not_be_laid_down_is_not_forgotten() {
    for fault in ["kind=flush,count=1", "kind=write,offset=0-256K,count=1"] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        real(async move {
            make(&path, Format::Qcow2).await;
            let faults = vec![fault.parse().expect("a rule")];
            let storage = OpenOptions { format: Some(Format::Qcow2), faults, ..OpenOptions::default() };
            let image = open(&spec(&path), ImageOptions { storage, ..ImageOptions::default() }).await;
            let disk = Disk::new("disk", image.expect("opens"), Default::default(), None).expect("no limits");
            write(&disk, 0, 7).await.expect("written");
            assert_eq!(disk.lay_down().await, Err(Error::IO), "{fault}");
            disk.take_up(&[]).await.expect("what is left can be written now");
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
fn bitmaps_go_along() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    real(async move {
        make(&path, Format::Qcow2).await;
        let storage = open_storage(&spec(&path), OpenOptions::default()).expect("nobody holds it");
        let image = Qcow2::open_for_upkeep(storage).await.expect("valid");
        image.add_bitmap("b", 16).await.expect("new");
        image.close().await.expect("room");
        drop(image);
        let disks = [disk(&path, Format::Qcow2).await, disk(&path, Format::Qcow2).await];
        let mut views = Vec::new();
        for disk in &disks {
            let Image::Qcow2(qcow2) = disk.image() else { panic!("it is") };
            views.push(qcow2.view_bitmap("b").await.expect("whoever has it"));
        }
        for turn in 0..6_u64 {
            let (disk, view) = (&disks[(turn % 2) as usize], &views[(turn % 2) as usize]);
            disk.hold(PATIENT, || true).await.expect("free");
            write(disk, turn << 17, 1).await.expect("held");
            let runs = view.marked(0, SIZE).await.expect("held");
            let marked = runs.iter().filter(|run| run.dirty).map(|run| run.length);
            assert_eq!(marked.collect::<Vec<_>>(), vec![65536; turn as usize + 1]);
            disk.let_go().await;
            assert_eq!(view.marked(0, SIZE).await, Err(Error::SHUTDOWN));
        }
    });
}

#[test]
fn another_image_under_the_same_name_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    real(async move {
        make(&path, Format::Qcow2).await;
        let disk = Arc::new(disk(&path, Format::Qcow2).await);
        let storage = open_storage(&spec(&path), OpenOptions::default()).expect("nobody holds it");
        let other = CreateOptions { size_bytes: SIZE, cluster_bytes: 4096, ..CreateOptions::default() };
        create(&storage, None, &other).await.expect("made");
        drop(storage);
        let said = disk.hold(PATIENT, || true).await.expect_err("other clusters").to_string();
        assert!(said.contains("is another image than it was"), "{said}");
        open_storage(&spec(&path), OpenOptions::default()).expect("and it is not kept");
    });
}
