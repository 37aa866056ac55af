//! Statistics of a prefetch cache: cumulative counters and current levels.

/// Counters and levels of one disk's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchStats {
    /// Reads answered from memory alone, including those that waited for data in flight.
    pub hits: u64,
    /// Reads of which only a part was in memory.
    pub partial_hits: u64,
    /// Reads of which no part was in memory.
    pub misses: u64,
    /// Reads above the size limit, which bypass the cache.
    pub skipped: u64,
    /// Hits that waited for data in flight.
    pub waited: u64,
    /// Bytes of reads answered from memory.
    pub hit_bytes: u64,
    /// Bytes read ahead, including those in flight.
    pub read_ahead_bytes: u64,
    /// Bytes read ahead that were then read.
    pub used_bytes: u64,
    /// Bytes read ahead that were dropped unread.
    pub wasted_bytes: u64,
    /// Memory in use, in bytes.
    pub memory_bytes: u64,
    /// Streams with unread data.
    pub streams: u32,
    /// True if the gate is closed: new streams get no read-ahead because it does not pay.
    pub is_gate_closed: bool,
}

impl PrefetchStats {
    /// Adds the counters of `other`; keeps the levels of `self`.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        Self {
            hits: self.hits.saturating_add(other.hits),
            partial_hits: self.partial_hits.saturating_add(other.partial_hits),
            misses: self.misses.saturating_add(other.misses),
            skipped: self.skipped.saturating_add(other.skipped),
            waited: self.waited.saturating_add(other.waited),
            hit_bytes: self.hit_bytes.saturating_add(other.hit_bytes),
            read_ahead_bytes: self.read_ahead_bytes.saturating_add(other.read_ahead_bytes),
            used_bytes: self.used_bytes.saturating_add(other.used_bytes),
            wasted_bytes: self.wasted_bytes.saturating_add(other.wasted_bytes),
            ..self
        }
    }

    /// Share of reads answered from memory, partly or wholly, from 0 to 1; `None` before any read.
    pub fn hit_rate(&self) -> Option<f64> {
        let hits = self.hits + self.partial_hits;
        share(hits, hits + self.misses)
    }

    /// Used share of the read-ahead that was used or dropped, from 0 to 1; `None` before any.
    pub fn accuracy(&self) -> Option<f64> {
        share(self.used_bytes, self.used_bytes + self.wasted_bytes)
    }
}

fn share(part: u64, total: u64) -> Option<f64> {
    (total > 0).then(|| part as f64 / total as f64)
}
