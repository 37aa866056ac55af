//! A file that shows a disk in place of its content, from mounting to unmounting.
//!
//! ```text
//!   root ────► mount(2) ──────────────► /dev/fuse
//!   users ───► fusermount3 (set-uid) ──► /dev/fuse, over a socket
//! ```
//!
//! A killed process leaves a mount on which every access fails ("Transport endpoint is not
//! connected"). It is removed either by a [watcher](MountWatcher), a process that notices the death
//! by the end of a pipe, or by the next process that mounts over the same file.
//!
//! Another user may replace a file in a directory of theirs between two lookups of its path.
//! So the file is opened once; checks, mount and unmount refer to the open file.
//!
//! A mount outlives its process while another process has its descriptor: see
//! [`FuseMount::transfer_state`].
//!
//! Blocks for the kernel and for other programs. Never call it on a thread that serves requests.

use std::{
    ffi::CString,
    fs::File,
    io::{self, IoSliceMut, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use reactor::{clone_fuse_device, operation::Fd};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxAttributes, StatxFlags, statx},
    io::Errno,
    mount::{MountFlags, UnmountFlags},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
        recvmsg, socketpair,
    },
};
use storage::OwnMount;

use super::{device::FuseFileOwner, negotiate::MAX_REQUEST_BYTES};

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
/// Time for a watcher to remove the mount of its process.
const WATCHER_TIMEOUT: Duration = Duration::from_millis(500);
/// Largest number of stacked mounts of killed processes.
const MAX_DEAD_MOUNTS: usize = 16;

/// Reason why a file was not mounted over.
#[derive(Debug, thiserror::Error)]
pub enum NotMounted {
    /// The file does not exist.
    #[error("{0}: no such file (create an empty one; the disk is mounted over it)")]
    Missing(PathBuf),
    /// It is a directory, a device or a pipe.
    #[error("{0}: not a regular file (name one, which may be empty; the disk is mounted over it)")]
    NotAFile(PathBuf),
    /// The file is already a mount point.
    #[error("{0}: already a mount point (unmount it, or name another file)")]
    Mounted(PathBuf),
    /// The file cannot be examined.
    #[error("{0}: {1}")]
    Path(PathBuf, io::Error),
    /// The kernel has no FUSE.
    #[error("{DEVICE}: {0} (load the kernel's module `fuse`; a container needs the device passed in)")]
    NoDevice(io::Error),
    /// `mount(2)` failed.
    #[error("{0}: cannot mount: {1}")]
    Refused(PathBuf, io::Error),
    /// The helper is needed and not installed.
    #[error("{0}: users other than root need {HELPER} to mount: {1} (install the package fuse3)")]
    NoHelper(PathBuf, io::Error),
    /// The helper failed.
    #[error("{path}: {HELPER} refuses to mount: {stderr}{remedy}")]
    HelperRefuses {
        /// The file.
        path: PathBuf,
        /// Its standard error.
        stderr: String,
        /// Remedy, if one is known.
        remedy: &'static str,
    },
}

/// Options of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FuseMountOptions {
    /// True to mount read-only.
    pub read_only: bool,
    /// Other users may open the file, subject to its mode; `None`: if the system permits that.
    pub allow_other: Option<bool>,
}

/// State of a mount for the new process of an upgrade; see [`FuseMount::transfer_state`].
#[derive(Debug)]
pub struct TransferredMount {
    /// The file.
    pub path: PathBuf,
    /// Descriptor of `/dev/fuse` from which requests are read.
    pub device: OwnedFd,
    /// True if the helper program has to unmount it.
    pub by_helper: bool,
    /// The kernel's mount ID.
    pub number: Option<u64>,
    /// Pipe of the watcher, which unmounts when the last copy is closed.
    pub watcher: Option<OwnedFd>,
}

/// A file that is mounted over; unmounted at the latest on drop.
#[derive(Debug)]
pub struct FuseMount {
    path: PathBuf,
    device: Fd,
    owner: FuseFileOwner,
    by_helper: bool,
    /// The kernel's mount ID.
    number: Option<u64>,
    /// Makes this process reject images on the mount.
    _own: Option<OwnMount>,
    is_unmounted: AtomicBool,
    watcher: Mutex<Option<MountWatcher>>,
}

