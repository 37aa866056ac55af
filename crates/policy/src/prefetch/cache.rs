//! The cache of one disk: every decision about its reads and writes, in order. Used behind one
//! lock, which workers hold for nanoseconds.
//!
//! **Never stale.** What [`Cache::read`] finds was read from the image after the last write to it
//! had ended. A write, when it begins, removes what it overlaps from the map, chunks in flight
//! included. Until it ends, no read-ahead may begin there ([`Writes`]).
//!
//! **Never above its memory.** A chunk counts from before it is requested until nothing of it can
//! be found, and none begins without room for it. Chunks in flight cannot be evicted.

use super::ahead::{Ahead, CHUNK_MAX_BYTES, StreamId, whole_blocks};
use super::chunk::{Chunk, footprint};
use super::congestion::Congestion;
use super::expectations::{Expectations, Expected};
use super::extents::{Extent, Extents};
use super::gate::Gate;
use super::lists::Chunks;
use super::settings::{Invalid, Mode, Settings};
use super::stats::Stats;
use super::streams::{Step, Streams};
use super::window::Window;
use super::writes::{WriteId, Writes};
use crate::throttle::GivenBack;
use crate::time::Instant;
use alloc::vec::Vec;
use core::ops::Range;

/// Requests of a scan until it is a stream.
const RUN: u8 = 3;
/// Windows that a stream on trial must use.
const TRIAL_WINDOWS: u64 = 2;

/// What a read finds.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<T> {
    /// Nothing: read it from the image.
    Nothing,
    /// All of it, in one chunk.
    Whole(Cached<T>),
    /// Parts that follow each other and cover it.
    Parts(Vec<Part<T>>),
}

/// A part of what a read asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Part<T> {
    /// It is in a chunk.
    Cached(Cached<T>),
    /// It must be read from the image.
    Missing(Range<u64>),
}

impl<T> Part<T> {
    /// Bytes.
    pub const fn length(&self) -> u64 {
        match self {
            Self::Cached(Cached { range, .. }) | Self::Missing(range) => range.end - range.start,
        }
    }
}

/// Bytes of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub struct Cached<T> {
    /// The caller's word for the chunk's data.
    pub token: T,
    /// Bytes of the chunk, which may still be on their way.
    pub range: Range<u64>,
}

/// A chunk on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchId(u32);

/// What is to be read from the image, now.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its memory is taken until it is told how it ended"]
pub struct Fetch<T> {
    /// For [`Cache::complete`] and [`Cache::fail`].
    pub id: FetchId,
    /// The bytes of the disk.
    pub range: Range<u64>,
    /// The caller's word for the data.
    pub token: T,
}

/// A disk's prefetch cache. `T` stands for the data of a chunk; clones stand for the same.
///
/// # Protocol
///
/// 1. [`read`](Cache::read) for every read, [`write_begins`](Cache::write_begins) before and
///    [`write_ends`](Cache::write_ends) after everything else that changes what is on the disk.
/// 2. For every range of an [`Ahead`]: [`begin`](Cache::begin), when its data is about to be read;
///    then exactly one of [`complete`](Cache::complete) and [`fail`](Cache::fail) for each [`Fetch`].
/// 3. [`take_dropped`](Cache::take_dropped) after each of these, to let go of what it gives.
/// 4. Who holds a token whose data is on its way waits for the data, wherever it may have gone.
#[derive(Debug)]
pub struct Cache<T> {
    settings: Settings,
    extents: Extents,
    chunks: Chunks<T>,
    memory_bytes: u64,
    writes: Writes,
    expectations: Option<Expectations>,
    streams: Streams,
    gate: Gate,
    congestion: Congestion,
    stats: Stats,
    /// Used since limits were asked last.
    given_back: GivenBack,
    dropped: Vec<T>,
}

/// How a request met its data; the later, the worse.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Met {
    There,
    OnItsWay,
    Missing,
}

