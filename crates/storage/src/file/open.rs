//! Opening a file or block device: its type, whether it supports the cache mode, its locks, its
//! size.
//!
//! Every error in an image's path is found here, before a client connects, and reported in full.

use std::{
    fs,
    io::{ErrorKind, Seek, SeekFrom},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::fs::{FileTypeExt, MetadataExt as _, OpenOptionsExt},
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
};

use nix::unistd::{SysconfVar, sysconf};

use super::{
    BufferedCloser, CacheMode, FileCloser, FileIdentity, FileKind, FileStorage, PassedFiles, SpaceCount,
    Syncs, direct, isolation::FileIsolation, zero,
};
use reactor::{
    debug_assert_may_block,
    error::descriptor_remedy,
    log_rate_limit::LogRateLimit,
    operation::{Fd, PassedFd},
};

use crate::{
    OpenError,
    align::Alignment,
    lock, own_mounts,
    root::{Pinned, Root},
};

/// Options of opening a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileOptions {
    pub(crate) cache: CacheMode,
    pub(crate) read_only: bool,
    /// Reads although another process writes.
    pub(crate) force_share: bool,
    /// Opens without locks, which are acquired before it is used.
    pub(crate) handover: bool,
    /// Accepts an empty regular file as a disk.
    pub(crate) may_be_empty: bool,
    /// Claims a block device, so that the kernel has no other user of it.
    pub(crate) exclusive: bool,
    /// Descriptors from another process; a file that is opened for writing is looked up here first.
    pub(crate) passed: Option<PassedFiles>,
    /// Directory that it must be in.
    pub(crate) root: Option<Root>,
    /// The open file, which may be outside `root`.
    pub(crate) descriptor: Option<Arc<PassedFd>>,
}

/// Opens `path`; blocks. Also returns a buffered descriptor for probing the file.
pub(crate) fn open(path: &Path, options: &FileOptions) -> Result<(FileStorage, fs::File), OpenError> {
    debug_assert_may_block();
    let name = path.display().to_string();
    if let Some(descriptor) = &options.descriptor {
        return open_descriptor(descriptor, name, options);
    }
    // Pinned until everything is open, so that all descriptors are of the same file.
    let pinned = options.root.as_ref().map(|root| root.pin(path, &name)).transpose()?;
    let pinned_path = pinned.as_ref().map(Pinned::path);
    let path = pinned_path.as_deref().unwrap_or(path);
    let failed = |error: &std::io::Error| describe(&name, error, options.read_only);
    // Before any request to the file system: this process itself may serve it and would deadlock.
    own_mounts::check_path(path, &name)?;
    // Before opening: opening a FIFO would wait for its other end.
    let expected = kind_of(&name, &fs::metadata(path).map_err(|error| failed(&error))?)?;
    let mut open_options = fs::OpenOptions::new();
    open_options.read(true).write(!options.read_only);
    let passed = options.passed.as_ref().filter(|_| !options.read_only);
    let found = passed.map(|passed| passed.claim_file(path, &name, options.cache.is_direct())).transpose()?;
    let (found, buffered) = match found.flatten() {
        Some((main, buffered)) => (Some(main), buffered),
        None if options.exclusive && expected == FileKind::BlockDevice => {
            // Only this descriptor: a second claim of the same device would fail.
            let claimed = open_options.clone().custom_flags(libc::O_EXCL).open(path);
            let claimed = claimed.map_err(|error| match error.kind() {
                ErrorKind::ResourceBusy => {
                    let why = "is mounted or in use by the kernel";
                    OpenError::new(&name, why, "unmount it, or use another device")
                }
                _ => failed(&error),
            })?;
            (None, claimed)
        }
        None => (None, open_options.open(path).map_err(|error| failed(&error))?),
    };
    let passed = passed.filter(|_| found.is_some()).cloned();
    let kind = kind_of(&name, &buffered.metadata().map_err(|error| failed(&error))?)?;
    let main = if options.cache.is_direct() {
        open_direct(path, found, &name, &open_options, kind, options)?
    } else {
        let file = found.map_or_else(|| buffered.try_clone(), Ok).map_err(|error| failed(&error))?;
        MainDescriptor { file, alignment: Alignment::NONE }
    };
    lock_and_measure(name, kind, main, buffered, passed, options)
}

