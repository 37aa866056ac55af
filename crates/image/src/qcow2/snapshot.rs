//! Internal snapshots: each has its own L1 table in the image.
//!
//! ```text
//!   header ─► snapshot table ─► entry ─► L1 table ─► L2 tables ─► guest clusters
//!                             └ entry ─► L1 table ─┘
//! ```
//!
//! L1 tables share L2 tables and guest clusters. The refcount of a shared cluster is the number of
//! L1 tables through which it is reached.
//!
//! - `table`: decodes and encodes the snapshot table.
//! - `change`: creates, applies and deletes snapshots of an open image.
//! - `refcount_change`: changes refcounts and flags of all clusters that an L1 table refers to.

mod change;
mod refcount_change;
mod table;
#[cfg(test)]
mod tests;

pub use change::NewSnapshot;
pub(super) use table::too_many;
pub use table::{InternalSnapshot, MAX_TABLE, SnapshotTable, encode, read};

use super::{
    InvalidImage, MetadataError,
    header::{MAX_SNAPSHOTS, Qcow2Header},
};
use reactor::error::Error;
use storage::Storage;

/// Reason why an operation on snapshots failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// No snapshot has this id or name.
    #[error("there is no snapshot {0:?} (`weir image snapshot -l` lists all)")]
    NotFound(String),
    /// The image is read-only.
    #[error("it is read-only (open it for writing)")]
    ReadOnly,
    /// Images with an external data file cannot have internal snapshots.
    #[error("an image with an external data file has no internal snapshots (use a backing file)")]
    DataFile,
    /// The limit of snapshots is reached.
    #[error("it has {MAX_SNAPSHOTS} snapshots, which is the maximum (delete some)")]
    TooMany,
    /// A refcount has its maximum, or is 0 for a cluster in use.
    #[error(
        "the refcount of the cluster at {offset:#x} cannot be incremented: it has reached its \
         maximum, or is wrong (delete snapshots, use larger refcount_bits, or try `weir image \
         check`)"
    )]
    Refcount {
        /// Offset of the cluster in the file.
        offset: u64,
    },
    /// A structure is invalid.
    #[error("{0} (`weir image check` shows the damage)")]
    Invalid(#[from] InvalidImage),
    /// A read or write of the file failed.
    #[error("{0}")]
    Failed(#[from] Error),
}

impl SnapshotError {
    fn refcount_error(error: Error, offset: u64) -> Self {
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

/// Replaces size and L1 table of `header` by those of a snapshot. Returns false if there is no
/// such snapshot.
pub(super) async fn select_snapshot(
    storage: &Storage,
    header: &mut Qcow2Header,
    name: &str,
) -> Result<bool, MetadataError> {
    let SnapshotTable { snapshots, truncation: cut, .. } = SnapshotTable::read(storage, header).await?;
    // A truncated table may hide the snapshot: report the damage instead of "not found".
    let Some(snapshot) = InternalSnapshot::find(&snapshots, name).map(|index| &snapshots[index]) else {
        return cut.map_or(Ok(false), |cut| Err(cut.into()));
    };
    snapshot.check(header)?;
    header.size_bytes = snapshot.disk_bytes.unwrap_or(header.size_bytes);
    (header.l1_offset, header.l1_entries) = (snapshot.l1_offset, snapshot.l1_entries);
    if u64::from(header.l1_entries) < header.l1_entries_for(header.size_bytes) {
        let message = format!(
            "the L1 table of snapshot {name:?} is too small for its disk of {} bytes",
            header.size_bytes
        );
        return Err(InvalidImage::new(message).into());
    }
    Ok(true)
}
