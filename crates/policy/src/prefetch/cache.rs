//! The prefetch cache of one disk: every decision about its reads and writes, in order. Protected
//! by one lock that workers hold for nanoseconds.
//!
//! **Never stale.** Data that [`PrefetchCache::read`] returns was read from the image after the
//! last write to it had ended. A write that begins removes the chunks it overlaps from the map,
//! including chunks in flight. Until it ends, no read-ahead starts in its range
//! ([`WritesInFlight`]).
//!
//! **Never above its memory limit.** A chunk counts from before it is requested until none of its
//! data can be found, and no chunk is started unless it fits. Chunks in flight cannot be evicted.

use super::chunk::{CacheChunk, footprint};
use super::congestion::CongestionControl;
use super::expectations::{Expectations, ExpectedRequest};
use super::extents::{ChunkExtent, ExtentMap};
use super::gate::ReadAheadGate;
use super::lru::ChunkLists;
use super::read_ahead::{CHUNK_MAX_BYTES, ReadAhead, StreamId, whole_blocks};
use super::settings::{InvalidPrefetchSettings, PrefetchConfig, PrefetchMode};
use super::stats::PrefetchStats;
use super::streams::{ScanStep, StreamTable};
use super::window::ReadAheadWindow;
use super::writes::{WriteId, WritesInFlight};
use crate::throttle::SpareRefund;
use crate::time::Instant;
use alloc::vec::Vec;
use core::ops::Range;

/// Number of requests after which a scan becomes a stream.
const STREAM_AFTER_REQUESTS: u8 = 3;
/// Number of minimum windows that a stream on trial must use.
const TRIAL_WINDOWS: u64 = 2;

/// Result of looking up a read.
#[derive(Debug, PartialEq, Eq)]
pub enum CacheLookup<T> {
    /// A miss: read all of it from the image.
    Nothing,
    /// A hit in one chunk.
    Whole(CachedRange<T>),
    /// Consecutive parts that together cover the read.
    Parts(Vec<CachePart<T>>),
}

/// A part of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum CachePart<T> {
    /// Data of a chunk.
    Cached(CachedRange<T>),
    /// Not cached: read this range of the disk from the image.
    Missing(Range<u64>),
}

impl<T> CachePart<T> {
    /// Length in bytes.
    pub const fn length(&self) -> u64 {
        match self {
            Self::Cached(CachedRange { range, .. }) | Self::Missing(range) => range.end - range.start,
        }
    }
}

/// A range of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub struct CachedRange<T> {
    /// The caller's token for the chunk's data.
    pub token: T,
    /// Bytes relative to the start of the chunk. The data may still be in flight.
    pub range: Range<u64>,
}

/// Identifies a chunk in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchId(u32);

/// A range to read from the image now.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the chunk's memory stays reserved until its read is completed"]
pub struct Fetch<T> {
    /// ID for [`PrefetchCache::complete`] and [`PrefetchCache::fail`].
    pub id: FetchId,
    /// Bytes of the disk.
    pub range: Range<u64>,
    /// The caller's token for the data.
    pub token: T,
}

/// A disk's prefetch cache. `T` is a token for the data of a chunk; clones represent the same data.
///
/// # Protocol
///
/// 1. Call [`read`](PrefetchCache::read) for every read. Call
///    [`write_begins`](PrefetchCache::write_begins) before and
///    [`write_ends`](PrefetchCache::write_ends) after every other operation that changes the disk.
/// 2. For every range of a [`ReadAhead`], call [`begin`](PrefetchCache::begin) immediately before
///    reading the data, then exactly one of [`complete`](PrefetchCache::complete) and
///    [`fail`](PrefetchCache::fail) for each [`Fetch`].
/// 3. After each of these calls, drop the tokens that
///    [`take_dropped_tokens`](PrefetchCache::take_dropped_tokens) returns.
/// 4. A caller with a token whose data is in flight waits for the data, even if the cache has
///    dropped the chunk since.
#[derive(Debug)]
pub struct PrefetchCache<T> {
    settings: PrefetchConfig,
    extents: ExtentMap,
    chunks: ChunkLists<T>,
    memory_bytes: u64,
    writes: WritesInFlight,
    expectations: Option<Expectations>,
    streams: StreamTable,
    gate: ReadAheadGate,
    congestion: CongestionControl,
    stats: PrefetchStats,
    /// Read-ahead used since the last request for admission.
    refund: SpareRefund,
    dropped_tokens: Vec<T>,
}

