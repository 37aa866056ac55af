//! A disk that runs, with what it was opened with and the names that it keeps from others.
//!
//! Only data: who looks after it is the inventory.

use std::{cell::Cell, sync::Arc};

use block::{disk::Disk, image::qcow2::CacheSettings, storage::CacheMode};
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
}

/// A node below a disk, which has no life of its own but keeps its name from being given again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeBelow {
    pub(crate) name: String,
    /// It was a disk before another was put over it, and is one again when that goes.
    pub(crate) stays: bool,
}
