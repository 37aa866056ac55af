//! Bitmaps that record, compared with plain arrays over random requests, resizes and openings.

use proptest::prelude::*;

use super::{BitmapEntry, BitmapView, DirtyBits, directory::flag, encode, view::BitmapViewError};
use reactor::{buffer::IoBuffer, error::Error, sim};
use storage::{Durability, ResizeError, Storage, ZeroOptions};

use crate::qcow2::{
    Qcow2Components, Qcow2Image,
    check::{Repair, check},
    create::{CreateOptions, create},
    header::{FileRegion, Qcow2Header, autoclear},
    metadata_io,
    snapshot::NewSnapshot,
};

const UNIT: u64 = 512;
const MAX_UNITS: u64 = 2000;

#[derive(Clone, Debug)]
enum BitmapTestStep {
    Write(u64, u64),
    Compressed(u64),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Resize(u64),
    Reopen,
    /// Opened again without closing, as after a crash with everything flushed.
    Abandon,
    /// Written for an upgrade, which fails: this process continues with the image.
    Resume,
    /// Written for an upgrade: another process continues with the image.
    HandOver,
    /// Another process opens the image, writes a range and closes it; this process then resumes it.
    UseElsewhere(u64, u64),
}

fn steps() -> impl Strategy<Value = BitmapTestStep> {
    // In bytes; most offsets are not aligned to anything.
    let range = || (0..MAX_UNITS * UNIT, prop_oneof![1..100_u64, 1..9000_u64, 1..200_000_u64]);
    prop_oneof![
        6 => range().prop_map(|(at, length)| BitmapTestStep::Write(at, length)),
        1 => (0..MAX_UNITS * UNIT).prop_map(BitmapTestStep::Compressed),
        2 => (range(), any::<bool>()).prop_map(|((at, length), unmap)| BitmapTestStep::Zero(at, length, unmap)),
        2 => range().prop_map(|(at, length)| BitmapTestStep::Discard(at, length)),
        2 => (1..MAX_UNITS).prop_map(BitmapTestStep::Resize),
        2 => Just(BitmapTestStep::Reopen),
        1 => Just(BitmapTestStep::Abandon),
        1 => Just(BitmapTestStep::Resume),
        1 => Just(BitmapTestStep::HandOver),
        1 => range().prop_map(|(at, length)| BitmapTestStep::UseElsewhere(at, length)),
    ]
}

/// Model of a bitmap.
#[derive(Clone, Debug)]
struct BitmapModel {
    name: &'static str,
    granularity_bits: u32,
    enabled: bool,
    in_use: bool,
    marked: Vec<bool>,
}

impl BitmapModel {
    fn mark(&mut self, at: u64, length: u64) {
        if self.enabled && length > 0 {
            for bit in at >> self.granularity_bits..=(at + length - 1) >> self.granularity_bits {
                self.marked[bit as usize] = true;
            }
        }
    }

    fn resize(&mut self, size: u64) {
        self.marked.resize(size.div_ceil(1 << self.granularity_bits) as usize, false);
    }
}

async fn copied(storage: &Storage) -> Storage {
    Storage::with_content(&storage.read_all().await.expect("memory")).await
}

async fn open(storage: Storage, read_only: bool) -> Qcow2Image {
    Qcow2Image::open(Qcow2Components { read_only, ..Qcow2Components::of(storage) }).await.expect("valid")
}

async fn open_for_handover(storage: Storage) -> Qcow2Image {
    Qcow2Image::open_for_handover(Qcow2Components::of(storage)).await.expect("valid")
}

/// Copies the content of `source` to `storage`.
async fn replace(storage: &Storage, source: &Storage) {
    let content = source.read_all().await.expect("memory");
    storage.resize(content.len() as u64).await.expect("memory");
    metadata_io::write(storage, 0, &content).await.expect("memory");
}