/// State of the data that a request needs, in the order of increasing delay.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum DataState {
    Cached,
    InFlight,
    Missing,
}

impl<T> Default for PrefetchCache<T> {
    /// An empty cache with read-ahead off until [`PrefetchCache::set`] is called.
    fn default() -> Self {
        let settings = PrefetchConfig::off();
        Self {
            settings,
            extents: ExtentMap::default(),
            chunks: ChunkLists::new(settings.memory_bytes),
            memory_bytes: 0,
            writes: WritesInFlight::default(),
            expectations: None,
            streams: StreamTable::new(settings.streams),
            gate: ReadAheadGate::new(settings.memory_bytes),
            congestion: CongestionControl::new(settings.memory_bytes),
            stats: PrefetchStats::default(),
            refund: SpareRefund::NONE,
            dropped_tokens: Vec::new(),
        }
    }
}

impl<T: Clone> PrefetchCache<T> {
    /// The settings in force.
    pub const fn settings(&self) -> PrefetchConfig {
        self.settings
    }

    /// Changes the settings. Cached data that still fits is kept.
    ///
    /// # Errors
    /// [`InvalidPrefetchSettings`]; the old settings remain in force.
    pub fn set(&mut self, settings: PrefetchConfig) -> Result<(), InvalidPrefetchSettings> {
        settings.validate()?;
        let old = core::mem::replace(&mut self.settings, settings);
        let is_on = settings.mode != PrefetchMode::Off;
        if !is_on {
            self.drop_range(&(0..u64::MAX));
            self.expectations = None;
        } else if self.expectations.is_none() {
            self.expectations = Some(Expectations::new());
            self.gate = ReadAheadGate::new(settings.memory_bytes);
        }
        if !is_on || old.streams != settings.streams {
            self.streams.reset(settings.streams);
        }
        if old.memory_bytes != settings.memory_bytes {
            self.chunks.set_memory(settings.memory_bytes);
            self.gate.resize(settings.memory_bytes);
            self.congestion.resize(settings.memory_bytes);
        }
        self.free_memory(0);
        Ok(())
    }

    /// Returns the tokens of chunks removed since the last call, so that the caller can drop them
    /// outside the lock.
    #[must_use = "the caller frees the memory of the returned chunks"]
    pub fn take_dropped_tokens(&mut self) -> Vec<T> {
        core::mem::take(&mut self.dropped_tokens)
    }

    /// Counters since the creation, and current levels.
    pub fn stats(&self) -> PrefetchStats {
        let closed = self.settings.mode == PrefetchMode::Auto
            && !self.gate.is_open_for(self.settings.window_min_bytes);
        PrefetchStats {
            memory_bytes: self.memory_bytes,
            streams: self.streams.streams_with_unread(),
            is_gate_closed: closed,
            ..self.stats
        }
    }

    /// Adds the counters of another cache to this one's.
    pub fn add_stats(&mut self, stats: &PrefetchStats) {
        self.stats = self.stats.plus(stats);
    }

    /// Looks up a read of a disk of `size_bytes`, made of `requests` merged requests; returns the
    /// cached parts and the read-ahead to start. `try_admit` returns whether that read-ahead is
    /// admitted; its second argument refunds the read-ahead used since its last call.
    ///
    /// The range must not be empty and must lie inside the disk.
    pub fn read(
        &mut self,
        range: Range<u64>,
        requests: u64,
        size_bytes: u64,
        try_admit: impl FnOnce(&ReadAhead, SpareRefund) -> bool,
    ) -> (CacheLookup<T>, Option<ReadAhead>) {
        if self.expectations.is_none() {
            return (CacheLookup::Nothing, None);
        }
        let length = range.end - range.start;
        self.gate.count_requested(length);
        // Merged requests are judged by their average size: merging must not hide small readers.
        if length / requests.max(1) > self.settings.largest_request_bytes {
            self.stats.skipped += 1;
            return (CacheLookup::Nothing, None);
        }
        let (found, state, owner) = self.find(&range);
        let stream = match self.streams.get_mut(owner).map(|stream| stream.step()) {
            Some(step) if !step.has_gaps() => Some(owner),
            // A strided stream that finds its data in the gaps of another may be a sequential scan.
            Some(_) => self.follow_expectation(&range, Some(owner)),
            None => self.follow_expectation(&range, None),
        };
        let ahead =
            stream.and_then(|stream| self.advance_stream(stream, &range, state, size_bytes, try_admit));
        (found, ahead)
    }

