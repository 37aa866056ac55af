//! Unix sockets as files. The file outlives a killed process; a stale socket file is replaced. A
//! socket file is stale if a connection to it is refused.

use std::{
    fs::{self, File, Permissions},
    io::{self, ErrorKind},
    os::{
        fd::AsRawFd as _,
        unix::{
            fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    libc,
    sys::{
        socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr, connect, socket},
        stat::{Mode, fchmod},
    },
    unistd::{self, AccessFlags, Group, User},
};
use sandbox::directory_of;
use settings::{FileOwner, SocketAccess};
use storage::PassedFiles;

use super::AddressConflictRule;

/// Socket file, removed on drop if it is still the same file.
#[derive(Debug)]
pub struct SocketFile {
    pub(super) path: PathBuf,
    /// Device and inode.
    identity: Option<(u64, u64)>,
    /// Set if the old process created the file.
    passed: Option<PassedFiles>,
}

impl SocketFile {
    /// File of the old process, which keeps owning it until the upgrade is final.
    pub(super) fn adopt(path: &Path, passed: &PassedFiles) -> Self {
        Self { path: path.to_owned(), identity: identity(path), passed: Some(passed.clone()) }
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A later daemon may have replaced the file; its socket must stay.
        // A file of the old process stays until the upgrade is final.
        let is_ours = self.passed.as_ref().is_none_or(PassedFiles::is_owner);
        if is_ours && self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Listens at `path` and replaces a stale socket. Only the daemon's own user may connect until the
/// file has its configured owner and mode.
pub(super) fn bind(path: &Path, access: &SocketAccess) -> anyhow::Result<(UnixListener, SocketFile)> {
    let listener = match bind_private(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            // The lock covers the check and the removal: see `lock_directory`.
            let _guard = lock_directory(path);
            remove_stale(path)?;
            bind_private(path)
        }
        result => result,
    };
    let listener = listener.map_err(|error| bind_error(path, &error))?;
    // The daemon may change directory; the path in URIs and for removal must not depend on it.
    let path = std::path::absolute(path)?;
    let identity = identity(&path);
    let file = SocketFile { path, identity, passed: None };
    if *access != SocketAccess::default() {
        file.set_access(access)?;
    }
    Ok((listener, file))
}

fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // Linux derives the file's mode from the socket's mode at bind time, minus the umask.
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    socket::bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    socket::listen(&socket, Backlog::MAXCONN)?;
    Ok(socket.into())
}

impl SocketFile {
    /// Sets owner and mode of the file. Goes through an O_PATH descriptor, so that a file which
    /// another user put in its place is not affected.
    fn set_access(&self, access: &SocketAccess) -> anyhow::Result<()> {
        let how =
            fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_NOFOLLOW).open(&self.path);
        let held = how.context("the socket cannot be examined")?;
        let metadata = held.metadata().context("the socket cannot be examined")?;
        // Compared through the descriptor, so the file cannot be exchanged after the check.
        if Some((metadata.dev(), metadata.ino())) != self.identity {
            bail!("another process has replaced it (choose a directory that only weir can write to)");
        }
        // fchmod(2) rejects O_PATH descriptors; the link in /proc leads to the same file.
        let path = format!("/proc/self/fd/{}", held.as_raw_fd());
        if let Some(owner) = &access.owner {
            let (user, group) = owner_ids(owner)?;
            if user.is_some_and(|user| user != metadata.uid())
                || group.is_some_and(|group| group != metadata.gid())
            {
                let chown = chown(&path, user, group);
                chown.context("its owner cannot be changed (only root gives files away)")?;
            }
        }
        if access.mode == metadata.mode() & 0o7777 {
            return Ok(());
        }
        fs::set_permissions(&path, Permissions::from_mode(access.mode)).context("its mode cannot be changed")
    }
}