impl FuseMount {
    /// Mounts over the file at `path` after removing mounts of killed processes.
    ///
    /// # Errors
    /// [`NotMounted`]; nothing has changed.
    pub fn mount_over(path: &Path, options: FuseMountOptions) -> Result<Self, NotMounted> {
        let path = std::path::absolute(path).map_err(|error| NotMounted::Path(path.into(), error))?;
        // Resolves links in the directories of the path.
        let path = std::fs::canonicalize(&path).unwrap_or(path);
        remove_dead(&path);
        let (file, owner) = open(&path)?;
        let (device, by_helper) = match mount(&file, &path, options, owner) {
            Err(NotMounted::Refused(_, error)) if error.kind() == io::ErrorKind::PermissionDenied => {
                (mount_by_helper(&path, options)?, true)
            }
            mounted => (mounted?, false),
        };
        // Only root may mount directly: after EACCES or EPERM the set-uid helper mounts.
        let root = mounted(&path);
        let watcher = MountWatcher::start(&path, by_helper).inspect_err(|error| {
            let path = path.display();
            tracing::warn!(
                %path, %error,
                "the file stays mounted if weir is killed, until it is served again"
            );
        });
        Ok(Self {
            number: root.as_ref().map(|(_, number)| *number),
            _own: root.as_ref().and_then(mark_own),
            path,
            device: device.into(),
            owner,
            by_helper,
            is_unmounted: AtomicBool::new(false),
            watcher: Mutex::new(watcher.ok()),
        })
    }

    /// State for another process. The descriptors are copies; this process keeps its own.
    ///
    /// # Errors
    /// Fails if no file descriptor is available.
    pub fn transfer_state(&self) -> io::Result<TransferredMount> {
        let watcher = self.watcher();
        let pipe = watcher.as_ref().map(|watcher| watcher.pipe.try_clone()).transpose()?;
        Ok(TransferredMount {
            path: self.path.clone(),
            device: self.device.as_fd().try_clone_to_owned()?,
            by_helper: self.by_helper,
            number: self.number,
            watcher: pipe,
        })
    }

    /// Wraps the mount of another process; it is not unmounted here before
    /// [`take_ownership`](FuseMount::take_ownership). Does not access the file, because no process
    /// may answer now.
    pub fn adopt(state: TransferredMount, owner: FuseFileOwner) -> Self {
        let TransferredMount { path, device, by_helper, number, watcher } = state;
        let watcher = watcher.map(|pipe| MountWatcher { pipe, child: None });
        let root = mounted(&path).filter(|(_, found)| Some(*found) == number);
        Self {
            _own: root.as_ref().and_then(mark_own),
            path,
            device: device.into(),
            owner,
            by_helper,
            number,
            is_unmounted: AtomicBool::new(true),
            watcher: Mutex::new(watcher),
        }
    }

    /// Takes responsibility for unmounting: the process it was adopted from has ended.
    pub(super) fn take_ownership(&self) {
        self.is_unmounted.store(false, SeqCst);
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Owner and permissions of the file below.
    pub fn owner(&self) -> FuseFileOwner {
        self.owner
    }

    fn watcher(&self) -> MutexGuard<'_, Option<MountWatcher>> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn device(&self) -> &Fd {
        &self.device
    }

    /// Opens another descriptor of the same connection.
    pub(super) fn another_device(&self) -> io::Result<Fd> {
        let device = open_device()?;
        clone_fuse_device(&self.device, &device)?;
        Ok(device.into())
    }

