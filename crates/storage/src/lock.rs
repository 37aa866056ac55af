//! Image locking, compatible with QEMU and with other weir processes.
//!
//! A process that opens an image declares its own permissions, and those it denies to others, by
//! shared OFD locks on single bytes of the file (which need not exist there):
//!
//! ```text
//!   byte 100 + n   permission n is used               n: 0 consistent read   1 write
//!   byte 200 + n   no other process may use it           2 write unchanged   3 resize
//! ```
//!
//! All locks are shared, so acquiring them never conflicts. A conflict is found afterwards, by a
//! query for the opposite byte. Since the locks are placed first, of two processes that start at
//! once at least one sees the conflict.
//!
//! The bytes and their meaning are QEMU's, observed on qemu-nbd and qemu-io 7.2 with `/proc/locks`
//! and strace: qcow2 read-write locks 100, 101, 103 and 201, 203; read-only 100 and 201, 203. weir
//! locks 100, 101 and 201, 203 to write; 100 and 201, 203 to read; only 100 to read while another
//! process writes.
//!
//! Locks are released when the file is no longer used, and by a crash. Images on file systems
//! without locks are served unlocked, with a warning, as in QEMU.

use std::{
    fs,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
};

use super::OpenError;
use reactor::{debug_assert_may_block, sanitize::sanitize};

const USED_BASE: i64 = 100;
const DENIED_BASE: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Maximum number of files of `/proc` that are read to find the holder of a lock. The holder only
/// improves an error message.
const MAX_FDINFO_FILES: usize = 100_000;

/// Access to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockMode {
    /// Reads and writes; excludes other writers.
    Write,
    /// Reads; excludes writers.
    Read,
    /// Reads, and allows writers.
    ReadShared,
}

impl LockMode {
    /// `force_share` has an effect for reading only.
    pub(super) fn new(read_only: bool, force_share: bool) -> Self {
        match (read_only, force_share) {
            (false, _) => Self::Write,
            (true, false) => Self::Read,
            (true, true) => Self::ReadShared,
        }
    }

    fn used_permissions(self) -> &'static [i64] {
        match self {
            Self::Write => &[CONSISTENT_READ, WRITE],
            Self::Read | Self::ReadShared => &[CONSISTENT_READ],
        }
    }

    fn denied_permissions(self) -> &'static [i64] {
        match self {
            Self::Write | Self::Read => &[WRITE, RESIZE],
            Self::ReadShared => &[],
        }
    }
}

/// Time for which a lock may outlive its process: operations in flight on an io_uring end after the
/// process is gone, and keep its files open until then (measured: 20 ms after a kill).
const LOCK_LINGER_TIME: Duration = Duration::from_millis(500);
/// Interval between two attempts. The kernel does not notify when such a lock is released.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Process that holds a lock.
#[derive(Debug, PartialEq, Eq)]
struct LockHolder {
    pid: u32,
    command: String,
}

/// Reason why the locks cannot be acquired.
#[derive(Debug)]
pub(super) struct Conflict {
    reason: String,
    /// The locked byte that another process holds.
    byte: i64,
    remedy: &'static str,
}

impl Conflict {
    fn new(byte: i64, reason: impl Into<String>, remedy: &'static str) -> Self {
        Self { reason: reason.into(), byte, remedy }
    }

    /// Converts to an error that names the process that holds the lock on `file`, if it can be
    /// found; blocks.
    pub(super) fn into_error(self, file: impl AsFd, name: &str) -> OpenError {
        let holder = find_holder(&file, self.byte);
        self.error(file, name, holder)
    }

    fn error(self, file: impl AsFd, name: &str, holder: Option<LockHolder>) -> OpenError {
        if holder.is_none() && is_locked_here(file, self.byte) {
            let why = self.reason.replace("another process", "this process");
            let remedy = "it is open already, perhaps under another name; name another file";
            return OpenError { held_here: true, ..OpenError::new(name, why, remedy) };
        }
        let holder_text =
            holder.as_ref().map(|LockHolder { pid, command }| format!(" (pid {pid}, {command})"));
        let why = self.reason + &holder_text.unwrap_or_default();
        OpenError { holder: holder.map(|holder| holder.command), ..OpenError::new(name, why, self.remedy) }
    }
}

