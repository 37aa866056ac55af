//! Who uses a device for good: not those who only pass, as udev and losetup(8) do, which look at
//! each device for an instant, nor the kernel while it writes back a file system that is unmounted.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use daemon::users::Users;

/// How often a device is looked at that is about to be free.
const LOOK: Duration = Duration::from_millis(20);
/// For longer nobody has a device open who only looks at it, as udev and losetup(8) do at each.
const GLANCE: Duration = Duration::from_secs(2);
/// How long a file system that was unmounted may take to be written back, until whoever waits is
/// told of it.
const WRITING_BACK: Duration = Duration::from_secs(60);

/// Who uses a device besides what is mounted at `except`, once those have gone who only pass.
pub(super) fn lasting_users(device: &Path, except: Option<&PathBuf>) -> Users {
    let began = Instant::now();
    loop {
        let mut users = Users::of(device);
        users.mounts.retain(|point| Some(point) != except);
        let stays = !users.mounts.is_empty() || !users.holders.is_empty();
        users = users.with_processes();
        users.mounts.retain(|point| Some(point) != except);
        if except.is_none() {
            users = users.with_claims();
        }
        let patience = if users.is_only_claimed() { WRITING_BACK } else { GLANCE };
        if users.is_empty() || stays || began.elapsed() >= patience {
            return users;
        }
        // Of neither does the kernel tell when it is over.
        thread::sleep(LOOK);
    }
}
