//! Files that another process has open and passes on, with the locks that it holds: a daemon that
//! takes over from another opens them by name as ever, and gets these descriptors.
//!
//! A lock belongs to the open file, not to a process, so it passes with the descriptor and nobody
//! can come in between. Until the other process has said that it does not go on, the locks are
//! still its own: whoever gives up before that leaves them in place.

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

/// A file as one process has it open: for its requests, and through the page cache.
#[derive(Debug)]
pub struct PassedFile {
    /// With O_DIRECT in the cache modes that have it. It holds the locks.
    pub main: OwnedFd,
    /// Without.
    pub buffered: OwnedFd,
}

/// Hears by which number a cluster knows this process, before that opens an image there; once for
/// each number, and nothing more once all is settled.
#[derive(Default)]
struct Announce {
    hears: Option<Box<dyn Fn(u64) + Send>>,
    heard: HashSet<u64>,
}

impl fmt::Debug for Announce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Announce")
    }
}

/// Those that were passed and nobody has opened. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Passed(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    files: Mutex<Vec<PassedFile>>,
    /// Of clusters, by what they really are.
    images: Mutex<HashSet<String>>,
    announce: Mutex<Announce>,
    are_ours: AtomicBool,
}

impl Passed {
    /// All that came; `images` are those of clusters among these, as
    /// [`Identity::what`](crate::Identity::what) has them. Before this process opens one
    /// there, `announce` hears by which number the cluster knows it.
    pub fn new(
        files: Vec<PassedFile>,
        images: impl IntoIterator<Item = String>,
        announce: impl Fn(u64) + Send + 'static,
    ) -> Self {
        Self(Arc::new(Shared {
            files: Mutex::new(files),
            images: Mutex::new(images.into_iter().collect()),
            announce: Mutex::new(Announce { hears: Some(Box::new(announce)), heard: HashSet::new() }),
            ..Shared::default()
        }))
    }

    /// This process is about to open an image, as this client of its cluster's.
    pub(crate) fn opens_as(&self, client: u64) {
        let mut announce = self.announce();
        if let Some(hears) = &announce.hears
            && !announce.heard.contains(&client)
        {
            hears(client);
            announce.heard.insert(client);
        }
    }

    fn announce(&self) -> std::sync::MutexGuard<'_, Announce> {
        self.0.announce.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes this image of a cluster's, if the other process has it; then it is opened without its
    /// lock.
    pub(crate) fn take_image(&self, what: &str) -> bool {
        self.0.images.lock().unwrap_or_else(PoisonError::into_inner).remove(what)
    }

    /// The other process does not go on: the locks are released with the files from now on.
    pub fn settle(&self) {
        self.0.are_ours.store(true, SeqCst);
        self.announce().hears = None;
    }

    /// How many nobody has opened.
    pub fn left(&self) -> usize {
        self.lock().len()
    }

    /// Whether [`Passed::settle`] was called.
    pub fn are_ours(&self) -> bool {
        self.0.are_ours.load(SeqCst)
    }

    /// Takes the one that `path` leads to, if it was passed.
    ///
    /// # Errors
    /// If it is open in another way.
    pub(super) fn take(
        &self,
        path: &std::path::Path,
        name: &str,
        direct: bool,
    ) -> Result<Option<(fs::File, fs::File)>, OpenError> {
        let Some(wanted) = FileIdentity::at(path) else { return Ok(None) };
        let mut files = self.lock();
        let is_it = |file: &PassedFile| FileIdentity::of_open(&file.buffered) == Some(wanted);
        let Some(at) = files.iter().position(is_it) else { return Ok(None) };
        let is_direct = flags(&files[at].main).is_some_and(|flags| flags.contains(OFlag::O_DIRECT));
        let is_writable =
            flags(&files[at].buffered).is_some_and(|flags| flags.bits() & libc::O_ACCMODE == libc::O_RDWR);
        if is_direct != direct || !is_writable {
            let other = if is_direct { "none or directsync" } else { "writeback, writethrough or unsafe" };
            let why = format!("the daemon that is taken over from has it open with cache={other}");
            return Err(OpenError::new(name, why, "give it the same, or restart"));
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
        Some(Self::of(status.st_dev, status.st_ino, status.st_rdev, is_device))
    }
}
