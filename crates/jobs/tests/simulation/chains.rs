//! Chains of backups: a full one and incremental ones, some of which fail or are cancelled. Each
//! restored chain must equal the disk at the instant of its last backup, and after a crash the
//! bitmap must mark all that differs from it, or be inconsistent.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use block::{
    disk::Disk,
    layer::throttle::{BackgroundSettings, DiskSettings},
};
use image::{
    Image, RawImage,
    qcow2::bitmap::{BitmapChange, BitmapError, DirtyBits, NewBitmap},
};
use jobs::{
    backup::{Backup, BackupBitmap, BackupOptions, BackupSizes},
    job::{Job, JobKind, JobResult},
    target::JobTarget,
};
use policy::{request::Direction, throttle::RequestCost};
use reactor::{buffer::IoBuffer, now, sim, sleep_until, spawn_joinable, timeout};
use storage::{Durability, Storage};

use crate::{
    backups::{FOREVER, operate},
    guest::{DiskModel, UNIT, chance, content_of, resizes, short_time, start_guests},
    seeds,
    world::{BitmapWorld, ChainTarget, open_file},
};

const BITMAP: &str = "since-last";

/// Results of all seeds.
#[derive(Clone, Copy, Debug, Default)]
struct Results {
    full: u64,
    incremental: u64,
    failed: u64,
    consistent_after_crash: u64,
    inconsistent_after_crash: u64,
}

/// A chain of backups of a disk.
struct Chain {
    world: BitmapWorld,
    model: Rc<RefCell<DiskModel>>,
    is_persistent: bool,
    /// Content of the last complete backup with all that are below it.
    restored: RefCell<Option<Vec<u8>>>,
    counts: Cell<Results>,
}

#[test]
fn restored_chains_equal_their_instants() {
    let results = Rc::new(Cell::new(Results::default()));
    let seeds = seeds::for_each("--test simulation", 300, |seed| {
        let results = Rc::clone(&results);
        sim::run(seed, async move {
            timeout(FOREVER, run(&results)).await.expect("everything ends within a day of virtual time");
        });
    });
    let Results { full, incremental, failed, consistent_after_crash, inconsistent_after_crash } =
        results.get();
    if seeds >= 100 {
        let counts = [full, incremental, failed, consistent_after_crash * 10, inconsistent_after_crash];
        assert!(
            counts.iter().all(|&count| count > seeds / 50),
            "too little happened in {seeds} seeds: {:?}",
            results.get()
        );
    }
}

async fn run(results: &Cell<Results>) {
    let units = sim::random(|random| random.u64(4..50)) * 8;
    let max_units = units + sim::random(|random| random.u64(0..4)) * 8;
    let world = BitmapWorld::draw(units).await;
    let model = Rc::new(RefCell::new(DiskModel::new(world.numbers.clone())));
    let chain = Rc::new(Chain {
        world,
        model,
        is_persistent: chance(80),
        restored: RefCell::default(),
        counts: Cell::new(results.get()),
    });
    chain.add_bitmap().await;
    let Chain { world, model, .. } = &*chain;
    let may_fail = Rc::new(Cell::new(world.source_may_fail));
    let tasks = start_guests(&world.disk, model, &may_fail, resizes(units, max_units));
    if chance(40) {
        let rounds = spawn_joinable({
            let chain = Rc::clone(&chain);
            async move { chain.run_rounds().await }
        });
        sleep_until(now() + short_time()).await;
        if chance(50) {
            sleep_until(now() + short_time() * 10).await;
        }
        let file = world.device.crash();
        // Nothing completes any more.
        drop((rounds, tasks));
        chain.check_crashed(file).await;
    } else {
        chain.run_rounds().await;
        for task in tasks {
            task.await;
        }
        chain.finish().await;
    }
    results.set(chain.counts.get());
}

