//! Locks on the limits file: files beside it, locked until they are closed.
//!
//! ```text
//!   cgroups.json.lock    process that changes the limits, during the change
//!   cgroups.json.watch   process that steers them
//!   cgroups.json.wanted  process about to steer, while it waits for another that gives way
//!   cgroups.json.guard   `watch` and its guard: as long as either may still settle limits
//! ```
//!
//! Steering is the continuous adjustment of io.max, for bursts, watermarks and limits of groups.
//! Settling sets io.max to the rates without them (settling.rs), before or after a process steers.

use std::{
    fs::{self, File},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use nix::fcntl::{Flock, FlockArg};

use super::limits_file::LimitsFile;

/// Attempts at a lock, one every 20 ms.
const LOCK_ATTEMPTS: usize = 10;
/// Attempts at the guard's lock: the guard of an earlier `watch` settles its limits first.
const GUARD_ATTEMPTS: usize = 500;
/// Attempts while claiming: the process that gives way settles all limits first.
const CLAIM_ATTEMPTS: usize = 150;
/// Attempts before a change: the process that holds the lock may be waiting for systemd. Settling
/// waits less, because a limit must be in force within a second.
const CHANGE_ATTEMPTS: usize = 1500;
const SETTLE_ATTEMPTS: usize = 25;
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The limits file, locked against concurrent changes until dropped.
#[derive(Debug)]
pub(crate) struct LockedLimitsFile {
    path: PathBuf,
    _lock: Flock<File>,
    pub(crate) limits_file: LimitsFile,
}

impl LockedLimitsFile {
    /// Waits up to 30 s for other changes; creates a missing directory.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let lock = lock_with_retries(path, "lock", CHANGE_ATTEMPTS)?;
        let lock = lock.with_context(|| {
            format!(
                "{}: another process has been changing these limits for half a minute (is another \
                 `weir cgroup limit` waiting for systemd?)",
                path.display()
            )
        })?;
        Ok(Self { path: path.to_owned(), _lock: lock, limits_file: LimitsFile::load(path)? })
    }

    /// Locks without waiting; `None` while another process changes the limits.
    pub(crate) fn try_open(path: &Path) -> anyhow::Result<Option<Self>> {
        let Some(lock) = lock_with_retries(path, "lock", 1)? else { return Ok(None) };
        Ok(Some(Self { path: path.to_owned(), _lock: lock, limits_file: LimitsFile::load(path)? }))
    }

    pub(crate) fn save(&self) -> anyhow::Result<()> {
        self.limits_file.save(&self.path)
    }
}

/// Writes a removed limits file again, unless another process has created one in the meantime.
pub(crate) fn restore(path: &Path, limits_file: &LimitsFile) -> anyhow::Result<()> {
    let _unchanged = ChangeLock::take(path);
    if path.exists() { Ok(()) } else { limits_file.save(path) }
}

/// Lock against changes while limits are settled: a change writes to the kernel before it writes to
/// the file, so settling by the file would undo a change that is not saved yet.
#[derive(Debug)]
pub(super) struct ChangeLock(Option<Flock<File>>);

impl ChangeLock {
    /// Waits only briefly, and proceeds without the lock: ending a burst is more urgent.
    pub(super) fn take(path: &Path) -> Self {
        Self(lock_with_retries(path, "lock", SETTLE_ATTEMPTS).ok().flatten())
    }

    pub(super) fn is_held(&self) -> bool {
        self.0.is_some()
    }
}

/// Lock of the process that steers these limits; at most one at a time.
#[derive(Debug)]
pub(crate) struct WatchLock(#[expect(dead_code, reason = "held")] Flock<File>);

impl WatchLock {
    /// Returns `None` if another process steers them.
    pub(crate) fn take(path: &Path) -> anyhow::Result<Option<Self>> {
        // Several attempts: `is_taken` holds the lock for a moment.
        Ok(lock_with_retries(path, "watch", LOCK_ATTEMPTS)?.map(Self))
    }

    /// Takes the lock over from `weir cgroup run`, which stops steering when another process waits;
    /// `None` if it is still held after 3 s.
    pub(crate) fn claim(path: &Path) -> anyhow::Result<Option<Self>> {
        let _wanted = lock_with_retries(path, "wanted", LOCK_ATTEMPTS)?;
        Ok(lock_with_retries(path, "watch", CLAIM_ATTEMPTS)?.map(Self))
    }

    pub(crate) fn is_wanted(path: &Path) -> bool {
        matches!(lock(path, "wanted", FlockArg::LockSharedNonblock), Ok(None))
    }

    pub(crate) fn is_taken(path: &Path) -> bool {
        matches!(lock(path, "watch", FlockArg::LockSharedNonblock), Ok(None))
    }
}

/// Lock held while a guard may settle these limits: by `watch` and, through the same open file
/// description, by its guard.
#[derive(Debug)]
pub(crate) struct GuardLock(Flock<File>);

impl GuardLock {
    /// Waits up to 10 s for an earlier guard to end: its settling would revoke bursts and quota
    /// that the new watch grants.
    pub(crate) fn take(path: &Path) -> anyhow::Result<Self> {
        lock_with_retries(path, "guard", GUARD_ATTEMPTS)?.map(Self).with_context(|| {
            format!(
                "{}: the guard of an earlier watch is still running (end the process `weir cgroup \
                 guard`; it may be stopped, or waiting for a disk)",
                path.display()
            )
        })
    }

    /// A duplicate for the guard: the lock lasts until both are closed (flock(2)).
    pub(crate) fn share(&self) -> std::io::Result<File> {
        self.0.try_clone()
    }
}

/// Tries a lock once; `None` if another process holds it.
fn lock(path: &Path, kind: &str, operation: FlockArg) -> anyhow::Result<Option<Flock<File>>> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{kind}"));
    let name = PathBuf::from(name);
    let open = || -> std::io::Result<File> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        // Other users must not be able to open the file: flock(2) also locks a file that is open
        // only for reading.
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&name)?;
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
        Ok(file)
    };
    let file = open().with_context(|| format!("{} cannot be opened (are you root?)", name.display()))?;
    match Flock::lock(file, operation) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error).with_context(|| format!("{} cannot be locked", name.display())),
    }
}

/// Tries an exclusive lock up to `attempts` times; `None` if another process still holds it.
fn lock_with_retries(path: &Path, kind: &str, attempts: usize) -> anyhow::Result<Option<Flock<File>>> {
    for _ in 0..attempts {
        if let Some(lock) = lock(path, kind, FlockArg::LockExclusiveNonblock)? {
            return Ok(Some(lock));
        }
        // A single attempt must not wait.
        if attempts > 1 {
            thread::sleep(RETRY_INTERVAL);
        }
    }
    Ok(None)
}
