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

pub use change::NewSnapshot;
pub(super) use table::too_many;
pub use table::{LARGEST_TABLE, Snapshot, SnapshotTable, encode, read};

use super::{
    Invalid, MetadataError,
    header::{Header, MOST_SNAPSHOTS},
};
use reactor::error::Error;
use storage::Storage;

/// Why nothing became of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// There is none of that id or name.
    #[error("there is no snapshot {0:?} (`weir image snapshot -l` lists them)")]
    NotFound(String),
    /// The image is not to be written to.
    #[error("it is read-only (open it for writing)")]
    ReadOnly,
    /// The format does not allow it.
    #[error("an image with an external data file has no internal snapshots (use a backing file)")]
    DataFile,
    /// The format's bound.
    #[error("it has {MOST_SNAPSHOTS} snapshots, which is the most (delete some)")]
    TooMany,
    /// A refcount has no room.
    #[error(
        "the refcount of the cluster at {offset:#x} cannot be raised: it is at its largest, or wrong (delete snapshots, give the image more \
         refcount_bits, or try `weir image check`)"
    )]
    Refcount {
        /// In the file.
        offset: u64,
    },
    /// Something in the image is wrong.
    #[error("{0} (`weir image check` shows the damage)")]
    Invalid(#[from] Invalid),
    /// The file cannot be read or written.
    #[error("{0}")]
    Failed(#[from] Error),
}

impl SnapshotError {
    fn of_refcount(error: Error, offset: u64) -> Self {
        if error == Error::INVALID { Self::Refcount { offset } } else { Self::Failed(error) }
    }
}

impl From<MetadataError> for SnapshotError {
    fn from(error: MetadataError) -> Self {
        match error {
            MetadataError::Invalid(invalid) => Self::Invalid(invalid),
            MetadataError::Storage(error) => Self::Failed(error),
        }
    }
}

/// Makes a header one by which the snapshot is read: its L1 table, and its size; whether there is
/// such a snapshot.
pub(super) async fn look_into(
    storage: &Storage,
    header: &mut Header,
    name: &str,
) -> Result<bool, MetadataError> {
    let SnapshotTable { snapshots, cut, .. } = SnapshotTable::read(storage, header).await?;
    let Some(snapshot) = Snapshot::find(&snapshots, name).map(|found| &snapshots[found]) else {
        return cut.map_or(Ok(false), |cut| Err(cut.into()));
    };
    snapshot.check(header)?;
    header.size_bytes = snapshot.disk_bytes.unwrap_or(header.size_bytes);
    (header.l1_offset, header.l1_entries) = (snapshot.l1_offset, snapshot.l1_entries);
    if u64::from(header.l1_entries) < header.l1_entries_for(header.size_bytes) {
        let what = format!(
            "the L1 table of snapshot {name:?} is too small for its disk of {} bytes",
            header.size_bytes
        );
        return Err(Invalid::new(what).into());
    }
    Ok(true)
}
