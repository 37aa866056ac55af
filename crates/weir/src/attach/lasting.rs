//! Who uses a device for good: not those who only pass, as udev and losetup(8) do, which look at
//! each device for an instant, nor the kernel while it writes back a file system that is unmounted.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use control::users::Users;

use super::host::Loop;

/// How soon a device is looked at again that is about to be free.
const LOOK: Duration = Duration::from_millis(20);
/// The longer it takes, the more seldom, but at least so often.
pub(super) const SELDOM: Duration = Duration::from_millis(500);
/// For longer nobody has a device open who only looks at it, as udev and losetup(8) do at each.
const GLANCE: Duration = Duration::from_secs(2);
/// How long a file system that was unmounted may take to be written back, until whoever waits is
/// told of it.
pub(super) const WRITING_BACK: Duration = Duration::from_secs(60);

/// Who uses a device besides what is mounted at `except`, once those have gone who only pass.
/// Nobody where it was the loop device that was `made` and has gone: its name may be another's.
pub(super) fn lasting_users(device: &Path, made: Option<&Loop>, except: Option<&PathBuf>) -> Users {
    let began = Instant::now();
    loop {
        let mut users = Users::of(device);
        users.mounts.retain(|point| Some(point) != except);
        let stays = !users.mounts.is_empty() || !users.holders.is_empty();
        users = users.with_processes();
        users.mounts.retain(|point| Some(point) != except);
        if except.is_none() {
            users = users.with_claims();
            if users.claimed && users.mounts.is_empty() && users.holders.is_empty() {
                users = users.with_inmates();
            }
        }
        if made.is_some_and(|made| made.device().is_none()) {
            return Users::default();
        }
        let is_over = users.is_empty() || stays || began.elapsed() >= GLANCE;
        if is_over && users.are_of(device) {
            return users;
        }
        // Of neither does the kernel tell when it is over.
        thread::sleep((began.elapsed() / 4).clamp(LOOK, SELDOM));
    }
}

/// Whether the kernel has a device for itself. Not where it was the loop device that was `made` and
/// has gone, as above.
pub(super) fn is_claimed(device: &Path, made: Option<&Loop>) -> bool {
    Users::of(device).with_claims().claimed && made.is_none_or(|made| made.device().is_some())
}

/// As [`lasting_users`], once what was unmounted has been written back too. `tell` is called where
/// that is waited for.
pub(super) fn users_after_writing_back(
    device: &Path,
    made: Option<&Loop>,
    except: Option<&PathBuf>,
    tell: impl FnOnce(),
) -> Users {
    let (began, mut tell) = (Instant::now(), Some(tell));
    loop {
        let users = lasting_users(device, made, except);
        if users.is_empty() || !users.is_only_claimed() || began.elapsed() >= WRITING_BACK {
            return users;
        }
        if let Some(tell) = tell.take() {
            tell();
        }
    }
}
