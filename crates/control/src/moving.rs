//! A disk goes to another host of the cluster, with its settings and what is in its buckets.
//!
//! ```text
//!   leaving     the host that has it: asks, closes the image, gives, and takes it back if need be
//!   arriving    the host where it goes: looks whether it could have it, opens the image, claims it
//!   moved_disk  what both tell of it
//! ```
//!
//! The steps in etcd, and which of them decides, are in `cluster::moving`. The image is open in one
//! of both daemons at most, and whoever has it is told by etcd alone: no clock decides.
//!
//! Never changes a config file.

mod arriving;
mod leaving;
mod moved_disk;

pub use arriving::receive;
pub(crate) use leaving::{Wish, away};
pub(crate) use moved_disk::MovedDisk;
use policy::time::Duration;
use settings::config;

use super::registry::Registry;

/// How long a host may take over each answer: an image on a network may have to be opened.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a look at an image may take, so that a refusal is heard.
const LOOK: Duration = Duration::from_secs(15);
/// How long a host that is to have a disk may take to appear in its cluster.
const APPEARS: Duration = Duration::from_secs(3);
/// Between two attempts at what must be known, or opened, before anything goes on.
const PAUSE: Duration = Duration::from_millis(500);

/// Whether the config file, as it is now, has a disk of this name; none where that cannot be told.
async fn is_listed(registry: &Registry, disk: &str) -> Option<bool> {
    let file = registry.loaded.borrow().as_ref().map(|loaded| loaded.file.clone())?;
    let draft = reactor::run_blocking(move || config::load(&file)).await.ok()?;
    Some(draft.disks.iter().any(|said| said.name == disk))
}