    /// Unmounts the file lazily: processes that have it open continue while it is served.
    /// Unmounts once, so that a later mount of another process stays.
    pub fn unmount(&self) {
        if self.is_unmounted.swap(true, SeqCst) {
            return;
        }
        if let Some((root, number)) = mounted(&self.path)
            && Some(number) == self.number
        {
            unmount(&root, &self.path, self.by_helper);
        }
        let watcher = self.watcher().take();
        if let Some(watcher) = watcher {
            watcher.dismiss();
        }
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// Opens a path without following a link, and reads its status from the kernel's cache only,
/// because the file system below may not answer.
fn open_path(path: &Path) -> rustix::io::Result<(OwnedFd, Statx)> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let status = statx(
        &file,
        c"",
        AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC,
        StatxFlags::TYPE | StatxFlags::MODE | StatxFlags::UID | StatxFlags::GID | StatxFlags::MNT_ID,
    )?;
    Ok((file, status))
}

/// Path of an open file that other processes cannot redirect.
fn path_of(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Root of the mount at this path, and its mount ID.
fn mounted(path: &Path) -> Option<(OwnedFd, u64)> {
    let (root, status) = open_path(path).ok()?;
    let known = StatxFlags::from_bits_retain(status.stx_mask).contains(StatxFlags::MNT_ID);
    (known && status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
        .then_some((root, status.stx_mnt_id))
}

/// Marks the file system that is mounted over the file at `path` as served by this process, which
/// is about to take it over; `None` if nothing is mounted there.
pub fn served_at(path: &Path) -> Option<OwnMount> {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    mark_own(&mounted(&path)?)
}

/// Marks a mount, by its root and number, as served by this process.
fn mark_own((root, _): &(OwnedFd, u64)) -> Option<OwnMount> {
    let own_mount = OwnMount::of(root);
    own_mount.inspect_err(|error| tracing::warn!(%error, "images on this mount cannot be detected")).ok()
}

/// Opens the file to be mounted over; returns its owner and permissions.
fn open(path: &Path) -> Result<(OwnedFd, FuseFileOwner), NotMounted> {
    let (file, status) = match open_path(path) {
        Ok(status) => status,
        Err(Errno::NOENT) => return Err(NotMounted::Missing(path.into())),
        Err(errno) => return Err(NotMounted::Path(path.into(), errno.into())),
    };
    if FileType::from_raw_mode(status.stx_mode.into()) != FileType::RegularFile {
        return Err(NotMounted::NotAFile(path.into()));
    }
    // `remove_dead` has removed dead mounts as far as possible, so this one is in use.
    if status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Err(NotMounted::Mounted(path.into()));
    }
    let owner = FuseFileOwner {
        permissions: u32::from(status.stx_mode) & 0o7777,
        uid: status.stx_uid,
        gid: status.stx_gid,
    };
    Ok((file, owner))
}

fn open_device() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::open(DEVICE, flags, Mode::empty())?)
}

/// Mounts as root.
fn mount(
    file: &OwnedFd,
    path: &Path,
    options: FuseMountOptions,
    owner: FuseFileOwner,
) -> Result<OwnedFd, NotMounted> {
    let device = match open_device() {
        Ok(device) => device,
        // Without the right to open the device, mounting would fail as well.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(NotMounted::Refused(path.into(), error));
        }
        Err(error) => return Err(NotMounted::NoDevice(error)),
    };
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    let mut data = format!(
        "fd={},rootmode={:o},user_id={},group_id={},default_permissions,max_read={MAX_REQUEST_BYTES}",
        device.as_raw_fd(),
        0o100_000 | owner.permissions,
        uid.as_raw(),
        gid.as_raw(),
    );
    // For root `allow_other` always works; for users /etc/fuse.conf must permit it.
    if options.allow_other != Some(false) {
        data.push_str(",allow_other");
    }
    let data = CString::new(data).unwrap_or_default();
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if options.read_only {
        flags |= MountFlags::RDONLY;
    }
    match rustix::mount::mount("weir", path_of(file), "fuse.weir", flags, &*data) {
        Ok(()) => Ok(device),
        Err(Errno::NODEV) => Err(NotMounted::NoDevice(Errno::NODEV.into())),
        Err(errno) => Err(NotMounted::Refused(path.into(), errno.into())),
    }
}

/// Mounts as a user, with the set-uid helper.
fn mount_by_helper(path: &Path, options: FuseMountOptions) -> Result<OwnedFd, NotMounted> {
    match options.allow_other {
        Some(allow_other) => run_helper(path, options.read_only, allow_other),
        None => {
            // Unspecified: tries with allow_other, which fails without user_allow_other in
            // /etc/fuse.conf.
            run_helper(path, options.read_only, true).or_else(|_| run_helper(path, options.read_only, false))
        }
    }
}

