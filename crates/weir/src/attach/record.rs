//! Record of an attachment: a directory with its name, locked by its keeper.
//!
//! ```text
//!   lock            held while the keeper, or a program that it runs, lives
//!   wanted.json     the request, from the start
//!   attached.json   the result, once the attachment is complete
//!   asked           exists once a daemon may have received a request to add a disk of this name
//!   loop            held while the loop device is removed
//!   loop.json       the loop device that was made
//!   server          held while a private server lives
//!   qmp, notify     the server's sockets                log   its messages
//!   disk            file over which FUSE mounts the disk
//! ```
//!
//! The directory is in /run and does not survive a boot, like the devices.
//!
//! A caller that waits for the lock checks the state of the processes that have it open. A keeper
//! that is stopped (SIGSTOP, a debugger) is reported, with `kill -CONT` as the remedy, before
//! anything is undone, and `weir detach --force` kills it; other waits end after 90 s. A deadline
//! alone would treat a keeper that writes a file system back like one that is stopped.

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
use control::openers::{DeviceOpeners, OpenerProcess, is_stopped};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid},
};
use serde::{Serialize, de::DeserializeOwned};
use settings::ImageLocation;

use super::{AttachRequest, Attachment, host::AttachedLoop, lasting_users::lasting_users};

/// Longest name, that of a QMP node name.
const MAX_NAME: usize = 31;
/// Interval at which a waiter checks if a keeper will still end.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Longest wait for a keeper: longer than its own wait for the writeback of an unmount.
const END_TIMEOUT: Duration = Duration::from_secs(90);

#[derive(Clone, Debug)]
pub(crate) struct AttachmentRecord(PathBuf);

/// Exclusive lock of a place, released on drop.
#[derive(Debug)]
pub(super) struct RecordLock(Flock<fs::File>);

impl RecordLock {
    /// Duplicate for child programs: the lock stays held until they end as well.
    pub(super) fn share(&self) -> std::io::Result<fs::File> {
        self.0.try_clone()
    }
}

pub(super) fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
    if !name.starts_with(|first: char| first.is_ascii_alphabetic()) || !name.chars().all(is_plain) {
        return Err("is not a valid name; a name begins with a letter and consists of letters, \
                    digits, `.`, `_` and `-`"
            .to_owned());
    }
    if name.len() > MAX_NAME {
        return Err(format!("is too long; a name has at most {MAX_NAME} characters"));
    }
    Ok(())
}

/// The image's name, with invalid characters replaced.
pub(super) fn default_name(image: &ImageLocation) -> String {
    let plain = |character: char| {
        if character.is_ascii_alphanumeric() || "._-".contains(character) { character } else { '-' }
    };
    let mut name: String = image.default_name().chars().map(plain).collect();
    if !name.starts_with(|first: char| first.is_ascii_alphabetic()) {
        name.insert_str(0, "disk-");
    }
    name.truncate(MAX_NAME);
    name
}

