//! Running disk, with the options that it was opened with and the names that it reserves.
//!
//! Data only; the registry manages it.

use std::{
    cell::{Cell, Ref, RefCell},
    path::absolute,
    rc::Rc,
    sync::Arc,
};

use anyhow::{anyhow, bail};
use block::{
    disk::{DetectZeroes, Discards, Disk},
    layer::throttle::{DiskSettings, ThrottleGroup},
};
use image::{Image, qcow2::CacheSettings};
use policy::{schedule::LimitSchedule, time::Duration};
use serde_json::{Map, Value};
use settings::{ConfigKey, DiskConfig, ImageLocation, KeyTable as _, ThrottleConfig};
use storage::{CacheMode, ImageFormat};

/// Time that the removal of a disk waits for its files to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Open disk.
#[derive(Debug)]
pub struct RunningDisk {
    /// The disk itself.
    pub disk: Arc<Disk>,
    /// Config when it was added, with the image of the last snapshot.
    pub(crate) config: RefCell<DiskConfig>,
    pub(crate) is_switched: Cell<bool>,
    /// Configured sizes of the metadata caches; the image may round them.
    pub(crate) caches: Cell<CacheSettings>,
    /// Option of `blockdev-add` that is no config key, and is valid on this host only.
    pub(crate) host_local_option: Option<&'static str>,
    /// Nodes that `blockdev-add` named below the disk's own, topmost first.
    pub(crate) lower_nodes: Vec<LowerNode>,
    /// Nodes that `blockdev-snapshot` put over the disk's own. They name the disk too.
    pub(crate) overlay_nodes: RefCell<Vec<String>>,
    /// Options of the protocol node, for a node that `blockdev-add` opened without a format.
    pub(crate) storage: Option<Rc<ProtocolNode>>,
    /// Arguments of each `blockdev-add` that created the disk or put a node above it, lowest node
    /// first. `None` for a disk of a config file or command line.
    pub(crate) creation_commands: Option<Vec<Map<String, Value>>>,
    /// True if a client of the control socket added it by keys and it is in no config file.
    pub(crate) is_added: bool,
}

impl RunningDisk {
    /// Disk that runs with the given config.
    pub(crate) fn new(disk: Disk, config: DiskConfig) -> Self {
        Self {
            disk: Arc::new(disk),
            caches: Cell::new(config.qcow2.caches),
            config: RefCell::new(config),
            is_switched: Cell::new(false),
            host_local_option: None,
            lower_nodes: Vec::new(),
            overlay_nodes: RefCell::default(),
            storage: None,
            creation_commands: None,
            is_added: false,
        }
    }

