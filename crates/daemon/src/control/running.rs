//! A disk that runs, with what it was opened with and the names that it keeps from others.
//!
//! Only data: who looks after it is the inventory.

use std::{cell::Cell, rc::Rc, sync::Arc};

use block::disk::{DetectZeroes, Discards, Disk};
use image::qcow2::CacheSettings;
use policy::time::Duration;
use serde_json::{Map, Value};
use settings::{Image, KeySet as _, key::Transfer};

/// Time that the removal of a disk waits for its files to be closed.
const TO_BE_FREE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct RunningDisk {
    pub(crate) disk: Arc<Disk>,
    pub(crate) image: Image,
    pub(crate) cache: CacheMode,
    /// What was asked for, not what it comes to.
    pub(crate) caches: Cell<CacheSettings>,
    pub(crate) opening: Opening,
    /// The nodes that `blockdev-add` named below the disk's own, topmost first.
    pub(crate) below: Vec<NodeBelow>,
    /// Of a node that `blockdev-add` has opened as it lies.
    pub(crate) storage: Option<Rc<StorageNode>>,
    /// The arguments of each `blockdev-add` that made it, the lowest node's first; none where a
    /// config file or a command line has it.
    pub(crate) told: Option<Vec<Map<String, Value>>>,
}

impl RunningDisk {
    /// Flushes and closes it. What fails is only logged: it would keep the disk for ever.
    pub(crate) async fn close(&self) {
        let disk = self.disk.name();
        self.disk.failures().lift();
        let ending = async {
            if let Err(error) = self.disk.flush().await {
                tracing::error!(%disk, %error, "the last flush of a disk that is removed failed");
            }
            if let Err(error) = self.disk.close().await {
                tracing::error!(%disk, %error, "a disk that is removed could not be closed");
            }
        };
        self.disk.unless_silent(ending).await;
    }

    /// Waits until the files of a disk that was closed are free for other programs, for
    /// [`TO_BE_FREE`] at most: a file system that does not answer keeps them open. The caller has
    /// the last reference to the disk.
    pub(crate) async fn until_free(self) {
        let (name, closed) = (Arc::clone(self.disk.name()), self.disk.closed());
        drop(self);
        if !closed.within(TO_BE_FREE).await {
            tracing::warn!(disk = %name, "the files of a disk that was removed are still open: its file system does not answer");
        }
    }
}

/// How a disk's image was opened, as far as neither the disk nor the image tells it: another host
/// that is to have the disk has to open it so.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Opening {
    /// The part of a raw image that is the disk.
    pub(crate) part: Option<Part>,
    /// How long requests wait for an NBD server that has gone.
    pub(crate) reconnect_delay: Duration,
    /// How long it is tried to reach one at first.
    pub(crate) open_timeout: Duration,
    /// What else was said, by its name: it means something here alone.
    pub(crate) only_here: Option<&'static str>,
}

/// The first of these that is so.
pub(crate) fn first_of(said: impl IntoIterator<Item = (&'static str, bool)>) -> Option<&'static str> {
    said.into_iter().find(|(_, is_so)| *is_so).map(|(name, _)| name)
}

impl From<&settings::DiskConfig> for Opening {
    fn from(disk: &settings::DiskConfig) -> Self {
        let mut stays = settings::DiskConfig::keys().iter().filter(|key| key.transfer == Transfer::Stays);
        Self {
            part: disk.part,
            reconnect_delay: disk.reconnect_delay,
            open_timeout: disk.open_timeout,
            only_here: stays.find(|key| !key.is_default(disk)).map(|key| key.name),
        }
    }
}

/// How `blockdev-add` opens the node that has the bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StorageNode {
    pub(crate) image: Image,
    /// Whether the path must be a block device's (true) or a regular file's (false).
    pub(crate) device: Option<bool>,
    pub(crate) cache: CacheMode,
    pub(crate) read_only: bool,
    /// Open it read-only where it cannot be written.
    pub(crate) auto_read_only: bool,
    pub(crate) force_share: bool,
    pub(crate) latency: Option<Duration>,
    /// How long requests wait for an NBD server that has gone.
    pub(crate) reconnect_delay: Duration,
    /// How long it is tried to reach one at first.
    pub(crate) open_timeout: Duration,
    /// Another daemon may take it over: see `--handover`.
    pub(crate) handover: bool,
    pub(crate) discards: Discards,
    pub(crate) detect_zeroes: DetectZeroes,
}

/// A node below a disk, which has no life of its own but keeps its name from being given again.
#[derive(Clone, Debug)]
pub(crate) struct NodeBelow {
    pub(crate) name: String,
    /// It was a disk before another was put over it, and is one again when that goes.
    pub(crate) stays: bool,
    /// It was closed, because what is above takes the bytes for another format: how to open it
    /// again.
    pub(crate) closed: Option<Rc<StorageNode>>,
}
