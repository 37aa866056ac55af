//! Connections to clusters: one for all images that are reached in the same way.
//!
//! Each has sixteen threads of the library's and 19 MB, and takes 5 ms to make, or as long as
//! `client_mount_timeout` where no monitor answers. So images share it: those of the same config
//! file, user, keyring and monitors, whose cache mode asks the same of librbd, since its cache is
//! set for a whole connection.
//!
//! Who takes the lock of one image by force has the cluster shut out the connection that had it,
//! and with it all images on it. What is opened from then on, also one of those, gets a new one.
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
    super::Address,
    library::{Handle, Library, library, remedy},
};
use reactor::error::Error;

use crate::{CacheMode, OpenError};

/// How long a monitor may take where nobody says otherwise, and what Ceph takes then: so long
/// nobody waits for a disk.
const PATIENCE_S: &str = "30";
const OF_CEPH_S: &str = "300";
/// Of a config file or a keyring.
const MOST_FILE_BYTES: u64 = 1 << 20;

/// What every command takes, and what `weir serve` has besides.
const CONFIG: &str = ":conf=FILE behind the image, or --rbd-config of `weir serve`,";
const USER: &str = ":id=USER behind the image, or --rbd-user of `weir serve`,";

/// What images have to agree on to share a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Way {
    config: Option<std::path::PathBuf>,
    user: Option<String>,
    keyring: Option<std::path::PathBuf>,
    monitors: Option<String>,
    caching: Caching,
}

/// What a cache mode asks of librbd.
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

/// What holds whatever the config file says.
const ALWAYS: [(&str, &str); 6] = [
    // A write that timed out may still land, on top of a later one.
    ("rados_osd_op_timeout", "0"),
    // No thread of ours waits for the cluster in a call.
    ("rbd_non_blocking_aio", "true"),
    // What goes wrong, weir says in its own log; and no file or socket of Ceph's is made.
    ("log_file", ""),
    ("log_to_stderr", "false"),
    ("err_to_stderr", "false"),
    ("admin_socket", ""),
];

/// A connection; ends with the last image that has it.
#[derive(Debug)]
pub(super) struct Cluster {
    handle: Handle,
    library: &'static Library,
    /// The cluster takes nothing from it any more, for good: no other image gets it.
    is_shut_out: AtomicBool,
    /// Of the cache of one image; 0 without.
    pub(super) cache_bytes: u64,
}

// SAFETY: librados' functions may be called from any thread, several at a time (`librados.h` names
// the exceptions, which are those that set up a handle: only `connect` does, before others have
// it).
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

/// Connections that are there or are being made. Whoever makes one holds its lock meanwhile, and
/// others for the same wait for it.
static ALL: LazyLock<Mutex<HashMap<Way, Slot>>> = LazyLock::new(Mutex::default);

type Slot = Arc<Mutex<Weak<Cluster>>>;

/// The connection for an image: one that is there, or a new one.
pub(super) fn connection(address: &Address, cache: CacheMode) -> Result<Arc<Cluster>, OpenError> {
    let way = Way {
        config: address.config.clone(),
        user: address.user.clone(),
        keyring: address.keyring.clone(),
        monitors: address.monitors.clone(),
        caching: Caching::of(cache),
    };
    let slot = {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that have ended, and that nobody is making again.
        all.retain(|_, slot| {
            Arc::strong_count(slot) > 1 || slot.try_lock().is_ok_and(|cluster| cluster.strong_count() > 0)
        });
        Arc::clone(all.entry(way.clone()).or_default())
    };
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cluster) = slot.upgrade().filter(|cluster| !cluster.is_shut_out()) {
        return Ok(cluster);
    }
    let cluster = Arc::new(Cluster::connect(address, &way)?);
    *slot = Arc::downgrade(&cluster);
    Ok(cluster)
}

/// A text as C has it. None has a zero byte: addresses are checked, and the others are ours.
pub(super) fn text(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// What the library has written, up to its zero byte.
pub(super) fn until_zero(mut bytes: Vec<u8>) -> String {
    bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len()));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What the library returned, as an error where it is negative.
pub(super) fn outcome(result: impl Into<i64>) -> Result<u64, Error> {
    let result = result.into();
    u64::try_from(result)
        .map_err(|_| Error::from_errno(i32::try_from(result.unsigned_abs()).unwrap_or(libc::EIO)))
}