impl AttachmentRecord {
    /// Directory of all attachments: root's, or this user's.
    fn base() -> anyhow::Result<PathBuf> {
        let run = match Uid::effective().is_root() {
            true => PathBuf::from("/run"),
            false => {
                env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute()).context(
                    "XDG_RUNTIME_DIR is not set, but attached disks are recorded there (log in, or set it)",
                )?
            }
        };
        Ok(run.join("weir/attached"))
    }

    /// All attachments, sorted by name.
    pub(super) fn all() -> anyhow::Result<Vec<Self>> {
        let entries = fs::read_dir(Self::base()?).into_iter().flatten().flatten();
        let mut all: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
        all.sort_unstable();
        Ok(all.into_iter().map(Self).collect())
    }

    /// Locks the place of this name for a new keeper. An incomplete attachment is `cleared`; a
    /// complete one can only be continued with an equal request.
    pub(super) fn lock_for(
        request: &AttachRequest,
        cleared: impl Fn(&Self),
    ) -> anyhow::Result<(Self, RecordLock)> {
        let place = Self(Self::base()?.join(&request.name));
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
                // Its previous owner is removing the directory: try again.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => {
                    // Removes only an empty directory.
                    let _ = fs::remove_dir(&place.0);
                    return Err(error).with_context(|| path.display().to_string());
                }
            };
            let number = file.metadata().map(|file| file.ino()).ok();
            let Some(lock) = place.lock(file, FlockArg::LockExclusiveNonblock)? else {
                // The owner may be ending: then the name is free in a moment.
                if place.await_end() {
                    continue;
                }
                place.ensure_not_stopped(false).with_context(|| request.name.clone())?;
                if let Some(users) = place.unmounted_users() {
                    bail!(
                        "{0}: its file system was unmounted and is still in use: {users} (end \
                         these, or `weir detach --force {0}`: data that is not written yet is lost)",
                        request.name
                    );
                }
                bail!(
                    "{}: is attached already (`weir attach --list` shows it; choose another --name)",
                    request.name
                );
            };
            // Without this check the lock could be on a file that its previous owner has deleted.
            if path.metadata().map(|file| file.ino()).ok() != number {
                continue;
            }
            match (place.attached(), place.request()) {
                // `attach --recover` repeats the recorded request: continue it.
                (Some(_), Some(before)) if before == *request => {}
                (Some(_), _) => bail!(
                    "{0}: its keeper process was killed (`weir attach --recover` restores it, \
                     `weir detach {0}` detaches it)",
                    request.name
                ),
                (None, _) => cleared(&place),
            }
            let written = place.write("wanted.json", request);
            // A full /run must not leave an empty record that blocks the name.
            if written.is_err() && place.attached().is_none() {
                place.remove();
            }
            return written.map(|()| (place, lock));
        }
    }

    /// Locks a file; `None` if it is locked and the call does not wait.
    fn lock(&self, file: fs::File, mode: FlockArg) -> anyhow::Result<Option<RecordLock>> {
        match Flock::lock(file, mode) {
            Ok(lock) => Ok(Some(RecordLock(lock))),
            Err((_, Errno::EWOULDBLOCK)) => Ok(None),
            Err((_, errno)) => Err(errno).with_context(|| self.0.display().to_string()),
        }
    }

    /// Locks a place without a keeper, for removing it; `None` if a keeper holds it.
    pub(super) fn lock_abandoned(&self) -> anyhow::Result<Option<RecordLock>> {
        let Ok(file) =
            fs::OpenOptions::new().create(true).truncate(false).write(true).open(self.file("lock"))
        else {
            return Ok(None);
        };
        let number = file.metadata().map(|file| file.ino()).ok();
        let lock = self.lock(file, FlockArg::LockExclusiveNonblock)?;
        // As in `lock_for`: the lock file may have been deleted before it was locked.
        let is_current = self.file("lock").metadata().map(|file| file.ino()).ok() == number;
        Ok(lock.filter(|_| is_current))
    }

    /// True if no keeper lives.
    pub(super) fn is_abandoned(&self) -> anyhow::Result<bool> {
        match fs::File::open(self.file("lock")) {
            // A shared lock, so that concurrent readers do not see each other as keepers.
            Ok(file) => Ok(self.lock(file, FlockArg::LockSharedNonblock)?.is_some()),
            Err(_) => Ok(true),
        }
    }

    /// Waits until the keeper has ended, which may have removed the directory of the record.
    ///
    /// # Errors
    /// If the keeper is stopped or does not end.
    pub(super) fn wait(&self) -> anyhow::Result<()> {
        if self.await_free("lock", || self.stopped().is_empty()) {
            return Ok(());
        }
        self.ensure_not_stopped(false)?;
        bail!(
            "its keeper does not end: {} (end these, then `weir detach --force {}`)",
            DeviceOpeners::of_directory(&self.file("lock")),
            self.name()
        )
    }

    /// Stopped processes that hold the lock: the keeper, or a program that it runs.
    fn stopped(&self) -> Vec<OpenerProcess> {
        let mut processes = DeviceOpeners::of_directory(&self.file("lock")).processes;
        processes.retain(|process| is_stopped(process.pid));
        processes
    }

    /// Fails if the keeper process is stopped (SIGSTOP), so that callers do not wait for it. With
    /// `force`, kills it instead.
    ///
    /// # Errors
    /// Names the stopped process.
    pub(super) fn ensure_not_stopped(&self, force: bool) -> anyhow::Result<()> {
        let stopped = self.stopped();
        let Some(OpenerProcess { pid, name }) = stopped.first() else { return Ok(()) };
        if !force {
            bail!(
                "its keeper, process {pid} ({name}), is stopped (continue it with `kill -CONT \
                 {pid}`, or end it with `weir detach --force {}`)",
                self.name()
            );
        }
        for OpenerProcess { pid, .. } in stopped {
            let pid = Pid::from_raw(pid.try_into().context("invalid process id")?);
            // SIGTERM would stay pending in a stopped process.
            kill(pid, Signal::SIGKILL).with_context(|| format!("process {pid}"))?;
        }
        self.await_free("lock", || true);
        Ok(())
    }

    /// Waits for the lock's owner while it is ending. True if it has ended.
    fn await_end(&self) -> bool {
        self.await_free("lock", || self.is_ending() && self.stopped().is_empty())
    }

    /// Waits for one of the place's locks while `is_expected` holds. True if the lock became free.
    fn await_free(&self, lock: &str, is_expected: impl Fn() -> bool) -> bool {
        let Ok(file) = fs::File::open(self.file(lock)) else { return true };
        self.lock_while(file, FlockArg::LockShared, is_expected).is_some()
    }

    /// Takes a lock, waiting while `is_expected` holds.
    fn lock_while(
        &self,
        file: fs::File,
        mode: FlockArg,
        is_expected: impl Fn() -> bool,
    ) -> Option<RecordLock> {
        let (place, (sender, receiver)) = (self.clone(), channel());
        thread::spawn(move || {
            // flock(2) has no timeout, so a thread waits. Its lock is dropped if the receiver is
            // gone.
            let _ = sender.send(place.lock(file, mode).ok().flatten());
        });
        let began = Instant::now();
        while is_expected() && began.elapsed() < END_TIMEOUT {
            if let Ok(lock) = receiver.recv_timeout(POLL_INTERVAL) {
                return lock;
            }
        }
        None
    }

    /// Lock that a private server holds for its lifetime.
    pub(super) fn lock_server(&self) -> anyhow::Result<RecordLock> {
        // An earlier server may be about to end.
        self.await_free("server", || true);
        let path = self.file("server");
        let file = fs::OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let lock =
            self.lock(file.with_context(|| path.display().to_string())?, FlockArg::LockExclusiveNonblock)?;
        lock.with_context(|| format!("{}: locked by another server (end its `weir serve`)", path.display()))
    }

    /// Waits until a private server that is starting listens, or has ended.
    ///
    /// # Errors
    /// Fails if the server neither listens nor ends in time.
    pub(super) fn await_server(&self) -> anyhow::Result<()> {
        let listens = || UnixStream::connect(self.file("qmp")).is_ok();
        if self.await_free("server", || !listens()) || listens() {
            return Ok(());
        }
        bail!(
            "its server was started, but does not listen (end its `weir serve`, whose log is {})",
            self.file("log").display()
        )
    }

    /// Waits until a private server that received `quit` has ended.
    pub(super) fn await_server_end(&self) {
        self.await_free("server", || true);
    }

    /// True if the keeper is undoing the attachment, or will: its mount is unmounted.
    fn is_ending(&self) -> bool {
        match self.attached() {
            // Counts mounts in other mount namespaces too.
            Some(Attachment { device, mount: Some(mount), .. }) => {
                !DeviceOpeners::of_device(&device).with_processes().mounts.contains(&mount)
            }
            Some(_) => false,
            // An attachment that is starting will be decided soon.
            None => true,
        }
    }

    /// Users of a file system that is unmounted.
    fn unmounted_users(&self) -> Option<DeviceOpeners> {
        let users = lasting_users(&self.attached()?.device, self.made_loop().as_ref(), None);
        (users.claimed && users.mounts.is_empty() && users.holders.is_empty()).then_some(users)
    }

    /// Lock for removing loop devices of this place. `None` if the place is gone, and its loop
    /// devices with it, or if the lock's owner is stopped.
    pub(super) fn lock_loops(&self) -> Option<RecordLock> {
        let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(self.file("loop"));
        self.lock_while(file.ok()?, FlockArg::LockExclusive, || true)
    }

    /// Name of the attachment.
    pub(super) fn name(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The place of this name, if it exists.
    pub(super) fn find(name: &str) -> Option<Self> {
        Self::all().ok()?.into_iter().find(|place| place.name() == name)
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(super) fn request(&self) -> Option<AttachRequest> {
        self.read("wanted.json")
    }

    pub(super) fn attached(&self) -> Option<Attachment> {
        self.read("attached.json")
    }

    pub(super) fn set_attached(&self, attached: &Attachment) -> anyhow::Result<()> {
        self.write("attached.json", attached)
    }

    /// Records that a daemon, which has no disk and no export of this name yet, is about to receive
    /// a request to add them.
    pub(super) fn set_asked(&self) -> anyhow::Result<()> {
        let path = self.file("asked");
        fs::File::create(&path).map(drop).with_context(|| path.display().to_string())
    }

    /// True if a daemon's disk of this name belongs to this attachment.
    pub(super) fn has_asked(&self) -> bool {
        self.file("asked").exists() || self.attached().is_some()
    }

    pub(super) fn made_loop(&self) -> Option<AttachedLoop> {
        self.read("loop.json")
    }

    pub(super) fn set_made_loop(&self, attached_loop: &AttachedLoop) -> anyhow::Result<()> {
        self.write("loop.json", attached_loop)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_slice(&fs::read(self.file(name)).ok()?).ok()
    }

    /// Writes a file atomically.
    fn write(&self, name: &str, value: &impl Serialize) -> anyhow::Result<()> {
        let (path, new) = (self.file(name), self.file(&format!("{name}.new")));
        // A keeper may be killed at any point; a reader must not see a partial file.
        let write = || -> anyhow::Result<()> {
            fs::write(&new, serde_json::to_vec_pretty(value)?)?;
            Ok(fs::rename(&new, &path)?)
        };
        write().with_context(|| path.display().to_string())
    }

    /// Removes the directory; the lock file last, so that no new keeper finds a partial record.
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
    fn default_names_are_valid() {
        for (image, name) in [
            ("/images/vm1.qcow2", "vm1"),
            ("memory:1G", "memory"),
            ("/x/2024 backup.raw", "disk-2024-backup"),
            ("/x/ä.raw", "disk--"),
            ("/x/a-name-that-is-longer-than-a-node-may-have.raw", "a-name-that-is-longer-than-a-no"),
        ] {
            let actual = default_name(&image.parse().unwrap());
            assert_eq!(actual, name);
            check_name(&actual).unwrap();
        }
    }

    #[test]
    fn path_like_names_are_rejected() {
        for name in ["", "..", "../x", "a/b", ".hidden", "-x", "a b", &"a".repeat(32)] {
            check_name(name).unwrap_err();
        }
    }
}