impl<T> Default for Cache<T> {
    /// An empty cache, with nothing read ahead until it is [set](Cache::set).
    fn default() -> Self {
        let settings = Settings::off();
        Self {
            settings,
            extents: Extents::default(),
            chunks: Chunks::new(settings.memory_bytes),
            memory_bytes: 0,
            writes: Writes::default(),
            expectations: None,
            streams: Streams::new(settings.streams),
            gate: Gate::new(settings.memory_bytes),
            congestion: Congestion::new(settings.memory_bytes),
            stats: Stats::default(),
            given_back: GivenBack::NOTHING,
            dropped: Vec::new(),
        }
    }
}

impl<T: Clone> Cache<T> {
    /// The settings in force.
    pub const fn settings(&self) -> Settings {
        self.settings
    }

    /// Puts other settings in force. What is in memory stays as far as it may.
    ///
    /// # Errors
    /// [`Invalid`]: everything stays as it was.
    pub fn set(&mut self, settings: Settings) -> Result<(), Invalid> {
        settings.check()?;
        let old = core::mem::replace(&mut self.settings, settings);
        let is_on = settings.mode != Mode::Off;
        if !is_on {
            self.drop_range(&(0..u64::MAX));
            self.expectations = None;
        } else if self.expectations.is_none() {
            self.expectations = Some(Expectations::new());
            self.gate = Gate::new(settings.memory_bytes);
        }
        if !is_on || old.streams != settings.streams {
            self.streams.forget_all(settings.streams);
        }
        if old.memory_bytes != settings.memory_bytes {
            self.chunks.divide(settings.memory_bytes);
            self.gate.resize(settings.memory_bytes);
            self.congestion.resize(settings.memory_bytes);
        }
        self.make_room(0);
        Ok(())
    }

    /// The words for chunks that went since this was asked last, to be dropped outside the lock.
    #[must_use = "their memory is not in use any more"]
    pub fn take_dropped(&mut self) -> Vec<T> {
        core::mem::take(&mut self.dropped)
    }

    /// What happened so far, and what there is.
    pub fn stats(&self) -> Stats {
        let closed = self.settings.mode == Mode::Auto && !self.gate.lends(self.settings.window_min_bytes);
        Stats { memory_bytes: self.memory_bytes, streams: self.streams.leading(), closed, ..self.stats }
    }

    /// Counts on from what another cache has counted.
    pub fn count_on(&mut self, stats: &Stats) {
        self.stats = self.stats.plus(stats);
    }

    /// Looks at a read of a disk of `size_bytes`: what of it is in memory, and what to read ahead.
    /// `may` has the last word on that, and is told how much read-ahead was used since.
    ///
    /// The range is not empty and lies inside the disk.
    pub fn read(
        &mut self,
        range: Range<u64>,
        requests: u64,
        size_bytes: u64,
        may: impl FnOnce(&Ahead, GivenBack) -> bool,
    ) -> (Found<T>, Option<Ahead>) {
        if self.expectations.is_none() {
            return (Found::Nothing, None);
        }
        let length = range.end - range.start;
        self.gate.asked(length);
        if length / requests.max(1) > self.settings.largest_request_bytes {
            self.stats.skipped += 1;
            return (Found::Nothing, None);
        }
        let (found, met, owner) = self.find(&range);
        let stream = match self.streams.get_mut(owner).map(|stream| stream.step()) {
            Some(step) if !step.has_gaps() => Some(owner),
            Some(_) => self.follow(&range, Some(owner)),
            None => self.follow(&range, None),
        };
        let ahead = stream.and_then(|stream| self.go_on(stream, &range, met, size_bytes, may));
        (found, ahead)
    }

