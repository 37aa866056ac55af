//! Where an attachment is written down: a directory of its name, locked by its keeper.
//!
//! ```text
//!   lock            held while the keeper lives, or a program that it runs for an attachment
//!   wanted.json     what it was asked for, from the start
//!   attached.json   what it has made, once all of it is there
//!   asked           once a daemon was about to be asked for a disk of this name
//!   loop            held while its loop device is removed
//!   loop.json       which loop device was made
//!   server          held while a server of its own lives
//!   qmp, notify     its sockets                         log   what it said
//!   disk            what FUSE puts the disk in place of
//! ```
//!
//! It lies in /run, and goes with the machine's next boot, as the devices do.
//!
//! A caller that waits for the lock looks at the state of the processes that have it open. A keeper
//! that is stopped (SIGSTOP, a debugger) is named, with `kill -CONT`, before anything is undone,
//! and `weir detach --force` kills it; other waits end after 90 s. A deadline alone would treat a
//! keeper that writes a file system back like one that is stopped.

use std::{
    env, fs,
    io::ErrorKind,
    os::unix::{
        fs::{DirBuilderExt as _, MetadataExt as _},
        net::UnixStream,
    },
    path::PathBuf,
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use control::users::{Process, Users, is_stopped};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid},
};
use serde::{Serialize, de::DeserializeOwned};
use settings::ImageLocation;

use super::{Attached, Wanted, host::Loop, lasting::lasting_users};

/// As a node's name over QMP.
const MAX_NAME: usize = 31;
/// How often whoever waits for a keeper to end looks whether it still will.
const LOOK: Duration = Duration::from_millis(100);
/// How long it waits at most: longer than a keeper does for what was unmounted to be written back.
const ENDING: Duration = Duration::from_secs(90);

#[derive(Clone, Debug)]
pub(crate) struct Place(PathBuf);

/// Until it is dropped, nobody else has the place.
#[derive(Debug)]
pub(super) struct Kept(Flock<fs::File>);

impl Kept {
    /// For programs that are not to outlive the keeper unnoticed: who has it open has the place.
    pub(super) fn share(&self) -> std::io::Result<fs::File> {
        self.0.try_clone()
    }
}

pub(super) fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    if !name.starts_with(|first: char| first.is_ascii_alphabetic()) || !name.chars().all(is_plain) {
        return Err("is no name of an attachment; that begins with a letter, and has letters, digits, `.`, `_` and `-`".to_owned());
    }
    if name.len() > MAX_NAME {
        return Err(format!("is too long; a name has {MAX_NAME} letters at most"));
    }
    Ok(())
}

/// The image's, as far as a name may have it.
pub(super) fn default_name(image: &ImageLocation) -> String {
    let plain =
        |letter: char| if letter.is_ascii_alphanumeric() || "._-".contains(letter) { letter } else { '-' };
    let mut name: String = image.default_name().chars().map(plain).collect();
    if !name.starts_with(|first: char| first.is_ascii_alphabetic()) {
        name.insert_str(0, "disk-");
    }
    name.truncate(MAX_NAME);
    name
}

impl Place {
    /// The directory of all: root's, or this user's own.
    fn base() -> anyhow::Result<PathBuf> {
        let run = match Uid::effective().is_root() {
            true => PathBuf::from("/run"),
            false => env::var_os("XDG_RUNTIME_DIR")
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
                .context("XDG_RUNTIME_DIR is not set, and there is no other place to keep note of what is attached (log in, or set it)")?,
        };
        Ok(run.join("weir/attached"))
    }

    /// All that there are, in the order of their names.
    pub(super) fn all() -> anyhow::Result<Vec<Self>> {
        let entries = fs::read_dir(Self::base()?).into_iter().flatten().flatten();
        let mut all: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
        all.sort_unstable();
        Ok(all.into_iter().map(Self).collect())
    }