    fn find(&mut self, range: &Range<u64>) -> (CacheLookup<T>, DataState, StreamId) {
        // The common case, one extent that covers the read, without an allocation.
        let last = self.extents.overlapping(range).next();
        let (found, state, stream) = match last {
            None => (CacheLookup::Nothing, DataState::Missing, StreamId::NONE),
            Some(last) if last.offset <= range.start && last.end() >= range.end => {
                let (cached, state, stream) = self.use_extent(last.within(range));
                (CacheLookup::Whole(cached), state, stream)
            }
            Some(_) => self.find_parts(range),
        };
        match (&found, state) {
            (CacheLookup::Nothing, _) => self.stats.misses += 1,
            (_, DataState::Missing) => self.stats.partial_hits += 1,
            (_, DataState::Cached) => self.stats.hits += 1,
            (_, DataState::InFlight) => {
                self.stats.hits += 1;
                self.stats.waited += 1;
            }
        }
        (found, state, stream)
    }

    fn find_parts(&mut self, range: &Range<u64>) -> (CacheLookup<T>, DataState, StreamId) {
        let mut extents: Vec<ChunkExtent> =
            self.extents.overlapping(range).map(|extent| extent.within(range)).collect();
        // `overlapping` yields descending order.
        extents.reverse();
        let mut parts = Vec::with_capacity(extents.len() * 2 + 1);
        let (mut worst, mut stream) = (DataState::Cached, StreamId::NONE);
        let mut at = range.start;
        for extent in extents {
            if at < extent.offset {
                worst = DataState::Missing;
                parts.push(CachePart::Missing(at..extent.offset));
            }
            at = extent.end();
            let (cached, state, owner) = self.use_extent(extent);
            // The stream of the last part is the one that the read continues.
            (worst, stream) = (worst.max(state), owner);
            parts.push(CachePart::Cached(cached));
        }
        if at < range.end {
            worst = DataState::Missing;
            parts.push(CachePart::Missing(at..range.end));
        }
        (CacheLookup::Parts(parts), worst, stream)
    }

    fn use_extent(&mut self, extent: ChunkExtent) -> (CachedRange<T>, DataState, StreamId) {
        let range = extent.chunk_offset..extent.chunk_offset + extent.length;
        let chunk = self.chunks.get_mut(extent.chunk);
        let used = chunk.settle(range.start, range.end);
        let state = if chunk.requested_at.is_none() { DataState::Cached } else { DataState::InFlight };
        let cached = CachedRange { token: chunk.token.clone(), range };
        let (owner, on_trial, is_used_up) = (chunk.stream, chunk.on_trial, chunk.open_blocks == 0);
        let charged = chunk.charged_bytes;
        self.stats.hit_bytes += extent.length;
        if state == DataState::Cached {
            self.chunks.touch(extent.chunk);
        }
        if used > 0 {
            self.stats.used_bytes += used;
            self.refund.add(used, charged);
            self.gate.count_used(used, on_trial);
            self.streams.count_used(owner, used);
        }
        // A chunk that was read to its end shows that the window was not too large: it may grow.
        if used > 0 && is_used_up {
            let max_bytes = self.max_read_ahead();
            if let Some(stream) = self.streams.get_mut(owner) {
                stream.window.grow(max_bytes);
            }
        }
        (cached, state, owner)
    }

    /// Finds the stream of a request that hit no chunk of a stream, or one of a strided stream. The
    /// request may have been expected by a scan, and may make that scan a stream.
    fn follow_expectation(&mut self, range: &Range<u64>, with_gaps: Option<StreamId>) -> Option<StreamId> {
        let expectations = self.expectations.as_mut()?;
        let length = range.end - range.start;
        let Some(expected) = expectations.take_match(range.start) else {
            match with_gaps {
                Some(_) => expectations.expect_forward(range.end),
                None => expectations.expect_scans(range.start, length),
            }
            return with_gaps;
        };
        if expected.step.has_gaps() {
            expectations.expect_forward(range.end);
        }
        if self.streams.get_mut(expected.stream).is_some() {
            return Some(expected.stream);
        }
        let run = expected.scan_length + 1;
        let next = expected.step.next(range.start, length);
        if run < STREAM_AFTER_REQUESTS {
            if let Some(next) = next {
                expectations.expect(next, ExpectedRequest { scan_length: run, ..expected });
            }
            return with_gaps;
        }
        // The head of a backward stream is its last offset; of any other the next one.
        let head = if expected.step == ScanStep::Backward { range.start } else { next? };
        let window = ReadAheadWindow::new(self.settings.window_min_bytes, self.max_read_ahead());
        Some(self.streams.find_or_add(expected.step, head, length, window))
    }

