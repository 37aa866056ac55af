//! Bitmaps that record writes, from opening an image for writing to its close, handover or upgrade.
//!
//! ```text
//!               opened: bits are read    first change          closed: bits, then directory
//!   in memory               │                 │▓▓▓▓▓ every change sets marks ▓▓▓▓▓│
//!   in the file  consistent ┴─────────────────┴─ in use ──────────────────────────┴ consistent
//! ```
//!
//! A bitmap that is found in use may lack marks: a crash leaves it so, and QEMU ignores it. The
//! file therefore needs no updates in between, and recording costs no I/O except at the first
//! change. QEMU marks bitmaps as in use when it opens the image; here an image that is opened and
//! not changed keeps its bitmaps even after a crash.
//!
//! Bitmaps with the flag `auto` that are not in use record. All others stay as they are, except
//! that their size follows the disk's.
//!
//! A mark is set before the change that it records, and stays if the change fails: a bitmap may
//! have too many marks, never too few. So growing the disk marks the added space, which QEMU does
//! not: after a shrink, a backup has other data there.
//!
//! A transient bitmap is not in the file: it ends when the image is closed or passes to another
//! process. A bitmap that begins anew for a backup keeps its earlier marks until the end of the
//! backup ([`rotate`](super::rotate)).
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Bitmaps extension"; docs/interop/bitmaps.rst.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use arc_swap::{ArcSwap, Guard};

use super::{
    BitmapCluster, BitmapEntry, BitmapError, DirtyBits,
    directory::{MAX_BITS, flag},
    live::LiveBits,
};
use reactor::{
    error::Result as IoResult,
    memory::{MemoryBudget, MemoryReservation, OutOfBudget},
};
use storage::RangeLocks;

use crate::qcow2::{InvalidImage, Qcow2Image, header::FileRegion};

// Name in messages that concern no single bitmap.
const ANY: &str = "of any name";
/// Purpose of the memory in messages.
pub(super) const PURPOSE: &str = "bitmaps that record writes";
// Memory limit of the recorded bitmaps of an image, in bytes.
const MAX_RECORDED: u64 = 1 << 30;

/// State of the bitmaps that record writes.
#[derive(Debug, Default)]
pub(in crate::qcow2) struct Recording {
    /// True if the file marks bitmaps that should record as consistent; must be false while the
    /// disk changes.
    is_marked_consistent: AtomicBool,
    /// Serializes changes of the in-use flags in the file.
    flags_lock: RangeLocks,
    /// True if `bitmaps` is valid: false before the first request and while another process uses
    /// the image.
    is_loaded: AtomicBool,
    /// Replaced only while no request is in flight.
    bitmaps: ArcSwap<Vec<Arc<RecordingBitmap>>>,
}

/// A bitmap in memory.
#[derive(Debug)]
pub(super) struct RecordingBitmap {
    name: Vec<u8>,
    /// True if the bitmap is in the file, or will be.
    is_persistent: bool,
    /// False for a transient bitmap that records nothing. Changes only while no request is in
    /// flight.
    is_enabled: AtomicBool,
    bits: ArcSwap<LiveBits>,
    /// True if the bits differ from the file.
    changed: AtomicBool,
    state: Mutex<RecordingState>,
}

/// State that is changed together with the bits, other than by marks.
#[derive(Debug)]
struct RecordingState {
    /// Reservation of memory for all of its bits, allocated or not.
    memory: MemoryReservation,
    earlier: Option<EarlierMarks>,
}

/// Marks of before the begin of a backup, which belong to the bitmap until the backup succeeds.
#[derive(Debug)]
struct EarlierMarks {
    bits: Arc<LiveBits>,
    memory: MemoryReservation,
}

impl RecordingBitmap {
    pub(super) fn new(name: &[u8], bits: &DirtyBits, is_persistent: bool, memory: MemoryReservation) -> Self {
        Self {
            name: name.to_vec(),
            is_persistent,
            is_enabled: AtomicBool::new(true),
            bits: ArcSwap::from_pointee(LiveBits::of(bits)),
            changed: AtomicBool::new(false),
            state: Mutex::new(RecordingState { memory, earlier: None }),
        }
    }

    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(super) fn is_persistent(&self) -> bool {
        self.is_persistent
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.is_enabled.load(Relaxed)
    }

    /// Starts or stops the recording of a transient bitmap. No request may be in flight.
    pub(super) fn set_enabled(&self, is_enabled: bool) {
        self.is_enabled.store(is_enabled, Relaxed);
    }

