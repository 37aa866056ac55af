//! Devices of the ublk driver that weir made and nobody serves any more: each waits for the next
//! `weir serve` of its image, or to be removed.

use std::{
    path::{Path, PathBuf, absolute},
    sync::mpsc,
    thread,
};

use anyhow::anyhow;
use daemon::users::Users;
use export::ublk::node;

use super::{host, lasting};

/// Their nodes; none for users who may not know of them.
pub(super) fn devices() -> Vec<PathBuf> {
    numbers().map(node::path).collect()
}

/// Removes the device at this path, and unmounts it. Whether it was one.
///
/// # Errors
/// The kernel refuses it, or somebody has it open for too long.
pub(super) fn remove(what: &Path) -> anyhow::Result<bool> {
    let whole = absolute(what)?;
    let Some(number) = numbers().find(|number| node::path(*number) == whole) else { return Ok(false) };
    // Later it has no node to ask for them.
    let users = Users::of(&whole);
    let (done, removed) = mpsc::channel();
    // First what waits for it fails, unmounting too; then the kernel waits for its last user.
    thread::spawn(move || done.send(node::remove(number)));
    for directory in users.mounts.iter().rev() {
        host::unmount_at_last(directory);
    }
    match removed.recv_timeout(lasting::WRITING_BACK) {
        Ok(result) => Ok(result.map(|()| true)?),
        Err(_) => Err(anyhow!("it fails all requests now, and goes with its last user ({users} had it)")),
    }
}

fn numbers() -> impl Iterator<Item = u32> {
    let lost =
        node::list().unwrap_or_default().into_iter().filter(|found| found.is_ours && found.process.is_none());
    lost.map(|found| found.number)
}