    fn advance_stream(
        &mut self,
        id: StreamId,
        range: &Range<u64>,
        state: DataState,
        size_bytes: u64,
        try_admit: impl FnOnce(&ReadAhead, SpareRefund) -> bool,
    ) -> Option<ReadAhead> {
        let (max_bytes, is_congested) = (self.max_read_ahead(), self.congestion.is_congested());
        let length = range.end - range.start;
        let stream = self.streams.get_mut(id)?;
        let had_lead = stream.lead_bytes() > 0;
        stream.advance(range.start, length);
        let has_lead = stream.lead_bytes() > 0;
        // The reader has caught up with its read-ahead. On a congested device a larger lead is no
        // remedy.
        let is_late = state == DataState::InFlight || (state == DataState::Missing && had_lead && !has_lead);
        if is_late && !is_congested {
            stream.window.reader_waited(max_bytes);
        }
        let (step, next) = (stream.step(), stream.next(length));
        // Read-ahead is useless if less than two requests fit into memory.
        let ahead =
            if max_bytes < 2 * length { None } else { self.plan(id, max_bytes, size_bytes, try_admit) };
        // A stream that is found by its data needs no expectation, which would displace others.
        let is_found = state != DataState::Missing && (has_lead || ahead.is_some());
        if let (false, Some(next), Some(expectations)) = (is_found, next, &mut self.expectations) {
            expectations
                .expect(next, ExpectedRequest { step, scan_length: STREAM_AFTER_REQUESTS, stream: id });
        }
        ahead
    }

    /// Plans read-ahead of a stream, with at most `max_bytes` read ahead of it in memory.
    fn plan(
        &mut self,
        id: StreamId,
        max_bytes: u64,
        size_bytes: u64,
        try_admit: impl FnOnce(&ReadAhead, SpareRefund) -> bool,
    ) -> Option<ReadAhead> {
        let stream = self.streams.get_mut(id)?;
        let (window, lead) = (stream.window.within(max_bytes), stream.lead_bytes());
        if lead > window.trigger {
            return None;
        }
        let trial_bytes = TRIAL_WINDOWS * self.settings.window_min_bytes;
        let on_trial = !stream.has_proven_use(trial_bytes);
        let pays = !on_trial || self.settings.mode == PrefetchMode::On || self.gate.is_open_for(window.size);
        let bytes = if pays { self.congestion.allowed_bytes(id, window.size, lead > 0) } else { 0 };
        if bytes == 0 {
            return None;
        }
        // The order matters: the congestion control may reserve capacity for the stream, and
        // admission is charged. The stream advances only if both permit the read-ahead.
        let ahead = ReadAhead { on_trial, ..stream.plan(id, bytes, size_bytes)? };
        if !try_admit(&ahead, core::mem::take(&mut self.refund)) {
            return None;
        }
        stream.advance_read_ahead(&ahead);
        Some(ahead)
    }

    fn max_read_ahead(&self) -> u64 {
        let share = self.chunks.unread_target() / u64::from(self.streams.streams_with_unread() + 1);
        self.settings.window_max_bytes.min(self.settings.memory_bytes / 2).min(share)
    }