fn owner_ids(owner: &FileOwner) -> anyhow::Result<(Option<u32>, Option<u32>)> {
    let user = owner.user.as_ref().map(|name| match name.parse() {
        Ok(number) => Ok(number),
        Err(_) => User::from_name(name)?
            .map(|user| user.uid.as_raw())
            .with_context(|| format!("socket-owner: there is no user {name:?} (`getent passwd` lists them)")),
    });
    let group = owner.group.as_ref().map(|name| match name.parse() {
        Ok(number) => Ok(number),
        Err(_) => Group::from_name(name)?
            .map(|group| group.gid.as_raw())
            .with_context(|| format!("socket-owner: there is no group {name:?} (`getent group` lists them)")),
    });
    Ok((user.transpose()?, group.transpose()?))
}

fn bind_error(path: &Path, error: &io::Error) -> anyhow::Error {
    let directory = directory_of(path).display();
    match error.kind() {
        // Some directories, such as /proc, accept no files.
        ErrorKind::NotFound if directory_of(path).is_dir() => {
            anyhow!("no socket can be made in {directory} (choose another directory)")
        }
        ErrorKind::NotFound => anyhow!("the directory {directory} does not exist (create it)"),
        ErrorKind::PermissionDenied => {
            anyhow!("no permission to create a socket in {directory} (choose another directory)")
        }
        _ => anyhow!("cannot listen: {error}"),
    }
}

/// Lock of the directory, for the time of a replacement: without it, the second of two processes
/// that find a stale socket would remove the new socket of the first. Returns `None` if the lock is
/// not available, and the caller continues: any reader of the directory can hold it indefinitely.
fn lock_directory(path: &Path) -> Option<Flock<File>> {
    let lock = || {
        let directory = File::open(directory_of(path))?;
        Flock::lock(directory, FlockArg::LockExclusiveNonblock).map_err(|_| ErrorKind::AddrInUse.into())
    };
    super::retry_while_in_use(lock).ok()
}

/// Reports what would prevent listening at `path` without trying it: permissions of the directory,
/// or an existing file.
pub(super) fn check(path: &Path, conflict_rule: AddressConflictRule) -> anyhow::Result<()> {
    let writable = unistd::access(directory_of(path), AccessFlags::W_OK | AccessFlags::X_OK);
    writable.map_err(|errno| bind_error(path, &errno.into()))?;
    match (path.exists(), conflict_rule) {
        (false, _) => Ok(()),
        (true, AddressConflictRule::Tolerated) => check_is_socket(path),
        // A datagram socket: connecting it to weir's stream socket fails with EPROTOTYPE (unix(7)),
        // and the listener does not notice. The sandbox permits only this socket type.
        (true, AddressConflictRule::Rejected) => check_is_stale(path, SockType::Datagram),
    }
}

/// Fails if the user or group does not exist.
pub(super) fn check_owner(owner: &FileOwner) -> anyhow::Result<()> {
    owner_ids(owner).map(drop)
}

fn check_is_socket(path: &Path) -> anyhow::Result<()> {
    let metadata = fs::symlink_metadata(path).context("cannot be examined")?;
    if !metadata.file_type().is_socket() {
        bail!("a file that is not a socket exists there (remove it, or choose another path)");
    }
    Ok(())
}

fn remove_stale(path: &Path) -> anyhow::Result<()> {
    check_is_stale(path, SockType::Stream)?;
    fs::remove_file(path).context("a stale socket is there and cannot be removed")
}

/// Probes with a socket of type `by`.
fn check_is_stale(path: &Path, by: SockType) -> anyhow::Result<()> {
    check_is_socket(path)?;
    let unserved = || if is_served(path, by)? { Err(ErrorKind::AddrInUse.into()) } else { Ok(()) };
    match super::retry_while_in_use(unserved) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            bail!("in use: another process listens there (stop it, or choose another path)")
        }
        Err(error) => Err(probe_error(&error)),
    }
}

fn probe_error(error: &io::Error) -> anyhow::Error {
    let why = match error.raw_os_error() {
        // The sandbox rejects connect(2).
        Some(libc::ENOSYS) => "sandboxed daemon cannot check whether a process listens there",
        _ => {
            return anyhow!("a socket exists there; whether it is in use cannot be checked: {error}");
        }
    };
    anyhow!("a socket exists there, and a {why} (remove it if none does, or choose another path)")
}

