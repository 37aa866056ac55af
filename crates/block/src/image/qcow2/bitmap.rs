//! Persistent bitmaps: which parts of the disk were written since some instant, kept in the image.
//!
//! ```text
//!   header ─► directory ─► entry ─► table ─► cluster of bits │ all zeroes │ all ones
//! ```
//!
//! - `directory`: directory and tables, from bytes to meaning and back.
//! - `bits`: what one marks, in memory.
//! - `change`: what becomes of them on an open image.
//! - `view`: what a bitmap marks, in an image that is not written to.

mod bits;
mod change;
mod directory;
mod view;

pub use bits::DirtyBits;
pub use change::BitmapError;
pub use directory::{
    Bits, Entry, GRANULARITY_BITS, LONGEST_NAME, decode_table, encode, encode_table, flag, read,
};
pub use view::{BitmapView, Marked, NoView};
