//! The prefetch layer: answers reads from memory if their data was read ahead, and reads ahead of
//! sequential readers.
//!
//! ```text
//!   read ──► PrefetchCache (policy) ── found ──────► copied from its chunk, after a wait     chunk.rs
//!               │        │
//!               │        └─ missing ──► image
//!               └─ ReadAhead ──► a task: image ──► chunk                                     fetch.rs
//!
//!   write ──► overlapping chunks are invalidated ──► image ──► may be read ahead again
//! ```
//!
//! `policy` decides what to read ahead and what to keep, behind a lock that is held for a decision
//! and never across an `.await`. The data is in chunks that all workers share. A guest gets a copy,
//! so that memory is freed when the cache drops it, and not when the slowest client has read its
//! reply.
//!
//! A read-ahead that fails is not reported. A read of the data goes to the image and returns the
//! image's error.
//!
//! Never caches data that was requested, only data that was read ahead. Never delays a read for a
//! read-ahead, except for the one with its own data.

mod chunk;
mod fetch;

use std::{
    future::Future,
    ops::Range,
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use policy::{
    prefetch::{
        CacheLookup, CachePart, CachedRange, InvalidPrefetchSettings, PrefetchCache, PrefetchConfig,
        PrefetchMode, PrefetchStats, ReadAhead, WriteId,
    },
    throttle::SpareRefund,
};

use smallvec::SmallVec;

use self::{
    chunk::PrefetchChunk,
    fetch::{FetchCounter, fetch},
};
use crate::current_image::CurrentImage;
use image::Image;
use reactor::{
    buffer::{ReadTarget, Segments},
    error::Result,
    ublk::RegisteredData,
};
use storage::Storage;

/// A disk's prefetch cache, whose settings can be changed while it runs.
#[derive(Debug)]
pub struct Prefetch {
    shared: Arc<PrefetchShared>,
}

/// State shared by the disk and its read-aheads.
#[derive(Debug)]
struct PrefetchShared {
    image: Arc<CurrentImage>,
    state: Mutex<PrefetchState>,
    /// True if the cache is on; if it is off, reads skip the lock.
    is_on: AtomicBool,
    fetches: FetchCounter,
}

#[derive(Debug)]
struct PrefetchState {
    cache: PrefetchCache<Arc<PrefetchChunk>>,
    /// Settings as configured. [`PrefetchMode::Auto`] is in force as off if there is nothing to
    /// gain.
    settings: PrefetchConfig,
    /// True after [`Prefetch::stop`]: nothing is read ahead.
    stopped: bool,
}

impl Prefetch {
    /// Creates the cache of a disk with this image, which may be replaced; off until it is [set](Prefetch::set).
    pub(crate) fn new(image: &Arc<CurrentImage>) -> Self {
        let settings = PrefetchConfig::off();
        let cache = PrefetchCache::default();
        let state = Mutex::new(PrefetchState { cache, settings, stopped: false });
        let is_on = AtomicBool::new(false);
        let shared =
            PrefetchShared { image: Arc::clone(image), state, is_on, fetches: FetchCounter::default() };
        Self { shared: Arc::new(shared) }
    }

    /// Settings as configured.
    pub fn settings(&self) -> PrefetchConfig {
        self.shared.with_state(|state| state.settings)
    }

    /// Changes the settings at once. Cached data is kept as far as they allow.
    ///
    /// # Errors
    /// [`InvalidPrefetchSettings`]: nothing is changed.
    pub fn set(&self, settings: PrefetchConfig) -> std::result::Result<(), InvalidPrefetchSettings> {
        let can_help = self.shared.image.with(can_help);
        self.shared.with_state(|state| {
            self.shared.apply_settings(state, state.in_force(settings, can_help))?;
            state.settings = settings;
            Ok(())
        })
    }

    /// Puts the settings in force for an image that has replaced another one with the same content:
    /// [`PrefetchMode::Auto`] depends on the image. Cached data stays valid.
    pub(crate) fn follow_image(&self) {
        let can_help = self.shared.image.with(can_help);
        self.shared.with_state(|state| {
            let in_force = state.in_force(state.settings, can_help);
            self.shared.apply_settings(state, in_force).expect("they were valid before");
        });
    }

    /// True if the cache is on.
    pub(crate) fn is_on(&self) -> bool {
        self.shared.is_on.load(Relaxed)
    }

    /// Current maximum size of the cache, in bytes.
    pub(crate) fn max_bytes(&self) -> u64 {
        if self.shared.is_on.load(Relaxed) { self.settings().memory_bytes } else { 0 }
    }

    /// Maximum size of the cache with any image, in bytes.
    pub(crate) fn max_bytes_of_any_image(&self) -> u64 {
        let settings = self.settings();
        if settings.mode == PrefetchMode::Off { 0 } else { settings.memory_bytes }
    }

    /// Counters so far, and current content.
    pub fn stats(&self) -> PrefetchStats {
        self.shared.with_state(|state| state.cache.stats())
    }

    /// Adds the counters of another process.
    pub fn add_stats(&self, stats: &PrefetchStats) {
        self.shared.with_state(|state| state.cache.add_stats(stats));
    }

    /// Reads into `target` at `offset`, inside the disk, for `requests` merged client requests.
    /// `may` decides whether the read-ahead is admitted: see [`PrefetchCache::read`].
    pub(crate) async fn read(
        &self,
        offset: u64,
        target: ReadTarget,
        requests: u64,
        may: impl FnOnce(&ReadAhead, SpareRefund) -> bool,
    ) -> Result<Segments> {
        let image = self.shared.image.get();
        let range = offset..offset.saturating_add(target.len() as u64);
        let (found, read_ahead) = self.look_up(&image, range, requests, may);
        match found {
            CacheLookup::Nothing if read_ahead.is_none() => image.read_to(offset, target).await,
            // Boxed and separate, so that the unusual path does not enlarge the future of every
            // read.
            CacheLookup::Nothing => {
                Box::pin(self.start_after(image.read_to(offset, target), read_ahead)).await
            }
            CacheLookup::Whole(cached) => {
                if let Some(read_ahead) = read_ahead {
                    self.start_fetches(&read_ahead);
                }
                match chunk_data(&cached).await {
                    Some(data) => Ok(target.copy_of(data)),
                    None => image.read_to(offset, target).await,
                }
            }
            CacheLookup::Parts(parts) => {
                let reading = self.read_parts(&image, offset, parts, target);
                Box::pin(self.start_after(reading, read_ahead)).await
            }
        }
    }

    /// As [`Prefetch::read`], into a registered buffer; data that was read ahead is copied there.
    pub(crate) async fn read_registered(
        &self,
        offset: u64,
        buffer: &RegisteredData,
        requests: u64,
        may: impl FnOnce(&ReadAhead, SpareRefund) -> bool,
    ) -> Result<()> {
        let image = self.shared.image.get();
        let range = offset..offset.saturating_add(buffer.bytes() as u64);
        let (found, read_ahead) = self.look_up(&image, range, requests, may);
        match found {
            CacheLookup::Nothing if read_ahead.is_none() => image.read_registered(offset, buffer).await,
            CacheLookup::Nothing => {
                Box::pin(self.start_after(image.read_registered(offset, buffer), read_ahead)).await
            }
            CacheLookup::Whole(cached) => {
                if let Some(read_ahead) = read_ahead {
                    self.start_fetches(&read_ahead);
                }
                match chunk_data(&cached).await {
                    Some(data) => buffer.copy_in(0, data),
                    None => image.read_registered(offset, buffer).await,
                }
            }
            CacheLookup::Parts(parts) => {
                let reading = self.read_parts(&image, offset, parts, ReadTarget::Anywhere(buffer.bytes()));
                buffer.copy_in_segments(&Box::pin(self.start_after(reading, read_ahead)).await?)
            }
        }
    }

    /// Looks a read up: the parts that are in memory, and the read-ahead that it causes.
    fn look_up(
        &self,
        image: &Image,
        range: Range<u64>,
        requests: u64,
        may: impl FnOnce(&ReadAhead, SpareRefund) -> bool,
    ) -> (CacheLookup<Arc<PrefetchChunk>>, Option<ReadAhead>) {
        let size_bytes = image.size_bytes();
        // Exports validate ranges, but a disk has other callers, and the image returns the right
        // error.
        let is_inside = !range.is_empty() && range.end <= size_bytes;
        // If a backing file was changed, reads of it must fail rather than return cached data.
        let is_enabled = self.shared.is_on.load(Relaxed) && !image.has_changed_below();
        match is_inside && is_enabled {
            true => self.shared.with_state(|state| state.cache.read(range, requests, size_bytes, may)),
            false => (CacheLookup::Nothing, None),
        }
    }

    /// Reads a partly cached range. One missing part is read from the image. With several missing
    /// parts everything is read: one read of the image is faster than several in sequence.
    async fn read_parts(
        &self,
        image: &Image,
        offset: u64,
        parts: Vec<CachePart<Arc<PrefetchChunk>>>,
        mut target: ReadTarget,
    ) -> Result<Segments> {
        if parts.iter().filter(|part| matches!(part, CachePart::Missing(_))).count() > 1 {
            return image.read_to(offset, target).await;
        }
        let all = target.duplicate();
        let mut targets: SmallVec<[Option<ReadTarget>; 4]> =
            parts.iter().map(|part| Some(target.split_front(part.length() as usize))).collect();
        let mut missing = Segments::default();
        // The missing part first; chunks in flight arrive meanwhile.
        for (part, target) in parts.iter().zip(&mut targets) {
            if let CachePart::Missing(range) = part
                && let Some(target) = target.take()
            {
                missing = image.read_to(range.start, target).await?;
            }
        }
        let mut data = Segments::default();
        for (part, target) in parts.iter().zip(targets) {
            match (part, target) {
                (CachePart::Cached(cached), Some(target)) => match chunk_data(cached).await {
                    Some(bytes) => data.append(target.copy_of(bytes)),
                    None => return image.read_to(offset, all).await,
                },
                _ => data.append(std::mem::take(&mut missing)),
            }
        }
        Ok(data)
    }

    /// Polls a read once and then starts the read-ahead, so that the read is submitted first.
    /// Returns when the read has completed.
    async fn start_after<T>(&self, reading: impl Future<Output = T>, mut read_ahead: Option<ReadAhead>) -> T {
        let mut reading = pin!(reading);
        std::future::poll_fn(|context| {
            let result = reading.as_mut().poll(context);
            if let Some(read_ahead) = read_ahead.take() {
                self.start_fetches(&read_ahead);
            }
            result
        })
        .await
    }

    fn start_fetches(&self, read_ahead: &ReadAhead) {
        for range in read_ahead.ranges() {
            reactor::spawn(fetch(Arc::clone(&self.shared), *read_ahead, range));
        }
    }

    /// Executes a change of `length` bytes at `offset`: a write, zeroing, discarding, resizing.
    /// From its beginning, reads of the range miss the cache; until its end, the range is not read
    /// ahead. A change whose request was cancelled has no end and may take effect at any time, so
    /// its range is never read ahead again.
    pub(crate) async fn change<T>(&self, offset: u64, length: u64, changing: impl Future<Output = T>) -> T {
        let write_id = self.begin_change(offset, length);
        let result = changing.await;
        self.end_change(write_id);
        result
    }

    /// Begins a [`Prefetch::change`], for callers that await the change themselves: passing its
    /// future to `change` would double the size of theirs.
    pub(crate) fn begin_change(&self, offset: u64, length: u64) -> WriteId {
        let range = offset..offset.saturating_add(length);
        self.shared.with_state(|state| state.cache.write_begins(range))
    }

    /// Ends a [`Prefetch::change`].
    pub(crate) fn end_change(&self, write_id: WriteId) {
        self.shared.with_state(|state| state.cache.write_ends(write_id));
    }

    /// Drops all cached data: the image may have changed.
    pub fn invalidate_all(&self) {
        self.shared.with_state(|state| {
            let write = state.cache.write_begins(0..u64::MAX);
            state.cache.write_ends(write);
        });
    }

    /// Stops reading ahead, and waits for read-aheads in flight.
    pub(crate) async fn stop(&self) {
        self.shared.with_state(|state| {
            state.stopped = true;
            self.shared.apply_settings(state, PrefetchConfig::off()).expect("the defaults are valid");
        });
        self.shared.fetches.wait_idle().await;
    }

    /// Undoes [`Prefetch::stop`]. The cache is empty.
    pub(crate) fn restart(&self) {
        self.shared.with_state(|state| {
            state.stopped = false;
            let settings = state.settings;
            self.shared.apply_settings(state, settings).expect("they were in force before");
        });
    }
}

impl PrefetchState {
    /// Settings in force, for an image that a cache [can help](can_help) or not.
    fn in_force(&self, settings: PrefetchConfig, can_help: bool) -> PrefetchConfig {
        let is_off = self.stopped || settings.mode == PrefetchMode::Auto && !can_help;
        PrefetchConfig { mode: if is_off { PrefetchMode::Off } else { settings.mode }, ..settings }
    }
}

impl PrefetchShared {
    /// Applies settings to the cache.
    fn apply_settings(
        &self,
        state: &mut PrefetchState,
        in_force: PrefetchConfig,
    ) -> std::result::Result<(), InvalidPrefetchSettings> {
        state.cache.set(in_force)?;
        // Relaxed: a concurrent read that sees the old value is ordered before the change.
        self.is_on.store(in_force.mode != PrefetchMode::Off, Relaxed);
        Ok(())
    }

    /// Runs a decision under the lock. Memory that it drops is freed after the lock.
    fn with_state<T>(&self, decide: impl FnOnce(&mut PrefetchState) -> T) -> T {
        // A panic under the lock is a bug in policy; release builds abort.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let decided = decide(&mut state);
        let dropped = state.cache.take_dropped_tokens();
        drop(state);
        drop(dropped);
        decided
    }
}

/// Waits for the bytes of a chunk; `None` if they could not be read.
async fn chunk_data(cached: &CachedRange<Arc<PrefetchChunk>>) -> Option<&[u8]> {
    let Range { start, end } = cached.range;
    let data = cached.token.data().await?;
    Some(&data[start as usize..end as usize])
}

/// True if caching can help: false if the image is in memory, or other processes may change it.
fn can_help(image: &Image) -> bool {
    let is_in_memory = |image: &Image| matches!(image.storage(), Storage::Memory(_) | Storage::Null(_));
    !image.storage().has_other_writers() && !image.chain().all(is_in_memory)
}