    /// True while a backup uses the marks of before its begin.
    pub(super) fn is_busy(&self) -> bool {
        self.lock().earlier.is_some()
    }

    fn mark(&self, range: Range<u64>) {
        if self.is_enabled() && self.bits.load().mark(range) && !self.changed.load(Relaxed) {
            self.changed.store(true, Relaxed);
        }
    }

    /// Changes the size of the disk from `from` bytes. No request may be marking.
    fn resize(&self, from: u64, to: u64) {
        let mut state = self.lock();
        let resized = |bits: &LiveBits| {
            let mut resized = bits.to_dirty_bits().resized(to);
            if self.is_enabled() {
                resized.mark(from..to);
            }
            Arc::new(LiveBits::of(&resized))
        };
        let bits = self.bits.load_full();
        let bytes = DirtyBits::bytes_for(to, bits.granularity_bits());
        // Sizes that exceed the budget were rejected before.
        let _ = state.memory.change(bytes);
        if let Some(earlier) = &mut state.earlier {
            let _ = earlier.memory.change(bytes);
            earlier.bits = resized(&earlier.bits);
        }
        self.bits.store(resized(&bits));
        self.changed.store(true, Relaxed);
    }

    /// The present bits, and those of before the begin of a backup. A run of the bitmap is one of
    /// their union.
    pub(super) fn live_bits(&self) -> (Arc<LiveBits>, Option<Arc<LiveBits>>) {
        let state = self.lock();
        (self.bits.load_full(), state.earlier.as_ref().map(|earlier| Arc::clone(&earlier.bits)))
    }

    /// The bits differ from the file, or may do so.
    pub(super) fn set_changed(&self) {
        self.changed.store(true, Relaxed);
    }

    /// All marks, those of before the begin of a backup included. Marks that are set concurrently
    /// may be missing.
    pub(super) fn all_marks(&self) -> DirtyBits {
        let state = self.lock();
        let mut bits = self.bits.load().to_dirty_bits();
        if let Some(earlier) = &state.earlier {
            bits.merge(&earlier.bits.to_dirty_bits());
        }
        bits
    }

    /// Bits of this bitmap without marks.
    pub(super) fn no_marks(&self) -> DirtyBits {
        let bits = self.bits.load();
        DirtyBits::new(bits.size_bytes(), bits.granularity_bits())
    }

    /// Replaces the marks by those of the file, `bits`. No request may be marking.
    pub(super) fn replace(&self, bits: &DirtyBits) {
        let _state = self.lock();
        self.bits.store(Arc::new(LiveBits::of(bits)));
        self.changed.store(false, Relaxed);
    }

    /// Begins anew without marks, and returns the earlier ones, which stay a part of the bitmap
    /// until [`RecordingBitmap::end_rotation`]. No request may be in flight.
    pub(super) fn begin_rotation(&self) -> Result<Arc<LiveBits>, BitmapError> {
        let mut state = self.lock();
        if state.earlier.is_some() {
            return Err(BitmapError::Busy(String::from_utf8_lossy(&self.name).into_owned()));
        }
        let bits = self.bits.load_full();
        let bytes = DirtyBits::bytes_for(bits.size_bytes(), bits.granularity_bits());
        let memory = MemoryReservation::new(MemoryBudget::process(), PURPOSE, bytes)?;
        self.bits.store(Arc::new(LiveBits::of(&self.no_marks())));
        self.changed.store(true, Relaxed);
        state.earlier = Some(EarlierMarks { bits: Arc::clone(&bits), memory });
        Ok(bits)
    }

