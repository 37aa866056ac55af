//! Persistent bitmaps: which parts of the disk were written since some instant, kept in the image.
//!
//! ```text
//!   header ─► directory ─► entry ─► table ─► cluster of bits │ all zeroes │ all ones
//! ```
//!
//! - `directory`: directory and tables, from bytes to meaning and back.
//! - `bits`: what one marks, in memory; `live`: the same while marks are being added.
//! - `change`: changes to the bitmaps of an open image.
//! - `record`: bitmaps that record writes, from the opening of an image to its close.
//! - `view`: what a bitmap marks, asked range by range.

mod bits;
mod change;
mod directory;
mod live;
mod record;
#[cfg(test)]
mod tests;
mod view;

pub use bits::DirtyBits;
pub use change::BitmapError;
pub(super) use directory::read_entries;
pub use directory::{
    Bits, Entry, GRANULARITY_BITS, LONGEST_NAME, copied_bytes, decode_table, encode, encode_table, flag, read,
};
use record::Recorded;
pub(super) use record::Recording;
pub use view::{BitmapView, Marked, NoView};