/// Opens from a descriptor that another process has opened.
fn open_descriptor(
    descriptor: &PassedFd,
    name: String,
    options: &FileOptions,
) -> Result<(FileStorage, fs::File), OpenError> {
    own_mounts::check(descriptor, &name)?;
    let failed = |error: &std::io::Error| describe(&name, error, options.read_only);
    let buffered = fs::File::from(descriptor.as_fd().try_clone_to_owned().map_err(|error| failed(&error))?);
    let kind = kind_of(&name, &buffered.metadata().map_err(|error| failed(&error))?)?;
    if !options.cache.is_direct() {
        let file = buffered.try_clone().map_err(|error| failed(&error))?;
        let main = MainDescriptor { file, alignment: Alignment::NONE };
        return lock_and_measure(name, kind, main, buffered, None, options);
    }
    // O_DIRECT is not set on it by fcntl: its flags are shared with the process that passed it.
    let descriptor_path = format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd());
    let mut open_options = fs::OpenOptions::new();
    open_options.read(true).write(!options.read_only);
    let direct = open_direct(Path::new(&descriptor_path), None, &name, &open_options, kind, options);
    let direct = direct.map_err(|error| {
        let why = format!("cannot be opened again for cache={}: {}", options.cache, error.why);
        let remedy = "pass a path instead of a descriptor, or use writeback, writethrough or unsafe";
        OpenError::new(&name, why, remedy)
    })?;
    lock_and_measure(name, kind, direct, buffered, None, options)
}

/// The descriptor for requests of the disk.
struct MainDescriptor {
    file: fs::File,
    alignment: Alignment,
}

/// Last steps of opening: acquires the locks and reads the size.
fn lock_and_measure(
    name: String,
    kind: FileKind,
    MainDescriptor { file: main, alignment }: MainDescriptor,
    mut buffered: fs::File,
    passed: Option<PassedFiles>,
    options: &FileOptions,
) -> Result<(FileStorage, fs::File), OpenError> {
    // Checked again: the path may have changed between the first check and the open.
    own_mounts::check(&main, &name)?;
    let failed = |error: &std::io::Error| describe(&name, error, options.read_only);
    let lock_mode = lock::LockMode::new(options.read_only, options.force_share);
    // A passed file is locked already; locking it again through the same open file changes nothing.
    let locked = || FileIdentity::of_open(&main).map(|file| file.to_string().into());
    let is_protected = options.handover
        || lock::acquire(&main, &name, lock_mode).map_err(|error| OpenError { locked: locked(), ..error })?;
    let size_bytes = buffered.seek(SeekFrom::End(0)).map_err(|error| failed(&error))?;
    if size_bytes == 0 && !(options.may_be_empty && kind == FileKind::Regular) {
        return Err(empty(name, kind));
    }
    let zero_alignment = match kind {
        FileKind::Regular => 1,
        FileKind::BlockDevice => rustix::fs::ioctl_blksszget(&buffered).map_or(4096, u64::from),
    };
    let status = buffered.metadata().map_err(|error| failed(&error))?;
    let (isolation, ending) =
        (Arc::new(FileIsolation::for_file(&buffered, kind == FileKind::BlockDevice)), FileCloser::new());
    let syncs = Syncs::new(name.clone(), !options.cache.is_direct());
    let buffered_fd = buffered.try_clone().map_err(|error| failed(&error))?;
    let fd = Fd::with_close_hook(main, Arc::clone(&ending) as _);
    let buffered_fd = Fd::with_close_hook(buffered_fd, Arc::new(BufferedCloser { _main: fd.clone() }));
    let file = FileStorage {
        changing_fd: fd.counted_separately(),
        changing_buffered: buffered_fd.counted_separately(),
        buffered: buffered_fd,
        fd,
        isolation,
        syncs,
        kind,
        identity: FileIdentity::from_numbers(
            status.dev(),
            status.ino(),
            status.rdev(),
            kind == FileKind::BlockDevice,
        ),
        device_number: if kind == FileKind::BlockDevice { status.rdev() } else { status.dev() },
        ending,
        cache: options.cache,
        read_only: AtomicBool::new(options.read_only),
        is_protected,
        handover: options.handover,
        alignment,
        zero_alignment,
        page_bytes: page_bytes(),
        size_bytes: AtomicU64::new(size_bytes),
        space: SpaceCount::new(status.blocks() * 512),
        name,
        passed_files: passed,
        zeroing: zero::UnsupportedCalls::default(),
        dsync_refused: AtomicBool::new(false),
        truncation_log: LogRateLimit::default(),
    };
    Ok((file, buffered))
}

