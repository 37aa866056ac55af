//! Devices of the ublk driver that weir made and nobody serves any more: each waits for the next
//! `weir serve` of its image, or to be removed.

use std::{
    path::{Path, PathBuf, absolute},
    sync::mpsc,
    thread,
};

use anyhow::{Context as _, anyhow};
use console::{CommandFailure, print_notice};
use control::users::Users;
use export::ublk::{guard, node};

use super::{host, lasting};

/// Their nodes; none for users who may not know of them.
pub(super) fn devices() -> Vec<PathBuf> {
    numbers().map(node::path).collect()
}

/// Removes one some time after its server has ended, as that has told.
pub(crate) fn run_guard() -> Result<(), CommandFailure> {
    if let Some(done) = guard::run().context("a device by ublk is not guarded any more")? {
        print_notice(&done);
    }
    Ok(())
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
    let all = users.clone().with_processes();
    let (done, removed) = mpsc::channel();
    // First what waits for it fails, unmounting too; then the kernel waits for its last user.
    thread::spawn(move || done.send(node::remove(number)));
    for directory in users.mounts.iter().rev() {
        host::unmount_at_last(directory);
    }
    match removed.recv_timeout(lasting::WRITING_BACK) {
        Ok(result) => Ok(result.map(|()| true)?),
        Err(_) => Err(goes_later(&all)),
    }
}

/// Of a device whose removal the kernel has begun.
pub(super) fn goes_later(users: &Users) -> anyhow::Error {
    let whom = if users.is_empty() { String::new() } else { format!(" (in use: {users})") };
    anyhow!("it fails all requests now, and goes with its last user{whom}")
}

fn numbers() -> impl Iterator<Item = u32> {
    let lost =
        node::list().unwrap_or_default().into_iter().filter(|found| found.is_ours && found.process.is_none());
    lost.map(|found| found.number)
}

#[cfg(test)]
mod tests {
    use control::users::Process;

    use super::*;

    #[test]
    fn who_keeps_a_device_is_named_where_that_is_known() {
        let mut users = Users::default();
        let said = "it fails all requests now, and goes with its last user";
        assert_eq!(goes_later(&users).to_string(), said);
        users.processes.push(Process { pid: 12, name: "dd".to_owned() });
        assert_eq!(goes_later(&users).to_string(), format!("{said} (in use: open in dd (12))"));
    }
}
