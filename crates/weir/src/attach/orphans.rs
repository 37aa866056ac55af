//! Orphaned ublk devices: made by weir and without a server. They wait for the next `weir serve` of
//! their image, or to be removed.

use std::{
    path::{Path, PathBuf, absolute},
    sync::mpsc,
    thread,
};

use anyhow::{Context as _, anyhow};
use console::{CommandFailure, print_notice};
use control::openers::DeviceOpeners;
use export::ublk::{guard, node};

use super::{host, lasting_users};

/// Nodes of orphaned devices; empty for a user without permission to list them.
pub(super) fn devices() -> Vec<PathBuf> {
    orphan_numbers().map(node::path).collect()
}

/// Removes a device some time after its server has ended. The server passes the device and the
/// time.
pub(crate) fn run_guard() -> Result<(), CommandFailure> {
    if let Some(done) = guard::run().context("an orphaned ublk device cannot be removed")? {
        print_notice(&done);
    }
    Ok(())
}

/// Removes the device at this path and unmounts it. Returns true if it was an orphaned device.
///
/// # Errors
/// If the kernel refuses, or if the device stays open for too long.
pub(super) fn remove(device: &Path) -> anyhow::Result<bool> {
    let full_path = absolute(device)?;
    let Some(number) = orphan_numbers().find(|number| node::path(*number) == full_path) else {
        return Ok(false);
    };
    // Read now: users are found by the device node, which is removed first.
    let users = DeviceOpeners::of_device(&full_path);
    let all = users.clone().with_processes();
    let (sender, receiver) = mpsc::channel();
    // The removal first fails all queued requests, which lets the unmounts below return; the kernel
    // then waits for the last user.
    thread::spawn(move || sender.send(node::remove(number)));
    for directory in users.mounts.iter().rev() {
        host::unmount_lazily(directory);
    }
    match receiver.recv_timeout(lasting_users::WRITEBACK_TIMEOUT) {
        Ok(result) => Ok(result.map(|()| true)?),
        Err(_) => Err(removal_pending(&all)),
    }
}

/// Error for a device whose removal waits for its last user.
pub(super) fn removal_pending(users: &DeviceOpeners) -> anyhow::Error {
    let whom = if users.is_empty() { String::new() } else { format!(" (in use: {users})") };
    anyhow!("all its requests fail now; the kernel removes it when its last user closes it{whom}")
}

fn orphan_numbers() -> impl Iterator<Item = u32> {
    // `is_ours` excludes devices of other ublk servers; a server process means that the device is
    // not orphaned.
    let lost =
        node::list().unwrap_or_default().into_iter().filter(|found| found.is_ours && found.process.is_none());
    lost.map(|found| found.number)
}

#[cfg(test)]
mod tests {
    use control::openers::OpenerProcess;

    use super::*;

    #[test]
    fn known_users_of_a_pending_removal_are_named() {
        let mut users = DeviceOpeners::default();
        let message = "all its requests fail now; the kernel removes it when its last user closes it";
        assert_eq!(removal_pending(&users).to_string(), message);
        users.processes.push(OpenerProcess { pid: 12, name: "dd".to_owned() });
        assert_eq!(removal_pending(&users).to_string(), format!("{message} (in use: open in dd (12))"));
    }
}
