//! The measured images: created, filled, and opened according to a configuration.
//!
//! All images are filled with incompressible bytes before they are read, because holes cost no disk
//! reads. Images are locked as usual, so none is open twice at a time.

use std::{
    cell::{Cell, RefCell},
    fs,
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, bail};
use block::{disk::Disk, layer::throttle::DiskSettings};
use console::progress::StepProgress;
use image::{
    Image,
    open::{ImageOptions, open},
    qcow2::{
        CacheSettings, L2CacheSize,
        create::{CreateOptions, create},
        header::BackingReference,
    },
};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use policy::prefetch::PrefetchConfig;
use reactor::{
    buffer::{ALIGNMENT, IoBuffer},
    run_blocking, spawn_joinable,
};
use settings::exact_size;
use storage::{CacheMode, Durability, ImageFormat, OpenOptions, open_storage};

use super::{
    configurations::{DiskConfiguration, L2Share, Qcow2Choice},
    stop::TuneStop,
    target::{TuneTarget, TuneTargetKind},
};

/// The overlays' backing file; also the raw disk that presets compare with.
pub(super) const BASE: &str = "base.raw";
const OVERLAY: &str = "overlay.qcow2";
const STEP_BYTES: u64 = 1 << 20;
const DEPTH: usize = 8;
/// Initial length of a new file, because an empty file cannot be opened as storage.
const MIN_FILE: u64 = 512;

#[derive(Debug)]
pub(super) struct TuneImages {
    pub(super) place: Rc<TuneTarget>,
    /// [`STEP_BYTES`] incompressible bytes from the aligned index `first` on.
    noise: Arc<[u8]>,
    first: usize,
}

impl TuneImages {
    pub(super) fn new(place: Rc<TuneTarget>) -> Self {
        let noise: Arc<[u8]> = (0..STEP_BYTES as usize + ALIGNMENT).map(|_| fastrand::u8(..)).collect();
        // Direct I/O needs aligned buffers, and the noise is shared without copying.
        let first = noise.as_ptr().align_offset(ALIGNMENT);
        Self { place, noise, first }
    }

    /// Creates and fills the base and an image for each cluster size, and returns the sizes
    /// created. Images that do not fit into the time are left out; it is an error if the first one
    /// does not.
    pub(super) async fn make(
        &self,
        clusters: &[u64],
        stop: &TuneStop,
        progress: &Rc<StepProgress>,
    ) -> anyhow::Result<Vec<u64>> {
        let mut created = Vec::new();
        // Nothing is created for an existing image or a device.
        let Some(base) = self.place.created_path(BASE) else { return Ok(clusters.to_vec()) };
        fs::File::create(&base)
            .and_then(|file| file.set_len(self.place.size_bytes))
            .context("cannot create it")?;
        if !self.fill(&base, ImageFormat::Raw, stop, progress).await? {
            bail!("writing the images took too long (give a smaller --size or a longer --budget)");
        }
        for &cluster_bytes in clusters {
            let path = self.path(cluster_bytes)?;
            self.create(&path, cluster_bytes, None).await?;
            // Out of time: an image that is only partly filled would be faster than a full one.
            if !self.fill(&path, ImageFormat::Qcow2, stop, progress).await? {
                fs::remove_file(&path).context("a file cannot be removed")?;
                break;
            }
            created.push(cluster_bytes);
        }
        if created.is_empty() {
            bail!("writing the images took too long (give a smaller --size or a longer --budget)");
        }
        Ok(created)
    }

    pub(super) async fn open(&self, configuration: &DiskConfiguration) -> anyhow::Result<Arc<Disk>> {
        // An existing image is opened read-only; a device is writable only on request.
        let (path, format, read_only) = match (&self.place.kind, configuration.qcow2) {
            (TuneTargetKind::Made { .. }, Some(Qcow2Choice { cluster_bytes, .. })) => {
                (self.path(cluster_bytes)?, Some(ImageFormat::Qcow2), false)
            }
            (TuneTargetKind::Made { .. }, None) => (self.base()?, Some(ImageFormat::Raw), false),
            (TuneTargetKind::Device { writable, .. }, _) => {
                (self.place.path.clone(), Some(ImageFormat::Raw), !writable)
            }
            (TuneTargetKind::Image { format, .. }, _) => (self.place.path.clone(), *format, true),
        };
        self.disk(&path, format, read_only, configuration).await
    }

    pub(super) async fn open_overlay(&self, configuration: &DiskConfiguration) -> anyhow::Result<Arc<Disk>> {
        let path = self.place.created_path(OVERLAY).context("there is no directory for an overlay")?;
        let cluster_bytes = configuration.qcow2.map_or(0, |qcow2| qcow2.cluster_bytes);
        let backing = BackingReference { name: BASE.to_owned(), format: Some("raw".to_owned()) };
        self.create(&path, cluster_bytes, Some(backing)).await?;
        self.disk(&path, Some(ImageFormat::Qcow2), false, configuration).await
    }

    pub(super) async fn remove_overlay(&self) -> anyhow::Result<()> {
        let path = self.place.created_path(OVERLAY).context("there is no directory for an overlay")?;
        run_blocking(move || fs::remove_file(path)).await.context("the overlay cannot be removed")
    }