/// Acquires the locks for `mode` on an open file. A lock whose holder cannot be found may belong
/// to a process that has just died, and is retried for [`LOCK_LINGER_TIME`], so that a daemon can
/// be restarted at once after a crash. A failed or waiting caller holds no locks.
///
/// Returns true if other writers are excluded; false if the file system has no locks.
///
/// # Errors
/// Another process holds a conflicting lock; the error names it.
pub(super) fn acquire(file: &fs::File, name: &str, mode: LockMode) -> Result<bool, OpenError> {
    let until = Instant::now() + LOCK_LINGER_TIME;
    loop {
        let conflict = match try_acquire(file, name, mode) {
            Ok(is_protected) => return Ok(is_protected),
            Err(conflict) => conflict,
        };
        let holder = find_holder(file, conflict.byte);
        // A live holder will not release the lock soon, so there is no retry.
        if holder.is_some() || Instant::now() >= until {
            return Err(conflict.error(file, name, holder));
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

/// As [`acquire`], in one attempt. Holds no locks on failure.
pub(super) fn try_acquire(file: impl AsFd, name: &str, mode: LockMode) -> Result<bool, Conflict> {
    debug_assert_may_block();
    let file = file.as_fd();
    place_locks(file, name, mode).inspect_err(|_| release(file))
}

fn place_locks(file: BorrowedFd<'_>, name: &str, mode: LockMode) -> Result<bool, Conflict> {
    let bytes = mode
        .used_permissions()
        .iter()
        .map(|n| USED_BASE + n)
        .chain(mode.denied_permissions().iter().map(|n| DENIED_BASE + n));
    // Place all before looking for conflicts: see the module's comment.
    for byte in bytes {
        match place_lock(file, byte) {
            Ok(()) => {}
            Err(Errno::EAGAIN | Errno::EACCES) => {
                let reason = "another process holds an exclusive lock on it";
                return Err(Conflict::new(byte, reason, "stop that process"));
            }
            Err(errno) => {
                tracing::warn!(
                    image = name,
                    error = errno.desc(),
                    "this file system does not support locks: other processes can open the image for \
                     writing"
                );
                return Ok(false);
            }
        }
    }
    find_conflict(file, mode)?;
    Ok(mode.denied_permissions().contains(&WRITE))
}

/// Checks the locks of other processes, and acquires none.
fn find_conflict(file: impl AsFd, mode: LockMode) -> Result<(), Conflict> {
    let file = file.as_fd();
    for &n in mode.denied_permissions() {
        if is_locked_elsewhere(file, USED_BASE + n) {
            let access = if n == WRITE { "writing" } else { "resizing" };
            let reason = format!("locked for {access} by another process");
            return Err(Conflict::new(USED_BASE + n, reason, remedy(mode, n)));
        }
    }
    for &n in mode.used_permissions() {
        if is_locked_elsewhere(file, DENIED_BASE + n) {
            let access = if n == WRITE { "writing" } else { "reading" };
            let reason = format!("another process has locked it against {access}");
            return Err(Conflict::new(DENIED_BASE + n, reason, remedy(mode, n)));
        }
    }
    Ok(())
}

/// Error with which opening this image would fail now, because another process has it open.
/// Acquires no locks. Blocks.
pub fn find_user(path: &Path, read_only: bool) -> Option<OpenError> {
    debug_assert_may_block();
    let file = fs::File::open(path).ok()?;
    let conflict = find_conflict(&file, LockMode::new(read_only, false)).err()?;
    Some(conflict.into_error(&file, &path.display().to_string()))
}

/// Releases the locks at once. Closing the file releases them too, but later: a kernel worker that
/// has completed an io_uring operation still holds the file for a moment, and so does a child
/// between `fork` and `exec`. QEMU, started by the next line of a script, would find the image
/// locked (observed on a busy machine).
pub(super) fn release(file: impl AsFd) {
    debug_assert_may_block();
    let all =
        libc::flock { l_len: DENIED_BASE + RESIZE + 1 - USED_BASE, ..request(libc::F_UNLCK, USED_BASE) };
    // Fails only if the file system has no locks; then there is nothing to release.
    let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&all));
}

/// Releases the lock of a writer, and keeps those of a reader: other processes may read, and none
/// may write.
pub(super) fn release_write(file: impl AsFd) {
    debug_assert_may_block();
    // As in `release`, a failure means that there is no lock.
    let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&request(libc::F_UNLCK, USED_BASE + WRITE)));
}

