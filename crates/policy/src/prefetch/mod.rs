//! Prefetching: who reads in sequence, how far ahead of him to read, and what of it to keep.
//!
//! ```text
//!   read ──► extents.rs: in memory? ── yes ──► chunk.rs: has been read ──► whose it is ─┐
//!               │ no                                                                   │
//!               ▼                                                                      ▼
//!            expectations.rs: was it expected? ── for the third time ──► streams.rs: how far ahead of it
//!               │ no                                                        │  window.rs: how much, how early
//!               ▼                                                           │  gate.rs: does it pay?
//!            expects what may follow                                        ▼  congestion.rs: is there room, and is it his turn?
//!                                                                         ahead.rs: to be read
//!
//!   memory is full ──► lists.rs: which chunk goes
//!   write ──► cache.rs: what it overlaps is found no more, also where it is still on its way
//! ```
//!
//! What pcache was (KVM Forum 2016), with its rules and defaults: only what was read ahead is kept, never what was asked for; requests above a
//! size are not looked at; what has been read goes first when memory is short. Beyond it: streams by place and not by client, backward and
//! strided ones; a window for each that adapts (AMP, FAST 2007); memory divided by what pays (SARC, FAST 2005); a gate that closes where nothing is
//! used; turns on a device that has more to do than it can.
//!
//! Never does I/O, keeps no data and knows no clock: the caller's word for a chunk's data goes in and comes out, time is an argument.

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