    /// Drops the disk from the page cache, as far as the kernel permits.
    pub(super) async fn drop_from_page_cache(&self, disk: &Disk) -> anyhow::Result<()> {
        let paths: Vec<_> =
            disk.image().chain().filter_map(|image| image.storage().path().map(PathBuf::from)).collect();
        let forget = move || -> anyhow::Result<()> {
            for path in paths {
                let file = fs::File::open(&path)?;
                // Dirty pages cannot be dropped.
                file.sync_data()?;
                posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
            }
            Ok(())
        };
        run_blocking(forget).await.context("the page cache cannot be emptied")
    }

    fn path(&self, cluster_bytes: u64) -> anyhow::Result<PathBuf> {
        self.place
            .created_path(&format!("{}.qcow2", exact_size(cluster_bytes)))
            .context("there is no directory for images")
    }

    fn base(&self) -> anyhow::Result<PathBuf> {
        self.place.created_path(BASE).context("there is no directory for images")
    }

    async fn create(
        &self,
        path: &Path,
        cluster_bytes: u64,
        backing: Option<BackingReference>,
    ) -> anyhow::Result<()> {
        fs::File::create(path).and_then(|file| file.set_len(MIN_FILE)).context("cannot create an image")?;
        let storage = open_storage(&spec(path)?, OpenOptions::default())?;
        let size_bytes = self.place.size_bytes;
        let options = CreateOptions { size_bytes, cluster_bytes, backing, ..CreateOptions::default() };
        create(&storage, None, &options).await.context("cannot create an image")?;
        Ok(())
    }

    async fn disk(
        &self,
        path: &Path,
        format: Option<ImageFormat>,
        read_only: bool,
        configuration: &DiskConfiguration,
    ) -> anyhow::Result<Arc<Disk>> {
        let options = ImageOptions {
            storage: OpenOptions { cache: configuration.cache, format, read_only, ..OpenOptions::default() },
            caches: configuration.qcow2.map_or_else(CacheSettings::default, |qcow2| self.caches(qcow2)),
            ..ImageOptions::default()
        };
        let disk = Disk::new("tune", open(&spec(path)?, options).await?, DiskSettings::default(), None)?;
        // Set explicitly, because the default mode would decide by itself.
        disk.prefetch().set(PrefetchConfig { mode: configuration.prefetch, ..PrefetchConfig::default() })?;
        Ok(Arc::new(disk))
    }

    fn caches(&self, Qcow2Choice { cluster_bytes, l2 }: Qcow2Choice) -> CacheSettings {
        if l2 == L2Share::Full {
            return CacheSettings { l2: Some(L2CacheSize::Full), ..CacheSettings::default() };
        }
        let bytes = l2.bytes(self.place.size_bytes, cluster_bytes);
        CacheSettings {
            l2: Some(L2CacheSize::Bytes(bytes)),
            entry_bytes: Some(L2Share::slice_bytes(bytes).min(cluster_bytes)),
            ..CacheSettings::default()
        }
    }

    /// Fills an image. Returns false if the time ran out.
    async fn fill(
        &self,
        path: &Path,
        format: ImageFormat,
        stop: &TuneStop,
        progress: &Rc<StepProgress>,
    ) -> anyhow::Result<bool> {
        let storage =
            OpenOptions { cache: CacheMode::Writeback, format: Some(format), ..OpenOptions::default() };
        let image = open(&spec(path)?, ImageOptions { storage, ..ImageOptions::default() }).await?;
        let pieces = self.place.size_bytes / STEP_BYTES;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        progress.begin(&format!("writing {name}"), pieces * STEP_BYTES);
        let filling = Rc::new(ImageFill {
            image,
            noise: Arc::clone(&self.noise),
            first: self.first,
            pieces,
            next: Cell::new(0),
            failed: RefCell::new(None),
            written: Cell::new(0),
            progress: Rc::clone(progress),
            stop: stop.clone(),
        });
        // Several writes in flight, else filling a slow disk takes most of the budget.
        let tasks: Vec<_> = (0..DEPTH).map(|_| spawn_joinable(Rc::clone(&filling).write())).collect();
        for task in tasks {
            task.await;
        }
        progress.end();
        if let Some(error) = filling.failed.borrow_mut().take() {
            return Err(error).with_context(|| format!("writing {name}"));
        }
        // Otherwise the first measured writes would include writing back these.
        filling.image.flush().await.with_context(|| format!("writing {name}"))?;
        filling.image.close().await.with_context(|| format!("writing {name}"))?;
        Ok(filling.next.get() >= pieces)
    }
}

struct ImageFill {
    image: Image,
    noise: Arc<[u8]>,
    first: usize,
    pieces: u64,
    next: Cell<u64>,
    written: Cell<u64>,
    progress: Rc<StepProgress>,
    failed: RefCell<Option<reactor::error::Error>>,
    stop: TuneStop,
}

impl ImageFill {
    async fn write(self: Rc<Self>) {
        while self.next.get() < self.pieces && self.failed.borrow().is_none() && !self.stop.is_due() {
            // Taken before the await, so that no two tasks write the same piece.
            let at = self.next.replace(self.next.get() + 1) * STEP_BYTES;
            let data = IoBuffer::view_of(&self.noise, self.first..self.first + STEP_BYTES as usize);
            let result = self.image.write(at, data.into(), Durability::Cached).await;
            self.written.set(self.written.get() + 1);
            self.progress.advance(self.written.get() * STEP_BYTES);
            if let Err(error) = result {
                self.failed.borrow_mut().get_or_insert(error);
            }
        }
    }
}

fn spec(path: &Path) -> anyhow::Result<String> {
    let text =
        path.to_str().with_context(|| format!("{}: not UTF-8 (use another name of it)", path.display()))?;
    Ok(format!("file:{text}"))
}
