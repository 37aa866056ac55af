//! The prefetch layer: answers reads from memory if their data was read ahead, and reads ahead of
//! sequential readers.
//!
//! ```text
//!   read ──► policy::prefetch::Cache ── found ────► copied from its chunk, after a wait     chunk.rs
//!               │        │
//!               │        └─ missing ──► image
//!               └─ Ahead ──► a task: image ──► chunk                                        fetch.rs
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
    prefetch::{Ahead, Cache, Cached, Found, Invalid, Mode, Part, Settings, Stats, WriteId},
    throttle::GivenBack,
};

use smallvec::SmallVec;

use self::{
    chunk::Chunk,
    fetch::{Flights, fetch},
};
use image::Image;
use reactor::{
    buffer::{Segments, Target},
    error::Result,
    ublk::Registered,
};
use storage::Storage;

/// A disk's prefetch cache, whose settings can be changed while it runs.
#[derive(Debug)]
pub struct Prefetch {
    shared: Arc<Shared>,
}

/// State shared by the disk and its read-aheads.
#[derive(Debug)]
struct Shared {
    image: Arc<Image>,
    state: Mutex<State>,
    /// True if the cache is on; if it is off, reads skip the lock.
    is_on: AtomicBool,
    flights: Flights,
}

#[derive(Debug)]
struct State {
    cache: Cache<Arc<Chunk>>,
    /// Settings as configured. [`Mode::Auto`] is in force as off if there is nothing to gain.
    settings: Settings,
    /// True after [`Prefetch::stop`]: nothing is read ahead.
    stopped: bool,
}

impl Prefetch {
    /// Creates the cache of a disk with this image; off until it is [set](Prefetch::set).
    pub(crate) fn new(image: &Arc<Image>) -> Self {
        let settings = Settings::off();
        let cache = Cache::default();
        let state = Mutex::new(State { cache, settings, stopped: false });
        let is_on = AtomicBool::new(false);
        let shared = Shared { image: Arc::clone(image), state, is_on, flights: Flights::default() };
        Self { shared: Arc::new(shared) }
    }

    /// Settings as configured.
    pub fn settings(&self) -> Settings {
        self.shared.with(|state| state.settings)
    }

    /// Changes the settings at once. Cached data is kept as far as they allow.
    ///
    /// # Errors
    /// [`Invalid`]: nothing is changed.
    pub fn set(&self, settings: Settings) -> std::result::Result<(), Invalid> {
        let mut in_force = settings;
        if settings.mode == Mode::Auto && !is_worth_it(&self.shared.image) {
            in_force.mode = Mode::Off;
        }
        self.shared.with(|state| {
            if state.stopped {
                in_force.mode = Mode::Off;
            }
            self.shared.put(state, in_force)?;
            state.settings = settings;
            Ok(())
        })
    }

    /// True if the cache is on.
    pub(crate) fn is_on(&self) -> bool {
        self.shared.is_on.load(Relaxed)
    }

    /// Current maximum size of the cache, in bytes.
    pub(crate) fn most_bytes(&self) -> u64 {
        if self.shared.is_on.load(Relaxed) { self.settings().memory_bytes } else { 0 }
    }

    /// Counters so far, and current content.
    pub fn stats(&self) -> Stats {
        self.shared.with(|state| state.cache.stats())
    }

    /// Adds the counters of another process.
    pub fn count_on(&self, stats: &Stats) {
        self.shared.with(|state| state.cache.count_on(stats));
    }

