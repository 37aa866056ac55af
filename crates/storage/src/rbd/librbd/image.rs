//! An open image of a pool: its handle, its other clients, its lock, and its closing.
//!
//! A writer locks the image (`exclusive-lock`, managed by librbd, not released on request), as
//! files are locked. An image without that feature has no such lock: then other clients are checked
//! once, when it is opened, and the log warns. A reader rejects an image with a writer unless
//! sharing was allowed; snapshots never change, and have no restriction.
//!
//! During an upgrade the lock passes between two daemons. The new process opens the image while the
//! old one has it open, and the old one releases its lock when the time comes. If a client dies
//! with the lock, the cluster blocklists it at once, so that none of its operations take effect
//! later.
//!
//! Otherwise a dead client remains visible as long as its watch lasts (`osd_client_watch_timeout`,
//! 30 s).
//!
//! All of this blocks.

use std::{
    collections::BTreeSet,
    ffi::{CStr, CString, c_char, c_int, c_void},
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use super::{
    super::{RbdAddress, RbdOptions, backend::ResumeOutcome, resize_notifier::ResizeNotifier},
    cluster::{ClusterConnection, RadosPool, c_string, connection, from_c_buffer, outcome},
    library::{Handle, Library, RbdWatcher},
};
use reactor::error::{Error, Result};

use crate::OpenError;

/// `RBD_FEATURE_…` of `rbd/features.h`.
const EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `CEPH_NOSNAP`.
const NO_SNAPSHOT: u64 = u64::MAX - 1;
const FAST_DIFF: u64 = 1 << 4;
/// `RBD_FEATURE_MIGRATING`: the image is being imported. If its source is not an image, librbd (16)
/// divides by zero in `rbd_diff_iterate2`.
const MIGRATING: u64 = 1 << 9;
/// `RBD_FLAG_OBJECT_MAP_INVALID | RBD_FLAG_FAST_DIFF_INVALID`.
const MAP_INVALID: u64 = 3;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
const EXCLUSIVE: c_int = 0;
/// Prefix of the cookies of locks that the library manages itself.
const OWN_LOCKS: &str = "auto ";
/// Size of the buffers for the names of lock holders.
const MAX_LOCKERS_BYTES: usize = 4096;
/// Maximum number of watchers to list: with more, at least one is another client.
const MAX_WATCHERS: usize = 64;

/// Callback of the library, on one of its threads.
unsafe extern "C" fn on_update(argument: *mut c_void) {
    // SAFETY: `RbdImage` keeps the `ResizeNotifier` until the library has removed the watch: see
    // `ImageCloser::run`.
    unsafe { &*argument.cast::<ResizeNotifier>() }.notify();
}

/// An open image. Closed when its last request has ended.
#[derive(Debug)]
pub(super) struct RbdImage {
    handle: Handle,
    library: &'static Library,
    watch: Option<u64>,
    pub(super) resize_notifier: Arc<ResizeNotifier>,
    pub(super) size_bytes: u64,
    /// Identity, independent of its name.
    pub(super) key: String,
    name: String,
    /// Name of its header object, and number of its snapshot; `None` for images of format 1.
    header: Option<(CString, u64)>,
    /// True if another process has it open and passes it.
    pub(super) is_passed: bool,
    /// True if it uses an exclusive lock.
    is_locked: bool,
    /// True if the lock was lost with the feature, and this was logged.
    is_unlocked: AtomicBool,
    /// Serializes acquiring and releasing the lock.
    lock_serializer: Mutex<()>,
    /// Receives the result of closing.
    closed: Option<async_channel::Sender<Result<()>>>,
    /// Dropped after the image is closed.
    pool: Option<RadosPool>,
}

// SAFETY: librbd's functions may be called from any thread, several at a time.
unsafe impl Send for RbdImage {}
// SAFETY: as above.
unsafe impl Sync for RbdImage {}

impl RbdImage {
    /// Opens it; `closed` receives the result of closing.
    pub(super) fn open(
        address: &RbdAddress,
        options: &RbdOptions,
        closed: async_channel::Sender<Result<()>>,
    ) -> std::result::Result<Self, OpenError> {
        let cluster = connection(address, options.cache)?;
        match Self::open_by(&cluster, address, options, closed.clone()) {
            // The connection was already blocklisted because of another image: use a new one.
            Err(_) if cluster.is_blocklisted() => {
                Self::open_by(&connection(address, options.cache)?, address, options, closed)
            }
            opened => opened,
        }
    }

    fn open_by(
        cluster: &Arc<ClusterConnection>,
        address: &RbdAddress,
        options: &RbdOptions,
        closed: async_channel::Sender<Result<()>>,
    ) -> std::result::Result<Self, OpenError> {
        if let Some(passed) = options.passed.as_ref().filter(|_| !options.read_only) {
            passed.announce_client(cluster.id());
        }
        let pool = RadosPool::open(Arc::clone(cluster), address)?;
        let library = pool.library;
        let (image, snapshot) = (c_string(&address.image), address.snapshot.as_deref().map(c_string));
        let snapshot = snapshot.as_ref().map_or(std::ptr::null(), |snapshot| snapshot.as_ptr());
        let open = if options.read_only { library.rbd_open_read_only } else { library.rbd_open };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pool is open, both names are null or end with a zero byte, and the function
        // writes one handle.
        let opened = unsafe { open(pool.handle, image.as_ptr(), &raw mut handle, snapshot) };
        outcome(opened).map_err(|error| {
            cluster.note_error(error);
            open_error(address, error)
        })?;
        let resize_notifier = Arc::new(ResizeNotifier::default());
        let mut image = Self {
            handle,
            library,
            watch: None,
            resize_notifier,
            size_bytes: 0,
            key: String::new(),
            name: address.name(),
            header: None,
            is_passed: false,
            is_locked: false,
            is_unlocked: AtomicBool::new(false),
            lock_serializer: Mutex::new(()),
            closed: None,
            pool: Some(pool),
        };
        if let Err(error) = image.initialize(address, options) {
            // Closed synchronously, so that it is not seen as another client by the next attempt.
            image.into_closer().run();
            return Err(error);
        }
        // From here on the owner waits for its closing.
        image.closed = Some(closed);
        Ok(image)
    }

    /// Records whether the error of a request means that the connection is blocklisted.
    pub(super) fn note_error(&self, error: Error) {
        if let Some(pool) = &self.pool {
            pool.cluster.note_error(error);
        }
    }

    /// Splits off the part that must be closed.
    fn into_closer(mut self) -> ImageCloser {
        self.take_closer()
    }

    fn take_closer(&mut self) -> ImageCloser {
        ImageCloser {
            handle: self.handle,
            library: self.library,
            watch: self.watch,
            resize_notifier: Arc::clone(&self.resize_notifier),
            pool: self.pool.take(),
            closed: self.closed.take(),
        }
    }

    fn initialize(
        &mut self,
        address: &RbdAddress,
        options: &RbdOptions,
    ) -> std::result::Result<(), OpenError> {
        let name = address.name();
        let failed = |error: Error| {
            OpenError::new(
                &name,
                format!("cannot be read: {error}"),
                "`ceph -s` shows the state of the cluster",
            )
        };
        self.key = self.identify(address).map_err(failed)?;
        if address.snapshot.is_none() {
            self.watch().map_err(failed)?;
            self.is_locked = !options.read_only && self.has_lock(&name).map_err(failed)?;
            let passed = options.passed.as_ref().filter(|_| !options.read_only);
            self.is_passed = passed.is_some_and(|passed| passed.claim_image(&self.key));
            if !self.is_passed {
                if !options.force_share {
                    self.check_no_writer(&name, options.read_only)?;
                }
                if !options.read_only {
                    self.check_lockers(&name)?;
                }
                if self.is_locked {
                    self.lock(&name)?;
                }
            }
        }
        // After the lock: no other client can resize it in between.
        self.size_bytes = self.current_size().map_err(failed)?;
        if self.size_bytes == 0 {
            return Err(OpenError::new(&name, "has size zero", "`rbd resize` gives it another"));
        }
        Ok(())
    }

    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Maximum size of librbd's cache of this image, in bytes.
    pub(super) fn cache_bytes(&self) -> u64 {
        self.pool.as_ref().map_or(0, |pool| pool.cluster.cache_bytes)
    }

    fn watch(&mut self) -> Result<()> {
        let (mut watch, resize_notifier) =
            (0, Arc::as_ptr(&self.resize_notifier).cast_mut().cast::<c_void>());
        // SAFETY: the image is open, the function writes one number, and the `ResizeNotifier`
        // outlives the watch.
        outcome(unsafe {
            (self.library.rbd_update_watch)(self.handle, &raw mut watch, on_update, resize_notifier)
        })?;
        self.watch = Some(watch);
        Ok(())
    }

    /// Identity from numbers of the cluster, which are never reused for another image.
    fn identify(&mut self, address: &RbdAddress) -> Result<String> {
        let Some(pool) = &self.pool else { return Err(Error::SHUTDOWN) };
        let (fsid, namespace) = (pool.cluster.fsid()?, address.namespace.as_deref().unwrap_or(""));
        // SAFETY: the pool is open.
        let number = unsafe { (self.library.rados_ioctx_get_id)(pool.handle) };
        let mut id = vec![0_u8; 256];
        // SAFETY: the image is open, and the function writes at most `id.len()` bytes.
        let found =
            unsafe { (self.library.rbd_get_id)(self.handle, id.as_mut_ptr().cast::<c_char>(), id.len()) };
        // Images of format 1 have no id, only a name.
        let (id, header) = match outcome(found) {
            Ok(_) => {
                let id = from_c_buffer(id);
                let header = c_string(&format!("rbd_header.{id}"));
                (format!("id {id}"), Some(header))
            }
            Err(error) if error == Error::INVALID => (format!("name {}", address.image), None),
            Err(error) => return Err(error),
        };
        let mut snapshot_number = NO_SNAPSHOT;
        let snapshot = match &address.snapshot {
            None => String::new(),
            Some(snapshot) => {
                let (snapshot, mut number) = (c_string(snapshot), 0);
                // SAFETY: the image is open, the name ends with a zero byte, and the function
                // writes one number.
                outcome(unsafe {
                    (self.library.rbd_snap_get_id)(self.handle, snapshot.as_ptr(), &raw mut number)
                })?;
                snapshot_number = number;
                format!(" at snapshot {number}")
            }
        };
        self.header = header.map(|header| (header, snapshot_number));
        Ok(format!("image of {id} in pool {number}/{namespace} of cluster {fsid}{snapshot}"))
    }

    /// Fails if another client has it open for writing.
    fn check_no_writer(&self, name: &str, read_only: bool) -> std::result::Result<(), OpenError> {
        let other_clients = self.other_writers(read_only).map_err(|error| {
            OpenError::new(
                name,
                format!("its other clients cannot be listed: {error}"),
                "`rbd status` lists them",
            )
        })?;
        let Some(other) = other_clients.first() else { return Ok(()) };
        let remedy = if read_only {
            "stop it, serve a snapshot, or read nonetheless with --force-share"
        } else {
            "stop it; a dead client is listed for another 30 s"
        };
        let why = format!("is open elsewhere for writing: {other}");
        Err(OpenError::new(name, why, remedy).transient())
    }

    /// Other clients that watch the image, as writers do.
    fn other_writers(&self, read_only: bool) -> Result<Vec<String>> {
        let own_id = self.own_id();
        // Opening for writing makes one watch for this client itself.
        let mut own_watches = usize::from(!read_only);
        let is_other = |(id, _): &(u64, String)| {
            let is_ours = *id == own_id && own_watches > 0;
            own_watches -= usize::from(is_ours);
            !is_ours
        };
        let other_clients = self.watchers()?.into_iter().filter(is_other);
        Ok(other_clients.map(|(id, address)| format!("client.{id} at {address}")).collect())
    }

    fn own_id(&self) -> u64 {
        self.pool.as_ref().map_or(0, |pool| pool.cluster.id())
    }

    /// Numbers and addresses of the clients that watch the image.
    fn watchers(&self) -> Result<Vec<(u64, String)>> {
        let empty = RbdWatcher { address: std::ptr::null_mut(), id: 0, cookie: 0 };
        let (mut watchers, mut count) = (vec![empty; MAX_WATCHERS], MAX_WATCHERS);
        // SAFETY: the image is open, and the function writes at most `count` watchers.
        let listed =
            unsafe { (self.library.rbd_watchers_list)(self.handle, watchers.as_mut_ptr(), &raw mut count) };
        outcome(listed)?;
        let found = watchers.iter().take(count).map(|watcher| {
            // SAFETY: the library has stored a text there, which is valid until the cleanup below.
            let address = unsafe { CStr::from_ptr(watcher.address) }.to_string_lossy();
            (watcher.id.unsigned_abs(), address.into_owned())
        });
        let found = found.collect();
        // SAFETY: the array and the count are those that the library has filled.
        unsafe { (self.library.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) }
        Ok(found)
    }

    fn features(&self) -> Result<u64> {
        let mut features = 0;
        // SAFETY: the image is open, and the function writes one number.
        outcome(unsafe { (self.library.rbd_get_features)(self.handle, &raw mut features) })?;
        Ok(features)
    }

    fn has_lock(&self, name: &str) -> Result<bool> {
        let has_lock = self.features()? & EXCLUSIVE_LOCK != 0;
        if !has_lock {
            let consequence = "two clients can write to it at once (`rbd feature enable … exclusive-lock`)";
            tracing::warn!(image = name, "the image has no exclusive lock: {consequence}");
        }
        Ok(has_lock)
    }

    /// Fails if the image is locked manually: such a lock has no live owner, and acquiring the
    /// library's lock would wait for it without end.
    fn check_lockers(&self, name: &str) -> std::result::Result<(), OpenError> {
        let manual_lock =
            self.lockers().ok().into_iter().flatten().find(|(_, id)| !id.starts_with(OWN_LOCKS));
        let Some((client, id)) = manual_lock else { return Ok(()) };
        Err(OpenError::new(
            name,
            format!("{client} has locked it manually, as {id:?}"),
            format!("`rbd lock rm IMAGE {id:?} {client}` once that lock is no longer needed"),
        ))
    }

    /// Clients that hold a lock, with its cookie.
    fn lockers(&self) -> Result<Vec<(String, String)>> {
        let mut exclusive = 0;
        let [mut tag, mut clients, mut ids, mut addresses] = [(); 4].map(|()| vec![0_u8; MAX_LOCKERS_BYTES]);
        let mut lengths = [MAX_LOCKERS_BYTES; 4];
        let [tag_bytes, clients_bytes, ids_bytes, addresses_bytes] = &mut lengths;
        // SAFETY: the image is open, and the function writes at most the given length of each
        // buffer.
        let listed = unsafe {
            (self.library.rbd_list_lockers)(
                self.handle,
                &raw mut exclusive,
                tag.as_mut_ptr().cast::<c_char>(),
                tag_bytes,
                clients.as_mut_ptr().cast::<c_char>(),
                clients_bytes,
                ids.as_mut_ptr().cast::<c_char>(),
                ids_bytes,
                addresses.as_mut_ptr().cast::<c_char>(),
                addresses_bytes,
            )
        };
        let count = outcome(listed as i64)? as usize;
        // A list of texts that end with a zero byte.
        let texts = |bytes: &[u8]| -> Vec<String> {
            bytes
                .split(|&byte| byte == 0)
                .take(count)
                .map(|text| String::from_utf8_lossy(text).into_owned())
                .collect()
        };
        Ok(texts(&clients).into_iter().zip(texts(&ids)).collect())
    }

    fn lock(&self, name: &str) -> std::result::Result<(), OpenError> {
        let failed = |error: Error| {
            let other_client_remedy = "stop it; `rbd lock ls` lists locks; a dead client's lock expires \
                             after 30 s if this user has mon 'profile rbd'";
            let (why, remedy) = match self.owner() {
                Some(owner) => {
                    let why = format!("another client has it locked: {owner}");
                    return OpenError::new(name, why, other_client_remedy).transient();
                }
                // A non-primary image of a mirror returns this.
                None if error == Error::INVALID => (
                    format!("cannot be locked: {error}"),
                    "if it is a non-primary image of a mirror, `rbd mirror image promote` makes it \
                     writable; --read-only opens it for reading",
                ),
                None => (format!("cannot be locked: {error}"), other_client_remedy),
            };
            OpenError::new(name, why, remedy)
        };
        self.acquire().map_err(failed)
    }

    /// Acquires the lock. Waits for an owner that releases it on request; fails with EROFS if the
    /// owner refuses.
    fn acquire(&self) -> Result<()> {
        // SAFETY: the image is open.
        outcome(unsafe { (self.library.rbd_lock_acquire)(self.handle, EXCLUSIVE) }).map(drop)
    }

    /// See [`RbdBackend::release_lock`](super::super::backend::RbdBackend::release_lock).
    pub(super) fn release_lock(&self) -> Result<()> {
        let _guard = self.lock_serializer.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_locked {
            return Ok(());
        }
        // SAFETY: the image is open.
        outcome(unsafe { (self.library.rbd_lock_release)(self.handle) }).map(drop)
    }

    /// See [`RbdBackend::resume`](super::super::backend::RbdBackend::resume).
    pub(super) fn resume(&self, new_clients: &[u64]) -> Result<ResumeOutcome> {
        // Waits for an abandoned release of the lock: until it has ended, the library reports the
        // lock as held.
        let _guard = self.lock_serializer.lock().unwrap_or_else(PoisonError::into_inner);
        self.blocklist(new_clients)?;
        if self.is_locked {
            match self.acquire() {
                Ok(()) => {}
                Err(error) if error.errno() == libc::EROFS => {
                    return Ok(ResumeOutcome::LockedElsewhere(self.owner()));
                }
                Err(error) => return Err(error),
            }
        }
        // SAFETY: the image is open.
        outcome(unsafe { (self.library.rbd_invalidate_cache)(self.handle) })?;
        self.current_size().map(ResumeOutcome::Resumed)
    }

    /// See [`RbdBackend::blocklist`](super::super::backend::RbdBackend::blocklist).
    pub(super) fn blocklist(&self, clients: &[u64]) -> Result<()> {
        if clients.is_empty() {
            return Ok(());
        }
        let own_id = self.own_id();
        let watchers = self.watchers()?.into_iter();
        let present: BTreeSet<_> = watchers.filter(|(id, _)| *id != own_id && clients.contains(id)).collect();
        for (client, address) in present {
            // Breaking its lock blocklists it too. Without that, librbd blocklists again when it
            // finds the lock of a dead owner; each takes the monitors up to a second.
            if !self.break_lock(&address)
                && let Some(pool) = &self.pool
            {
                pool.cluster.blocklist(&address)?;
            }
            tracing::info!(
                client,
                address,
                "the cluster has blocklisted a new process that has ended with an image open"
            );
        }
        Ok(())
    }

    /// Breaks the lock of this owner, which blocklists it; false if it did not hold the lock.
    fn break_lock(&self, owner: &str) -> bool {
        if !self.is_locked || self.owner().as_deref() != Some(owner) {
            return false;
        }
        let owner = c_string(owner);
        // SAFETY: the image is open, and the text ends with a zero byte.
        outcome(unsafe { (self.library.rbd_lock_break)(self.handle, EXCLUSIVE, owner.as_ptr()) }).is_ok()
    }

    /// Address of the client that holds the lock, if any.
    fn owner(&self) -> Option<String> {
        let (mut mode, mut count) = (0, 1);
        let mut owners: [*mut c_char; 1] = [std::ptr::null_mut()];
        // SAFETY: the image is open, and the function writes at most `count` texts.
        let listed = unsafe {
            (self.library.rbd_lock_get_owners)(
                self.handle,
                &raw mut mode,
                owners.as_mut_ptr(),
                &raw mut count,
            )
        };
        outcome(listed).ok()?;
        let [owner] = owners;
        if count == 0 || owner.is_null() {
            return None;
        }
        // SAFETY: the library has stored a text there.
        let text = unsafe { CStr::from_ptr(owner) }.to_string_lossy().into_owned();
        // SAFETY: the array and the count are those that the library has filled.
        unsafe { (self.library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Some(text)
    }

    pub(super) fn current_size(&self) -> Result<u64> {
        let mut size = 0;
        // SAFETY: the image is open, and the function writes one number.
        outcome(unsafe { (self.library.rbd_get_size)(self.handle, &raw mut size) })?;
        self.check_lock_feature()?;
        Ok(size)
    }

    /// Reads the size in bytes from its header object in the cluster; `None` for images of format
    /// 1.
    ///
    /// # Errors
    /// As reported by the cluster; `ENOENT` if the image, or the snapshot, no longer exists.
    pub(super) fn stored_size(&self) -> Result<Option<u64>> {
        let (Some((header, snapshot)), Some(pool)) = (&self.header, &self.pool) else { return Ok(None) };
        // The reply of the class method `rbd.get_size`: the order (1 byte) and the size (8 bytes).
        let (snapshot_bytes, mut reply) = (snapshot.to_le_bytes(), [0_u8; 9]);
        // SAFETY: the pool is open, the names end with a zero byte, and the function reads and
        // writes within the given lengths.
        let done = unsafe {
            (self.library.rados_exec)(
                pool.handle,
                header.as_ptr(),
                c"rbd".as_ptr(),
                c"get_size".as_ptr(),
                snapshot_bytes.as_ptr().cast::<c_char>(),
                snapshot_bytes.len(),
                reply.as_mut_ptr().cast::<c_char>(),
                reply.len(),
            )
        };
        outcome(done)?;
        let [_, size @ ..] = reply;
        Ok(Some(u64::from_le_bytes(size)))
    }

    /// Checks whether the image still has the lock feature, which any client can disable and
    /// enable.
    fn check_lock_feature(&self) -> Result<()> {
        if !self.is_locked {
            return Ok(());
        }
        let is_unlocked = self.features()? & EXCLUSIVE_LOCK == 0;
        let was_unlocked = self.is_unlocked.swap(is_unlocked, Relaxed);
        if is_unlocked && !was_unlocked {
            tracing::warn!(
                image = self.name,
                "the image no longer has an exclusive lock: two clients can write to it at once \
                 (`rbd feature enable … exclusive-lock`)"
            );
        }
        Ok(())
    }

    pub(super) fn resize(&self, size_bytes: u64) -> Result<()> {
        // SAFETY: the image is open. `on_progress` is passed although nothing uses the progress:
        // the library does not accept null.
        let result = unsafe {
            (self.library.rbd_resize2)(self.handle, size_bytes, true, on_progress, std::ptr::null_mut())
        };
        outcome(result).map(drop)
    }

    /// Reads the first `count` bytes, or fewer if the image is smaller.
    pub(super) fn first_bytes(&self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        // SAFETY: the image is open, and the buffer has `count` bytes.
        let read = unsafe { (self.library.rbd_read)(self.handle, 0, count, bytes.as_mut_ptr().cast()) };
        bytes.truncate(usize::try_from(outcome(read as i64)?).unwrap_or(0));
        Ok(bytes)
    }

    /// See [`RbdBackend::allocated`](super::super::backend::RbdBackend::allocated). Uses the object
    /// map; without it each object would have to be queried.
    pub(super) fn allocated(&self, range: &Range<u64>, most: usize) -> Result<Option<Vec<Range<u64>>>> {
        let mut flags = 0;
        // SAFETY: the image is open, and the function writes one number.
        outcome(unsafe { (self.library.rbd_get_flags)(self.handle, &raw mut flags) })?;
        if self.features()? & (FAST_DIFF | MIGRATING) != FAST_DIFF || flags & MAP_INVALID != 0 {
            return Ok(None);
        }
        let mut search = AllocationSearch { pieces: Vec::new(), max_pieces: most };
        let (offset, length) = (range.start, range.end - range.start);
        // SAFETY: the image is open. `on_allocated` is called with `search` only before this
        // returns, by one thread at a time.
        let result = unsafe {
            let argument = (&raw mut search).cast();
            (self.library.rbd_diff_iterate2)(
                self.handle,
                std::ptr::null(),
                offset,
                length,
                1,
                1,
                on_allocated,
                argument,
            )
        };
        match outcome(result) {
            Err(error) if error.errno() != ENOUGH => Err(error),
            _ => Ok(Some(search.pieces)),
        }
    }
}

/// Progress callback of a resize; zero continues it.
unsafe extern "C" fn on_progress(_done: u64, _of: u64, _argument: *mut c_void) -> c_int {
    0
}

struct AllocationSearch {
    pieces: Vec<Range<u64>>,
    max_pieces: usize,
}

/// Return value that ends a search early; not an error number of the library.
const ENOUGH: c_int = 9000;

/// Callback for a piece that differs from an empty image, that is, an allocated one.
unsafe extern "C" fn on_allocated(offset: u64, length: usize, exists: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: `allocated` passed a pointer to its `AllocationSearch`, and waits.
    let search = unsafe { &mut *argument.cast::<AllocationSearch>() };
    if exists == 0 {
        return 0;
    }
    let end = offset.saturating_add(length as u64);
    let is_full = search.pieces.len() == search.max_pieces;
    match search.pieces.last_mut() {
        Some(last) if last.end == offset => last.end = end,
        _ if is_full => return -ENOUGH,
        _ => search.pieces.push(offset..end),
    }
    0
}

/// Error of a failed open.
fn open_error(address: &RbdAddress, error: Error) -> OpenError {
    let name = address.name();
    match (error.errno(), &address.snapshot) {
        (libc::ENOENT, None) => OpenError::new(
            &name,
            match &address.namespace {
                None => format!("the pool {:?} has no image {:?}", address.pool, address.image),
                Some(namespace) => format!(
                    "the namespace {namespace:?} of the pool {:?} is not there, or has no image {:?}",
                    address.pool, address.image
                ),
            },
            "`rbd ls` lists them, `rbd trash ls` those that were thrown away, `rbd create` makes one",
        ),
        (libc::ENOENT, Some(snapshot)) => OpenError::new(
            &name,
            format!("there is no such image, or it has no snapshot {snapshot:?}"),
            "`rbd snap ls` lists them",
        ),
        (libc::EPERM | libc::EACCES, _) => OpenError::new(
            &name,
            format!("the cluster denies this user access: {error}"),
            "its capabilities lack it: `ceph auth caps client.USER mon 'profile rbd' osd 'profile \
             rbd pool=POOL'` (with all that it has already: `ceph auth get client.USER`)",
        ),
        _ => {
            OpenError::new(&name, format!("cannot be opened: {error}"), "`rbd info` and `ceph -s` show more")
        }
    }
}

impl Drop for RbdImage {
    fn drop(&mut self) {
        if self.pool.is_none() {
            // Already closed by `into_closer`.
            return;
        }
        // Closing waits for the cluster, so it must not run on a worker.
        let end = self.take_closer();
        let ending = ClosingImage::new();
        let thread = std::thread::Builder::new().name("rbd close".to_owned());
        let started = thread.spawn(move || {
            end.run();
            drop(ending);
        });
        // Without a thread it stays open until the process ends.
        if started.is_err() {
            tracing::warn!("an RBD image could not be closed: no thread can be started");
        }
    }
}

/// Number of images that are being closed.
static ENDING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();
/// True if the process exits without waiting for them.
static ARE_ABANDONED: AtomicBool = AtomicBool::new(false);

struct ClosingImage;

impl ClosingImage {
    fn new() -> Self {
        *ENDING.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self
    }
}

impl Drop for ClosingImage {
    fn drop(&mut self) {
        *ENDING.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ENDED.notify_all();
    }
}

/// Waits until all dropped images are closed, for `timeout` at most; returns true if all are. A
/// process that exits earlier leaves locks behind, which the cluster keeps for 30 s.
pub fn wait_for_closing(timeout: Duration) -> bool {
    let timeout = if ARE_ABANDONED.load(Relaxed) { Duration::ZERO } else { timeout };
    let ending = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = ENDED.wait_timeout_while(ending, timeout, |ending| *ending > 0);
    *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
}

/// Makes [`wait_for_closing`] return at once from now on, for an immediate exit.
pub fn abandon_closing() {
    ARE_ABANDONED.store(true, Relaxed);
}

/// The part of an image that must be closed.
struct ImageCloser {
    handle: Handle,
    library: &'static Library,
    watch: Option<u64>,
    resize_notifier: Arc<ResizeNotifier>,
    pool: Option<RadosPool>,
    closed: Option<async_channel::Sender<Result<()>>>,
}

// SAFETY: as for `RbdImage`.
unsafe impl Send for ImageCloser {}

impl ImageCloser {
    fn run(self) {
        if let Some(watch) = self.watch {
            // SAFETY: the image is open. Returns when no callback runs any more.
            unsafe { (self.library.rbd_update_unwatch)(self.handle, watch) };
        }
        drop(self.resize_notifier);
        // SAFETY: this is the last owner of the handle. Closing writes the cache back and releases
        // the lock.
        let result = outcome(unsafe { (self.library.rbd_close)(self.handle) }).map(drop);
        drop(self.pool);
        if let Some(closed) = self.closed {
            // Fails only if the receiver was dropped.
            let _ = closed.try_send(result);
        }
    }
}
