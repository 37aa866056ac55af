//! Bitmaps that record, compared with plain arrays over random requests, resizes and openings.

use proptest::prelude::*;

use super::{
    BitmapChange, BitmapEntry, BitmapError, BitmapView, DirtyBits, MergeSource, NewBitmap, RotatedBitmap,
    directory::flag, encode, view::BitmapViewError,
};
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
    /// With its granularity; recording or not; with all marks or none.
    Add(usize, u32, bool, bool),
    Remove(usize),
    Clear(usize),
    Enable(usize, bool),
    Merge(usize, usize),
    /// Begins anew, for a backup.
    Rotate(usize),
    /// Ends the backup, with success or not.
    EndRotation(bool),
}

/// Names of bitmaps; the first three exist at the beginning.
const NAMES: [&str; 4] = ["one", "off", "other", "added"];

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
        1 => (0..4_usize, 9..18_u32, any::<bool>(), any::<bool>())
            .prop_map(|(at, bits, on, all)| BitmapTestStep::Add(at, bits, on, all)),
        1 => (0..4_usize).prop_map(BitmapTestStep::Remove),
        1 => (0..4_usize).prop_map(BitmapTestStep::Clear),
        2 => (0..4_usize, any::<bool>()).prop_map(|(at, on)| BitmapTestStep::Enable(at, on)),
        1 => (0..4_usize, 0..4_usize).prop_map(|(to, from)| BitmapTestStep::Merge(to, from)),
        2 => (0..4_usize).prop_map(BitmapTestStep::Rotate),
        2 => any::<bool>().prop_map(BitmapTestStep::EndRotation),
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
    /// Marks of before the begin of a backup.
    earlier: Option<Vec<bool>>,
    /// Marks in the file.
    stored: Vec<bool>,
    /// True if the disk has changed since they were stored.
    changed: bool,
}

impl BitmapModel {
    fn new(name: &'static str, granularity_bits: u32, enabled: bool, size: u64) -> Self {
        let marked = vec![false; size.div_ceil(1 << granularity_bits) as usize];
        let stored = marked.clone();
        Self { name, granularity_bits, enabled, in_use: false, marked, earlier: None, stored, changed: false }
    }

    fn granules(&self, at: u64, length: u64) -> std::ops::Range<usize> {
        let bits = self.granularity_bits;
        (at >> bits) as usize..(at + length).div_ceil(1 << bits) as usize
    }

    fn mark(&mut self, at: u64, length: u64) {
        if self.enabled {
            self.changed = true;
            let granules = self.granules(at, length);
            if length > 0 {
                self.marked[granules].fill(true);
            }
        }
    }

    /// Growing marks the added space.
    fn resize(&mut self, from: u64, to: u64) {
        let added = (from < to && self.enabled).then(|| self.granules(from, to - from));
        let count = self.granules(0, to).end;
        for marks in [&mut self.marked, &mut self.stored].into_iter().chain(&mut self.earlier) {
            marks.resize(count, false);
            if let Some(added) = added.clone() {
                marks[added].fill(true);
            }
        }
    }

    /// All marks, those of before a backup included.
    fn all(&self) -> Vec<bool> {
        match &self.earlier {
            None => self.marked.clone(),
            Some(earlier) => self.marked.iter().zip(earlier).map(|(new, old)| *new || *old).collect(),
        }
    }

    /// The file has all marks from now on.
    fn store(&mut self) {
        self.stored = self.all();
        self.changed = false;
    }

    /// The bitmap is read from the file.
    fn load(&mut self) {
        self.marked = self.stored.clone();
        self.earlier = None;
    }
}

pub(super) async fn copied(storage: &Storage) -> Storage {
    Storage::with_content(&storage.read_all().await.expect("memory")).await
}