    /// Reads into `target` at `offset`, inside the disk, for `requests` merged client requests.
    /// `may` decides whether the read-ahead is admitted: see [`Cache::read`].
    pub(crate) async fn read(
        &self,
        offset: u64,
        target: Target,
        requests: u64,
        may: impl FnOnce(&Ahead, GivenBack) -> bool,
    ) -> Result<Segments> {
        let image = &self.shared.image;
        let (found, ahead) = self.look(offset, target.len(), requests, may);
        match found {
            Found::Nothing if ahead.is_none() => image.read_to(offset, target).await,
            // Boxed and separate, so that the unusual path does not enlarge the future of every
            // read.
            Found::Nothing => Box::pin(self.start_behind(image.read_to(offset, target), ahead)).await,
            Found::Whole(cached) => {
                if let Some(ahead) = ahead {
                    self.start(&ahead);
                }
                match data_of(&cached).await {
                    Some(data) => Ok(target.copy_of(data)),
                    None => image.read_to(offset, target).await,
                }
            }
            Found::Parts(parts) => {
                Box::pin(self.start_behind(self.read_parts(offset, parts, target), ahead)).await
            }
        }
    }

    /// As [`Prefetch::read`], into a registered buffer; data that was read ahead is copied there.
    pub(crate) async fn read_registered(
        &self,
        offset: u64,
        buffer: &Registered,
        requests: u64,
        may: impl FnOnce(&Ahead, GivenBack) -> bool,
    ) -> Result<()> {
        let image = &self.shared.image;
        let (found, ahead) = self.look(offset, buffer.bytes(), requests, may);
        match found {
            Found::Nothing if ahead.is_none() => image.read_registered(offset, buffer).await,
            Found::Nothing => Box::pin(self.start_behind(image.read_registered(offset, buffer), ahead)).await,
            Found::Whole(cached) => {
                if let Some(ahead) = ahead {
                    self.start(&ahead);
                }
                match data_of(&cached).await {
                    Some(data) => buffer.put(0, data),
                    None => image.read_registered(offset, buffer).await,
                }
            }
            Found::Parts(parts) => {
                let reading = self.read_parts(offset, parts, Target::Anywhere(buffer.bytes()));
                buffer.put_all(&Box::pin(self.start_behind(reading, ahead)).await?)
            }
        }
    }

    /// Looks a read up: the parts that are in memory, and the read-ahead that it causes.
    fn look(
        &self,
        offset: u64,
        length: usize,
        requests: u64,
        may: impl FnOnce(&Ahead, GivenBack) -> bool,
    ) -> (Found<Arc<Chunk>>, Option<Ahead>) {
        let size_bytes = self.shared.image.size_bytes();
        // Exports validate ranges, but a disk has other callers, and the image returns the right
        // error.
        let end = offset.checked_add(length as u64).filter(|&end| end <= size_bytes && length > 0);
        // If a backing file was changed, reads of it must fail rather than return cached data.
        let may_look = self.shared.is_on.load(Relaxed) && !self.shared.image.has_changed_below();
        match end.filter(|_| may_look) {
            Some(end) => self.shared.with(|state| state.cache.read(offset..end, requests, size_bytes, may)),
            None => (Found::Nothing, None),
        }
    }

    /// Reads a partly cached range. One missing part is read from the image. With several missing
    /// parts everything is read: one read of the image is faster than several in sequence.
    async fn read_parts(
        &self,
        offset: u64,
        parts: Vec<Part<Arc<Chunk>>>,
        mut target: Target,
    ) -> Result<Segments> {
        let image = &self.shared.image;
        if parts.iter().filter(|part| matches!(part, Part::Missing(_))).count() > 1 {
            return image.read_to(offset, target).await;
        }
        let all = target.again();
        let mut targets: SmallVec<[Option<Target>; 4]> =
            parts.iter().map(|part| Some(target.split_front(part.length() as usize))).collect();
        let mut rest = Segments::default();
        // The missing part first; chunks in flight arrive meanwhile.
        for (part, target) in parts.iter().zip(&mut targets) {
            if let Part::Missing(range) = part
                && let Some(target) = target.take()
            {
                rest = image.read_to(range.start, target).await?;
            }
        }
        let mut data = Segments::default();
        for (part, target) in parts.iter().zip(targets) {
            match (part, target) {
                (Part::Cached(cached), Some(target)) => match data_of(cached).await {
                    Some(bytes) => data.append(target.copy_of(bytes)),
                    None => return image.read_to(offset, all).await,
                },
                _ => data.append(std::mem::take(&mut rest)),
            }
        }
        Ok(data)
    }

