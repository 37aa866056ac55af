//! Files that another process has open and passes, with the locks that it holds. During an upgrade
//! the new daemon opens files by name as usual and receives these descriptors.
//!
//! A lock belongs to the open file description, not to a process. It passes with the descriptor, so
//! no third process can acquire it in between. Until the old process has confirmed that it does not
//! resume, it owns the locks: a new process that exits before that leaves them in place.

use std::{
    collections::HashSet,
    fmt, fs,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    libc,
    sys::stat::fstat,
};

use super::{FileIdentity, OpenError};

/// The descriptors of a file as one process has it open.
#[derive(Debug)]
pub struct PassedFile {
    /// For requests; with O_DIRECT in the direct cache modes. It holds the locks.
    pub main: OwnedFd,
    /// Without O_DIRECT.
    pub buffered: OwnedFd,
}

/// Callback that receives this process's client number at a Ceph cluster before an image is opened
/// there; called once for each number, and no more after [`PassedFiles::take_ownership`].
#[derive(Default)]
struct ClientAnnouncer {
    callback: Option<Box<dyn Fn(u64) + Send>>,
    announced: HashSet<u64>,
}

impl fmt::Debug for ClientAnnouncer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Announce")
    }
}

/// Files and images that were passed and not opened yet. Clones share their content.
#[derive(Clone, Debug, Default)]
pub struct PassedFiles(Arc<PassedFilesState>);

#[derive(Debug, Default)]
struct PassedFilesState {
    files: Mutex<Vec<PassedFile>>,
    /// RBD images, by [`StorageIdentity::key`](crate::StorageIdentity::key).
    images: Mutex<HashSet<String>>,
    announce: Mutex<ClientAnnouncer>,
    is_owner: AtomicBool,
}

impl PassedFiles {
    /// Creates it from everything received; `images` are RBD images, as
    /// [`StorageIdentity::key`](crate::StorageIdentity::key) names them. `announce` is called with
    /// this process's client number at a cluster before an image there is opened.
    pub fn new(
        files: Vec<PassedFile>,
        images: impl IntoIterator<Item = String>,
        announce: impl Fn(u64) + Send + 'static,
    ) -> Self {
        Self(Arc::new(PassedFilesState {
            files: Mutex::new(files),
            images: Mutex::new(images.into_iter().collect()),
            announce: Mutex::new(ClientAnnouncer {
                callback: Some(Box::new(announce)),
                announced: HashSet::new(),
            }),
            ..PassedFilesState::default()
        }))
    }

    /// Announces that this process is about to open an image as this client of its cluster.
    pub(crate) fn announce_client(&self, client: u64) {
        let mut announce = self.announce();
        if let Some(callback) = &announce.callback
            && !announce.announced.contains(&client)
        {
            callback(client);
            announce.announced.insert(client);
        }
    }

    fn announce(&self) -> std::sync::MutexGuard<'_, ClientAnnouncer> {
        self.0.announce.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes this RBD image and returns true if the other process has it open; then it is opened
    /// without its lock.
    pub(crate) fn claim_image(&self, key: &str) -> bool {
        self.0.images.lock().unwrap_or_else(PoisonError::into_inner).remove(key)
    }

    /// Records that the other process does not resume: from now on this process owns the locks, and
    /// closing the files releases them.
    pub fn take_ownership(&self) {
        self.0.is_owner.store(true, SeqCst);
        self.announce().callback = None;
    }

    /// Number of files that were not opened yet.
    pub fn remaining(&self) -> usize {
        self.lock().len()
    }

    /// True after [`PassedFiles::take_ownership`].
    pub fn is_owner(&self) -> bool {
        self.0.is_owner.load(SeqCst)
    }

    /// Removes and returns the descriptors of the file that `path` resolves to, if it was passed.
    ///
    /// # Errors
    /// It is open with another cache mode.
    pub(super) fn claim_file(
        &self,
        path: &std::path::Path,
        name: &str,
        direct: bool,
    ) -> Result<Option<(fs::File, fs::File)>, OpenError> {
        let Some(identity) = FileIdentity::of_path(path) else { return Ok(None) };
        let mut files = self.lock();
        let is_same_file = |file: &PassedFile| FileIdentity::of_open(&file.buffered) == Some(identity);
        let Some(at) = files.iter().position(is_same_file) else { return Ok(None) };
        let is_direct = flags(&files[at].main).is_some_and(|flags| flags.contains(OFlag::O_DIRECT));
        let is_writable =
            flags(&files[at].buffered).is_some_and(|flags| flags.bits() & libc::O_ACCMODE == libc::O_RDWR);
        if is_direct != direct || !is_writable {
            let other = if is_direct { "none or directsync" } else { "writeback, writethrough or unsafe" };
            let why = format!("the old process has it open with cache={other}");
            return Err(OpenError::new(name, why, "set the same cache mode, or restart"));
        }
        let PassedFile { main, buffered } = files.swap_remove(at);
        Ok(Some((main.into(), buffered.into())))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<PassedFile>> {
        self.0.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn flags(file: impl AsFd) -> Option<OFlag> {
    fcntl(file, FcntlArg::F_GETFL).ok().map(OFlag::from_bits_retain)
}

impl FileIdentity {
    pub(crate) fn of_open(file: impl AsFd) -> Option<Self> {
        let status = fstat(file).ok()?;
        let is_device = status.st_mode & libc::S_IFMT == libc::S_IFBLK;
        Some(Self::from_numbers(status.st_dev, status.st_ino, status.st_rdev, is_device))
    }
}