fn remedy(mode: LockMode, permission: i64) -> &'static str {
    match mode {
        LockMode::Write if permission == WRITE => {
            "stop it, or serve the image with --read-only --force-share"
        }
        LockMode::Read => "stop it, or read what it writes with --force-share",
        LockMode::Write | LockMode::ReadShared => "stop it",
    }
}

fn request(kind: i32, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

fn place_lock(file: impl AsFd, byte: i64) -> Result<(), Errno> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&request(libc::F_RDLCK, byte))).map(drop)
}

/// True if another open file holds the byte. Queries for an exclusive lock, with which any other
/// lock conflicts.
fn is_locked_elsewhere(file: impl AsFd, byte: i64) -> bool {
    let mut lock = request(libc::F_WRLCK, byte);
    match fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)) {
        Ok(_) => i32::from(lock.l_type) != libc::F_UNLCK,
        // Without locks no other process can hold one.
        Err(_) => false,
    }
}

/// Finds the process that holds the byte, if it can: the kernel reports no owner of an OFD lock,
/// but `/proc/PID/fdinfo` lists the locks of each descriptor to privileged readers.
///
/// Skips this process's own children: between `fork` and `exec` a child has every descriptor of its
/// parent. It would be reported for a lock of its parent, or for one that the parent has just
/// closed and that is released in a moment.
fn find_holder(file: impl AsFd, byte: i64) -> Option<LockHolder> {
    let inode = rustix::fs::fstat(file).ok()?.st_ino;
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let own_pid = std::process::id();
    let mut checked_files = 0;
    for pid in pids.filter(|&pid| pid != own_pid && parent(pid) != Some(own_pid)) {
        if has_lock(pid, inode, byte, &mut checked_files)? {
            let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            return Some(LockHolder { pid, command: sanitize(command.trim()) });
        }
    }
    None
}

/// True if this process holds the byte through another descriptor than `file`, which holds no lock.
fn is_locked_here(file: impl AsFd, byte: i64) -> bool {
    let inode = rustix::fs::fstat(file).map(|stat| stat.st_ino).ok();
    inode.and_then(|inode| has_lock(std::process::id(), inode, byte, &mut 0)) == Some(true)
}

/// True if a descriptor of the process holds the byte. Counts the descriptors in `checked_files`;
/// `None` if there are more than [`MAX_FDINFO_FILES`].
fn has_lock(pid: u32, inode: u64, byte: i64, checked_files: &mut usize) -> Option<bool> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    for descriptor in descriptors {
        *checked_files += 1;
        if *checked_files > MAX_FDINFO_FILES {
            return None;
        }
        let Ok(info) = fs::read_to_string(descriptor.path()) else { continue };
        if info.lines().any(|line| is_lock_on(line, inode, byte)) {
            return Some(true);
        }
    }
    Some(false)
}

fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// Parses a line such as `lock:    1: OFDLCK  ADVISORY  READ -1 fe:00:10084644 100 101`: bytes 100
/// and 101 of inode 10084644. The device is not compared, because btrfs shows another than stat.
fn is_lock_on(line: &str, inode: u64, byte: i64) -> bool {
    let Some(lock) = line.strip_prefix("lock:") else { return false };
    let fields: Vec<_> = lock.split_whitespace().collect();
    let [_, _, _, _, _, file, first, last] = fields[..] else { return false };
    let Ok(first) = first.parse::<i64>() else { return false };
    let last = last.parse().unwrap_or(i64::MAX); // EOF
    file.rsplit(':').next() == Some(&inode.to_string()) && (first..=last).contains(&byte)
}

#[cfg(test)]
mod tests {
    use std::{
        env, io,
        process::{Command, Stdio},
    };

    use super::*;

    fn image() -> tempfile::NamedTempFile {
        tempfile::NamedTempFile::new().expect("a temporary file")
    }