    /// Polls a read once before it starts the read-ahead, so that the read is submitted first; then
    /// waits for the read.
    async fn start_behind<T>(&self, reading: impl Future<Output = T>, mut ahead: Option<Ahead>) -> T {
        let mut reading = pin!(reading);
        std::future::poll_fn(|context| {
            // The first poll submits the read, so that it precedes the read-ahead in the queue.
            let result = reading.as_mut().poll(context);
            if let Some(ahead) = ahead.take() {
                self.start(&ahead);
            }
            result
        })
        .await
    }

    fn start(&self, ahead: &Ahead) {
        for range in ahead.ranges() {
            reactor::spawn(fetch(Arc::clone(&self.shared), *ahead, range));
        }
    }

    /// Executes a change of `length` bytes at `offset`: a write, zeroing, discarding, resizing.
    /// From its beginning nothing of the range is found, and until its end nothing is read ahead
    /// there. If the end is missing, because the request was cancelled, the change may take effect
    /// at any time: nothing is read ahead there any more.
    pub(crate) async fn change<T>(&self, offset: u64, length: u64, changing: impl Future<Output = T>) -> T {
        let begun = self.change_begins(offset, length);
        let result = changing.await;
        self.change_ends(begun);
        result
    }

    /// Begins a [`Prefetch::change`], for callers that await the change themselves: passing a
    /// future on would double its size.
    pub(crate) fn change_begins(&self, offset: u64, length: u64) -> WriteId {
        let range = offset..offset.saturating_add(length);
        self.shared.with(|state| state.cache.write_begins(range))
    }

    /// Ends a [`Prefetch::change`].
    pub(crate) fn change_ends(&self, begun: WriteId) {
        self.shared.with(|state| state.cache.write_ends(begun));
    }

    /// Drops all cached data: the image may have changed.
    pub(crate) fn forget(&self) {
        self.shared.with(|state| {
            let write = state.cache.write_begins(0..u64::MAX);
            state.cache.write_ends(write);
        });
    }

    /// Stops reading ahead, and waits for read-aheads in flight.
    pub(crate) async fn stop(&self) {
        self.shared.with(|state| {
            state.stopped = true;
            self.shared.put(state, Settings::off()).expect("the defaults are valid");
        });
        self.shared.flights.all_landed().await;
    }

    /// Undoes [`Prefetch::stop`]. The cache is empty.
    pub(crate) fn go_on(&self) {
        self.shared.with(|state| {
            state.stopped = false;
            let settings = state.settings;
            self.shared.put(state, settings).expect("they were in force before");
        });
    }
}

impl Shared {
    /// Applies settings to the cache.
    fn put(&self, state: &mut State, in_force: Settings) -> std::result::Result<(), Invalid> {
        state.cache.set(in_force)?;
        // Relaxed: a read that just misses it counts as one before it.
        self.is_on.store(in_force.mode != Mode::Off, Relaxed);
        Ok(())
    }

    /// Runs a decision under the lock. Memory that it drops is freed after the lock.
    fn with<T>(&self, decide: impl FnOnce(&mut State) -> T) -> T {
        // A panic under the lock is a bug in policy; release builds abort.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let decided = decide(&mut state);
        let dropped = state.cache.take_dropped();
        drop(state);
        drop(dropped);
        decided
    }
}

/// Waits for the bytes of a chunk; `None` if they could not be read.
async fn data_of(cached: &Cached<Arc<Chunk>>) -> Option<&[u8]> {
    let Range { start, end } = cached.range;
    let data = cached.token.data().await?;
    Some(&data[start as usize..end as usize])
}

/// True if caching can help: false if the image is in memory, or other processes may change it.
fn is_worth_it(image: &Image) -> bool {
    let is_in_memory = |image: &Image| matches!(image.storage(), Storage::Memory(_) | Storage::Null(_));
    !image.storage().may_be_written_by_others() && !image.chain().all(is_in_memory)
}