impl Cluster {
    fn connect(address: &Address, way: &Way) -> Result<Self, OpenError> {
        let name = address.name();
        let library = library()
            .map_err(|why| OpenError::new(&name, format!("librbd cannot be loaded: {why}"), remedy(&why)))?;
        let failed = |what: &str, error: Error, remedy: &str| {
            OpenError::new(&name, format!("{what}: {error}"), remedy)
        };
        for path in [&way.config, &way.keyring].into_iter().flatten() {
            // The library reads whatever there is to its end.
            if std::fs::metadata(path).is_ok_and(|file| !file.is_file() || file.len() > MOST_FILE_BYTES) {
                let what = format!("{} is no file, or longer than any of Ceph's", path.display());
                return Err(OpenError::new(
                    &name,
                    what,
                    "name a config file as ceph.conf(5) has it, or a keyring",
                ));
            }
        }
        let user = way.user.as_deref().map(text);
        let mut handle = std::ptr::null_mut();
        let user_or_null = user.as_ref().map_or(std::ptr::null(), |user| user.as_ptr());
        // SAFETY: it writes one handle, and the name ends with a zero byte or is none.
        let created = unsafe { (library.rados_create)(&raw mut handle, user_or_null) };
        outcome(created).map_err(|error| failed("no connection can be made", error, "is memory left?"))?;
        // From here on it is shut down whatever happens.
        let mut cluster = Self { handle, library, is_shut_out: AtomicBool::new(false), cache_bytes: 0 };
        cluster.read(way.config.as_deref()).map_err(|error| {
            let file = way
                .config
                .as_ref()
                .map_or_else(|| "Ceph's config file".to_owned(), |path| path.display().to_string());
            failed(
                &format!("{file} cannot be used"),
                error,
                &format!("{CONFIG} names it, as ceph.conf(5) has it"),
            )
        })?;
        let keyring = way.keyring.as_ref().map(|path| path.to_string_lossy().into_owned());
        let own = [("keyring", keyring), ("mon_host", way.monitors.clone())];
        let own: Vec<_> = own.iter().filter_map(|(key, value)| Some((*key, value.as_deref()?))).collect();
        cluster
            .set(&own)
            .and_then(|()| cluster.set(&ALWAYS))
            .and_then(|()| match cluster.get("client_mount_timeout") {
                Some(seconds) if seconds != OF_CEPH_S => Ok(()),
                _ => cluster.set(&[("client_mount_timeout", PATIENCE_S)]),
            })
            .and_then(|()| cluster.set(way.caching.settings()))
            .map_err(|error| {
                failed("this version of librados refuses a setting", error, "install Ceph 16 or later")
            })?;
        // SAFETY: the handle is set up, and nobody else has it.
        let connected = unsafe { (library.rados_connect)(cluster.handle) };
        outcome(connected).map_err(|error| cluster.unreachable(&name, way, error))?;
        if way.caching != Caching::Off {
            cluster.cache_bytes =
                cluster.get("rbd_cache_size").and_then(|size| size.parse().ok()).unwrap_or(0);
        }
        Ok(cluster)
    }