    fn find(&mut self, range: &Range<u64>) -> (Found<T>, Met, StreamId) {
        let last = self.extents.overlapping(range).next();
        let (found, met, stream) = match last {
            None => (Found::Nothing, Met::Missing, StreamId::NONE),
            Some(last) if last.offset <= range.start && last.end() >= range.end => {
                let (cached, met, stream) = self.use_extent(last.within(range));
                (Found::Whole(cached), met, stream)
            }
            Some(_) => self.find_parts(range),
        };
        match (&found, met) {
            (Found::Nothing, _) => self.stats.misses += 1,
            (_, Met::Missing) => self.stats.partial_hits += 1,
            (_, Met::There) => self.stats.hits += 1,
            (_, Met::OnItsWay) => {
                self.stats.hits += 1;
                self.stats.waited += 1;
            }
        }
        (found, met, stream)
    }

    fn find_parts(&mut self, range: &Range<u64>) -> (Found<T>, Met, StreamId) {
        let mut extents: Vec<Extent> =
            self.extents.overlapping(range).map(|extent| extent.within(range)).collect();
        extents.reverse();
        let mut parts = Vec::with_capacity(extents.len() * 2 + 1);
        let (mut worst, mut stream) = (Met::There, StreamId::NONE);
        let mut at = range.start;
        for extent in extents {
            if at < extent.offset {
                worst = Met::Missing;
                parts.push(Part::Missing(at..extent.offset));
            }
            at = extent.end();
            let (cached, met, owner) = self.use_extent(extent);
            (worst, stream) = (worst.max(met), owner);
            parts.push(Part::Cached(cached));
        }
        if at < range.end {
            worst = Met::Missing;
            parts.push(Part::Missing(at..range.end));
        }
        (Found::Parts(parts), worst, stream)
    }

    fn use_extent(&mut self, extent: Extent) -> (Cached<T>, Met, StreamId) {
        let range = extent.from..extent.from + extent.length;
        let chunk = self.chunks.get_mut(extent.chunk);
        let used = chunk.settle(range.start, range.end);
        let met = if chunk.begun.is_none() { Met::There } else { Met::OnItsWay };
        let cached = Cached { token: chunk.token.clone(), range };
        let (owner, on_trial, is_used_up) = (chunk.stream, chunk.on_trial, chunk.open_blocks == 0);
        let charged = chunk.charged_bytes;
        self.stats.hit_bytes += extent.length;
        if met == Met::There {
            self.chunks.touch(extent.chunk);
        }
        if used > 0 {
            self.stats.used_bytes += used;
            self.given_back.add(used, charged);
            self.gate.used(used, on_trial);
            self.streams.count_used(owner, used);
        }
        if used > 0 && is_used_up {
            let most = self.most_ahead();
            if let Some(stream) = self.streams.get_mut(owner) {
                stream.window.used_up(most);
            }
        }
        (cached, met, owner)
    }

    /// The stream that a request belongs to which found no data by one, or by one with gaps: a scan
    /// that was expected, which may become a stream by this.
    fn follow(&mut self, range: &Range<u64>, with_gaps: Option<StreamId>) -> Option<StreamId> {
        let expectations = self.expectations.as_mut()?;
        let length = range.end - range.start;
        let Some(met) = expectations.meet(range.start) else {
            match with_gaps {
                Some(_) => expectations.expect_forward(range.end),
                None => expectations.expect_any(range.start, length),
            }
            return with_gaps;
        };
        if met.step.has_gaps() {
            expectations.expect_forward(range.end);
        }
        if self.streams.get_mut(met.stream).is_some() {
            return Some(met.stream);
        }
        let run = met.run + 1;
        let next = met.step.next(range.start, length);
        if run < RUN {
            if let Some(next) = next {
                expectations.expect(next, Expected { run, ..met });
            }
            return with_gaps;
        }
        // A backward scan has come to its last request; others to where they go on.
        let head = if met.step == Step::Backward { range.start } else { next? };
        let window = Window::new(self.settings.window_min_bytes, self.most_ahead());
        Some(self.streams.join(met.step, head, length, window))
    }