    /// Takes the place of this name, for whoever wants this. One that a keeper left half made is
    /// `cleared`; a whole one may only be taken over as it was.
    pub(super) fn take(wanted: &Wanted, cleared: impl Fn(&Self)) -> anyhow::Result<(Self, Kept)> {
        let place = Self(Self::base()?.join(&wanted.name));
        loop {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&place.0)
                .with_context(|| place.0.display().to_string())?;
            let path = place.file("lock");
            let file = fs::OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
            let file = match file {
                Ok(file) => file,
                // Whoever had it removes it just now.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => {
                    // If there is nothing in it.
                    let _ = fs::remove_dir(&place.0);
                    return Err(error).with_context(|| path.display().to_string());
                }
            };
            let number = file.metadata().map(|file| file.ino()).ok();
            let Some(kept) = place.lock(file, FlockArg::LockExclusiveNonblock)? else {
                if place.await_end() {
                    continue;
                }
                place.ensure_goes_on(false).with_context(|| wanted.name.clone())?;
                if let Some(users) = place.inmates() {
                    bail!(
                        "{0}: its file system was unmounted and is still in use: {users} (end that, or `weir detach --force {0}`: what is not written yet is lost)",
                        wanted.name
                    );
                }
                bail!(
                    "{}: is attached already (`weir attach --list` shows it; choose another --name)",
                    wanted.name
                );
            };
            // Whoever had it may have removed it before this lock was taken.
            if path.metadata().map(|file| file.ino()).ok() != number {
                continue;
            }
            match (place.attached(), place.wanted()) {
                (Some(_), Some(before)) if before == *wanted => {}
                (Some(_), _) => bail!(
                    "{0}: the process that kept it was killed (`weir attach --recover` goes on with it, `weir detach {0}` ends it)",
                    wanted.name
                ),
                (None, _) => cleared(&place),
            }
            let written = place.write("wanted.json", wanted);
            if written.is_err() && place.attached().is_none() {
                place.remove();
            }
            return written.map(|()| (place, kept));
        }
    }

    /// `None` where somebody has it, and nobody is to wait.
    fn lock(&self, file: fs::File, how: FlockArg) -> anyhow::Result<Option<Kept>> {
        match Flock::lock(file, how) {
            Ok(lock) => Ok(Some(Kept(lock))),
            Err((_, Errno::EWOULDBLOCK)) => Ok(None),
            Err((_, errno)) => Err(errno).with_context(|| self.0.display().to_string()),
        }
    }

    /// Takes a place that no keeper has, for whoever removes it; `None` where one has it.
    pub(super) fn take_deserted(&self) -> anyhow::Result<Option<Kept>> {
        let Ok(file) =
            fs::OpenOptions::new().create(true).truncate(false).write(true).open(self.file("lock"))
        else {
            return Ok(None);
        };
        let number = file.metadata().map(|file| file.ino()).ok();
        let kept = self.lock(file, FlockArg::LockExclusiveNonblock)?;
        // Whoever had it may have removed it meanwhile.
        let is_there = self.file("lock").metadata().map(|file| file.ino()).ok() == number;
        Ok(kept.filter(|_| is_there))
    }

    /// Whether no keeper lives.
    pub(super) fn is_deserted(&self) -> anyhow::Result<bool> {
        match fs::File::open(self.file("lock")) {
            Ok(file) => Ok(self.lock(file, FlockArg::LockSharedNonblock)?.is_some()),
            Err(_) => Ok(true),
        }
    }

    /// Waits until no keeper lives. The place may be gone then.
    ///
    /// # Errors
    /// That one is stopped, or does not end.
    pub(super) fn wait(&self) -> anyhow::Result<()> {
        if self.await_free("lock", || self.stopped().is_empty()) {
            return Ok(());
        }
        self.ensure_goes_on(false)?;
        bail!(
            "what keeps it does not end: {} (`weir detach --force {}` once that is ended)",
            Users::inside(&self.file("lock")),
            self.name()
        )
    }

    /// Those who have it and stand still: its keeper, or a program that it runs.
    fn stopped(&self) -> Vec<Process> {
        let mut processes = Users::inside(&self.file("lock")).processes;
        processes.retain(|process| is_stopped(process.pid));
        processes
    }

    /// Sees that nobody has it who stands still, before somebody waits for that. With `force`, who
    /// does is ended.
    ///
    /// # Errors
    /// Who does.
    pub(super) fn ensure_goes_on(&self, force: bool) -> anyhow::Result<()> {
        let stopped = self.stopped();
        let Some(Process { pid, name }) = stopped.first() else { return Ok(()) };
        if !force {
            bail!(
                "process {pid} ({name}), which keeps it, is stopped (continue it with `kill -CONT {pid}`, or end it with `weir detach --force {}`)",
                self.name()
            );
        }
        for Process { pid, .. } in stopped {
            let pid = Pid::from_raw(pid.try_into().context("no number of a process")?);
            kill(pid, Signal::SIGKILL).with_context(|| format!("process {pid}"))?;
        }
        self.await_free("lock", || true);
        Ok(())
    }

    /// Waits until nobody has it, where whoever does is about to leave. Whether that came to pass.
    fn await_end(&self) -> bool {
        self.await_free("lock", || self.is_ending() && self.stopped().is_empty())
    }

    /// Waits until nobody has one of its locks, as long as somebody expects that. Whether that came
    /// to pass.
    fn await_free(&self, lock: &str, is_expected: impl Fn() -> bool) -> bool {
        let Ok(file) = fs::File::open(self.file(lock)) else { return true };
        self.lock_while(file, FlockArg::LockShared, is_expected).is_some()
    }

    /// Takes a lock, as long as somebody expects that to come to pass.
    fn lock_while(&self, file: fs::File, how: FlockArg, is_expected: impl Fn() -> bool) -> Option<Kept> {
        let (place, (taken, taking)) = (self.clone(), channel());
        thread::spawn(move || {
            // Let go again where nobody waits any more.
            let _ = taken.send(place.lock(file, how).ok().flatten());
        });
        let began = Instant::now();
        while is_expected() && began.elapsed() < ENDING {
            if let Ok(kept) = taking.recv_timeout(LOOK) {
                return kept;
            }
        }
        None
    }

    /// What a server of its own is to share as long as it lives.
    pub(super) fn keep_server(&self) -> anyhow::Result<Kept> {
        // The one before may be about to end.
        self.await_free("server", || true);
        let path = self.file("server");
        let file = fs::OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let kept =
            self.lock(file.with_context(|| path.display().to_string())?, FlockArg::LockExclusiveNonblock)?;
        kept.with_context(|| format!("{}: another server has it (end its `weir serve`)", path.display()))
    }

    /// Waits until a server of its own that has begun listens, or has ended.
    ///
    /// # Errors
    /// If it does neither.
    pub(super) fn await_server(&self) -> anyhow::Result<()> {
        let listens = || UnixStream::connect(self.file("qmp")).is_ok();
        if self.await_free("server", || !listens()) || listens() {
            return Ok(());
        }
        bail!(
            "its server began, and still does not listen (end its `weir serve`, whose log is {})",
            self.file("log").display()
        )
    }

    /// Waits until a server of its own that was told to end has.
    pub(super) fn await_server_end(&self) {
        self.await_free("server", || true);
    }

    /// Whether its keeper has begun to undo it, or will: what it had mounted is mounted no more.
    fn is_ending(&self) -> bool {
        match self.attached() {
            // Perhaps in a namespace of its own.
            Some(Attached { device, mount: Some(mount), .. }) => {
                !Users::of(&device).with_processes().mounts.contains(&mount)
            }
            Some(_) => false,
            // Or it is still at the beginning, and then it is soon known what becomes of it.
            None => true,
        }
    }

    /// Who still uses a file system that is mounted no more.
    fn inmates(&self) -> Option<Users> {
        let users = lasting_users(&self.attached()?.device, self.made_loop().as_ref(), None);
        (users.claimed && users.mounts.is_empty() && users.holders.is_empty()).then_some(users)
    }

    /// Until it is dropped, nobody else removes loop devices of this place. `None` where the place
    /// is gone, and they with it, or where somebody stands still in the midst of that.
    pub(super) fn changing_loops(&self) -> Option<Kept> {
        let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(self.file("loop"));
        self.lock_while(file.ok()?, FlockArg::LockExclusive, || true)
    }

    /// What it is called.
    pub(super) fn name(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// That of this name, if there is one.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::all().ok()?.into_iter().find(|place| place.name() == name)
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(super) fn wanted(&self) -> Option<Wanted> {
        self.read("wanted.json")
    }

    pub(super) fn attached(&self) -> Option<Attached> {
        self.read("attached.json")
    }

    pub(super) fn set_attached(&self, attached: &Attached) -> anyhow::Result<()> {
        self.write("attached.json", attached)
    }

    /// Before a daemon, which has no disk and no export of this name, is asked for them.
    pub(super) fn set_asked(&self) -> anyhow::Result<()> {
        let path = self.file("asked");
        fs::File::create(&path).map(drop).with_context(|| path.display().to_string())
    }

    /// Whether what a daemon has by this name is this attachment's.
    pub(super) fn has_asked(&self) -> bool {
        self.file("asked").exists() || self.attached().is_some()
    }

    pub(super) fn made_loop(&self) -> Option<Loop> {
        self.read("loop.json")
    }

    pub(super) fn set_made_loop(&self, made: &Loop) -> anyhow::Result<()> {
        self.write("loop.json", made)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_slice(&fs::read(self.file(name)).ok()?).ok()
    }

    /// Whole, or not at all.
    fn write(&self, name: &str, value: &impl Serialize) -> anyhow::Result<()> {
        let (path, new) = (self.file(name), self.file(&format!("{name}.new")));
        let write = || -> anyhow::Result<()> {
            fs::write(&new, serde_json::to_vec_pretty(value)?)?;
            Ok(fs::rename(&new, &path)?)
        };
        write().with_context(|| path.display().to_string())
    }

    /// Removes it, its lock last.
    pub(super) fn remove(&self) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if entry.file_name() != "lock" {
                let _ = fs::remove_file(entry.path());
            }
        }
        let _ = fs::remove_file(self.file("lock"));
        let _ = fs::remove_dir(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_name_is_one() {
        for (image, name) in [
            ("/images/vm1.qcow2", "vm1"),
            ("memory:1G", "memory"),
            ("/x/2024 backup.raw", "disk-2024-backup"),
            ("/x/ä.raw", "disk--"),
            ("/x/a-name-that-is-longer-than-a-node-may-have.raw", "a-name-that-is-longer-than-a-no"),
        ] {
            let made = default_name(&image.parse().unwrap());
            assert_eq!(made, name);
            check_name(&made).unwrap();
        }
    }

    #[test]
    fn a_name_is_no_path() {
        for name in ["", "..", "../x", "a/b", ".hidden", "-x", "a b", &"a".repeat(32)] {
            check_name(name).unwrap_err();
        }
    }
}
