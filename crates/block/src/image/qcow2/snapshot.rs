//! Internal snapshots: an L1 table each, kept in the image beside the active one.
//!
//! ```text
//!   header ─► snapshot table ─► entry ─► L1 table ─► L2 tables ─► guest clusters
//!                             └ entry ─► L1 table ─┘   shared: a refcount for each L1 table that leads there
//! ```
//!
//! - `table`: the snapshot table, from bytes to meaning and back.
//! - `change`: taking one, going back to one, deleting one, on an open image.
//! - `reach`: everything that an L1 table leads to, with its refcounts and flags.

mod change;
mod reach;
mod table;
#[cfg(test)]
mod tests;

pub use change::{NewSnapshot, SnapshotError};
pub use table::{LARGEST_TABLE, Snapshot, encode, read};

use super::{Invalid, MetadataError, header::Header};
use crate::storage::Storage;

/// Makes a header one by which the snapshot is read: its L1 table, and its size.
///
/// # Errors
/// If there is no such snapshot, or the table cannot be read.
pub(super) async fn look_into(
    storage: &Storage,
    header: &mut Header,
    name: &str,
) -> Result<(), MetadataError> {
    let (snapshots, _) = read(storage, header).await?;
    let Some(snapshot) = Snapshot::find(&snapshots, name).map(|found| &snapshots[found]) else {
        return Err(Invalid::new(format!(
            "it has no snapshot {name:?} (`weir image snapshot -l` lists them)"
        ))
        .into());
    };
    header.size_bytes = snapshot.disk_bytes.unwrap_or(header.size_bytes);
    (header.l1_offset, header.l1_entries) = (snapshot.l1_offset, snapshot.l1_entries);
    if u64::from(header.l1_entries) < header.l1_entries_for(header.size_bytes) {
        let what = format!(
            "the L1 table of snapshot {name:?} is too small for its disk of {} bytes",
            header.size_bytes
        );
        return Err(Invalid::new(what).into());
    }
    Ok(())
}
