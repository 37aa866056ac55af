//! Prefetching: detects sequential readers, decides how far to read ahead and what to cache.
//!
//! ```text
//!   read ──► extents.rs: cached? ──── yes ──► chunk.rs: mark as read ──► its stream ──┐
//!               │ no                                                                  │
//!               ▼                                                                     ▼
//!            expectations.rs: expected? ── third request ──► streams.rs: position, lead
//!               │ no                                            │  window.rs: how much, how early
//!               ▼                                               │  gate.rs: worth its cost?
//!            record what may follow                             ▼  congestion.rs: in-flight limit
//!                                                            read_ahead.rs: ranges to read
//!
//!   memory is full ──► lru.rs: which chunk to evict
//!   write ──► cache.rs: invalidate overlapping chunks, including those in flight
//! ```
//!
//! Rules and defaults follow pcache (KVM Forum 2016): cache only data that was read ahead; ignore
//! requests above a size; when memory is full, evict data that has been read first. Additions:
//! streams are detected by offset, including backward and strided ones; each has an adaptive window
//! (AMP, FAST 2007); memory is divided by marginal utility (SARC, FAST 2005); a gate stops
//! read-ahead whose data is not used.
//!
//! Never does I/O, reads a clock or holds data: tokens represent the data of chunks.

mod cache;
mod chunk;
mod congestion;
mod expectations;
mod extents;
mod gate;
mod lru;
mod read_ahead;
mod settings;
mod stats;
mod streams;
mod window;
mod writes;

pub use cache::{CacheLookup, CachePart, CachedRange, Fetch, FetchId, PrefetchCache};
pub use read_ahead::{ReadAhead, whole_blocks};
pub use settings::{
    InvalidPrefetchSettings, PrefetchConfig, PrefetchMode, PrefetchSetting, UnknownPrefetchMode,
};
pub use stats::PrefetchStats;
pub use writes::WriteId;