/// Granules that a view reports as marked.
async fn marked_granules(image: &Qcow2Image, model: &BitmapModel) -> Result<Vec<bool>, BitmapViewError> {
    Ok(marked_granules_of_view(&image.view_bitmap(model.name).await?, image, model).await)
}

async fn marked_granules_of_view(view: &BitmapView, image: &Qcow2Image, model: &BitmapModel) -> Vec<bool> {
    let mut marked = vec![false; model.marked.len()];
    let mut at = 0;
    while at < image.size_bytes() {
        for run in view.marked(at, image.size_bytes() - at).await.expect("inside") {
            let end = at + run.length;
            assert!(end.is_multiple_of(1 << model.granularity_bits) || end == image.size_bytes());
            marked
                [(at >> model.granularity_bits) as usize..end.div_ceil(1 << model.granularity_bits) as usize]
                .fill(run.dirty);
            at = end;
        }
    }
    marked
}

struct BitmapTestWorld {
    image: Qcow2Image,
    cluster_bytes: u64,
    models: Vec<BitmapModel>,
    /// Leaked clusters of images that were not closed.
    leaks: u64,
    /// True if the disk was changed since the image was opened.
    changed: bool,
}

impl BitmapTestWorld {
    async fn new(cluster_bits: u32, granularities: [u32; 3]) -> Self {
        let storage = Storage::memory(512);
        let size_bytes = MAX_UNITS / 2 * UNIT;
        let options =
            CreateOptions { size_bytes, cluster_bytes: 1 << cluster_bits, ..CreateOptions::default() };
        create(&storage, None, &options).await.expect("valid");
        let maintenance = Qcow2Image::open_for_maintenance(storage).await.expect("valid");
        let names = ["one", "off", "other"];
        let mut models = Vec::new();
        for (name, granularity_bits) in names.into_iter().zip(granularities) {
            maintenance.add_bitmap(name, granularity_bits).await.expect("new");
            let mut model = BitmapModel {
                name,
                granularity_bits,
                enabled: name != "off",
                in_use: false,
                marked: Vec::new(),
            };
            model.resize(size_bytes);
            if !model.enabled {
                let mut bits = DirtyBits::new(size_bytes, granularity_bits);
                bits.mark(UNIT * 300..size_bytes);
                maintenance.store_bitmap(name, &bits).await.expect("there");
                maintenance.enable_bitmap(name, false).await.expect("there");
                let first = (UNIT * 300) >> granularity_bits;
                model.marked[first as usize..].fill(true);
            }
            models.push(model);
        }
        maintenance.close().await.expect("memory");
        let image = open(copied(maintenance.storage()).await, false).await;
        Self { image, cluster_bytes: 1 << cluster_bits, models, leaks: 0, changed: false }
    }

