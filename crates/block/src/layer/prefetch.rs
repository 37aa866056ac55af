//! The prefetch layer: answers reads from memory if their data was read ahead, and reads ahead of
//! sequential readers.
//!
//! ```text
//!   read ──► policy::prefetch::Cache ── found ────► copy it out of its chunk, or wait for it    chunk.rs
//!               │        │
//!               │        └─ missing ──► image
//!               └─ Ahead ──► a task: image ──► chunk                                            fetch.rs
//!
//!   write ──► what it overlaps is not found any more ──► image ──► may be read ahead again
//! ```
//!
//! `policy` decides what to read ahead and what to keep, behind a lock that is held for a decision
//! and never across an `.await`. The data is in chunks that all workers share. A guest gets a copy,
//! so that memory is freed when the cache drops it, and not when the slowest client has read its
//! answer.
//!
//! A read-ahead that fails is not reported. Whoever wants the data reads it from the image and gets
//! the image's error.
//!
//! Never caches data that was asked for, only data that was read ahead. Never delays a read for a
//! read-ahead, except for the one that brings its own data.

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

/// A disk's prefetch cache: to look at and to change while it runs.
#[derive(Debug)]
pub struct Prefetch {
    shared: Arc<Shared>,
}

/// What the disk and its read-aheads share.
#[derive(Debug)]
struct Shared {
    image: Arc<Image>,
    state: Mutex<State>,
    /// Whether the cache is on: where it is not, reads are spared the lock.
    is_on: AtomicBool,
    flights: Flights,
}

#[derive(Debug)]
struct State {
    cache: Cache<Arc<Chunk>>,
    /// As they were set; where there is nothing to gain, [`Mode::Auto`] is off.
    settings: Settings,
    /// Nothing is read ahead any more, for good.
    stopped: bool,
}

impl Prefetch {
    /// Of a disk with this image; nothing is read ahead until it is [set](Prefetch::set).
    pub(crate) fn new(image: &Arc<Image>) -> Self {
        let settings = Settings::off();
        let cache = Cache::default();
        let state = Mutex::new(State { cache, settings, stopped: false });
        let is_on = AtomicBool::new(false);
        let shared = Shared { image: Arc::clone(image), state, is_on, flights: Flights::default() };
        Self { shared: Arc::new(shared) }
    }

    /// The settings, as they were set.
    pub fn settings(&self) -> Settings {
        self.shared.with(|state| state.settings)
    }

    /// Puts other settings in force, at once. What is in memory stays as far as they allow.
    ///
    /// # Errors
    /// [`Invalid`]: everything stays as it was.
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

    /// Whether anything is kept or read ahead now.
    pub(crate) fn is_on(&self) -> bool {
        self.shared.is_on.load(Relaxed)
    }

    /// The most that it may hold now, in bytes.
    pub(crate) fn most_bytes(&self) -> u64 {
        if self.shared.is_on.load(Relaxed) { self.settings().memory_bytes } else { 0 }
    }

    /// What it did so far, and what it holds now.
    pub fn stats(&self) -> Stats {
        self.shared.with(|state| state.cache.stats())
    }

    /// Counts on from what another process has counted.
    pub fn count_on(&self, stats: &Stats) {
        self.shared.with(|state| state.cache.count_on(stats));
    }

    /// Reads what `target` wants at `offset`, inside the disk, for `requests` of a client's that
    /// were merged. `may` has the last word on what is read ahead: see [`Cache::read`].
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
            // Apart, because every read has room for what is not.
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

    /// The same, with the data where a request's is: what was read ahead is copied there.
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

    /// What is in memory of a read, and what is to be read ahead because of it.
    fn look(
        &self,
        offset: u64,
        length: usize,
        requests: u64,
        may: impl FnOnce(&Ahead, GivenBack) -> bool,
    ) -> (Found<Arc<Chunk>>, Option<Ahead>) {
        let size_bytes = self.shared.image.size_bytes();
        // Exports let no others through, but a disk has other callers, and the image knows what to
        // say to them.
        let end = offset.checked_add(length as u64).filter(|&end| end <= size_bytes && length > 0);
        let may_look = self.shared.is_on.load(Relaxed) && !self.shared.image.has_changed_below();
        match end.filter(|_| may_look) {
            Some(end) => self.shared.with(|state| state.cache.read(offset..end, requests, size_bytes, may)),
            None => (Found::Nothing, None),
        }
    }