    /// Ends a rotation: drops the earlier marks, or adds them to those that were set since.
    pub(super) fn end_rotation(&self, are_dropped: bool) {
        let mut state = self.lock();
        let Some(earlier) = state.earlier.take() else { return };
        if !are_dropped {
            // Requests may be marking. The lock excludes a replacement of the bits.
            let bits = self.bits.load();
            for range in earlier.bits.to_dirty_bits().marked() {
                bits.mark(range);
            }
            self.changed.store(true, Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, RecordingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Qcow2Image {
    pub(super) fn recorded(&self) -> Guard<Arc<Vec<Arc<RecordingBitmap>>>> {
        self.recording.bitmaps.load()
    }

    /// True if there are bitmaps in memory.
    pub(in crate::qcow2) fn has_recorded_bitmaps(&self) -> bool {
        !self.recorded().is_empty()
    }

    /// Bitmap in memory with this name.
    pub(super) fn recorded_bitmap(&self, name: &str) -> Option<Arc<RecordingBitmap>> {
        self.recorded().iter().find(|recorded| recorded.name == name.as_bytes()).cloned()
    }

    /// Names of the persistent bitmaps that record, as text.
    pub fn recorded_names(&self) -> Vec<String> {
        let recorded = self.recorded();
        let persistent = recorded.iter().filter(|recorded| recorded.is_persistent);
        persistent.map(|recorded| String::from_utf8_lossy(&recorded.name).into_owned()).collect()
    }

    /// Changes the list of bitmaps in memory. No request may be in flight.
    pub(super) fn change_recorded(&self, change: impl FnOnce(&mut Vec<Arc<RecordingBitmap>>)) {
        let mut recorded = Vec::clone(&self.recorded());
        change(&mut recorded);
        self.recording.bitmaps.store(recorded.into());
    }

    /// The next change of the disk marks the bitmaps as in use in the file again. No request may be
    /// in flight.
    pub(super) fn mark_in_use_at_next_change(&self) {
        self.recording.is_marked_consistent.store(true, Release);
    }

    /// Reserves memory for the bits of another bitmap.
    ///
    /// # Errors
    /// [`BitmapError::Memory`], [`BitmapError::InvalidValue`].
    pub(super) fn reserve_bits(&self, granularity_bits: u32) -> Result<MemoryReservation, BitmapError> {
        let bytes_of = |bits: u32| DirtyBits::bytes_for(self.size_bytes(), bits);
        let used: u64 =
            self.recorded().iter().map(|recorded| bytes_of(recorded.bits.load().granularity_bits())).sum();
        let bytes = bytes_of(granularity_bits);
        check_recorded(used, bytes)?;
        Ok(MemoryReservation::new(MemoryBudget::process(), PURPOSE, bytes)?)
    }

    /// True if the state is valid; false while another process uses the image.
    pub(super) fn has_loaded_bitmaps(&self) -> bool {
        self.recording.is_loaded.load(Acquire)
    }

    /// Invalidates the state: another process is about to use the image and may change its
    /// bitmaps.
    pub(in crate::qcow2) fn invalidate_recording(&self) {
        self.recording.is_loaded.store(false, Release);
        self.recording.bitmaps.store(Arc::default());
    }

    /// Marks a range before it changes. The caller must hold a guard of the gate.
    pub(in crate::qcow2) async fn record(&self, offset: u64, length: u64) -> IoResult<()> {
        if self.recording.is_marked_consistent.load(Acquire) {
            Box::pin(self.mark_recording_in_use()).await?;
        }
        self.mark_recorded(offset, length);
        Ok(())
    }

    /// Marks a range. The bitmaps must already be marked as in use in the file.
    pub(in crate::qcow2) fn mark_recorded(&self, offset: u64, length: u64) {
        for recorded in self.recorded().iter() {
            recorded.mark(offset..offset + length);
        }
    }

    /// Marks the bitmaps that should record as in use in the file, durably, including those that
    /// cannot record.
    pub(in crate::qcow2) async fn mark_recording_in_use(&self) -> IoResult<()> {
        let _lock = self.recording.flags_lock.exclusive(0..1).await;
        // Another task may have marked them while this one waited.
        if !self.recording.is_marked_consistent.load(Acquire) {
            return Ok(());
        }
        if let Some(entries) = self.bitmap_entries().await? {
            let recorded = self.recorded();
            let is_recorded =
                |entry: &BitmapEntry| recorded.iter().any(|recorded| recorded.name == entry.name);
            self.mark_in_use(entries, |entry| entry.flags & flag::AUTO != 0 || is_recorded(entry)).await?;
        }
        // Published after the flags are durable: no request may change the disk earlier.
        self.recording.is_marked_consistent.store(false, Release);
        Ok(())
    }

    /// Reads the bitmaps that should record, unless they are in memory. Must precede the first
    /// request.
    ///
    /// The loss of a bitmap for lack of memory would be noticed only at the next backup, so it is
    /// an error, and the image must not be used.
    ///
    /// # Errors
    /// Errors of the file; `Ok(Err(_))` if the bitmaps exceed the memory budget.
    pub(in crate::qcow2) async fn load_recorded_bitmaps(&self) -> IoResult<Result<(), OutOfBudget>> {
        if self.has_loaded_bitmaps() {
            return Ok(Ok(()));
        }
        let entries = self.bitmap_entries().await?.unwrap_or_default();
        let mut recorded = Vec::new();
        let mut used = 0;
        for entry in entries.iter().filter(|entry| entry.flags & (flag::AUTO | flag::IN_USE) == flag::AUTO) {
            match self.load_recorded_bitmap(entry, &mut used).await {
                Ok(loaded) => recorded.push(Arc::new(loaded)),
                Err(BitmapError::Failed(error)) => return Err(error),
                Err(BitmapError::Memory(error)) => return Ok(Err(error)),
                Err(why) => self.warn_of_loss(&entry.name(), &why),
            }
        }
        self.recording.bitmaps.store(recorded.into());
        self.recording.is_marked_consistent.store(!entries.is_empty(), Release);
        self.recording.is_loaded.store(true, Release);
        Ok(Ok(()))
    }

    async fn load_recorded_bitmap(
        &self,
        entry: &BitmapEntry,
        used: &mut u64,
    ) -> Result<RecordingBitmap, BitmapError> {
        entry.check_usable()?;
        let bytes = DirtyBits::bytes_for(self.size_bytes(), entry.granularity_bits);
        check_recorded(*used, bytes)?;
        *used += bytes;
        let memory = MemoryReservation::new(MemoryBudget::process(), PURPOSE, bytes)?;
        let cluster_bytes = 1 << self.shape.cluster_bits;
        // The clusters of bits and table are freed when the bitmap is stored elsewhere, so they
        // must not overlap other metadata.
        let FileRegion { offset, length } = entry.table();
        let stored = self.bitmap_table(entry).await?.into_iter().filter_map(|part| match part {
            BitmapCluster::Stored(offset) => Some((offset, cluster_bytes)),
            BitmapCluster::Zeroes | BitmapCluster::Ones => None,
        });
        let mut regions = stored.chain([(offset, length)]);
        if let Some((place, _)) = regions.find(|&(offset, length)| self.overlap.contains(offset, length)) {
            return Err(InvalidImage::new(format!("it overlaps other metadata at {place:#x}")).into());
        }
        let bits = self.read_bits(entry, self.size_bytes()).await?;
        Ok(RecordingBitmap::new(&entry.name, &bits, true, memory))
    }

    /// Stores the recorded bits and marks the bitmaps consistent; they stay in memory. No request
    /// may be in flight, and all other metadata must be in the file. Returns the bitmaps that
    /// could not be stored, which stay in use, with the reasons.
    pub(in crate::qcow2) async fn store_recorded_bitmaps(&self) -> Vec<(String, BitmapError)> {
        let mut recorded = Vec::clone(&self.recorded());
        recorded.retain(|recorded| recorded.is_persistent);
        if recorded.is_empty() {
            return Vec::new();
        }
        // Set first: should the disk change after a failure, the flags are written again.
        self.recording.is_marked_consistent.store(true, Release);
        let mut not_stored = Vec::new();
        let result = async {
            let mut stored = BitmapStore::new(self).await?;
            let mut in_file = Vec::new();
            for recorded in &recorded {
                let bits = recorded.changed.load(Relaxed).then(|| recorded.all_marks());
                match stored.store(&recorded.name, bits).await {
                    Ok(()) => in_file.push(recorded),
                    Err(failed) => not_stored.push(failed),
                }
            }
            stored.finish().await?;
            in_file.iter().for_each(|recorded| recorded.changed.store(false, Relaxed));
            Ok(())
        };
        let result: Result<(), BitmapError> = result.await;
        not_stored.extend(result.err().map(|error| (ANY.to_owned(), error)));
        not_stored
    }

    /// Marks all bitmaps as in use before a resize. Returns the names of those that were
    /// consistent.
    pub(in crate::qcow2) async fn suspend_bitmaps(&self) -> IoResult<Vec<Vec<u8>>> {
        let Some(entries) = self.bitmap_entries().await? else { return Ok(Vec::new()) };
        let consistent = entries.iter().filter(|entry| entry.flags & flag::IN_USE == 0);
        let names = consistent.map(|entry| entry.name.clone()).collect();
        self.mark_in_use(entries, |_| true).await?;
        Ok(names)
    }

    /// Changes the size of all bitmaps, and marks the suspended ones consistent in the file. No
    /// request may be in flight.
    pub(in crate::qcow2) async fn resize_bitmaps(&self, from: u64, to: u64, suspended: &[Vec<u8>]) {
        if from != to {
            self.recorded().iter().for_each(|recorded| recorded.resize(from, to));
        }
        if suspended.is_empty() {
            return;
        }
        let result = async {
            let mut stored = BitmapStore::new(self).await?;
            for name in suspended {
                if let Err((name, why)) = stored.resize(name, from, to).await {
                    self.warn_of_loss(&name, &why);
                }
            }
            stored.finish().await
        };
        if let Err(error) = result.await {
            self.warn_of_loss(ANY, &error);
        }
    }

    /// Largest size of the disk at which its bitmaps fit into memory and into the format's limits.
    pub(in crate::qcow2) async fn largest_with_bitmaps(&self) -> IoResult<u64> {
        let entries = self.bitmap_entries().await?.unwrap_or_default();
        let consistent = entries.iter().filter(|entry| entry.flags & flag::IN_USE == 0);
        let consistent = consistent.map(|entry| entry.granularity_bits);
        let recorded: Vec<_> =
            self.recorded().iter().map(|recorded| recorded.bits.load().granularity_bits()).collect();
        let largest = consistent.chain(recorded.iter().copied()).map(|bits| (MAX_BITS * 8) << bits).min();
        // Bits for 2 GiB of the disk, the range of one bit at the coarsest granularity.
        let total: u128 = recorded.iter().map(|bits| 1 << (31 - bits)).sum();
        let now: u64 = recorded.iter().map(|&bits| DirtyBits::bytes_for(self.size_bytes(), bits)).sum();
        let budget = now.saturating_add(MemoryBudget::process().free()).min(MAX_RECORDED);
        let fit = (u128::from(budget * 8) << 31).checked_div(total).unwrap_or(u128::MAX);
        let fit = u64::try_from(fit).unwrap_or(u64::MAX);
        Ok(largest.unwrap_or(u64::MAX).min(fit) & !511)
    }

    pub(in crate::qcow2) fn warn_of_loss(&self, name: &str, why: &BitmapError) {
        let image = self.file.storage().description();
        tracing::error!(
            image,
            bitmap = name,
            "the bitmap cannot be stored and stays marked in-use (remove it): {why}"
        );
    }
}

/// Fails if the bits of a further bitmap exceed the limit of an image.
fn check_recorded(used: u64, bytes: u64) -> Result<(), BitmapError> {
    if used.saturating_add(bytes) > MAX_RECORDED {
        let message = format!("all recording bitmaps would need more than {MAX_RECORDED} bytes of memory");
        return Err(BitmapError::InvalidValue(message));
    }
    Ok(())
}

/// Bitmaps that are being stored: first the bits, then a directory that refers to all of them.
struct BitmapStore<'a> {
    image: &'a Qcow2Image,
    entries: Vec<BitmapEntry>,
    by_name: HashMap<Vec<u8>, usize>,
    /// Previous entries, to be freed.
    old: Vec<BitmapEntry>,
    changed: bool,
}

impl<'a> BitmapStore<'a> {
    async fn new(image: &'a Qcow2Image) -> Result<Self, BitmapError> {
        let entries = image.bitmaps().await?;
        let by_name = entries.iter().enumerate().map(|(index, entry)| (entry.name.clone(), index)).collect();
        Ok(Self { image, entries, by_name, old: Vec::new(), changed: false })
    }

    /// Marks a bitmap consistent with these bits, or with its stored bits.
    async fn store(&mut self, name: &[u8], bits: Option<DirtyBits>) -> Result<(), (String, BitmapError)> {
        let Some(entry) = self.by_name.get(name).map(|&index| &mut self.entries[index]) else {
            return Ok(());
        };
        if bits.is_none() && entry.flags & flag::IN_USE == 0 {
            return Ok(());
        }
        if let Some(bits) = bits {
            let stored = self.image.store_bits(&bits).await;
            let (table_offset, table_entries) = stored.map_err(|why| (entry.name().into_owned(), why))?;
            self.old.push(entry.clone());
            (entry.table_offset, entry.table_entries) = (table_offset, table_entries);
        }
        entry.flags &= !flag::IN_USE;
        self.changed = true;
        Ok(())
    }

    /// Marks a bitmap consistent with its stored bits, for a disk of another size.
    async fn resize(&mut self, name: &[u8], from: u64, to: u64) -> Result<(), (String, BitmapError)> {
        let Some(entry) = self.by_name.get(name).map(|&index| &self.entries[index]) else { return Ok(()) };
        if from == to {
            return self.store(name, None).await;
        }
        let bits = self.image.read_bits(entry, from).await;
        let mut bits = bits.map_err(|why| (entry.name().into_owned(), why))?.resized(to);
        if entry.flags & flag::AUTO != 0 {
            bits.mark(from..to);
        }
        self.store(name, Some(bits)).await
    }

    async fn finish(self) -> Result<(), BitmapError> {
        if !self.changed {
            return Ok(());
        }
        self.image.replace_directory(&self.entries).await?;
        for entry in &self.old {
            self.image.free_bits(entry).await;
        }
        Ok(())
    }
}