    async fn step(&mut self, step: &BitmapTestStep) {
        let size = self.image.size_bytes();
        let inside = |at: u64, length: u64| (at % size, length.min(size - at % size));
        match *step {
            BitmapTestStep::Write(at, length) => {
                let (at, length) = inside(at, length);
                let data = IoBuffer::copy_of(&vec![7; length as usize]).into();
                self.image.write(at, data, Durability::Cached).await.expect("room");
                self.mark(at, length);
            }
            BitmapTestStep::Compressed(at) => {
                let (at, length) =
                    inside(at % size / self.cluster_bytes * self.cluster_bytes, self.cluster_bytes);
                let data = IoBuffer::copy_of(&vec![8; length as usize]).into();
                self.image.write_compressed(at, data).await.expect("room");
                self.mark(at, length);
            }
            BitmapTestStep::Zero(at, length, may_unmap) => {
                let (at, length) = inside(at, length);
                let options = ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached };
                self.image.write_zeroes(at, length, options).await.expect("room");
                self.mark(at, length);
            }
            BitmapTestStep::Discard(at, length) => {
                let (at, length) = inside(at, length);
                self.image.discard(at, length).await.expect("a hint");
                self.mark(at, length);
            }
            BitmapTestStep::Resize(units) => {
                self.image.resize(units * UNIT).await.expect("possible");
                // Added space leaves the marks unchanged.
                self.changed |= units * UNIT < size;
                self.models.iter_mut().for_each(|model| model.resize(units * UNIT));
            }
            BitmapTestStep::Reopen => {
                self.image.close().await.expect("memory");
                let report = check(self.image.storage(), Repair::Nothing).await.expect("valid");
                assert_eq!((report.corruptions, report.leaks), (0, self.leaks), "{report:?}");
                let file = copied(self.image.storage()).await;
                self.compare(&open(copied(&file).await, true).await).await;
                self.image = open(file, false).await;
                self.changed = false;
            }
            BitmapTestStep::Abandon => {
                self.image.flush().await.expect("memory");
                let file = copied(self.image.storage()).await;
                let report = check(&file, Repair::Nothing).await.expect("valid");
                assert_eq!(report.corruptions, 0, "{report:?}");
                self.leaks = report.leaks;
                let changed = std::mem::take(&mut self.changed);
                self.models.iter_mut().for_each(|model| model.in_use |= model.enabled && changed);
                self.compare(&open(copied(&file).await, true).await).await;
                self.image = open(file, false).await;
            }
            BitmapTestStep::Resume => {
                self.suspend().await;
                self.image.take_over().await.expect("unchanged in between");
            }
            BitmapTestStep::HandOver => {
                let next = open_for_handover(copied(self.image.storage()).await).await;
                let views = self.views_of(&next).await;
                self.suspend().await;
                replace(next.storage(), self.image.storage()).await;
                next.take_over().await.expect("it was suspended");
                self.image = next;
                self.compare_views(&views).await;
            }
            BitmapTestStep::UseElsewhere(at, length) => {
                let (at, length) = inside(at, length);
                let views = self.views_of(&self.image).await;
                self.image.hand_over().await.expect("memory");
                for view in &views {
                    assert_eq!(
                        view.marked(0, 1).await,
                        Err(Error::SHUTDOWN),
                        "another process may have replaced the bitmap"
                    );
                }
                let other = open(copied(self.image.storage()).await, false).await;
                let data = IoBuffer::copy_of(&vec![9; length as usize]).into();
                other.write(at, data, Durability::Cached).await.expect("room");
                other.close().await.expect("memory");
                replace(self.image.storage(), other.storage()).await;
                self.image.take_over().await.expect("it was closed");
                self.mark(at, length);
                self.changed = false;
                self.compare_views(&views).await;
            }
        }
        self.compare_recorded().await;
    }

    fn mark(&mut self, at: u64, length: u64) {
        self.changed = true;
        self.models.iter_mut().for_each(|model| model.mark(at, length));
    }

    /// Writes the image for an upgrade; the file must then be the same as that of a closed image.
    async fn suspend(&mut self) {
        self.image.write_for_handover().await.expect("room");
        let file = copied(self.image.storage()).await;
        let report = check(&file, Repair::Nothing).await.expect("valid");
        assert_eq!((report.corruptions, report.leaks), (0, self.leaks), "{report:?}");
        self.compare(&open(file, true).await).await;
        self.changed = false;
    }

    /// Views of the bitmaps that record.
    async fn views_of(&self, image: &Qcow2Image) -> Vec<BitmapView> {
        let mut views = Vec::new();
        for model in self.models.iter().filter(|model| model.enabled && !model.in_use) {
            views.push(image.view_bitmap(model.name).await.expect("it is there, whatever it marks"));
        }
        views
    }

    async fn compare_views(&self, views: &[BitmapView]) {
        for view in views {
            let model = self.models.iter().find(|model| model.name == &**view.name()).expect("ours");
            assert_eq!(
                marked_granules_of_view(view, &self.image, model).await,
                model.marked,
                "{}",
                model.name
            );
        }
    }

    async fn compare_recorded(&self) {
        for model in &self.models {
            let marked = marked_granules(&self.image, model).await;
            match (model.in_use, model.enabled) {
                (true, _) => assert_eq!(marked, Err(BitmapViewError::Inconsistent(model.name.to_owned()))),
                (false, true) => assert_eq!(marked.as_ref(), Ok(&model.marked), "{}", model.name),
                (false, false) => assert_eq!(marked, Err(BitmapViewError::Disabled(model.name.to_owned()))),
            }
        }
    }

    /// Compares the model with the bitmaps of a read-only image.
    async fn compare(&self, image: &Qcow2Image) {
        for model in &self.models {
            let marked = marked_granules(image, model).await;
            if model.in_use {
                assert_eq!(marked, Err(BitmapViewError::Inconsistent(model.name.to_owned())));
            } else {
                assert_eq!(marked.as_ref(), Ok(&model.marked), "{}", model.name);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
    #[test]
    fn bitmap_marks_exactly_the_written_ranges(
        cluster_bits in prop_oneof![Just(9_u32), Just(12), Just(16)],
        granularities in (9..18_u32, 9..18_u32, 9..18_u32),
        steps in prop::collection::vec(steps(), 1..30),
        seed in any::<u64>(),
    ) {
        sim::run(seed, async move {
            let mut world = BitmapTestWorld::new(cluster_bits, granularities.into()).await;
            world.compare_recorded().await;
            for step in &steps {
                world.step(step).await;
            }
            world.step(&BitmapTestStep::Reopen).await;
        });
    }
}

#[test]
fn snapshot_revert_marks_the_whole_disk() {
    sim::run(1, async {
        let mut world = BitmapTestWorld::new(12, [9, 12, 16]).await;
        world.step(&BitmapTestStep::Write(0, 5000)).await;
        let new = NewSnapshot { name: "s", date_s: 0, date_ns: 0 };
        world.image.create_snapshot(new).await.expect("room");
        world.step(&BitmapTestStep::Resize(MAX_UNITS)).await;
        world.image.apply_snapshot("s").await.expect("there");
        world.models.iter_mut().for_each(|model| {
            model.resize(MAX_UNITS / 2 * UNIT);
            if model.enabled {
                model.marked.fill(true);
            }
            // A bitmap that does not record becomes inconsistent too.
            model.in_use |= !model.enabled;
        });
        world.step(&BitmapTestStep::Reopen).await;
    });
}

#[test]
fn bitmap_that_cannot_be_stored_continues_recording() {
    sim::run(1, async {
        let mut world = BitmapTestWorld::new(12, [9, 12, 16]).await;
        // Allocated clusters that are not marked.
        let maintenance =
            Qcow2Image::open_for_maintenance(copied(world.image.storage()).await).await.expect("valid");
        maintenance.write(0, IoBuffer::zeroed(100_000).into(), Durability::Cached).await.expect("room");
        maintenance.close().await.expect("memory");
        let file = copied(maintenance.storage()).await;
        // The write goes to allocated clusters; only the bits need new ones.
        let rule = format!("kind=write,offset={}-,count=1,error=ENOSPC", file.size_bytes());
        world.image = open(file.with_faults(vec![rule.parse().expect("a rule")]), false).await;
        world.step(&BitmapTestStep::Write(5000, 10_000)).await;
        assert_eq!(world.image.write_for_handover().await, Err(Error::NO_SPACE));
        world.image.take_over().await.expect("it stays here");
        world.compare_recorded().await;
        world.step(&BitmapTestStep::Write(50_000, 1)).await;
        world.step(&BitmapTestStep::Resume).await;
        world.step(&BitmapTestStep::Reopen).await;
    });
}

#[test]
fn bitmap_removed_by_another_process_is_unavailable() {
    sim::run(1, async {
        let world = BitmapTestWorld::new(12, [9, 12, 16]).await;
        let views = world.views_of(&world.image).await;
        world.image.hand_over().await.expect("memory");
        let other =
            Qcow2Image::open_for_maintenance(copied(world.image.storage()).await).await.expect("valid");
        other.remove_bitmap("one").await.expect("there");
        other.close().await.expect("memory");
        replace(world.image.storage(), other.storage()).await;
        world.image.take_over().await.expect("the disk is the same");
        assert_eq!(world.image.recorded_names(), ["other"]);
        assert_eq!(views[0].marked(0, 1).await, Err(Error::SHUTDOWN));
        assert!(views[1].marked(0, 1).await.is_ok());
    });
}

/// File of an image with one bitmap, whose directory entry `change` has modified.
async fn with_altered_entries(size_bytes: u64, change: impl Fn(&mut BitmapEntry, &Qcow2Header)) -> Storage {
    let storage = Storage::memory(512);
    let options = CreateOptions { size_bytes, ..CreateOptions::default() };
    create(&storage, None, &options).await.expect("valid");
    let maintenance = Qcow2Image::open_for_maintenance(storage).await.expect("valid");
    maintenance.add_bitmap("b", 31).await.expect("new");
    maintenance.close().await.expect("memory");
    let header = maintenance.header();
    let mut entry = maintenance.bitmaps().await.expect("readable").remove(0);
    change(&mut entry, &header);
    let FileRegion { offset, .. } = header.bitmaps.expect("added").directory;
    metadata_io::write(maintenance.storage(), offset, &encode(&[entry])).await.expect("memory");
    copied(maintenance.storage()).await
}

#[test]
fn invalid_bitmap_is_ignored() {
    const LARGE: u64 = 1 << 50;
    type Change = fn(&mut BitmapEntry, &Qcow2Header);
    let changes: [(u64, Change, bool); 4] = [
        // Bits for 2⁵⁰ bytes at a granularity of 512 take 256 GiB.
        (LARGE, |entry, _| entry.granularity_bits = 9, false),
        (UNIT, |entry, header| entry.table_offset = header.l1_offset, false),
        (UNIT, |entry, _| entry.table_offset = 1 << 40, false),
        // Surplus table entries are harmless if they refer to nothing.
        (UNIT, |entry, _| entry.table_entries = 8192, true),
    ];
    for (size_bytes, change, is_recorded) in changes {
        sim::run(1, async move {
            let image = open(with_altered_entries(size_bytes, change).await, false).await;
            image.write(0, IoBuffer::zeroed(512).into(), Durability::Cached).await.expect("room");
            image.close().await.expect("memory");
            assert!(!image.is_read_only(), "the disk itself is right");
            let entry = image.bitmaps().await.expect("readable").remove(0);
            assert_eq!(entry.flags & flag::IN_USE == 0, is_recorded, "{entry:?}");
        });
    }
}

#[test]
fn resize_is_limited_by_bitmaps() {
    sim::run(1, async {
        let storage = Storage::memory(512);
        let options = CreateOptions { size_bytes: 1 << 30, ..CreateOptions::default() };
        create(&storage, None, &options).await.expect("valid");
        let maintenance = Qcow2Image::open_for_maintenance(storage).await.expect("valid");
        for name in ["a", "b", "c"] {
            maintenance.add_bitmap(name, 9).await.expect("new");
        }
        maintenance.close().await.expect("memory");
        let image = open(copied(maintenance.storage()).await, false).await;
        // 512 MiB of bits at a granularity of 512 cover 2 TiB; three such bitmaps exceed the
        // memory limit.
        let error = image.resize(4 << 40).await.expect_err("too large");
        let ResizeError::TooLarge { largest } = error else { panic!("{error}") };
        assert_eq!(largest, ((1_u64 << 30) * 8 / 3 * 512) & !511);
        assert_eq!(image.size_bytes(), 1 << 30);
        image.resize(1 << 40).await.expect("small enough");
        image.close().await.expect("memory");
        assert_eq!(image.header().autoclear & autoclear::BITMAPS, autoclear::BITMAPS);
        assert!(image.bitmaps().await.expect("readable").iter().all(|entry| entry.flags == flag::AUTO));
    });
}
