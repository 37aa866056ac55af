//! A file with the process ID, for scripts that wait for the daemon or end it.
//!
//! It is locked while the process runs, as qemu-nbd locks its own: a locked file belongs to a live
//! process, and an unlocked one to a process that has ended.
//!
//! ```text
//!   missing or empty          ─► created
//!   a number, and locked      ─► rejected: that process runs
//!   a number, and not locked  ─► replaced: that process has ended
//!   anything else             ─► rejected: not a pid file
//! ```

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, ErrorKind, Read as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context as _, bail, ensure};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc::{self, O_NOFOLLOW, O_NONBLOCK},
};
use policy::time::Duration;

/// Interval between attempts to lock the file of an ending process: the kernel does not notify when
/// a lock is released.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum number of these attempts: they take 5 s.
const MAX_LOCK_ATTEMPTS: u32 = 500;
/// Maximum size of a pid file in bytes. A process ID with a line feed is shorter.
const MAX_BYTES: u64 = 32;

/// The file; removed on drop if it still holds this process's ID, or emptied if the directory is
/// not writable any more (`--user`).
#[derive(Debug)]
pub(crate) struct PidFile {
    path: PathBuf,
    /// Holds the lock.
    file: File,
}

impl PidFile {
    /// Fails if the existing file would make [`PidFile::write`] fail. Changes nothing.
    pub(crate) fn check(path: &Path) -> anyhow::Result<()> {
        open_and_lock(path, false).map(drop).with_context(|| format!("pid file {}", path.display()))
    }

    /// Writes the file, replacing the one of an ended process.
    ///
    /// # Errors
    /// Fails if another process has locked the file, if it is not a pid file, or if it cannot be
    /// written.
    pub(crate) fn write(path: &Path) -> anyhow::Result<Self> {
        let file_context = || format!("pid file {}", path.display());
        let path = std::path::absolute(path).with_context(file_context)?;
        let Some(file) = open_and_lock(&path, true).with_context(file_context)? else {
            bail!("{}: cannot be written: other processes keep removing it", file_context());
        };
        let write = || {
            // Repairs the mode of an existing file that others may write; the mode of a new one
            // does not depend on the umask.
            file.set_permissions(Permissions::from_mode(0o644))?;
            write(&file)
        };
        write().context("cannot be written").with_context(file_context)?;
        Ok(Self { path, file })
    }
}

/// Pid file of an ending process. Opened before this process gives up privileges (`--user`), and
/// written once the ending process has unlocked it.
#[derive(Debug)]
pub(crate) struct ClaimedPidFile {
    path: PathBuf,
    file: File,
}

impl ClaimedPidFile {
    /// Opens the file, or creates it. Does not lock it.
    ///
    /// # Errors
    /// Fails if the path is not a regular file, or if the file cannot be opened for writing.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let file_context = || format!("pid file {}", path.display());
        let path = std::path::absolute(path).with_context(file_context)?;
        let file = open_options(true).open(&path).context("cannot be written").with_context(file_context)?;
        ensure!(
            file.metadata()?.is_file(),
            "{}: is not a regular file (choose another path)",
            file_context()
        );
        Ok(Self { path, file })
    }

    /// Locks and writes the file once the old process has ended. Logs a failure and returns `None`;
    /// the daemon then serves without a pid file.
    pub(crate) async fn lock_and_write(self) -> Option<PidFile> {
        let Self { path, file } = self;
        let mut locked = lock(&file);
        for _ in 0..MAX_LOCK_ATTEMPTS {
            if locked != Ok(false) {
                break;
            }
            reactor::sleep_until(reactor::now() + LOCK_RETRY_INTERVAL).await;
            locked = lock(&file);
        }
        let result = match locked {
            Ok(true) => write(&file),
            Ok(false) => Err(ErrorKind::WouldBlock.into()),
            Err(errno) => Err(errno.into()),
        };
        if let Err(error) = result {
            tracing::warn!(
                path = %path.display(), %error,
                "the pid file cannot be written, and still contains another process ID"
            );
            return None;
        }
        Some(PidFile { path, file })
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let is_own =
            fs::read_to_string(&self.path).is_ok_and(|text| text.trim() == process::id().to_string());
        if is_own && fs::remove_file(&self.path).is_err() {
            let _ = self.file.set_len(0);
        }
    }
}

/// Writes this process's ID.
fn write(file: &File) -> io::Result<()> {
    file.set_len(0)?;
    // At offset 0: an earlier read has moved the file's position.
    file.write_all_at(format!("{}\n", process::id()).as_bytes(), 0)
}

