//! The task of a read-ahead: reads the data of one range of the disk into chunks.
//!
//! It belongs to the worker that started it, and ends with it. When the task is dropped, readers
//! that wait for its data read it from the image.

use std::{
    future::Future,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use event_listener::Event;
use policy::prefetch::{Fetch, FetchId, ReadAhead, whole_blocks};
use smallvec::SmallVec;

use super::{PrefetchChunk, PrefetchShared};
use image::Image;
use reactor::{buffer::FrozenBuffer, error::Result};

/// Counter of the read-aheads in flight.
#[derive(Debug, Default)]
pub(super) struct FetchCounter {
    count: AtomicUsize,
    completed: Event,
}

/// A read-ahead in flight.
struct FetchGuard(Arc<PrefetchShared>);

/// A chunk in flight, until its result is set.
struct PendingChunk {
    flight: FetchGuard,
    /// `None` after the result is set.
    id: Option<FetchId>,
    chunk: Arc<PrefetchChunk>,
}

impl FetchCounter {
    /// Waits until no read-ahead is in flight.
    pub(super) async fn wait_idle(&self) {
        while self.count.load(Ordering::Acquire) > 0 {
            // Listens and checks again: the last one may have ended in between.
            let completed = self.completed.listen();
            if self.count.load(Ordering::Acquire) > 0 {
                completed.await;
            }
        }
    }
}

impl FetchGuard {
    fn begin(shared: Arc<PrefetchShared>) -> Self {
        shared.fetches.count.fetch_add(1, Ordering::AcqRel);
        Self(shared)
    }
}

impl Drop for FetchGuard {
    fn drop(&mut self) {
        if self.0.fetches.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.fetches.completed.notify(usize::MAX);
        }
    }
}

impl PendingChunk {
    /// Sets the result: the data, or `None` if the read failed.
    fn set_result(&mut self, data: Option<FrozenBuffer>) {
        let Some(id) = self.id.take() else { return };
        let has_data = data.is_some();
        // Before the cache is updated, so that no reader waits for a chunk that counts as complete.
        self.chunk.set(data);
        self.flight.0.with_state(|state| {
            if has_data { state.cache.complete(id, reactor::now()) } else { state.cache.fail(id) }
        });
    }
}

impl Drop for PendingChunk {
    fn drop(&mut self) {
        self.set_result(None);
    }
}

/// Reads a range of `ahead` into memory. Failures are ignored.
pub(super) fn fetch(
    shared: Arc<PrefetchShared>,
    ahead: ReadAhead,
    range: Range<u64>,
) -> impl Future<Output = ()> {
    let flight = FetchGuard::begin(Arc::clone(&shared));
    async move {
        // A guest's read of a hole costs nothing, so holes are not read ahead.
        let Ok(pieces) = reactor::in_background(data_ranges(&shared.image.get(), range)).await else {
            return;
        };
        for piece in pieces {
            let now = reactor::now();
            let fetches = shared
                .with_state(|state| state.cache.begin(&ahead, piece, now, Arc::<PrefetchChunk>::default));
            // Mostly one chunk. All are read concurrently, since a reader may wait for any of them
            // next.
            for fetch in fetches {
                reactor::spawn(read_chunk(FetchGuard::begin(Arc::clone(&shared)), fetch));
            }
        }
        drop(flight);
    }
}

/// The parts of a range that are worth reading ahead: without those that the format knows to be
/// zeroes.
async fn data_ranges(image: &Image, range: Range<u64>) -> Result<SmallVec<[Range<u64>; 1]>> {
    let mut parts = SmallVec::new();
    let Image::Qcow2(qcow2) = image else {
        // For a raw image the query of the file system takes longer than reading a hole.
        parts.push(range);
        return Ok(parts);
    };
    let mut at = range.start;
    while at < range.end {
        for extent in qcow2.block_status(at, range.end - at).await? {
            let end = at + extent.length;
            if !extent.zero {
                let blocks = whole_blocks(&(at..end));
                let part = blocks.start.max(range.start)..blocks.end.min(range.end);
                match parts.last_mut() {
                    Some(Range { end: last, .. }) if *last >= part.start => *last = part.end,
                    _ => parts.push(part),
                }
            }
            at = end;
        }
    }
    Ok(parts)
}

/// Reads a chunk.
fn read_chunk(flight: FetchGuard, fetch: Fetch<Arc<PrefetchChunk>>) -> impl Future<Output = ()> {
    let Fetch { id, range, token } = fetch;
    let mut pending = PendingChunk { flight, id: Some(id), chunk: token };
    async move {
        let length = (range.end - range.start) as usize;
        let image = pending.flight.0.image.get();
        let data = reactor::in_background(image.read(range.start, length)).await;
        // Joined to one buffer, so that a chunk occupies the memory that it is charged for.
        pending.set_result(data.ok().map(|data| data.joined().freeze()));
    }
}
