//! Connections to clusters, shared by all images with the same parameters.
//!
//! A connection has sixteen threads of the library and 19 MB, and takes 5 ms to open, or up to
//! `client_mount_timeout` if no monitor answers. So images share it if they have the same config
//! file, user, keyring and monitors, and a cache mode with the same settings of librbd, whose cache
//! is configured for a whole connection.
//!
//! If a client breaks the lock of one image, the cluster blocklists the connection that held it,
//! and with it all images on it. Images that are opened later, also the same ones, get a new
//! connection.
//!
//! All of this blocks.

use std::{
    collections::HashMap,
    ffi::{CString, c_char},
    path::Path,
    sync::{
        Arc, LazyLock, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use super::{
    super::RbdAddress,
    library::{Handle, Library, library, remedy},
};
use reactor::error::Error;

use crate::{CacheMode, OpenError};

/// Timeout of connecting, in seconds, unless the config file sets one; and Ceph's default, which is
/// too long for the opening of a disk.
const MOUNT_TIMEOUT_S: &str = "30";
const CEPH_MOUNT_TIMEOUT_S: &str = "300";
/// Maximum size of a config file or keyring.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// How to name a config file and a user: on every command, and at `weir serve`.
const CONFIG: &str = ":conf=FILE behind the image, or --rbd-config of `weir serve`,";
const USER: &str = ":id=USER behind the image, or --rbd-user of `weir serve`,";

/// Parameters that images must have in common to share a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClusterKey {
    config: Option<std::path::PathBuf>,
    user: Option<String>,
    keyring: Option<std::path::PathBuf>,
    monitors: Option<String>,
    caching: Caching,
}

/// Settings of librbd's cache for a cache mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Caching {
    Off,
    Clean,
    Dirty,
    Unsafe,
}

impl Caching {
    fn of(cache: CacheMode) -> Self {
        match cache {
            CacheMode::None | CacheMode::Directsync => Self::Off,
            CacheMode::Writethrough => Self::Clean,
            CacheMode::Writeback => Self::Dirty,
            CacheMode::Unsafe => Self::Unsafe,
        }
    }

    fn settings(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Off => &[("rbd_cache", "false")],
            Self::Clean => &[("rbd_cache", "true"), ("rbd_cache_max_dirty", "0")],
            Self::Dirty => &[("rbd_cache", "true")],
            Self::Unsafe => &[("rbd_cache", "true"), ("rbd_cache_writethrough_until_flush", "false")],
        }
    }
}

/// Settings that override the config file.
const FIXED_SETTINGS: [(&str, &str); 6] = [
    // A write that timed out may still take effect, on top of a later one.
    ("rados_osd_op_timeout", "0"),
    // Submitting a request never blocks on the cluster.
    ("rbd_non_blocking_aio", "true"),
    // weir logs errors itself, and Ceph creates no file or socket.
    ("log_file", ""),
    ("log_to_stderr", "false"),
    ("err_to_stderr", "false"),
    ("admin_socket", ""),
];

/// A connection; closed with its last image.
#[derive(Debug)]
pub(super) struct ClusterConnection {
    handle: Handle,
    library: &'static Library,
    /// True if the cluster has blocklisted it, which is permanent: no other image uses it.
    is_blocklisted: AtomicBool,
    /// Size of the cache of one image, in bytes; 0 without a cache.
    pub(super) cache_bytes: u64,
}

// SAFETY: librados' functions may be called from any thread, several at a time. `librados.h` names
// the exceptions, which set up a handle; only `connect` calls those, before the value is shared.
unsafe impl Send for ClusterConnection {}
// SAFETY: as above.
unsafe impl Sync for ClusterConnection {}

/// Open connections and those being opened. The thread that opens one holds its lock, and threads
/// that need the same one wait.
static ALL: LazyLock<Mutex<HashMap<ClusterKey, Slot>>> = LazyLock::new(Mutex::default);

type Slot = Arc<Mutex<Weak<ClusterConnection>>>;

