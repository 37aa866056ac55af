//! Read-ahead as in the daemon: the policy's cache, driven in the same order.
//!
//! ```text
//!   read ──► cache.read ─── hit ──────► complete when the last of its chunks has arrived
//!               │        └─ miss ─────► device
//!               └─ ReadAhead ──► cache.begin ──► device ──► chunk arrives: cache.complete
//!
//!   write ──► cache.write_begins ──► device ──► cache.write_ends
//! ```
//!
//! The counterpart of block's `layer/prefetch`, without data: a chunk is the time of its arrival.

use policy::{
    prefetch::{
        CacheLookup, CachePart, CachedRange, Fetch, FetchId, InvalidPrefetchSettings, PrefetchCache,
        PrefetchMode, PrefetchStats, WriteId,
    },
    throttle::{RequestCost, SpareRefund},
    time::Instant,
};

use super::{
    device::DevicePlacement,
    flow::{EventQueue, SimulationEvent},
    request::{RequestOp, SimulatedRequest},
    world::DiskSpec,
};

#[derive(Debug)]
pub(super) struct PrefetchModel {
    cache: PrefetchCache<u32>,
    place: DevicePlacement,
    size_bytes: u64,
    /// Arrival time of each chunk, by the cache's token.
    chunks: Vec<u64>,
    free: Vec<u32>,
}

impl PrefetchModel {
    /// Creates the cache of a disk; `None` if its settings disable read-ahead.
    pub(super) fn new(disk: &DiskSpec) -> Result<Option<Self>, InvalidPrefetchSettings> {
        disk.prefetch.validate()?;
        // Read-ahead gains nothing on a device that takes no time, like a disk in memory.
        let may_gain = disk.place != DevicePlacement::default();
        if disk.prefetch.mode == PrefetchMode::Off || disk.prefetch.mode == PrefetchMode::Auto && !may_gain {
            return Ok(None);
        }
        let mut cache = PrefetchCache::default();
        cache.set(disk.prefetch)?;
        let DiskSpec { place, size_bytes, .. } = *disk;
        Ok(Some(Self { cache, place, size_bytes, chunks: Vec::new(), free: Vec::new() }))
    }

    pub(super) fn stats(&self) -> PrefetchStats {
        self.cache.stats()
    }

    /// Starts an admitted read and returns its completion time. `try_admit` can reject read-ahead.
    pub(super) fn read(
        &mut self,
        request: &SimulatedRequest,
        now: u64,
        flow: &mut EventQueue,
        try_admit: impl FnOnce(&RequestCost, SpareRefund) -> bool,
    ) -> u64 {
        let SimulatedRequest { disk, offset, length, .. } = *request;
        let try_admit_ahead = |ahead: &policy::prefetch::ReadAhead, refund| try_admit(&ahead.cost(), refund);
        let (found, ahead) = self.cache.read(offset..offset + length, 1, self.size_bytes, try_admit_ahead);
        // Missing data is fetched before the read-ahead that it triggers, or the device would
        // delay the client.
        let mut completes_at = now;
        match found {
            CacheLookup::Nothing => {
                completes_at = flow.devices.begin(self.place, RequestOp::Read, length, now);
            }
            CacheLookup::Whole(cached) => completes_at = completes_at.max(self.cached_bytes(&cached)),
            CacheLookup::Parts(parts) => completes_at = self.read_parts(&parts, length, now, flow),
        }
        if let Some(ahead) = ahead {
            for range in ahead.ranges() {
                let at = Instant::from_nanos(now);
                let (chunks, free) = (&mut self.chunks, &mut self.free);
                let new_token = || {
                    free.pop().unwrap_or_else(|| {
                        chunks.push(0);
                        (chunks.len() - 1) as u32
                    })
                };
                for fetch in self.cache.begin(&ahead, range, at, new_token) {
                    let Fetch { id, range, token } = fetch;
                    let arrival_ns =
                        flow.devices.begin(self.place, RequestOp::Read, range.end - range.start, now);
                    self.chunks[token as usize] = arrival_ns;
                    flow.schedule(arrival_ns, SimulationEvent::Chunk(disk, id));
                }
            }
        }
        self.free_dropped();
        completes_at
    }

    fn read_parts(&self, parts: &[CachePart<u32>], length: u64, now: u64, flow: &mut EventQueue) -> u64 {
        let mut missing = parts.iter().filter(|part| matches!(part, CachePart::Missing(_)));
        let mut completes_at = now;
        // Several gaps: one read of the whole range costs less than several small ones.
        match (missing.next(), missing.next()) {
            (Some(_), Some(_)) => return flow.devices.begin(self.place, RequestOp::Read, length, now),
            (Some(part), None) => {
                completes_at = flow.devices.begin(self.place, RequestOp::Read, part.length(), now);
            }
            (None, _) => {}
        }
        for part in parts {
            if let CachePart::Cached(cached) = part {
                completes_at = completes_at.max(self.cached_bytes(cached));
            }
        }
        completes_at
    }

    fn cached_bytes(&self, cached: &CachedRange<u32>) -> u64 {
        self.chunks[cached.token as usize]
    }

    /// Starts any other request and returns its completion time.
    pub(super) fn change(&mut self, request: &SimulatedRequest, now: u64, flow: &mut EventQueue) -> u64 {
        let SimulatedRequest { disk, op, offset, length, .. } = *request;
        let completes_at = flow.devices.begin(self.place, op, length, now);
        if op != RequestOp::Flush {
            // Before the write completes: a chunk that overlaps it must not be used any more.
            let write = self.cache.write_begins(offset..offset.saturating_add(length));
            self.free_dropped();
            // A write without duration needs no event for its end.
            if completes_at == now {
                self.cache.write_ends(write);
            } else {
                flow.schedule(completes_at, SimulationEvent::Written(disk, write));
            }
        }
        completes_at
    }

    pub(super) fn arrived(&mut self, fetch: FetchId, now: u64) {
        self.cache.complete(fetch, Instant::from_nanos(now));
        self.free_dropped();
    }

    pub(super) fn written(&mut self, write: WriteId) {
        self.cache.write_ends(write);
    }

    /// Frees dropped chunks; their readers have already read the arrival times.
    fn free_dropped(&mut self) {
        self.free.extend(self.cache.take_dropped_tokens());
    }
}