/// True if a process serves the socket at `path`.
fn is_served(path: &Path, by: SockType) -> io::Result<bool> {
    // Nonblocking: connecting to a full backlog would wait.
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket(AddressFamily::Unix, by, flags, None)?;
    match connect(socket.as_raw_fd(), &UnixAddr::new(path)?) {
        // EAGAIN: the backlog is full, so the socket has a listener.
        Ok(()) | Err(Errno::EAGAIN | Errno::EPROTOTYPE) => Ok(true),
        Err(Errno::ECONNREFUSED) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn open(path: &Path) -> anyhow::Result<(UnixListener, SocketFile)> {
        bind(path, &SocketAccess::default())
    }

    #[test]
    fn socket_has_configured_mode_and_owner() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let gid = unistd::getgid().as_raw();
        let owner = Some(format!(":{gid}").parse().unwrap());
        let (_listener, _file) = bind(&path, &SocketAccess { mode: 0o666, owner }).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.mode() & 0o777, metadata.gid()), (0o666, gid), "whatever the umask");
        let unknown_owner = SocketAccess { mode: 0o600, owner: Some("no such user".parse().unwrap()) };
        let error = bind(&directory.path().join("t"), &unknown_owner).unwrap_err().to_string();
        assert!(error.starts_with("socket-owner: there is no user \"no such user\""), "{error}");
        assert!(!directory.path().join("t").exists(), "nothing is left of it");
    }

    #[test]
    fn replaced_file_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (_listener, file) = open(&path).unwrap();
        fs::rename(&path, directory.path().join("old")).unwrap();
        fs::write(&path, "precious").unwrap();
        let before = fs::metadata(&path).unwrap().mode();
        file.set_access(&SocketAccess { mode: 0o777, owner: None }).unwrap_err();
        assert_eq!(fs::metadata(&path).unwrap().mode(), before);
    }

    #[test]
    fn socket_file_is_removed_on_drop() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (_listener, file) = open(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_without_a_listener_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the file outlives its listener");
        let (_listener, _file) = open(&path).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn stale_socket_is_replaced_by_one_process() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        // All four find the stale socket; one replaces it, and the rest find the new one in use.
        let listeners: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| open(&path))).collect();
            threads.into_iter().filter_map(|handle| handle.join().unwrap().ok()).collect()
        });
        assert_eq!(listeners.len(), 1);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn socket_in_use_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let _theirs = UnixListener::bind(&path).unwrap();
        let error = open(&path).unwrap_err();
        assert_eq!(
            error.to_string(),
            "in use: another process listens there (stop it, or choose another path)"
        );
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_file_is_never_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        fs::write(&path, "precious").unwrap();
        let error = open(&path).unwrap_err().to_string();
        assert!(error.starts_with("a file that is not a socket exists there"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn replaced_socket_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (listener, file) = open(&path).unwrap();
        // The old inode stays in use, so that the new socket cannot get its number.
        fs::rename(&path, directory.path().join("old")).unwrap();
        let _theirs = UnixListener::bind(&path).unwrap();
        drop((listener, file));
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn private_socket_has_mode_0600() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let (_listener, file) = open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn check_is_not_noticed_by_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        check(&path, AddressConflictRule::Rejected).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        check(&path, AddressConflictRule::Tolerated).unwrap();
        let error = check(&path, AddressConflictRule::Rejected).unwrap_err().to_string();
        assert!(error.starts_with("in use: another process listens there"), "{error}");
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        drop(listener);
        check(&path, AddressConflictRule::Rejected).unwrap();
        assert!(path.exists(), "what is looked at stays");
    }

    #[test]
    fn directory_without_files_is_not_reported_missing() {
        let error = open(Path::new("/proc/s")).unwrap_err();
        assert_eq!(error.to_string(), "no socket can be made in /proc (choose another directory)");
    }

    #[test]
    fn missing_directory_is_reported() {
        let error = open(Path::new("/nonexistent/s")).unwrap_err();
        assert_eq!(error.to_string(), "the directory /nonexistent does not exist (create it)");
    }
}
