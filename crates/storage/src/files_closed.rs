//! Notification that files are closed (`FilesClosed`).

use policy::time::Duration;

use crate::{FileStorage, Storage};

/// Notification that files are closed and their locks are released, which follows their last use.
/// Does not keep them open.
#[derive(Debug)]
pub struct FilesClosed(Vec<async_channel::Receiver<()>>);

impl FilesClosed {
    /// The files at the bottom of storage; other storage counts as closed.
    pub fn of<'a>(storage: impl Iterator<Item = &'a Storage>) -> Self {
        Self(storage.filter_map(Storage::bottom_file).map(FileStorage::closed).collect())
    }

    /// Waits until all files are closed and their locks are released.
    pub async fn all(self) {
        for file in self.0 {
            // The channel carries no values; it closes.
            let _ = file.recv().await;
        }
    }

    /// As [`FilesClosed::all`], for `timeout` at most. Returns true if they are.
    pub async fn within(self, timeout: Duration) -> bool {
        reactor::timeout(timeout, self.all()).await.is_ok()
    }
}