    /// Why no connection came about.
    fn unreachable(&self, name: &str, way: &Way, error: Error) -> OpenError {
        let user = format!("client.{}", way.user.as_deref().unwrap_or("admin"));
        let said = |key| self.get(key).filter(|value| !value.is_empty());
        match error.errno() {
            libc::ETIMEDOUT => {
                let seconds = said("client_mount_timeout").unwrap_or_default();
                let monitors = said("mon_host").unwrap_or_else(|| "the monitors".to_owned());
                OpenError::new(
                    name,
                    format!(
                        "the cluster does not answer: no monitor at {monitors} did so within {seconds} s"
                    ),
                    "start it, or correct mon_host; client_mount_timeout in the config file is how long that may take",
                )
                .that_may_pass()
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
                format!("no connection comes about as {user}: {error}"),
                "does each name in mon_host stand for an address, and is the keyring whole? `ceph -s` with the same config file says more",
            ),
            libc::EACCES | libc::EPERM => OpenError::new(
                name,
                format!("the cluster does not let {user} in: {error}"),
                format!(
                    "is its key in the keyring? `ceph auth get {user}` shows the right one; {USER} names another user"
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
                "`ceph -s` tells how it is",
            ),
        }
    }

    fn set(&self, settings: &[(&str, &str)]) -> Result<(), Error> {
        for (key, value) in settings {
            let (key, value) = (text(key), text(value));
            // SAFETY: the handle is open, and both end with a zero byte.
            let result = unsafe { (self.library.rados_conf_set)(self.handle, key.as_ptr(), value.as_ptr()) };
            outcome(result)?;
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Option<String> {
        let (key, mut value) = (text(key), vec![0_u8; 4096]);
        // SAFETY: the handle is open, and it writes no more than there is room for.
        let result = unsafe {
            (self.library.rados_conf_get)(
                self.handle,
                key.as_ptr(),
                value.as_mut_ptr().cast::<c_char>(),
                value.len(),
            )
        };
        outcome(result).ok()?;
        Some(until_zero(value))
    }

    /// The config file that was named, or the one that Ceph finds, if there is any.
    fn read(&self, config: Option<&Path>) -> Result<(), Error> {
        let path = config.map(|path| text(&path.to_string_lossy()));
        let path_or_null = path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: the handle is open; the path ends with a zero byte or is none.
        let result = unsafe { (self.library.rados_conf_read_file)(self.handle, path_or_null) };
        match outcome(result) {
            Err(error) if config.is_none() && error.errno() == libc::ENOENT => Ok(()),
            result => result.map(drop),
        }
    }

    /// Looks whether an error says that it is shut out.
    pub(super) fn note(&self, error: Error) {
        // Ceph's EBLOCKLISTED.
        if error.errno() == libc::ESHUTDOWN {
            self.is_shut_out.store(true, Relaxed);
        }
    }

    /// Whether an error has said so.
    pub(super) fn is_shut_out(&self) -> bool {
        self.is_shut_out.load(Relaxed)
    }

    /// How the cluster calls this connection.
    pub(super) fn id(&self) -> u64 {
        // SAFETY: it is connected.
        unsafe { (self.library.rados_get_instance_id)(self.handle) }
    }

    /// What the cluster calls itself.
    pub(super) fn fsid(&self) -> Result<String, Error> {
        let mut fsid = vec![0_u8; 64];
        // SAFETY: it is connected, and it writes no more than there is room for.
        let result = unsafe {
            (self.library.rados_cluster_fsid)(self.handle, fsid.as_mut_ptr().cast::<c_char>(), fsid.len())
        };
        outcome(result)?;
        Ok(until_zero(fsid))
    }

    /// Has the cluster take nothing from a client any more, at this address, whatever of it is
    /// under way. Returns once what is asked here is asked behind that.
    pub(super) fn shut_out(&self, client: &str) -> Result<(), Error> {
        let client = text(client);
        // SAFETY: it is connected, and the text ends with a zero byte and is only read.
        let shut_out =
            unsafe { (self.library.rados_blocklist_add)(self.handle, client.as_ptr().cast_mut(), 0) };
        outcome(shut_out)?;
        // SAFETY: it is connected.
        outcome(unsafe { (self.library.rados_wait_for_latest_osdmap)(self.handle) }).map(drop)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nobody has it any more; to shut down what was never connected is allowed.
        unsafe { (self.library.rados_shutdown)(self.handle) }
    }
}

/// A pool of a cluster, and perhaps a namespace in it.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) handle: Handle,
    pub(super) cluster: Arc<Cluster>,
    pub(super) library: &'static Library,
}

// SAFETY: as for `Cluster`; its settings are made in `open` alone.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    pub(super) fn open(cluster: Arc<Cluster>, address: &Address) -> Result<Self, OpenError> {
        let library = cluster.library;
        let (pool, mut handle) = (text(&address.pool), std::ptr::null_mut());
        // SAFETY: the cluster is connected, the name ends with a zero byte, and it writes one
        // handle.
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
                "`ceph -s` tells how the cluster is",
            ),
        })?;
        if let Some(namespace) = &address.namespace {
            let namespace = text(namespace);
            // SAFETY: the handle was just made, and the name ends with a zero byte.
            unsafe { (library.rados_ioctx_set_namespace)(handle, namespace.as_ptr()) }
        }
        Ok(Self { handle, cluster, library })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: no image of it is open any more, and nobody else has it.
        unsafe { (self.library.rados_ioctx_destroy)(self.handle) }
    }
}
