//! Persistent dirty bitmaps: the parts of the disk that were written since some point in time.
//!
//! ```text
//!   header ─► directory ─► entry ─► table ─► cluster of bits │ all zeroes │ all ones
//! ```
//!
//! - `directory`: decodes and encodes the directory and the tables.
//! - `bits`: a bitmap in memory; `live`: one that concurrent requests mark.
//! - `change`: changes the bitmaps of an open image.
//! - `record`: bitmaps that record writes, from opening an image to closing it.
//! - `live_change`: changes the bitmaps of an image in use. `rotate`: a bitmap begins anew.
//! - `view`: queries of a bitmap by range.

mod bits;
mod change;
mod directory;
#[cfg(test)]
mod failure_tests;
mod live;
mod live_change;
mod record;
mod rotate;
#[cfg(test)]
mod tests;
mod view;

pub use bits::DirtyBits;
pub use change::BitmapError;
pub(super) use directory::read_entries;
pub use directory::{
    BitmapCluster, BitmapEntry, GRANULARITY_BITS, MAX_NAME, copied_bytes, decode_table, encode, encode_table,
    flag, read,
};
pub use live_change::{BitmapChange, BitmapStatus, MergeSource, NewBitmap};
pub(super) use record::Recording;
use record::RecordingBitmap;
pub use rotate::RotatedBitmap;
pub use view::{BitmapView, BitmapViewError, MarkedRun};