    fn go_on(
        &mut self,
        id: StreamId,
        range: &Range<u64>,
        met: Met,
        size_bytes: u64,
        may: impl FnOnce(&Ahead, GivenBack) -> bool,
    ) -> Option<Ahead> {
        let (most, is_congested) = (self.most_ahead(), self.congestion.is_congested());
        let length = range.end - range.start;
        let stream = self.streams.get_mut(id)?;
        let had_lead = stream.lead_bytes() > 0;
        stream.advance(range.start, length);
        let has_lead = stream.lead_bytes() > 0;
        let is_late = met == Met::OnItsWay || (met == Met::Missing && had_lead && !has_lead);
        if is_late && !is_congested {
            stream.window.came_late(most);
        }
        let (step, next) = (stream.step(), stream.next(length));
        // Memory too short for two requests gains nothing.
        let ahead = if most < 2 * length { None } else { self.plan(id, most, size_bytes, may) };
        // Requests found by their data would crowd out what is not known.
        let is_found = met != Met::Missing && (has_lead || ahead.is_some());
        if let (false, Some(next), Some(expectations)) = (is_found, next, &mut self.expectations) {
            expectations.expect(next, Expected { step, run: RUN, stream: id });
        }
        ahead
    }

    /// Reads ahead of a stream, with at most so much in memory.
    fn plan(
        &mut self,
        id: StreamId,
        most: u64,
        size_bytes: u64,
        may: impl FnOnce(&Ahead, GivenBack) -> bool,
    ) -> Option<Ahead> {
        let stream = self.streams.get_mut(id)?;
        let (window, lead) = (stream.window.within(most), stream.lead_bytes());
        if lead > window.trigger {
            return None;
        }
        let trial_bytes = TRIAL_WINDOWS * self.settings.window_min_bytes;
        let on_trial = !stream.has_used(trial_bytes);
        let pays = !on_trial || self.settings.mode == Mode::On || self.gate.lends(window.size);
        let bytes = if pays { self.congestion.room(id, window.size, lead > 0) } else { 0 };
        if bytes == 0 {
            return None;
        }
        let ahead = Ahead { on_trial, ..stream.plan(id, bytes, size_bytes)? };
        if !may(&ahead, core::mem::take(&mut self.given_back)) {
            return None;
        }
        stream.lead(&ahead);
        Some(ahead)
    }

    fn most_ahead(&self) -> u64 {
        let share = self.chunks.wanted_ahead() / u64::from(self.streams.leading() + 1);
        self.settings.window_max_bytes.min(self.settings.memory_bytes / 2).min(share)
    }

    /// A range of an [`Ahead`] is about to be read: what of it is neither in memory nor on its way,
    /// as far as there is room. `make` makes a token for each.
    pub fn begin(
        &mut self,
        ahead: &Ahead,
        range: Range<u64>,
        now: Instant,
        mut make: impl FnMut() -> T,
    ) -> Vec<Fetch<T>> {
        let mut fetches = Vec::new();
        if self.expectations.is_none() {
            return fetches;
        }
        for gap in self.extents.gaps(&range) {
            let mut start = gap.start;
            while start < gap.end {
                let end = gap.end.min(start + CHUNK_MAX_BYTES);
                let piece = start..end;
                start = end;
                if self.writes.overlaps(&piece) {
                    continue;
                }
                if !self.make_room(footprint(end - piece.start)) {
                    return fetches;
                }
                fetches.push(self.begin_chunk(ahead, piece, now, make()));
            }
        }
        fetches
    }

    fn begin_chunk(&mut self, ahead: &Ahead, range: Range<u64>, now: Instant, token: T) -> Fetch<T> {
        let length = range.end - range.start;
        let chunk = Chunk::new(token.clone(), &range, ahead, now);
        self.memory_bytes += chunk.footprint();
        self.stats.read_ahead_bytes += length;
        self.congestion.begun(length);
        if ahead.on_trial {
            self.gate.lend(length);
        }
        self.streams.count_unread(ahead.stream, length);
        let number = self.chunks.insert(chunk);
        self.extents.insert(Extent { offset: range.start, length, chunk: number, from: 0 });
        Fetch { id: FetchId(number), range, token }
    }