fn open_direct(
    path: &Path,
    passed: Option<fs::File>,
    name: &str,
    open_options: &fs::OpenOptions,
    kind: FileKind,
    options: &FileOptions,
) -> Result<MainDescriptor, OpenError> {
    let no_direct = || {
        OpenError::new(
            name,
            format!("this file system does not support O_DIRECT, which cache={} needs", options.cache),
            "use writeback, writethrough or unsafe",
        )
    };
    let open = || open_options.clone().custom_flags(libc::O_DIRECT).open(path);
    let file = match passed.map_or_else(open, Ok) {
        Ok(file) => file,
        // The file opened without O_DIRECT before, so EINVAL can only mean the flag.
        Err(error) if error.kind() == ErrorKind::InvalidInput => return Err(no_direct()),
        Err(error) => return Err(describe(name, &error, options.read_only)),
    };
    let alignment = direct::alignment(&file, kind).ok_or_else(no_direct)?;
    Ok(MainDescriptor { file, alignment })
}

fn kind_of(name: &str, metadata: &fs::Metadata) -> Result<FileKind, OpenError> {
    let kind = metadata.file_type();
    match not_an_image(kind) {
        Some(reason) => Err(OpenError::new(name, reason, KINDS)),
        None if kind.is_block_device() => Ok(FileKind::BlockDevice),
        None => Ok(FileKind::Regular),
    }
}

/// Advice for [`not_an_image`].
pub(crate) const KINDS: &str = "an image is a regular file or a block device";

/// Reason why a file of this kind cannot be an image; `None` if it can.
pub(crate) fn not_an_image(kind: fs::FileType) -> Option<&'static str> {
    if kind.is_file() || kind.is_block_device() {
        None
    } else if kind.is_dir() {
        Some("is a directory")
    } else if kind.is_char_device() {
        Some("is a character device")
    } else {
        Some("is a pipe or a socket")
    }
}

fn empty(name: String, kind: FileKind) -> OpenError {
    match kind {
        FileKind::Regular => OpenError::new(
            &name,
            "is empty, so there is no disk",
            format!("give it a size: truncate -s 10G {name}"),
        ),
        FileKind::BlockDevice => OpenError::new(&name, "has size zero", "is there a medium in the device?"),
    }
}

pub(super) fn describe(name: &str, error: &std::io::Error, read_only: bool) -> OpenError {
    let (why, remedy) = match error.kind() {
        ErrorKind::NotFound => ("no such file", "create it first, or check the path"),
        ErrorKind::PermissionDenied if read_only => {
            ("no permission to read", "check the owner and mode of the file and its directories")
        }
        ErrorKind::PermissionDenied => {
            ("no permission to read and write", "check its owner and mode, or serve it --read-only")
        }
        ErrorKind::ReadOnlyFilesystem => ("is on a read-only file system", "serve it --read-only"),
        _ => {
            let remedy = descriptor_remedy(error).unwrap_or("the system refused to open it");
            return OpenError::new(name, error.to_string(), remedy);
        }
    };
    OpenError::new(name, why, remedy)
}

fn page_bytes() -> u64 {
    // 64 KiB is the largest page of Linux: a safe default.
    sysconf(SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|bytes| u64::try_from(bytes).ok())
        .unwrap_or(65_536)
}
