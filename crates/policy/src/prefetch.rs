//! Prefetching: who reads in sequence, how far to read ahead, and what to keep.
//!
//! ```text
//!   read ──► extents.rs: in memory? ── yes ──► chunk.rs: has been read ──► its stream ──┐
//!               │ no                                                                   │
//!               ▼                                                                      ▼
//!            expectations.rs: was it expected? ── for the third time ──► streams.rs: how far ahead of it
//!               │ no                                                        │  window.rs: how much, how early
//!               ▼                                                           │  gate.rs: does it pay?
//!            expects what may follow                                        ▼  congestion.rs: is there room?
//!                                                                         ahead.rs: to be read
//!
//!   memory is full ──► lists.rs: which chunk to evict
//!   write ──► cache.rs: what it overlaps is not found any more, also if it is still in flight
//! ```
//!
//! The rules and defaults are those of pcache (KVM Forum 2016): keep only data that was read ahead;
//! ignore requests above a size; when memory is short, evict what has been read first. Beyond it:
//! streams are found by place, also backward and strided ones; each has a window that adapts (AMP,
//! FAST 2007); memory is divided by what pays (SARC, FAST 2005); a gate closes if the data is not
//! used.
//!
//! Never does I/O, keeps no data and knows no clock: tokens stand for a chunk's data.

mod ahead;
mod cache;
mod chunk;
mod congestion;
mod expectations;
mod extents;
mod gate;
mod lists;
mod settings;
mod stats;
mod streams;
mod window;
mod writes;

pub use ahead::{Ahead, whole_blocks};
pub use cache::{Cache, Cached, Fetch, FetchId, Found, Part};
pub use settings::{Invalid, Mode, Setting, Settings, UnknownMode};
pub use stats::Stats;
pub use writes::WriteId;
