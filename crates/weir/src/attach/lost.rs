//! Devices of the ublk driver that weir made and nobody serves any more: each waits for the next
//! `weir serve` of its image, or to be removed.

use std::path::{Path, PathBuf, absolute};

use export::ublk::node;

/// Their nodes; none for users who may not know of them.
pub(super) fn devices() -> Vec<PathBuf> {
    numbers().map(node::path).collect()
}

/// Removes the device at this path. Whether it was one.
pub(super) fn remove(what: &Path) -> anyhow::Result<bool> {
    let whole = absolute(what)?;
    match numbers().find(|number| node::path(*number) == whole) {
        None => Ok(false),
        Some(number) => Ok(node::remove(number).map(|()| true)?),
    }
}

fn numbers() -> impl Iterator<Item = u32> {
    let lost =
        node::list().unwrap_or_default().into_iter().filter(|found| found.is_ours && found.process.is_none());
    lost.map(|found| found.number)
}