impl Chain {
    fn count(&self, change: impl FnOnce(&mut Results)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    async fn add_bitmap(&self) {
        let new = NewBitmap {
            name: BITMAP.to_owned(),
            granularity_bits: sim::random(|random| random.u32(9..17)),
            is_persistent: self.is_persistent,
            is_enabled: true,
            is_marked: chance(50),
        };
        loop {
            match self.world.disk.change_bitmap(&BitmapChange::Add(new.clone())).await {
                Ok(()) => return,
                // Of an attempt that has failed in the end.
                Err(BitmapError::Exists(name)) => {
                    let _ = self.world.disk.change_bitmap(&BitmapChange::Remove(name)).await;
                }
                Err(error) => assert!(self.world.source_may_fail, "{error}"),
            }
        }
    }

    async fn run_rounds(&self) {
        for _ in 0..sim::random(|random| random.u32(1..6)) {
            sleep_until(now() + short_time()).await;
            self.round(true).await;
        }
    }

    /// One backup, which is restored and compared.
    async fn round(&self, is_controlled: bool) {
        let Self { world, model, .. } = self;
        let last = self.restored.borrow().clone();
        let is_incremental = last.is_some();
        // The disk may grow until the instant.
        let size_bytes = world.disk.size_bytes() + 4096 * sim::random(|random| random.u64(0..3));
        let chain_target = world.draw_target(size_bytes, last.as_deref()).await;
        let max_buffer_bytes = if chance(20) { sim::random(|random| random.u64(0..8000)) } else { 64 << 20 };
        let cluster_bytes = 1 << sim::random(|random| random.u32(9..15));
        let options = BackupOptions {
            settings: BackgroundSettings::default(),
            sizes: BackupSizes { cluster_bytes, max_buffer_bytes },
            bitmap: Some(BackupBitmap { name: BITMAP.to_owned(), is_incremental }),
        };
        let job = Job::new("backup-disk", JobKind::Backup);
        let begun = Backup::begin(&job, &world.disk, chain_target.target.clone(), options).await;
        let mut backup = match begun {
            Ok(backup) => backup,
            Err(error) => {
                assert!(error.to_string().contains("use a larger target"), "{error}");
                return;
            }
        };
        // No other task has run since the instant.
        let at_instant = model.borrow().clone();
        let bitmap = backup.take_bitmap().expect("it is given");
        let operator = is_controlled.then(|| spawn_joinable(operate(Arc::clone(&job))));
        let result = backup.run().await;
        let is_closed = chain_target.target.image.close().await.is_ok();
        job.conclude(result.clone());
        drop(operator);
        if result != JobResult::Completed || !is_closed {
            self.count(|counts| counts.failed += 1);
            return;
        }
        let progress = job.status().progress;
        assert_eq!(progress.done_bytes, progress.total_bytes, "each byte is done once");
        let size_bytes = at_instant.units.len() * UNIT as usize;
        let restored = restore(chain_target, last.as_deref(), size_bytes).await;
        at_instant.check("the restored chain", 0, &restored);
        bitmap.drop_earlier();
        *self.restored.borrow_mut() = Some(restored);
        self.count(|counts| match is_incremental {
            true => counts.incremental += 1,
            false => counts.full += 1,
        });
    }

    /// Without changes, one more backup equals the disk exactly; the bitmap survives closing.
    async fn finish(&self) {
        let world = &self.world;
        // Changes that were cancelled take effect until then.
        sleep_until(now() + short_time() * 100).await;
        for _ in 0..100 {
            let before = self.counts.get();
            self.round(false).await;
            let after = self.counts.get();
            if (before.full, before.incremental) != (after.full, after.incremental) {
                break;
            }
            assert!(
                world.source_may_fail || world.target_may_fail || after.failed > before.failed,
                "nothing prevents the backup"
            );
        }
        let Some(restored) = self.restored.borrow().clone() else { return };
        let bytes = world.disk.size_bytes() as usize;
        if restored.len() == bytes {
            let content = content_of(&world.disk, bytes, world.source_may_fail).await;
            let first =
                restored.chunks(UNIT as usize).zip(content.chunks(UNIT as usize)).position(|(a, b)| a != b);
            assert_eq!(first, None, "unit that differs");
        }
        assert!(!world.disk.has_job());
        // A write that has failed may be visible and not durable, so it is not compared.
        if !world.source_may_fail && world.disk.close().await.is_ok() {
            self.check_crashed(world.device.crash()).await;
        }
    }

    /// Checks what the file of a crashed or closed disk claims to have changed.
    async fn check_crashed(&self, file: Vec<u8>) {
        let image = open_file(file, self.world.backing.as_deref()).await;
        let bits = match image.live_bitmap_bits(BITMAP).await {
            Ok(bits) => bits,
            // Not yet in the file, or transient.
            Err(BitmapError::NotFound(_)) => return,
            Err(BitmapError::InUse(_)) => return self.count(|counts| counts.inconsistent_after_crash += 1),
            Err(error) => panic!("{error}"),
        };
        self.count(|counts| counts.consistent_after_crash += 1);
        let Some(restored) = self.restored.borrow().clone() else { return };
        let content = image.read(0, image.size_bytes() as usize).await.expect("memory").to_vec();
        check_marks(&bits, &restored, &content);
    }
}

/// Content of the chain that ends with this target.
async fn restore(target: ChainTarget, last: Option<&[u8]>, size_bytes: usize) -> Vec<u8> {
    let file = target.device.crash();
    if !target.is_qcow2 {
        return file[..size_bytes].to_vec();
    }
    let image = open_file(file, last.filter(|_| target.target.is_overlay)).await;
    image.read(0, size_bytes).await.expect("memory").to_vec()
}

/// Panics unless all units that differ are marked.
fn check_marks(bits: &DirtyBits, restored: &[u8], content: &[u8]) {
    let zeroes = vec![0; UNIT as usize];
    for (index, unit) in content.chunks(UNIT as usize).enumerate() {
        let start = index * UNIT as usize;
        let before = restored.get(start..start + unit.len()).unwrap_or(&zeroes[..unit.len()]);
        let is_marked = || bits.marked().any(|range| range.contains(&(start as u64)));
        assert!(
            before == unit || is_marked(),
            "unit {index} of {} has changed and is not marked, of {} before: {:02x?} to {:02x?}",
            content.len() / UNIT as usize,
            restored.len() / UNIT as usize,
            &before[..8],
            &unit[..8]
        );
    }
}

#[test]
fn an_incremental_backup_reads_what_has_changed() {
    const MIB: u64 = 1 << 20;
    sim::run(1, async {
        let world = BitmapWorld::of_size(64 * MIB).await;
        let new = NewBitmap {
            name: BITMAP.to_owned(),
            granularity_bits: 16,
            is_persistent: true,
            is_enabled: true,
            is_marked: false,
        };
        world.disk.change_bitmap(&BitmapChange::Add(new)).await.expect("room");
        let changed = [3, 17, 18, 19, 400, 777, 778, 1023];
        for granule in changed {
            let permit = world.disk.admit(Direction::Write, RequestCost::one(65536)).await;
            let data = IoBuffer::copy_of(&[7; 65536]).into();
            world.disk.write(permit, granule * 65536, data, Durability::Cached).await.expect("room");
        }
        let before = world.device.traffic().read_bytes;
        let job = Job::new("backup-disk", JobKind::Backup);
        let image = Arc::new(Image::Raw(RawImage::new(Storage::memory(64 * MIB))));
        let target = JobTarget { image, is_zero: false, is_overlay: false, may_unmap: true };
        let bitmap = BackupBitmap { name: BITMAP.to_owned(), is_incremental: true };
        let options = BackupOptions { bitmap: Some(bitmap), ..BackupOptions::default() };
        let backup = Backup::begin(&job, &world.disk, target, options).await.expect("nothing prevents it");
        assert_eq!(backup.run().await, JobResult::Completed);
        let changed_bytes = changed.len() as u64 * 65536;
        assert_eq!(job.status().progress.copied_bytes, changed_bytes);
        let read_bytes = world.device.traffic().read_bytes - before;
        assert!(read_bytes * 10 <= changed_bytes * 11, "{read_bytes} bytes are read for {changed_bytes}");
    });
}

#[test]
fn a_raw_image_has_no_bitmap_to_use() {
    sim::run(1, async {
        let image = Image::Raw(RawImage::new(Storage::memory(1 << 20)));
        let disk = Arc::new(Disk::new("disk", image, DiskSettings::default(), None).expect("valid"));
        let job = Job::new("backup-disk", JobKind::Backup);
        let image = Arc::new(Image::Raw(RawImage::new(Storage::memory(1 << 20))));
        let target = JobTarget { image, is_zero: true, is_overlay: false, may_unmap: true };
        let bitmap = BackupBitmap { name: BITMAP.to_owned(), is_incremental: false };
        let options = BackupOptions { bitmap: Some(bitmap), ..BackupOptions::default() };
        let error = Backup::begin(&job, &disk, target, options).await.expect_err("it is raw").to_string();
        assert!(error.contains("has no bitmaps"), "{error}");
        assert!(!disk.has_job());
    });
}
