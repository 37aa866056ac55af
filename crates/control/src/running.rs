//! A disk that runs, with what it was opened with and the names that it keeps from others.
//!
//! Only data: who looks after it is the registry.

use std::{cell::Cell, path::absolute, rc::Rc, sync::Arc};

use block::{
    disk::{DetectZeroes, Discards, Disk},
    layer::throttle::{DiskSettings, ThrottleGroup, GroupSettings},
};
use image::qcow2::CacheSettings;
use policy::time::Duration;
use serde_json::{Map, Value};
use settings::{DiskConfig, ImageLocation, ConfigKey, KeyTable as _, ThrottleConfig};
use storage::CacheMode;

/// Time that the removal of a disk waits for its files to be closed.
const TO_BE_FREE: Duration = Duration::from_secs(5);

/// An open disk.
#[derive(Debug)]
pub struct RunningDisk {
    /// The disk itself.
    pub disk: Arc<Disk>,
    /// As it was configured. [`RunningDisk::current_config`] has what was changed since.
    pub config: DiskConfig,
    /// Sizes of the metadata caches as they were configured last, not as the image has them.
    pub(crate) caches: Cell<CacheSettings>,
    /// An option of `blockdev-add` that is no key of a disk, and has a meaning on this host alone.
    pub(crate) only_here: Option<&'static str>,
    /// The nodes that `blockdev-add` named below the disk's own, topmost first.
    pub(crate) below: Vec<NodeBelow>,
    /// Of a node that `blockdev-add` has opened as it lies.
    pub(crate) storage: Option<Rc<StorageNode>>,
    /// The arguments of each `blockdev-add` that made it, the lowest node's first; none where a
    /// config file or a command line has it.
    pub(crate) told: Option<Vec<Map<String, Value>>>,
    /// A client of the control socket added it by its keys: no config has it.
    pub(crate) added: bool,
}

impl RunningDisk {
    /// A disk that runs as it was configured.
    pub(crate) fn new(disk: Disk, config: DiskConfig) -> Self {
        Self {
            disk: Arc::new(disk),
            caches: Cell::new(config.qcow2.caches),
            config,
            only_here: None,
            below: Vec::new(),
            storage: None,
            told: None,
            added: false,
        }
    }

    /// A disk without settings in a mebibyte of memory, for tests and fuzzing.
    pub(crate) fn in_memory(name: &str, group: Option<&Arc<ThrottleGroup>>) -> Self {
        let config = DiskConfig { image: "memory:1M".parse().expect("an image"), ..DiskConfig::default() };
        let image = image::open_raw("memory:1M", storage::OpenOptions::default());
        let image = image.expect("a mebibyte of memory");
        Self::new(Disk::new(name, image, DiskSettings::default(), group).expect("no settings"), config)
    }

    /// The config with everything that can be changed at run time as it is now.
    pub(crate) fn current_config(&self) -> DiskConfig {
        let throttle = self.disk.throttle();
        let DiskSettings { limits, share, watermark } = throttle.settings();
        let mut config = self.config.clone();
        config.settings = ThrottleConfig::from_running(&GroupSettings { limits, share, watermark });
        config.group = throttle.group().map(|group| group.name().to_owned());
        config.prefetch = self.disk.prefetch().settings();
        config.on_error = self.disk.failures().policies();
        config.qcow2.caches = self.caches.get();
        config
    }

    /// The keys that are not at their defaults and that `which` selects, as they are now, with
    /// absolute paths. A format that was probed is not among them: opened as explicitly raw, the
    /// image would accept a header of another format from its guest.
    pub(crate) fn keys_now(&self, which: impl Fn(&ConfigKey<DiskConfig>) -> bool) -> Map<String, Value> {
        let mut config = self.current_config();
        if let Ok(here) = absolute(".") {
            config.image = config.image.relative_to(&here);
        }
        config.read_only = self.disk.image().is_read_only();
        let is_set = |key: &&ConfigKey<DiskConfig>| self.has_key(key.name) && !key.is_default(&config);
        let keys = DiskConfig::keys().iter().filter(is_set).filter(|key| which(key));
        keys.filter_map(|key| Some((key.name.to_owned(), Value::from(&key.write(&config)?)))).collect()
    }

    /// The keys that the new process of an upgrade receives. Exports are transferred by themselves,
    /// each with its access rules.
    pub(crate) fn keys_of_upgrade(&self) -> Map<String, Value> {
        self.keys_now(|key| key.name != "export" && key.heading != "Access")
    }

    /// The keys of qcow2 images, where the image is one, and all others.
    pub(crate) fn has_key(&self, name: &str) -> bool {
        let is_raw = matches!(self.disk.image(), image::Image::Raw(_));
        !is_raw || DiskConfig::key(name).is_none_or(|key| key.heading != "qcow2")
    }

    /// Flushes and closes it. What fails is only logged: it would keep the disk for ever.
    pub(crate) async fn close(&self) {
        let disk = self.disk.name();
        self.disk.failures().stop_waiting();
        let ending = async {
            if let Err(error) = self.disk.flush().await {
                tracing::error!(%disk, %error, "the last flush of a disk that is removed failed");
            }
            if let Err(error) = self.disk.close().await {
                tracing::error!(%disk, %error, "a disk that is removed could not be closed");
            }
        };
        self.disk.run_unless_unresponsive(ending).await;
    }

    /// Waits until the files of a disk that was closed are free for other programs, for
    /// [`TO_BE_FREE`] at most: a file system that does not answer keeps them open. The caller has
    /// the last reference to the disk.
    pub(crate) async fn until_free(self) {
        let (name, closed) = (Arc::clone(self.disk.name()), self.disk.closed());
        drop(self);
        if !closed.within(TO_BE_FREE).await {
            tracing::warn!(disk = %name, "the files of a disk that was removed are still open: its file system does not answer");
        }
    }
}

/// How `blockdev-add` opens the node that has the bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct StorageNode {
    pub(crate) image: ImageLocation,
    /// Whether the path must be a block device's (true) or a regular file's (false).
    pub(crate) device: Option<bool>,
    pub(crate) cache: CacheMode,
    pub(crate) read_only: bool,
    /// Open it read-only where it cannot be written.
    pub(crate) auto_read_only: bool,
    pub(crate) force_share: bool,
    pub(crate) latency: Option<Duration>,
    /// How long requests wait for an NBD server that has gone.
    pub(crate) reconnect_delay: Duration,
    /// How long it is tried to reach one at first.
    pub(crate) open_timeout: Duration,
    /// Another daemon may take it over: see `--handover`.
    pub(crate) handover: bool,
    pub(crate) discards: Discards,
    pub(crate) detect_zeroes: DetectZeroes,
}

/// A node below a disk, which has no life of its own but keeps its name from being given again.
#[derive(Clone, Debug)]
pub struct NodeBelow {
    pub(crate) name: String,
    /// It was a disk before another was put over it, and is one again when that goes.
    pub(crate) stays: bool,
    /// It was closed, because what is above takes the bytes for another format: how to open it
    /// again.
    pub(crate) closed: Option<Rc<StorageNode>>,
}
