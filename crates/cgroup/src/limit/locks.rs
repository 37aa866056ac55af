//! Who may do what with the file of limits: locks on files beside it, held until closed.
//!
//! ```text
//!   cgroups.json.lock    whoever changes the limits, for as long as that takes
//!   cgroups.json.watch   the one that steers them
//!   cgroups.json.wanted  one that is about to, for as long as another does that makes way
//!   cgroups.json.guard   it and its guard: as long as either may still settle them
//! ```

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

/// How often each lock is tried, every 20 ms.
const LOOKS_AT_A_LOCK: usize = 10;
/// A guard settles what the watch before has left.
const LOOKS_AT_A_GUARD: usize = 500;
/// A watch that makes way settles all limits first.
const LOOKS_AT_A_CLAIM: usize = 150;
/// A change may wait for systemd; settling waits less, since a limit is to hold within a second.
const LOOKS_AT_A_CHANGE: usize = 1500;
const SHORT_LOOKS_AT_A_CHANGE: usize = 25;
const LOOK: Duration = Duration::from_millis(20);

/// The file, locked against changes by others until dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    path: PathBuf,
    _lock: Flock<File>,
    pub(crate) kept: Kept,
}

impl Locked {
    /// Waits up to half a minute for other changes; creates a missing directory.
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

    /// The same without waiting; `None` while somebody changes the limits.
    pub(crate) fn open_at_once(path: &Path) -> anyhow::Result<Option<Self>> {
        let Some(lock) = lock_soon(path, "lock", 1)? else { return Ok(None) };
        Ok(Some(Self { path: path.to_owned(), _lock: lock, kept: Kept::load(path)? }))
    }

    pub(crate) fn save(&self) -> anyhow::Result<()> {
        self.kept.save(&self.path)
    }
}

pub(crate) fn restore(path: &Path, kept: &Kept) -> anyhow::Result<()> {
    let _unchanged = Unchanged::take(path);
    if path.exists() { Ok(()) } else { kept.save(path) }
}

/// Held while limits are settled: whoever changes them has told the kernel and not kept it yet.
#[derive(Debug)]
pub(super) struct Unchanged(Option<Flock<File>>);

impl Unchanged {
    /// Waits only briefly: taking a burst back matters more.
    pub(super) fn take(path: &Path) -> Self {
        Self(lock_soon(path, "lock", SHORT_LOOKS_AT_A_CHANGE).ok().flatten())
    }

    pub(super) fn is_held(&self) -> bool {
        self.0.is_some()
    }
}

/// Held by who steers these limits: there can be one at a time.
#[derive(Debug)]
pub(crate) struct Watched(#[expect(dead_code, reason = "held")] Flock<File>);

impl Watched {
    /// `None` if somebody steers them already.
    pub(crate) fn take(path: &Path) -> anyhow::Result<Option<Self>> {
        // Perhaps it is only being looked at (`is_taken`).
        Ok(lock_soon(path, "watch", LOOKS_AT_A_LOCK)?.map(Self))
    }

    /// The same, once who steers them for one command alone has made way.
    pub(crate) fn claim(path: &Path) -> anyhow::Result<Option<Self>> {
        let _wanted = lock_soon(path, "wanted", LOOKS_AT_A_LOCK)?;
        Ok(lock_soon(path, "watch", LOOKS_AT_A_CLAIM)?.map(Self))
    }

    pub(crate) fn is_wanted(path: &Path) -> bool {
        matches!(lock(path, "wanted", FlockArg::LockSharedNonblock), Ok(None))
    }

    pub(crate) fn is_taken(path: &Path) -> bool {
        matches!(lock(path, "watch", FlockArg::LockSharedNonblock), Ok(None))
    }
}

/// Held while a guard may settle these limits: by the watch and, through the same open file, its
/// guard.
#[derive(Debug)]
pub(crate) struct Guarded(Flock<File>);

impl Guarded {
    /// Waits up to ten seconds for an earlier guard: what that settles must not undo new grants.
    pub(crate) fn take(path: &Path) -> anyhow::Result<Self> {
        lock_soon(path, "guard", LOOKS_AT_A_GUARD)?.map(Self).with_context(|| {
            format!(
                "{}: the guard of an earlier watch is still there (end the process `weir cgroup guard`; it may be stopped, or wait for \
                 a disk)",
                path.display()
            )
        })
    }

    /// For the guard to hold: the lock lasts as long as either has it open.
    pub(crate) fn share(&self) -> std::io::Result<File> {
        self.0.try_clone()
    }
}

/// `None` if another has it and this one does not wait.
fn lock(path: &Path, kind: &str, how: FlockArg) -> anyhow::Result<Option<Flock<File>>> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{kind}"));
    let name = PathBuf::from(name);
    let open = || -> std::io::Result<File> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        // Not readable by others: whoever can read the file can take its lock.
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
        if looks > 1 {
            thread::sleep(LOOK);
        }
    }
    Ok(None)
}
