//! What a prefetch cache has done since it was made, and what it holds now.

/// Counters and levels of one disk's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Reads answered from memory alone, also where the data was still on its way.
    pub hits: u64,
    /// Reads of which a part was in memory.
    pub partial_hits: u64,
    /// Reads of which nothing was.
    pub misses: u64,
    /// Reads that were too large to be looked at.
    pub skipped: u64,
    /// Of the hits, those that had to wait for data on its way.
    pub waited: u64,
    /// Bytes that readers had from memory.
    pub hit_bytes: u64,
    /// Bytes that were read ahead, or are being.
    pub read_ahead_bytes: u64,
    /// Of these, bytes that somebody then read.
    pub used_bytes: u64,
    /// Of these, bytes that were dropped before anybody read them.
    pub wasted_bytes: u64,
    /// Bytes of memory in use now.
    pub memory_bytes: u64,
    /// Streams that have something read ahead which nobody has read yet.
    pub streams: u32,
    /// Whether nothing new is read ahead of now, because it does not pay.
    pub closed: bool,
}

impl Stats {
    /// What adds up, of both; what is now, of this one.
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

    /// The share of reads answered from memory, partly or whole, from 0 to 1.
    pub fn hit_rate(&self) -> Option<f64> {
        let hits = self.hits + self.partial_hits;
        share(hits, hits + self.misses)
    }

    /// The used share of read-ahead whose fate is known, from 0 to 1; none before.
    pub fn accuracy(&self) -> Option<f64> {
        share(self.used_bytes, self.used_bytes + self.wasted_bytes)
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