    /// Starts reading a range of a [`ReadAhead`]: returns the pieces that are neither cached nor in
    /// flight, as far as memory allows. `new_token` creates a token for each.
    pub fn begin(
        &mut self,
        ahead: &ReadAhead,
        range: Range<u64>,
        now: Instant,
        mut new_token: impl FnMut() -> T,
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
                // A read concurrent with this write may return old data, so nothing is started.
                if self.writes.overlaps(&piece) {
                    continue;
                }
                if !self.free_memory(footprint(end - piece.start)) {
                    return fetches;
                }
                fetches.push(self.begin_chunk(ahead, piece, now, new_token()));
            }
        }
        fetches
    }

    fn begin_chunk(&mut self, ahead: &ReadAhead, range: Range<u64>, now: Instant, token: T) -> Fetch<T> {
        let length = range.end - range.start;
        let chunk = CacheChunk::new(token.clone(), &range, ahead, now);
        self.memory_bytes += chunk.footprint();
        self.stats.read_ahead_bytes += length;
        self.congestion.add_in_flight(length);
        if ahead.on_trial {
            self.gate.charge_trial(length);
        }
        self.streams.count_unread(ahead.stream, length);
        let number = self.chunks.insert(chunk);
        self.extents.insert(ChunkExtent { offset: range.start, length, chunk: number, chunk_offset: 0 });
        Fetch { id: FetchId(number), range, token }
    }

    /// Records that the data of a chunk has arrived.
    pub fn complete(&mut self, id: FetchId, now: Instant) {
        let chunk = self.chunks.get_mut(id.0);
        let requested_at = chunk.requested_at.take().expect("completed once");
        let (length, is_found) = (chunk.length, chunk.extent_count > 0);
        self.congestion.remove_in_flight(length);
        self.congestion.record_response(length, now.nanos_since(requested_at));
        // A write has removed the chunk from the map while it was in flight.
        if is_found {
            self.chunks.touch(id.0);
        } else {
            self.remove(id.0);
        }
        // The memory limit may have been lowered while chunks in flight could not be evicted.
        self.free_memory(0);
    }

    /// Records that the data of a chunk could not be read, and removes the chunk.
    pub fn fail(&mut self, id: FetchId) {
        let chunk = self.chunks.get_mut(id.0);
        chunk.requested_at = None;
        self.congestion.remove_in_flight(chunk.length);
        self.evict(id.0);
    }

    /// Invalidates the range of a write, or of another change of the disk, that is about to begin.
    pub fn write_begins(&mut self, range: Range<u64>) -> WriteId {
        // Whole blocks, the unit of read-ahead.
        self.drop_range(&whole_blocks(&range));
        self.writes.begin(range)
    }

    /// Records the end of a write, successful or not.
    pub fn write_ends(&mut self, write: WriteId) {
        self.writes.end(write);
    }

    fn drop_range(&mut self, range: &Range<u64>) {
        if self.extents.is_empty() || range.is_empty() {
            return;
        }
        let mut parts = Vec::new();
        self.extents.remove_range(range, |removed, extents| parts.push((removed, extents)));
        for (removed, extents) in parts {
            let chunk = self.chunks.get_mut(removed.chunk);
            chunk.extent_count = chunk.extent_count.wrapping_add_signed(extents);
            let (has_arrived, is_found) = (chunk.requested_at.is_none(), chunk.extent_count > 0);
            let unread = if is_found {
                chunk.settle(removed.chunk_offset, removed.chunk_offset + removed.length)
            } else {
                chunk.settle_rest()
            };
            self.count_wasted(removed.chunk, unread);
            if has_arrived && !is_found {
                self.remove(removed.chunk);
            }
        }
    }

    /// Evicts chunks until `bytes` more fit; returns false if that is not possible now.
    fn free_memory(&mut self, bytes: u64) -> bool {
        // Terminates: each round removes a chunk or finds that all are in flight.
        while self.memory_bytes + bytes > self.settings.memory_bytes {
            let Some(victim) = self.chunks.victim() else { return false };
            let owner = self.chunks.get(victim).stream;
            if self.evict(victim) > 0
                && let Some(stream) = self.streams.get_mut(owner)
            {
                stream.window.shrink();
            }
        }
        true
    }

    /// Removes a chunk that is not in flight; returns its number of unread bytes.
    fn evict(&mut self, number: u32) -> u64 {
        let chunk = self.chunks.get(number);
        if chunk.extent_count > 0 {
            let range = chunk.offset..chunk.offset + chunk.length;
            let extents: Vec<ChunkExtent> =
                self.extents.overlapping(&range).filter(|extent| extent.chunk == number).collect();
            for extent in extents {
                self.extents.remove_range(&(extent.offset..extent.end()), |_, _| {});
            }
        }
        let unread = self.chunks.get_mut(number).settle_rest();
        self.count_wasted(number, unread);
        self.remove(number);
        unread
    }

    fn count_wasted(&mut self, number: u32, bytes: u64) {
        let chunk = self.chunks.get(number);
        let (owner, on_trial) = (chunk.stream, chunk.on_trial);
        self.stats.wasted_bytes += bytes;
        self.gate.count_wasted(bytes, on_trial);
        self.streams.count_wasted(owner, bytes);
    }

    fn remove(&mut self, number: u32) {
        let chunk = self.chunks.remove(number);
        self.memory_bytes -= chunk.footprint();
        self.dropped_tokens.push(chunk.token);
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