    /// What is missing in one place is read there, and all of it where it is missing in several:
    /// one read from the image takes less time than several, one after the other.
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
        // Before the wait for what is on its way, which comes by itself.
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

    /// Has a read on its way before the read-ahead that it gave rise to, if there is one, and then
    /// waits for it.
    async fn start_behind<T>(&self, reading: impl Future<Output = T>, mut ahead: Option<Ahead>) -> T {
        let mut reading = pin!(reading);
        std::future::poll_fn(|context| {
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

    /// Carries out something that changes what `length` bytes at `offset` read as: a write,
    /// zeroing, discarding, resizing. From its beginning nothing of it is found any more, and until
    /// its end nothing is read ahead there. Where the end never comes, since the request was given
    /// up, nobody knows when the change takes effect: then nothing is read ahead there any more.
    pub(crate) async fn change<T>(&self, offset: u64, length: u64, changing: impl Future<Output = T>) -> T {
        let begun = self.change_begins(offset, length);
        let result = changing.await;
        self.change_ends(begun);
        result
    }

    /// The beginning of a [`Prefetch::change`], for those who await it themselves: a future that is
    /// handed on takes its room twice.
    pub(crate) fn change_begins(&self, offset: u64, length: u64) -> WriteId {
        let range = offset..offset.saturating_add(length);
        self.shared.with(|state| state.cache.write_begins(range))
    }

    /// Its end.
    pub(crate) fn change_ends(&self, begun: WriteId) {
        self.shared.with(|state| state.cache.write_ends(begun));
    }

    /// Lets go of all that is in memory: the image may not be what it was.
    pub(crate) fn forget(&self) {
        self.shared.with(|state| {
            let write = state.cache.write_begins(0..u64::MAX);
            state.cache.write_ends(write);
        });
    }

    /// Reads nothing ahead any more, for good, and waits for what is on its way.
    pub(crate) async fn stop(&self) {
        self.shared.with(|state| {
            state.stopped = true;
            self.shared.put(state, Settings::off()).expect("the defaults are valid");
        });
        self.shared.flights.all_landed().await;
    }

    /// Takes [`Prefetch::stop`] back. Nothing is in memory.
    pub(crate) fn go_on(&self) {
        self.shared.with(|state| {
            state.stopped = false;
            let settings = state.settings;
            self.shared.put(state, settings).expect("they were in force before");
        });
    }
}

impl Shared {
    /// Puts settings in force for the cache.
    fn put(&self, state: &mut State, in_force: Settings) -> std::result::Result<(), Invalid> {
        state.cache.set(in_force)?;
        // Relaxed: a read that just misses it is one that came before.
        self.is_on.store(in_force.mode != Mode::Off, Relaxed);
        Ok(())
    }

    /// Decides something. What goes from memory by that is let go of after the lock.
    fn with<T>(&self, decide: impl FnOnce(&mut State) -> T) -> T {
        // A panic under the lock is a bug in policy, and the release build ends with it.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let decided = decide(&mut state);
        let dropped = state.cache.take_dropped();
        drop(state);
        drop(dropped);
        decided
    }
}

/// Bytes of a chunk, once they are there; `None` if they could not be read.
async fn data_of(cached: &Cached<Arc<Chunk>>) -> Option<&[u8]> {
    let Range { start, end } = cached.range;
    let data = cached.token.data().await?;
    Some(&data[start as usize..end as usize])
}

/// Whether something is gained by keeping what an image says: not if it is in memory already, and
/// not if others may change it meanwhile.
fn is_worth_it(image: &Image) -> bool {
    let is_in_memory = |image: &Image| matches!(image.storage(), Storage::Memory(_) | Storage::Null(_));
    !image.storage().may_be_written_by_others() && !image.chain().all(is_in_memory)
}
