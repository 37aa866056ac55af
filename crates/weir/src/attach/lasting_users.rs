//! Lasting users of a device. Excluded are udev and losetup(8), which open each device briefly, and
//! the kernel's writeback of an unmounted file system.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use control::openers::DeviceOpeners;

use super::host::AttachedLoop;

/// Initial polling interval of a device that is about to become free.
const FIRST_POLL: Duration = Duration::from_millis(20);
/// Longest polling interval.
pub(super) const LAST_POLL: Duration = Duration::from_millis(500);
/// Longest time for which udev and losetup(8) keep a device open.
const BRIEF_OPEN: Duration = Duration::from_secs(2);
/// Longest wait for the kernel to release a device, for example after the writeback of an unmounted
/// file system.
pub(super) const WRITEBACK_TIMEOUT: Duration = Duration::from_secs(60);

/// Lasting users of a device, excluding the mount at `except`. Empty if the device was the loop
/// device `attached_loop` and that is gone: its name may belong to another device.
pub(super) fn lasting_users(
    device: &Path,
    attached_loop: Option<&AttachedLoop>,
    except: Option<&PathBuf>,
) -> DeviceOpeners {
    let began = Instant::now();
    loop {
        let mut users = DeviceOpeners::of_device(device);
        users.mounts.retain(|point| Some(point) != except);
        let is_lasting = !users.mounts.is_empty() || !users.holders.is_empty();
        // Slow, as it reads /proc of all processes. Adds mounts of other namespaces, so `except` is
        // filtered again.
        users = users.with_processes();
        users.mounts.retain(|point| Some(point) != except);
        // Reading /proc of all processes is costly, and a mount that stays explains the claim
        // already.
        if except.is_none() {
            users = users.with_claims();
            if users.claimed && users.mounts.is_empty() && users.holders.is_empty() {
                users = users.with_file_system_users();
            }
        }
        if attached_loop.is_some_and(|attached_loop| attached_loop.device().is_none()) {
            return DeviceOpeners::default();
        }
        let is_over = users.is_empty() || is_lasting || began.elapsed() >= BRIEF_OPEN;
        // The name may have changed its meaning during the scan: then the result is discarded.
        if is_over && users.are_unchanged(device) {
            return users;
        }
        // The kernel reports neither event: poll, less often the longer it takes.
        thread::sleep((began.elapsed() / 4).clamp(FIRST_POLL, LAST_POLL));
    }
}

/// True if the kernel has claimed a device exclusively. False if it was the loop device
/// `attached_loop` and that is gone.
pub(super) fn is_claimed(device: &Path, attached_loop: Option<&AttachedLoop>) -> bool {
    DeviceOpeners::of_device(device).with_claims().claimed
        && attached_loop.is_none_or(|attached_loop| attached_loop.device().is_some())
}

/// As [`lasting_users`], after the writeback of an unmounted file system. Calls `notify` once if it
/// has to wait for the writeback.
pub(super) fn users_after_writing_back(
    device: &Path,
    attached_loop: Option<&AttachedLoop>,
    except: Option<&PathBuf>,
    notify: impl FnOnce(),
) -> DeviceOpeners {
    let (began, mut notify) = (Instant::now(), Some(notify));
    loop {
        let users = lasting_users(device, attached_loop, except);
        if users.is_empty() || !users.is_only_claimed() || began.elapsed() >= WRITEBACK_TIMEOUT {
            return users;
        }
        if let Some(notify) = notify.take() {
            notify();
        }
    }
}