    /// Config when it was added, with the present image. [`RunningDisk::current_config`] includes
    /// later changes of settings. Must not be held across an await.
    pub fn config(&self) -> Ref<'_, DiskConfig> {
        self.config.borrow()
    }

    /// Changes the image in the config, after the disk was switched to it.
    pub(crate) fn set_image(&self, image: ImageLocation, format: ImageFormat) {
        let mut config = self.config.borrow_mut();
        (config.image, config.format) = (image, Some(format));
        self.is_switched.set(true);
    }

    /// True if a snapshot or a mirror has replaced the image that the disk was added with.
    pub(crate) fn is_switched(&self) -> bool {
        self.is_switched.get()
    }

    /// Sets the sizes of the metadata caches of the present image, also if a snapshot replaces it
    /// meanwhile.
    ///
    /// # Errors
    /// The image is raw, or the sizes are invalid; the previous ones stay in force.
    pub(crate) async fn set_caches(&self, caches: CacheSettings) -> anyhow::Result<()> {
        loop {
            let image = self.disk.image();
            let Image::Qcow2(qcow2) = &*image else {
                bail!("cache sizes are for qcow2 images, and this one is raw (leave them out)");
            };
            qcow2.set_caches(caches).await.map_err(|error| anyhow!("{error}"))?;
            if Arc::ptr_eq(&image, &self.disk.image()) {
                self.caches.set(caches);
                return Ok(());
            }
        }
    }

    /// Adds the names of the nodes of a new overlay.
    pub(crate) fn add_overlay_nodes(&self, names: Vec<String>) {
        self.overlay_nodes.borrow_mut().extend(names);
    }

    /// Names of the nodes that were put over the disk's own by snapshots.
    pub(crate) fn overlay_nodes(&self) -> Vec<String> {
        self.overlay_nodes.borrow().clone()
    }

    /// Disk of one MiB in memory without settings, for tests and fuzzing.
    pub(crate) fn in_memory(name: &str, group: Option<&Arc<ThrottleGroup>>) -> Self {
        let config = DiskConfig { image: "memory:1M".parse().expect("an image"), ..DiskConfig::default() };
        let image = image::open_raw("memory:1M", storage::OpenOptions::default());
        let image = image.expect("a mebibyte of memory");
        Self::new(Disk::new(name, image, DiskSettings::default(), group).expect("no settings"), config)
    }

    /// Config with the current values of all settings that can change at run time.
    pub(crate) fn current_config(&self) -> DiskConfig {
        let throttle = self.disk.throttle();
        let mut config = self.config().clone();
        config.settings = ThrottleConfig::from_running(&throttle.settings().into());
        config.schedule = LimitSchedule::clone(&throttle.scheduled().schedule);
        config.group = throttle.group().map(|group| group.name().to_owned());
        config.prefetch = self.disk.prefetch().settings();
        config.on_error = self.disk.failures().policies();
        config.qcow2.caches = self.caches.get();
        config
    }

    /// Current values of the keys that differ from their defaults and that the function selects,
    /// with absolute paths. Excludes a probed format: the image, opened as explicitly raw, would
    /// accept the header of another format from its guest.
    pub(crate) fn current_keys(
        &self,
        is_selected: impl Fn(&ConfigKey<DiskConfig>) -> bool,
    ) -> Map<String, Value> {
        let mut config = self.current_config();
        if let Ok(here) = absolute(".") {
            config.image = config.image.relative_to(&here);
        }
        config.read_only = self.disk.image().is_read_only();
        let is_set = |key: &&ConfigKey<DiskConfig>| self.has_key(key.name) && !key.is_default(&config);
        let keys = DiskConfig::keys().iter().filter(is_set).filter(|key| is_selected(key));
        keys.filter_map(|key| Some((key.name.to_owned(), Value::from(&key.write(&config)?)))).collect()
    }

    /// Keys that the new process of an upgrade receives. Exports are transferred separately, with
    /// their access rules.
    pub(crate) fn transferred_keys(&self) -> Map<String, Value> {
        self.current_keys(|key| key.name != "export" && key.heading != "Access")
    }

    /// True if the key applies to this image: keys of qcow2 do not apply to raw images.
    pub(crate) fn has_key(&self, name: &str) -> bool {
        let is_raw = matches!(&*self.disk.image(), Image::Raw(_));
        !is_raw || DiskConfig::key(name).is_none_or(|key| key.heading != "qcow2")
    }

    /// Flushes and closes the disk. Errors are only logged, or the disk could never be removed.
    pub(crate) async fn close(&self) {
        let disk = self.disk.name();
        // Fails held requests, which would otherwise never complete.
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

    /// Waits until the files of a closed disk are free for other programs, at most
    /// [`CLOSE_TIMEOUT`]: a file system that does not answer keeps them open. The caller must hold
    /// the last reference.
    pub(crate) async fn wait_until_free(self) {
        // Subscribed before the last reference is dropped.
        let (name, closed) = (Arc::clone(self.disk.name()), self.disk.closed());
        drop(self);
        if !closed.within(CLOSE_TIMEOUT).await {
            tracing::warn!(
                disk = %name,
                "the files of a disk that was removed are still open: its file system does not \
                 answer"
            );
        }
    }
}

/// Options of `blockdev-add` for the protocol node, which stores the bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct ProtocolNode {
    pub(crate) image: ImageLocation,
    /// True if the path must be a block device, false if it must be a regular file.
    pub(crate) device: Option<bool>,
    pub(crate) cache: CacheMode,
    pub(crate) read_only: bool,
    /// Opens it read-only if it is not writable.
    pub(crate) auto_read_only: bool,
    pub(crate) force_share: bool,
    pub(crate) latency: Option<Duration>,
    /// Time that requests wait for an NBD server that is disconnected.
    pub(crate) reconnect_delay: Duration,
    /// Time limit of the first connection to an NBD server.
    pub(crate) open_timeout: Duration,
    /// Another daemon may open it while this one runs: see `--handover`.
    pub(crate) handover: bool,
    pub(crate) discards: Discards,
    pub(crate) detect_zeroes: DetectZeroes,
}

/// Node below a disk. It serves nothing itself, but reserves its name.
#[derive(Clone, Debug)]
pub struct LowerNode {
    pub(crate) name: String,
    /// True if it was a disk before an overlay was added, and becomes one again when the overlay is
    /// removed.
    pub(crate) is_own_disk: bool,
    /// Options for opening it again. Set if it was closed because the node above uses another
    /// format.
    pub(crate) reopen_options: Option<Rc<ProtocolNode>>,
}