/// The connection for an image: an open one, or a new one.
pub(super) fn connection(
    address: &RbdAddress,
    cache: CacheMode,
) -> Result<Arc<ClusterConnection>, OpenError> {
    let cluster_key = ClusterKey {
        config: address.config.clone(),
        user: address.user.clone(),
        keyring: address.keyring.clone(),
        monitors: address.monitors.clone(),
        caching: Caching::of(cache),
    };
    let slot = {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        // Removes closed connections, except those that a thread is about to open (it holds the
        // `Arc`).
        all.retain(|_, slot| {
            Arc::strong_count(slot) > 1 || slot.try_lock().is_ok_and(|cluster| cluster.strong_count() > 0)
        });
        Arc::clone(all.entry(cluster_key.clone()).or_default())
    };
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cluster) = slot.upgrade().filter(|cluster| !cluster.is_blocklisted()) {
        return Ok(cluster);
    }
    let cluster = Arc::new(ClusterConnection::connect(address, &cluster_key)?);
    *slot = Arc::downgrade(&cluster);
    Ok(cluster)
}

/// Converts to a C string. There are no zero bytes to lose: addresses are checked, and other texts
/// are constants.
pub(super) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// Text that the library has written, up to its zero byte.
pub(super) fn from_c_buffer(mut bytes: Vec<u8>) -> String {
    bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len()));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Converts a return value of the library; a negative one is an error number.
pub(super) fn outcome(result: impl Into<i64>) -> Result<u64, Error> {
    let result = result.into();
    u64::try_from(result)
        .map_err(|_| Error::from_errno(i32::try_from(result.unsigned_abs()).unwrap_or(libc::EIO)))
}

impl ClusterConnection {
    fn connect(address: &RbdAddress, cluster_key: &ClusterKey) -> Result<Self, OpenError> {
        let name = address.name();
        let library = library()
            .map_err(|why| OpenError::new(&name, format!("librbd cannot be loaded: {why}"), remedy(&why)))?;
        let failed = |problem: &str, error: Error, remedy: &str| {
            OpenError::new(&name, format!("{problem}: {error}"), remedy)
        };
        for path in [&cluster_key.config, &cluster_key.keyring].into_iter().flatten() {
            // The library would read any file to its end, also a device or a pipe.
            if std::fs::metadata(path).is_ok_and(|file| !file.is_file() || file.len() > MAX_FILE_BYTES) {
                let problem = format!(
                    "{} is not a regular file, or is larger than {MAX_FILE_BYTES} bytes",
                    path.display()
                );
                return Err(OpenError::new(
                    &name,
                    problem,
                    "name a config file in the format of ceph.conf(5), or a keyring",
                ));
            }
        }
        let user = cluster_key.user.as_deref().map(c_string);
        let mut handle = std::ptr::null_mut();
        let user_or_null = user.as_ref().map_or(std::ptr::null(), |user| user.as_ptr());
        // SAFETY: it writes one handle, and the name is null or ends with a zero byte.
        let created = unsafe { (library.rados_create)(&raw mut handle, user_or_null) };
        outcome(created)
            .map_err(|error| failed("librados cannot create a connection", error, "check free memory"))?;
        // From here on, dropping `cluster` shuts the handle down.
        let mut cluster = Self { handle, library, is_blocklisted: AtomicBool::new(false), cache_bytes: 0 };
        cluster.read(cluster_key.config.as_deref()).map_err(|error| {
            let file = cluster_key
                .config
                .as_ref()
                .map_or_else(|| "Ceph's config file".to_owned(), |path| path.display().to_string());
            failed(
                &format!("{file} cannot be used"),
                error,
                &format!("{CONFIG} names another config file; see ceph.conf(5)"),
            )
        })?;
        let keyring = cluster_key.keyring.as_ref().map(|path| path.to_string_lossy().into_owned());
        let explicit_settings = [("keyring", keyring), ("mon_host", cluster_key.monitors.clone())];
        let explicit_settings: Vec<_> =
            explicit_settings.iter().filter_map(|(key, value)| Some((*key, value.as_deref()?))).collect();
        cluster
            .set(&explicit_settings)
            .and_then(|()| cluster.set(&FIXED_SETTINGS))
            .and_then(|()| match cluster.get("client_mount_timeout") {
                Some(seconds) if seconds != CEPH_MOUNT_TIMEOUT_S => Ok(()),
                _ => cluster.set(&[("client_mount_timeout", MOUNT_TIMEOUT_S)]),
            })
            .and_then(|()| cluster.set(cluster_key.caching.settings()))
            .map_err(|error| {
                failed("this version of librados rejects a setting", error, "install Ceph 16 or later")
            })?;
        // SAFETY: the handle is set up and not shared.
        let connected = unsafe { (library.rados_connect)(cluster.handle) };
        outcome(connected).map_err(|error| cluster.connect_error(&name, cluster_key, error))?;
        if cluster_key.caching != Caching::Off {
            cluster.cache_bytes =
                cluster.get("rbd_cache_size").and_then(|size| size.parse().ok()).unwrap_or(0);
        }
        Ok(cluster)
    }

