//! A disk that runs, with what it was opened with and the names that it keeps from others.
//!
//! Only data: who looks after it is the inventory.

use std::{cell::Cell, rc::Rc, sync::Arc};

use block::{
    disk::{DetectZeroes, Discards, Disk},
    image::qcow2::CacheSettings,
    storage::CacheMode,
};
use policy::time::Duration;
use serde_json::{Map, Value};
use settings::Image;

#[derive(Debug)]
pub(crate) struct RunningDisk {
    pub(crate) disk: Arc<Disk>,
    pub(crate) image: Image,
    pub(crate) cache: CacheMode,
    /// What was asked for, not what it comes to.
    pub(crate) caches: Cell<CacheSettings>,
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
        if let Err(error) = self.disk.flush().await {
            tracing::error!(%disk, %error, "the last flush of a disk that is removed failed");
        }
        if let Err(error) = self.disk.close().await {
            tracing::error!(%disk, %error, "a disk that is removed could not be closed");
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