/// Options for opening. Does not follow a link, which another user may have created in a shared
/// directory.
fn open_options(may_create: bool) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(may_create).mode(0o644).custom_flags(O_NOFOLLOW | O_NONBLOCK);
    options
}

/// Opens and locks the file; `None` if it does not exist and `may_create` is false, or if it was
/// removed between open and lock in each attempt.
fn open_and_lock(path: &Path, may_create: bool) -> anyhow::Result<Option<File>> {
    // A process that ends may remove the file between open and lock, so that is checked and
    // retried.
    const TRIES: usize = 16;
    for _ in 0..TRIES {
        let mut file = match open_options(may_create).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound && !may_create => return Ok(None),
            file => file.context("cannot be written")?,
        };
        let metadata = file.metadata().context("cannot be examined")?;
        if !metadata.is_file() {
            bail!("is not a regular file (choose another path)");
        }
        let is_locked_here = lock(&file).context("cannot be locked")?;
        // The lock is on the inode; the path must still refer to it.
        let is_in_place = fs::symlink_metadata(path)
            .is_ok_and(|now| (now.dev(), now.ino()) == (metadata.dev(), metadata.ino()));
        if !is_in_place {
            continue;
        }
        let mut text = Vec::new();
        (&mut file).take(MAX_BYTES).read_to_end(&mut text).context("cannot be read")?;
        let text = String::from_utf8_lossy(&text);
        let text = text.trim();
        // Only the beginning of a longer file was read, so it does not count as a number.
        let is_short = metadata.len() <= MAX_BYTES;
        let number = text.parse::<u32>().ok().filter(|_| is_short);
        match number {
            Some(number) if !is_locked_here => {
                bail!("is locked by process {number} (stop it first, or choose another file)")
            }
            None if !is_locked_here => {
                bail!("is locked by another process (stop it first, or choose another file)")
            }
            None if !text.is_empty() || !is_short => {
                bail!("does not contain a process ID (remove it, or choose another file)")
            }
            _ => return Ok(Some(file)),
        }
    }
    Ok(None)
}

/// True if the lock was acquired. QEMU's tools use the same lock, so they and weir exclude each
/// other.
fn lock(file: &File) -> nix::Result<bool> {
    let full_range = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&full_range)) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_exists_while_the_process_serves() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        PidFile::check(&path).unwrap();
        assert!(!path.exists(), "a check creates no file");
        let file = PidFile::write(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", process::id()));
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn only_stale_pid_files_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        for (content, is_taken) in [
            ("", true),
            ("4000000000\n", true),
            ("12 \n", true),
            ("hi\n", false),
            ("-1\n", false),
            ("12\n13\n", false),
            ("1                                     2", false),
            ("                                        x", false),
        ] {
            fs::write(&path, content).unwrap();
            let (checked, written) = (PidFile::check(&path), PidFile::write(&path));
            assert_eq!((checked.is_ok(), written.is_ok()), (is_taken, is_taken), "{content:?}");
            let now = fs::read_to_string(&path).unwrap();
            match written {
                Ok(_file) => assert_eq!(now, format!("{}\n", process::id())),
                Err(error) => {
                    let text = format!("{error:#}");
                    assert!(text.contains(": does not contain a process ID ("), "{text}");
                    assert_eq!(now, content);
                }
            }
        }
    }

    #[test]
    fn file_of_a_running_process_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let first = PidFile::write(&path).unwrap();
        for result in [PidFile::check(&path), PidFile::write(&path).map(drop)] {
            let text = format!("{:#}", result.unwrap_err());
            let expect = format!(": is locked by process {} (", process::id());
            assert!(text.contains(&expect), "{text}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", process::id()));
        drop(first);
        PidFile::write(&path).unwrap();
    }

    #[test]
    fn pid_file_of_another_process_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let file = PidFile::write(&path).unwrap();
        fs::write(&path, "1\n").unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn symlinks_are_not_followed_and_the_mode_is_0644() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("precious"), directory.path().join("pid"));
        fs::write(&target, "precious").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        PidFile::write(&link).unwrap_err();
        assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
        let path = directory.path().join("own");
        fs::write(&path, "1").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let _file = PidFile::write(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    }

    #[test]
    fn error_names_a_file_that_cannot_be_written() {
        let error = PidFile::write(Path::new("/nonexistent/pid")).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.starts_with("pid file /nonexistent/pid: cannot be written: No such file"), "{text}");
    }
}