    /// Error of a failed connection.
    fn connect_error(&self, name: &str, cluster_key: &ClusterKey, error: Error) -> OpenError {
        let user = format!("client.{}", cluster_key.user.as_deref().unwrap_or("admin"));
        let setting = |key| self.get(key).filter(|value| !value.is_empty());
        match error.errno() {
            libc::ETIMEDOUT => {
                let seconds = setting("client_mount_timeout").unwrap_or_default();
                let monitors = setting("mon_host").unwrap_or_else(|| "the monitors".to_owned());
                OpenError::new(
                    name,
                    format!(
                        "the cluster does not answer: no monitor at {monitors} did so within {seconds} s"
                    ),
                    "start it, or correct mon_host; client_mount_timeout in the config file is how \
                     long that may take",
                )
                .transient()
            }
            libc::EACCES | libc::EPERM | libc::EINVAL if user.starts_with("client.client.") => {
                OpenError::new(
                    name,
                    format!("the cluster does not know {user}: {error}"),
                    "users are named without `client.` here",
                )
            }
            libc::EINVAL => OpenError::new(
                name,
                format!("no connection as {user}: {error}"),
                "does each name in mon_host resolve to an address, and is the keyring valid? `ceph \
                 -s` with the same config file shows more",
            ),
            libc::EACCES | libc::EPERM => OpenError::new(
                name,
                format!("the cluster rejects {user}: {error}"),
                format!(
                    "is its key in the keyring? `ceph auth get {user}` shows the right one; {USER} \
                     names another user"
                ),
            ),
            libc::ENOENT => OpenError::new(
                name,
                format!("no monitor is known, or no keyring of {user} is found: {error}"),
                format!("{CONFIG} names Ceph's config file, with mon_host and keyring; {USER} another user"),
            ),
            _ => OpenError::new(
                name,
                format!("the cluster cannot be reached: {error}"),
                "`ceph -s` shows its state",
            ),
        }
    }