    /// The data of a chunk is there.
    pub fn complete(&mut self, id: FetchId, now: Instant) {
        let chunk = self.chunks.get_mut(id.0);
        let begun = chunk.begun.take().expect("completed once");
        let (length, is_found) = (chunk.length, chunk.extents > 0);
        self.congestion.ended(length);
        self.congestion.took(length, now.nanos_since(begun));
        if is_found {
            self.chunks.touch(id.0);
        } else {
            self.remove(id.0);
        }
        // Settings may have changed meanwhile.
        self.make_room(0);
    }

    /// The data of a chunk could not be read: as if it had never been asked for.
    pub fn fail(&mut self, id: FetchId) {
        let chunk = self.chunks.get_mut(id.0);
        chunk.begun = None;
        self.congestion.ended(chunk.length);
        self.evict(id.0);
    }

    /// A write, or whatever else changes the range, begins: nothing there is found any more.
    pub fn write_begins(&mut self, range: Range<u64>) -> WriteId {
        // Whole blocks, as they were read ahead.
        self.drop_range(&whole_blocks(&range));
        self.writes.begin(range)
    }

    /// The write has ended, well or not.
    pub fn write_ends(&mut self, write: WriteId) {
        self.writes.end(write);
    }

    fn drop_range(&mut self, range: &Range<u64>) {
        if self.extents.is_empty() || range.is_empty() {
            return;
        }
        let mut parts = Vec::new();
        self.extents.cut(range, |gone, extents| parts.push((gone, extents)));
        for (gone, extents) in parts {
            let chunk = self.chunks.get_mut(gone.chunk);
            chunk.extents = chunk.extents.wrapping_add_signed(extents);
            let (is_there, is_found) = (chunk.begun.is_none(), chunk.extents > 0);
            let unread =
                if is_found { chunk.settle(gone.from, gone.from + gone.length) } else { chunk.settle_rest() };
            self.waste(gone.chunk, unread);
            if is_there && !is_found {
                self.remove(gone.chunk);
            }
        }
    }

    /// Evicts until there is room for so many more bytes; `false` if there cannot be now.
    fn make_room(&mut self, bytes: u64) -> bool {
        while self.memory_bytes + bytes > self.settings.memory_bytes {
            let Some(victim) = self.chunks.victim() else { return false };
            let owner = self.chunks.get(victim).stream;
            if self.evict(victim) > 0
                && let Some(stream) = self.streams.get_mut(owner)
            {
                stream.window.was_wasted();
            }
        }
        true
    }

    /// Removes a chunk that is there; returns how much of it was unread.
    fn evict(&mut self, number: u32) -> u64 {
        let chunk = self.chunks.get(number);
        if chunk.extents > 0 {
            let range = chunk.offset..chunk.offset + chunk.length;
            let shown: Vec<Extent> =
                self.extents.overlapping(&range).filter(|extent| extent.chunk == number).collect();
            for extent in shown {
                self.extents.cut(&(extent.offset..extent.end()), |_, _| {});
            }
        }
        let unread = self.chunks.get_mut(number).settle_rest();
        self.waste(number, unread);
        self.remove(number);
        unread
    }

    fn waste(&mut self, number: u32, bytes: u64) {
        let chunk = self.chunks.get(number);
        let (owner, on_trial) = (chunk.stream, chunk.on_trial);
        self.stats.wasted_bytes += bytes;
        self.gate.wasted(bytes, on_trial);
        self.streams.count_wasted(owner, bytes);
    }

    fn remove(&mut self, number: u32) {
        let chunk = self.chunks.remove(number);
        self.memory_bytes -= chunk.footprint();
        self.dropped.push(chunk.token);
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