pub(super) async fn open(storage: Storage, read_only: bool) -> Qcow2Image {
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
    /// Backups that are running, by the names of their bitmaps.
    rotations: Vec<(&'static str, RotatedBitmap)>,
}

impl BitmapTestWorld {
    async fn new(cluster_bits: u32, granularities: [u32; 3]) -> Self {
        let storage = Storage::memory(512);
        let size_bytes = MAX_UNITS / 2 * UNIT;
        let options =
            CreateOptions { size_bytes, cluster_bytes: 1 << cluster_bits, ..CreateOptions::default() };
        create(&storage, None, &options).await.expect("valid");
        let maintenance = Qcow2Image::open_for_maintenance(storage).await.expect("valid");
        let mut models = Vec::new();
        for (name, granularity_bits) in NAMES.into_iter().zip(granularities) {
            maintenance.add_bitmap(name, granularity_bits).await.expect("new");
            let mut model = BitmapModel::new(name, granularity_bits, name != "off", size_bytes);
            if !model.enabled {
                let mut bits = DirtyBits::new(size_bytes, granularity_bits);
                bits.mark(UNIT * 300..size_bytes);
                maintenance.store_bitmap(name, &bits).await.expect("there");
                maintenance.enable_bitmap(name, false).await.expect("there");
                let first = (UNIT * 300) >> granularity_bits;
                model.marked[first as usize..].fill(true);
                model.store();
            }
            models.push(model);
        }
        maintenance.close().await.expect("memory");
        let image = open(copied(maintenance.storage()).await, false).await;
        Self { image, cluster_bytes: 1 << cluster_bits, models, leaks: 0, rotations: Vec::new() }
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
                for model in &mut self.models {
                    model.changed |= model.enabled && units * UNIT < size;
                    model.resize(size, units * UNIT);
                }
            }
            BitmapTestStep::Reopen => {
                self.image.close().await.expect("memory");
                let report = check(self.image.storage(), Repair::Nothing).await.expect("valid");
                assert_eq!((report.corruptions, report.leaks), (0, self.leaks), "{report:?}");
                let file = copied(self.image.storage()).await;
                self.models.iter_mut().for_each(BitmapModel::store);
                self.compare(&open(copied(&file).await, true).await).await;
                self.image = open(file, false).await;
                self.load();
            }
            BitmapTestStep::Abandon => {
                self.image.flush().await.expect("memory");
                let file = copied(self.image.storage()).await;
                let report = check(&file, Repair::Nothing).await.expect("valid");
                assert_eq!(report.corruptions, 0, "{report:?}");
                self.leaks = report.leaks;
                for model in &mut self.models {
                    model.in_use |= model.enabled && std::mem::take(&mut model.changed);
                }
                self.compare(&open(copied(&file).await, true).await).await;
                self.image = open(file, false).await;
                self.load();
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
                self.load();
                self.compare_views(&views).await;
            }
            BitmapTestStep::UseElsewhere(at, length) => {
                let (at, length) = inside(at, length);
                let views = self.views_of(&self.image).await;
                self.image.hand_over().await.expect("memory");
                self.models.iter_mut().for_each(BitmapModel::store);
                self.load();
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
                self.models.iter_mut().for_each(BitmapModel::store);
                self.compare_views(&views).await;
            }
            _ => self.change_bitmaps(step).await,
        }
        self.compare_recorded().await;
    }

    fn model(&mut self, at: usize) -> Option<&mut BitmapModel> {
        self.models.iter_mut().find(|model| model.name == NAMES[at])
    }

    /// Executes a change of the bitmaps, or checks its error.
    async fn change_bitmaps(&mut self, step: &BitmapTestStep) {
        let size = self.image.size_bytes();
        let change = async |change: &BitmapChange| self.image.drain().await.change_bitmap(change).await;
        let name = |at: usize| NAMES[at].to_owned();
        let (at, result) = match *step {
            BitmapTestStep::Add(at, granularity_bits, is_enabled, is_marked) => {
                let new = NewBitmap {
                    name: name(at),
                    granularity_bits,
                    is_persistent: true,
                    is_enabled,
                    is_marked,
                };
                let result = change(&BitmapChange::Add(new)).await;
                if self.model(at).is_some() {
                    assert_eq!(result, Err(BitmapError::Exists(name(at))));
                } else {
                    result.expect("room");
                    let mut model = BitmapModel::new(NAMES[at], granularity_bits, is_enabled, size);
                    model.marked.fill(is_marked);
                    model.store();
                    self.models.push(model);
                }
                return;
            }
            BitmapTestStep::Rotate(at) => {
                let views = self.views_of(&self.image).await;
                let result = self.image.drain().await.rotate_bitmap(NAMES[at]);
                let Some(model) = self.model(at).filter(|model| model.enabled && !model.in_use) else {
                    assert_eq!(result.expect_err("it does not record"), BitmapError::NotFound(name(at)));
                    return;
                };
                if model.earlier.is_some() {
                    assert_eq!(result.expect_err("it has begun anew"), BitmapError::Busy(name(at)));
                    return;
                }
                let none = vec![false; model.marked.len()];
                model.earlier = Some(std::mem::replace(&mut model.marked, none));
                self.rotations.push((NAMES[at], result.expect("memory")));
                self.compare_views(&views).await;
                return;
            }
            BitmapTestStep::EndRotation(is_success) => {
                let Some((name, rotated)) = self.rotations.pop() else { return };
                let model = self.models.iter_mut().find(|model| model.name == name).expect("it is busy");
                match is_success {
                    true => rotated.drop_earlier(),
                    false => {
                        drop(rotated);
                        model.marked = model.all();
                    }
                }
                model.earlier = None;
                return;
            }
            BitmapTestStep::Remove(at) => (at, change(&BitmapChange::Remove(name(at))).await),
            BitmapTestStep::Clear(at) => (at, change(&BitmapChange::Clear(name(at))).await),
            BitmapTestStep::Enable(at, is_enabled) => {
                (at, change(&BitmapChange::Enable { name: name(at), is_enabled }).await)
            }
            BitmapTestStep::Merge(to, from) => {
                let change_step =
                    BitmapChange::Merge { name: name(to), sources: vec![MergeSource::Own(name(from))] };
                let result = change(&change_step).await;
                // The receiving bitmap is read first.
                if self.refusal(to, false).is_none()
                    && let Some(expected) = self.refusal(from, false)
                {
                    assert_eq!(result, Err(expected));
                    return;
                }
                (to, result)
            }
            _ => unreachable!("a step of another kind"),
        };
        let is_removal = matches!(step, BitmapTestStep::Remove(_));
        if let Some(expected) = self.refusal(at, is_removal) {
            assert_eq!(result, Err(expected));
            return;
        }
        result.expect("room");
        self.apply(step, at);
    }

    /// Error of a change of this bitmap.
    fn refusal(&mut self, at: usize, is_removal: bool) -> Option<BitmapError> {
        let name = NAMES[at].to_owned();
        match self.model(at) {
            None => Some(BitmapError::NotFound(name)),
            Some(model) if model.earlier.is_some() => Some(BitmapError::Busy(name)),
            Some(model) if model.in_use && !is_removal => Some(BitmapError::InUse(name)),
            Some(_) => None,
        }
    }

    /// Applies a change to the model.
    fn apply(&mut self, step: &BitmapTestStep, at: usize) {
        let mut merged = Vec::new();
        if let BitmapTestStep::Merge(_, from) = *step {
            let source = self.model(from).expect("checked").clone();
            let marks = source.marked.iter().enumerate().filter(|(_, marked)| **marked);
            merged.extend(
                marks
                    .map(|(granule, _)| (granule as u64) << source.granularity_bits)
                    .map(|start| (start, 1_u64 << source.granularity_bits)),
            );
        }
        let size = self.image.size_bytes();
        let model = self.model(at).expect("checked");
        match *step {
            BitmapTestStep::Remove(_) => {
                self.models.retain(|model| model.name != NAMES[at]);
                return;
            }
            BitmapTestStep::Clear(_) => model.marked.fill(false),
            // Nothing changes, and nothing is stored.
            BitmapTestStep::Enable(_, is_enabled) if is_enabled == model.enabled => return,
            BitmapTestStep::Enable(_, is_enabled) => model.enabled = is_enabled,
            _ => {
                for (start, length) in merged {
                    let granules = model.granules(start, length.min(size - start));
                    model.marked[granules].fill(true);
                }
            }
        }
        model.store();
    }

    /// Bitmaps are read from the file, and backups end.
    fn load(&mut self) {
        self.rotations.clear();
        self.models.iter_mut().for_each(BitmapModel::load);
    }

    fn mark(&mut self, at: u64, length: u64) {
        self.models.iter_mut().for_each(|model| model.mark(at, length));
    }

    /// Writes the image for an upgrade; the file must then be the same as that of a closed image.
    async fn suspend(&mut self) {
        self.image.write_for_handover().await.expect("room");
        let file = copied(self.image.storage()).await;
        let report = check(&file, Repair::Nothing).await.expect("valid");
        assert_eq!((report.corruptions, report.leaks), (0, self.leaks), "{report:?}");
        self.models.iter_mut().for_each(BitmapModel::store);
        self.compare(&open(file, true).await).await;
    }

    /// Views of the bitmaps that record.
    async fn views_of(&self, image: &Qcow2Image) -> Vec<BitmapView> {
        let mut views = Vec::new();
        let is_viewable = |model: &&BitmapModel| model.enabled && !model.in_use && model.earlier.is_none();
        for model in self.models.iter().filter(is_viewable) {
            views.push(image.view_bitmap(model.name).await.expect("it is there, whatever it marks"));
        }
        views
    }

    async fn compare_views(&self, views: &[BitmapView]) {
        for view in views {
            let model = self.models.iter().find(|model| model.name == &**view.name()).expect("ours");
            assert_eq!(
                marked_granules_of_view(view, &self.image, model).await,
                model.all(),
                "{}",
                model.name
            );
        }
    }

    async fn compare_recorded(&self) {
        for model in &self.models {
            let marked = marked_granules(&self.image, model).await;
            if model.earlier.is_some() {
                assert_eq!(marked, Err(BitmapViewError::Busy(model.name.to_owned())));
                continue;
            }
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
                assert_eq!(marked.as_ref(), Ok(&model.stored), "{}", model.name);
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
            model.resize(MAX_UNITS * UNIT, MAX_UNITS / 2 * UNIT);
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