    fn set(&self, settings: &[(&str, &str)]) -> Result<(), Error> {
        for (key, value) in settings {
            let (key, value) = (c_string(key), c_string(value));
            // SAFETY: the handle is open, and both texts end with a zero byte.
            let result = unsafe { (self.library.rados_conf_set)(self.handle, key.as_ptr(), value.as_ptr()) };
            outcome(result)?;
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Option<String> {
        let (key, mut value) = (c_string(key), vec![0_u8; 4096]);
        // SAFETY: the handle is open, and the function writes at most `value.len()` bytes.
        let result = unsafe {
            (self.library.rados_conf_get)(
                self.handle,
                key.as_ptr(),
                value.as_mut_ptr().cast::<c_char>(),
                value.len(),
            )
        };
        outcome(result).ok()?;
        Some(from_c_buffer(value))
    }

    /// Reads the given config file, or the one that Ceph finds, if it exists.
    fn read(&self, config: Option<&Path>) -> Result<(), Error> {
        let path = config.map(|path| c_string(&path.to_string_lossy()));
        let path_or_null = path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: the handle is open; the path is null or ends with a zero byte.
        let result = unsafe { (self.library.rados_conf_read_file)(self.handle, path_or_null) };
        match outcome(result) {
            Err(error) if config.is_none() && error.errno() == libc::ENOENT => Ok(()),
            result => result.map(drop),
        }
    }

    /// Records whether an error means that the connection is blocklisted.
    pub(super) fn note_error(&self, error: Error) {
        // Ceph's EBLOCKLISTED.
        if error.errno() == libc::ESHUTDOWN {
            self.is_blocklisted.store(true, Relaxed);
        }
    }

    /// True if an error has shown that the connection is blocklisted.
    pub(super) fn is_blocklisted(&self) -> bool {
        self.is_blocklisted.load(Relaxed)
    }

    /// Client number of this connection at the cluster.
    pub(super) fn id(&self) -> u64 {
        // SAFETY: the handle is connected.
        unsafe { (self.library.rados_get_instance_id)(self.handle) }
    }

    /// Identifier of the cluster.
    pub(super) fn fsid(&self) -> Result<String, Error> {
        let mut fsid = vec![0_u8; 64];
        // SAFETY: the handle is connected, and the function writes at most `fsid.len()` bytes.
        let result = unsafe {
            (self.library.rados_cluster_fsid)(self.handle, fsid.as_mut_ptr().cast::<c_char>(), fsid.len())
        };
        outcome(result)?;
        Ok(from_c_buffer(fsid))
    }

    /// Blocklists a client at this address, including its operations in flight. Returns once later
    /// operations of this connection are ordered after that.
    pub(super) fn blocklist(&self, client: &str) -> Result<(), Error> {
        let client = c_string(client);
        // SAFETY: the handle is connected; the text ends with a zero byte and is only read.
        let status =
            unsafe { (self.library.rados_blocklist_add)(self.handle, client.as_ptr().cast_mut(), 0) };
        outcome(status)?;
        // SAFETY: the handle is connected.
        outcome(unsafe { (self.library.rados_wait_for_latest_osdmap)(self.handle) }).map(drop)
    }
}

impl Drop for ClusterConnection {
    fn drop(&mut self) {
        // SAFETY: this is the last owner; shutting down a handle that was never connected is
        // allowed.
        unsafe { (self.library.rados_shutdown)(self.handle) }
    }
}

/// A pool of a cluster, with an optional namespace.
#[derive(Debug)]
pub(super) struct RadosPool {
    pub(super) handle: Handle,
    pub(super) cluster: Arc<ClusterConnection>,
    pub(super) library: &'static Library,
}

// SAFETY: as for `ClusterConnection`; only `open` changes its settings.
unsafe impl Send for RadosPool {}
// SAFETY: as above.
unsafe impl Sync for RadosPool {}

impl RadosPool {
    pub(super) fn open(cluster: Arc<ClusterConnection>, address: &RbdAddress) -> Result<Self, OpenError> {
        let library = cluster.library;
        let (pool, mut handle) = (c_string(&address.pool), std::ptr::null_mut());
        // SAFETY: the cluster is connected, the name ends with a zero byte, and the function writes
        // one handle.
        let result = unsafe { (library.rados_ioctx_create)(cluster.handle, pool.as_ptr(), &raw mut handle) };
        outcome(result).map_err(|error| match error.errno() {
            libc::ENOENT => OpenError::new(
                &address.name(),
                format!("the cluster has no pool {:?}", address.pool),
                "`ceph osd pool ls` lists them",
            ),
            _ => OpenError::new(
                &address.name(),
                format!("the pool {:?} cannot be used: {error}", address.pool),
                "`ceph -s` shows the state of the cluster",
            ),
        })?;
        if let Some(namespace) = &address.namespace {
            let namespace = c_string(namespace);
            // SAFETY: the handle was just created and is not shared; the name ends with a zero
            // byte.
            unsafe { (library.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) }
        }
        Ok(Self { handle, cluster, library })
    }
}

impl Drop for RadosPool {
    fn drop(&mut self) {
        // SAFETY: no image of it is open any more, and this is the last owner.
        unsafe { (self.library.rados_ioctx_destroy)(self.handle) }
    }
}