fn run_helper(path: &Path, read_only: bool, allow_other: bool) -> Result<OwnedFd, NotMounted> {
    let no_helper = |error: io::Error| NotMounted::NoHelper(path.into(), error);
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (local_end, helper_end) = pair.map_err(|errno| no_helper(errno.into()))?;
    let mut options = format!("fsname=weir,subtype=weir,default_permissions,max_read={MAX_REQUEST_BYTES}");
    for (option, is_on) in [("ro", read_only), ("allow_other", allow_other)] {
        if is_on {
            options.push(',');
            options.push_str(option);
        }
    }
    let output = Command::new(HELPER)
        .args(["-o", &options, "--"])
        .arg(path)
        // The helper sends the descriptor over its standard input, which is a socket.
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(helper_end))
        .output()
        .map_err(no_helper)?;
    let refused = || {
        let stderr = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        let remedy = if stderr.contains("user_allow_other") {
            " (or omit allow-other)"
        } else if stderr.contains(DEVICE) {
            " (as root: chmod 666 /dev/fuse, which is the mode that udev sets)"
        } else {
            ""
        };
        NotMounted::HelperRefuses { path: path.into(), stderr, remedy }
    };
    if !output.status.success() {
        return Err(refused());
    }
    let device = receive_descriptor(&local_end).ok_or_else(refused)?;
    // The helper opens the device in blocking mode.
    rustix::fs::fcntl_setfl(&device, OFlags::NONBLOCK).map_err(|errno| no_helper(errno.into()))?;
    Ok(device)
}

fn receive_descriptor(socket: &OwnedFd) -> Option<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut received = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut received, flags).ok()?;
    received.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })
}

/// Unmounts the mount with this root.
fn unmount(root: &OwnedFd, path: &Path, by_helper: bool) {
    let result = match rustix::mount::unmount(path_of(root), UnmountFlags::DETACH) {
        Err(Errno::PERM) if by_helper => {
            Command::new(HELPER).args(["-u", "-z", "-q", "--"]).arg(path).output().and_then(|output| {
                let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                if output.status.success() { Ok(()) } else { Err(io::Error::other(stderr)) }
            })
        }
        result => result.map_err(io::Error::from),
    };
    if let Err(error) = result {
        tracing::warn!(
            path = %path.display(), %error,
            "cannot unmount the file (run `fusermount3 -u`)"
        );
    }
}

/// True if a mount at this path has lost its process.
fn is_dead(path: &Path) -> bool {
    matches!(rustix::fs::stat(path), Err(Errno::NOTCONN))
}

/// Removes mounts of killed processes over a file. Waits for their watchers first, so that a late
/// watcher does not unmount the next mount.
fn remove_dead(path: &Path) {
    for _ in 0..MAX_DEAD_MOUNTS {
        if !is_dead(path) {
            return;
        }
        let waited = wait_until_changed(WATCHER_TIMEOUT, || !is_dead(path));
        if waited.is_ok_and(|is_removed| is_removed) {
            return;
        }
        tracing::info!(path = %path.display(), "unmounting the mount of a killed process");
        if let Some((root, _)) = mounted(path) {
            unmount(&root, path, true);
        }
    }
}

/// Waits for a change of the mount table that meets the condition; false after `time`.
fn wait_until_changed(time: Duration, is_met: impl Fn() -> bool) -> io::Result<bool> {
    let mounts = File::open("/proc/self/mounts")?;
    let deadline = Instant::now() + time;
    loop {
        if is_met() {
            return Ok(true);
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        let remaining = Timespec { tv_sec: 0, tv_nsec: remaining.subsec_nanos().into() };
        // poll(2) reports POLLPRI when the mount table has changed, see proc_pid_mounts(5).
        match poll(&mut [PollFd::new(&mounts, PollFlags::PRI)], Some(&remaining)) {
            Ok(0) => return Ok(is_met()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// A process that unmounts a file if this process ends without unmounting. It waits for the end of
/// its standard input, and exits without unmounting if it reads a line before.
#[derive(Debug)]
struct MountWatcher {
    /// Its standard input.
    pipe: OwnedFd,
    /// Set if it is a child of this process.
    child: Option<Child>,
}

impl MountWatcher {
    fn start(path: &Path, by_helper: bool) -> io::Result<Self> {
        // `[ -e ]` fails on a dead mount. If it succeeds, a newer mount is there and stays.
        let script = if by_helper {
            r#"trap '' HUP INT TERM; read -r _ || [ -e "$0" ] || exec fusermount3 -u -z -q -- "$0""#
        } else {
            r#"trap '' HUP INT TERM; read -r _ || [ -e "$0" ] || exec umount -l -- "$0""#
        };
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .arg(path)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let pipe = child.stdin.take().ok_or_else(|| io::Error::other("it has no standard input"))?.into();
        Ok(Self { pipe, child: Some(child) })
    }

    fn dismiss(self) {
        // Fails if the watcher was killed.
        let _ = File::from(self.pipe).write_all(b"\n");
        if let Some(mut child) = self.child {
            let _ = child.wait();
        }
    }
}
