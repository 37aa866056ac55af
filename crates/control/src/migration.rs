//! Migration: a disk moves to another host of the cluster, with its settings and bucket levels.
//!
//! ```text
//!   source         offers, closes the image, hands over; resumes on failure
//!   target         checks the offer, opens the image, claims the disk
//!   migrated_disk  description that both exchange
//! ```
//!
//! The steps in etcd are in `cluster::migration`. At most one of the two daemons has the image
//! open. Transactions in etcd alone decide which host owns the disk; clocks never do.
//!
//! Never changes a config file.

mod migrated_disk;
mod source;
mod target;

pub(crate) use migrated_disk::MigratedDisk;
use policy::time::Duration;
use settings::config;
pub(crate) use source::{MigrationRequest, migrate};
pub use target::receive_disks;

use super::registry::Registry;

/// Time limit for each answer of the peer host, which may have to open an image over the network.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for the check at the target; below [`ANSWER_TIMEOUT`], so that its rejection arrives
/// in time.
const CHECK_TIMEOUT: Duration = Duration::from_secs(15);
/// Time for the target host to join the cluster.
const JOIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval between attempts of a step that must succeed before the migration continues.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// True if the current config file contains the disk; `None` if the file cannot be read.
async fn is_in_config_file(registry: &Registry, disk: &str) -> Option<bool> {
    let file = registry.loaded.borrow().as_ref().map(|loaded| loaded.file.clone())?;
    let file_config = reactor::run_blocking(move || config::load(&file)).await.ok()?;
    Some(file_config.disks.iter().any(|listed| listed.name == disk))
}
