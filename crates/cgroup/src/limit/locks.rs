//! Who may do what with the file of limits: locks on files beside it, which end with whoever holds
//! them.
//!
//! ```text
//!   cgroups.json.lock    whoever changes the limits, for as long as that takes
//!   cgroups.json.watch   the one that steers them
//!   cgroups.json.wanted  one that is about to, for as long as another does that makes way
//!   cgroups.json.guard   it and its guard: as long as either may still settle them
//! ```
//!
//! Never reads or writes a limit.

use std::{
    fs::{self, File},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::Context as _;
use nix::fcntl::{Flock, FlockArg};

use super::kept::Kept;

/// How often a lock is tried before somebody has it for good.
const LOOKS_AT_A_LOCK: usize = 10;
/// The same of a guard's, which settles what the watch before has left.
const LOOKS_AT_A_GUARD: usize = 500;
/// The same of a watch that may make way, after settling all limits.
const LOOKS_AT_A_CLAIM: usize = 150;
/// The same of a change, which may have to wait for systemd; and for who has no time to wait, since
/// a limit is to hold within a second.
const LOOKS_AT_A_CHANGE: usize = 1500;
const SHORT_LOOKS_AT_A_CHANGE: usize = 25;
const LOOK: Duration = Duration::from_millis(20);

/// The file, locked against others who would change it, until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    path: PathBuf,
    _lock: Flock<File>,
    pub(crate) kept: Kept,
}

impl Locked {
    /// Waits until nobody else changes it; makes its directory if that is missing.
    ///
    /// # Errors
    /// If it cannot be read or locked, or somebody else changes it for half a minute.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let lock = lock_soon(path, "lock", LOOKS_AT_A_CHANGE)?;
        let lock = lock.with_context(|| {
            format!(
                "{}: somebody else changes these limits, for half a minute now (is another `weir cgroup limit` waiting for systemd?)",
                path.display()
            )
        })?;
        Ok(Self { path: path.to_owned(), _lock: lock, kept: Kept::load(path)? })
    }

    /// Writes what has been changed.
    ///
    /// # Errors
    /// If that fails; the file is then as it was.
    pub(crate) fn save(&self) -> anyhow::Result<()> {
        self.kept.save(&self.path)
    }
}

/// Writes the file anew, if it has been removed.
pub(crate) fn restore(path: &Path, kept: &Kept) -> anyhow::Result<()> {
    let _unchanged = Unchanged::take(path);
    if path.exists() { Ok(()) } else { kept.save(path) }
}

/// Held while limits are settled, so that nobody changes them meanwhile: who does has told the
/// kernel and not kept it yet.
#[derive(Debug)]
pub(super) struct Unchanged(Option<Flock<File>>);

impl Unchanged {
    /// Waits for who changes them, and not for long: to take a burst back matters more.
    pub(super) fn take(path: &Path) -> Self {
        Self(lock_soon(path, "lock", SHORT_LOOKS_AT_A_CHANGE).ok().flatten())
    }

    /// Whether it was let go in time.
    pub(super) fn is_held(&self) -> bool {
        self.0.is_some()
    }
}

/// Held by who steers these limits: there can be one at a time.
#[derive(Debug)]
pub(crate) struct Watched(#[expect(dead_code, reason = "held")] Flock<File>);

impl Watched {
    /// `None` if somebody steers them already.
    ///
    /// # Errors
    /// If the lock's file cannot be made.
    pub(crate) fn take(path: &Path) -> anyhow::Result<Option<Self>> {
        // Perhaps it is only being looked at (`is_taken`), which nobody tells.
        Ok(lock_soon(path, "watch", LOOKS_AT_A_LOCK)?.map(Self))
    }

    /// The same, once who steers them for one command alone has made way.
    ///
    /// # Errors
    /// If a lock's file cannot be made.
    pub(crate) fn claim(path: &Path) -> anyhow::Result<Option<Self>> {
        let _wanted = lock_soon(path, "wanted", LOOKS_AT_A_LOCK)?;
        Ok(lock_soon(path, "watch", LOOKS_AT_A_CLAIM)?.map(Self))
    }

    /// Whether somebody claims them.
    pub(crate) fn is_wanted(path: &Path) -> bool {
        matches!(lock(path, "wanted", FlockArg::LockSharedNonblock), Ok(None))
    }

    /// Whether somebody steers them.
    pub(crate) fn is_taken(path: &Path) -> bool {
        matches!(lock(path, "watch", FlockArg::LockSharedNonblock), Ok(None))
    }
}

/// Held as long as a guard may still settle these limits: by the watch and, through the same open
/// file, by its guard.
#[derive(Debug)]
pub(crate) struct Guarded(Flock<File>);

impl Guarded {
    /// Waits until no earlier guard is left: what that settles must not come after what the next
    /// watch has granted.
    ///
    /// # Errors
    /// If the lock's file cannot be made, or a guard is still there after ten seconds.
    pub(crate) fn take(path: &Path) -> anyhow::Result<Self> {
        lock_soon(path, "guard", LOOKS_AT_A_GUARD)?.map(Self).with_context(|| {
            format!(
                "{}: the guard of an earlier watch is still there (end the process `weir cgroup guard`; it may be stopped, or wait for \
                 a disk)",
                path.display()
            )
        })
    }

    /// The file, for the guard to hold: the lock lasts as long as either has it open.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(crate) fn share(&self) -> std::io::Result<File> {
        self.0.try_clone()
    }
}

/// A lock beside the file; `None` if another has it and this one does not wait.
fn lock(path: &Path, kind: &str, how: FlockArg) -> anyhow::Result<Option<Flock<File>>> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{kind}"));
    let name = PathBuf::from(name);
    let open = || -> std::io::Result<File> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        // Not to be opened by anybody else: a lock can be taken, and kept, by whoever can read the
        // file.
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&name)?;
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
        Ok(file)
    };
    let file = open().with_context(|| format!("{} cannot be opened (are you root?)", name.display()))?;
    match Flock::lock(file, how) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error).with_context(|| format!("{} cannot be locked", name.display())),
    }
}

/// The same for this process alone; `None` if another still has it after so many looks.
fn lock_soon(path: &Path, kind: &str, looks: usize) -> anyhow::Result<Option<Flock<File>>> {
    for _ in 0..looks {
        if let Some(lock) = lock(path, kind, FlockArg::LockExclusiveNonblock)? {
            return Ok(Some(lock));
        }
        thread::sleep(LOOK);
    }
    Ok(None)
}