    fn open(image: &tempfile::NamedTempFile) -> fs::File {
        // Not `reopen` alone: placing a read lock needs the read access that a writer also has.
        fs::OpenOptions::new().read(true).write(true).open(image.path()).expect("opens")
    }

    #[test]
    fn compatible_lock_modes() {
        use LockMode::{Read, ReadShared, Write};
        for (first, second, together) in [
            (Write, Write, false),
            (Write, Read, false),
            (Write, ReadShared, true),
            (Read, Write, false),
            (Read, Read, true),
            (Read, ReadShared, true),
            (ReadShared, Write, true),
            (ReadShared, Read, true),
        ] {
            let image = image();
            let (one, two) = (open(&image), open(&image));
            acquire(&one, "image", first).expect("no other process has it open");
            let result = acquire(&two, "image", second);
            assert_eq!(result.is_ok(), together, "{first:?} then {second:?}: {result:?}");
            release(one);
            acquire(&two, "image", second).expect("the other lock was released");
        }
    }

    #[test]
    fn released_locks_are_free_while_the_file_is_open() {
        let image = image();
        let (one, two) = (open(&image), open(&image));
        acquire(&one, "image", LockMode::Write).expect("no other process has it open");
        // As the kernel does for a moment.
        let held = one.try_clone().expect("a descriptor");
        assert!(try_acquire(&two, "image", LockMode::Write).is_err());
        release(&one);
        drop(one);
        let conflict = try_acquire(&two, "image", LockMode::Write).err().map(|conflict| conflict.reason);
        assert_eq!(conflict, None, "at once");
        drop(held);
    }

    #[test]
    fn conflict_error_names_the_holder_and_a_remedy() {
        let image = image();
        let (one, two) = (open(&image), open(&image));
        acquire(&one, "vm1.raw", LockMode::Write).expect("no other process has it open");
        let error = acquire(&two, "vm1.raw", LockMode::Read).expect_err("locked").to_string();
        assert_eq!(
            error,
            "vm1.raw: locked for writing by this process (it is open already, perhaps under another name; \
             name another file)"
        );
        let conflict = try_acquire(&two, "vm1.raw", LockMode::Read).expect_err("locked");
        let holder = Some(LockHolder { pid: 7, command: "qemu-io".to_owned() });
        assert_eq!(
            conflict.error(&two, "vm1.raw", holder).to_string(),
            "vm1.raw: locked for writing by another process (pid 7, qemu-io) (stop it, or read \
             what it writes with --force-share)"
        );
    }

    #[test]
    fn lock_inherited_by_a_child_is_retried() {
        let image = image();
        let (one, two) = (open(&image), open(&image));
        acquire(&one, "image", LockMode::Write).expect("no other process has it open");
        // A child inherits it until it runs another program; this child until its input ends.
        let inherited = one.try_clone().expect("a descriptor");
        let mut child = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", "--ignored", "lock::tests::reads_its_input_to_the_end"])
            .stdin(Stdio::piped())
            .stdout(inherited)
            .spawn()
            .expect("it runs");
        drop(one);
        let conflict = try_acquire(&two, "image", LockMode::Write).expect_err("the child holds the lock");
        assert_eq!(find_holder(&two, conflict.byte), None);
        let child_exit = thread::spawn(move || {
            drop(child.stdin.take());
            child.wait()
        });
        acquire(&two, "image", LockMode::Write).expect("the child has gone");
        assert!(child_exit.join().expect("no panic").expect("it has ended").success());
    }

    #[test]
    #[ignore = "the child of the test above"]
    fn reads_its_input_to_the_end() {
        io::copy(&mut io::stdin(), &mut io::sink()).expect("a pipe");
    }

    #[test]
    fn a_line_of_fdinfo_is_understood() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:10084644 100 101";
        assert!(is_lock_on(line, 10_084_644, 101));
        assert!(!is_lock_on(line, 10_084_644, 102));
        assert!(!is_lock_on(line, 84_644, 101));
        assert!(is_lock_on("lock:\t1: OFDLCK ADVISORY WRITE -1 00:01:7 0 EOF", 7, 1 << 40));
        assert!(!is_lock_on("pos:\t0", 0, 0));
        assert!(!is_lock_on("lock:\tnonsense", 0, 0));
    }
}
