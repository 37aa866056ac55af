//! Internal snapshots: an L1 table each, kept in the image beside the active one.
//!
//! ```text
//!   header ─► snapshot table ─► entry ─► L1 table ─► L2 tables ─► guest clusters
//!                             └ entry ─► L1 table ─┘   shared, with a refcount for each L1 table that reaches them
//! ```
//!
//! - `table`: the snapshot table, from bytes to meaning and back.

mod table;

pub use table::{LARGEST_TABLE, Snapshot, encode, read};
