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
use policy::prefetch::{Ahead, Fetch, FetchId, whole_blocks};
use smallvec::SmallVec;

use super::{Chunk, Shared};
use image::Image;
use reactor::{buffer::Frozen, error::Result};

/// Counter of the read-aheads in flight.
#[derive(Debug, Default)]
pub(super) struct Flights {
    count: AtomicUsize,
    landed: Event,
}

/// A read-ahead in flight.
struct Flight(Arc<Shared>);

/// A chunk in flight, until its result is set.
struct Pending {
    flight: Flight,
    /// `None` after the result is set.
    id: Option<FetchId>,
    chunk: Arc<Chunk>,
}

impl Flights {
    /// Waits until no read-ahead is in flight.
    pub(super) async fn all_landed(&self) {
        while self.count.load(Ordering::Acquire) > 0 {
            // Listens and checks again: the last one may have ended in between.
            let landed = self.landed.listen();
            if self.count.load(Ordering::Acquire) > 0 {
                landed.await;
            }
        }
    }
}

impl Flight {
    fn begin(shared: Arc<Shared>) -> Self {
        shared.flights.count.fetch_add(1, Ordering::AcqRel);
        Self(shared)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.0.flights.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.flights.landed.notify(usize::MAX);
        }
    }
}

impl Pending {
    /// Sets the result: the data, or `None` if the read failed.
    fn end(&mut self, data: Option<Frozen>) {
        let Some(id) = self.id.take() else { return };
        let is_there = data.is_some();
        // Before the cache is updated, so that no reader waits for a chunk that counts as complete.
        self.chunk.arrive(data);
        self.flight.0.with(|state| {
            if is_there { state.cache.complete(id, reactor::now()) } else { state.cache.fail(id) }
        });
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// Reads a range of `ahead` into memory. Failures are ignored.
pub(super) fn fetch(shared: Arc<Shared>, ahead: Ahead, range: Range<u64>) -> impl Future<Output = ()> {
    let flight = Flight::begin(Arc::clone(&shared));
    async move {
        // A guest's read of a hole costs nothing, so holes are not read ahead.
        let Ok(pieces) = reactor::in_background(data_in(&shared.image, range)).await else { return };
        for piece in pieces {
            let now = reactor::now();
            let fetches = shared.with(|state| state.cache.begin(&ahead, piece, now, Arc::<Chunk>::default));
            // Mostly one chunk. All are read concurrently, since a reader may wait for any of them
            // next.
            for fetch in fetches {
                reactor::spawn(bring(Flight::begin(Arc::clone(&shared)), fetch));
            }
        }
        drop(flight);
    }
}

/// The parts of a range that are worth reading ahead: without those that the format knows to be
/// zeroes.
async fn data_in(image: &Image, range: Range<u64>) -> Result<SmallVec<[Range<u64>; 1]>> {
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
fn bring(flight: Flight, fetch: Fetch<Arc<Chunk>>) -> impl Future<Output = ()> {
    let Fetch { id, range, token } = fetch;
    let mut pending = Pending { flight, id: Some(id), chunk: token };
    async move {
        let length = (range.end - range.start) as usize;
        let reading = pending.flight.0.image.read(range.start, length);
        let data = reactor::in_background(reading).await;
        // Joined to one buffer, so that a chunk occupies the memory that it is charged for.
        pending.end(data.ok().map(|data| data.joined().freeze()));
    }
}
