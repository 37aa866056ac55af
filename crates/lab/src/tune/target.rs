//! The measured target: a directory for images, a device, or an existing image.
//!
//! ```text
//!   DIR     .weir-tune-PID-XXXXXX/   base.raw   64K.qcow2 … 2M.qcow2   overlay.qcow2 (over base.raw, recreated for each first write)
//!   DEVICE  raw: opened exclusively against other users; written to only on request
//!   IMAGE   only read
//! ```
//!
//! Obstacles are detected before anything is changed: too little space, a device or image in use.
//! The directory is removed however the command ends, except by SIGKILL.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context as _, bail, ensure};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::statvfs::statvfs,
};
use settings::exact_size;
use storage::ImageFormat;
use tempfile::TempDir;

use super::{
    configurations::{CLUSTERS, ConfigurationSpace, PatternOperation, RequestPattern},
    stop::TuneStop,
};
use crate::probe::{in_use, in_use::ExclusiveDevice};

/// A few dozen of the largest requests.
const MIN_SIZE: u64 = 16 << 20;
/// Upper bound of the default size.
const USUAL_SIZE: u64 = 1 << 30;
/// Default size per second of the budget: seven images at 60 MB/s then take a quarter of the time.
const BYTES_PER_SECOND: u64 = 2 << 20;
/// Bytes written to an overlay before it is recreated.
pub(super) const OVERLAY_BYTES: u64 = 64 << 20;
/// Minimum share of data in an existing image; with less, mostly reads of holes would be measured.
const MIN_DATA_PERCENT: u64 = 50;
/// Prefix of the temporary directory, followed by the pid of the process.
const PREFIX: &str = ".weir-tune-";
/// Space left free for metadata of images and of the file system.
const SPARE_BYTES: u64 = 32 << 20;

#[derive(Clone, Copy, Debug)]
pub(super) struct TuneTargetOptions<'a> {
    pub(super) path: &'a Path,
    pub(super) size_bytes: Option<u64>,
    pub(super) format: Option<ImageFormat>,
    pub(super) write: bool,
    /// True to write despite a known signature.
    pub(super) force: bool,
    pub(super) budget_seconds: u64,
}

#[derive(Debug)]
pub(super) struct TuneTarget {
    pub(super) kind: TuneTargetKind,
    pub(super) path: PathBuf,
    pub(super) size_bytes: u64,
    pub(super) whole_bytes: u64,
    remarks: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InspectedImage {
    pub(super) size_bytes: u64,
    pub(super) cluster_bytes: Option<u64>,
    /// Bytes of the measured part that hold data; the rest are holes.
    pub(super) data_bytes: u64,
}

#[derive(Debug)]
pub(super) enum TuneTargetKind {
    /// A temporary directory for images, locked so that another run does not remove it as stale.
    Made {
        directory: TempDir,
        /// `None` on a file system without locks.
        _lock: Option<Flock<fs::File>>,
    },
    Device {
        writable: bool,
        _claim: ExclusiveDevice,
    },
    Image {
        format: Option<ImageFormat>,
        cluster_bytes: Option<u64>,
    },
}

impl TuneTarget {
    /// Opens the target without changing it. `image` inspects an image: its format, and the number
    /// of bytes to inspect (or all).
    pub(super) fn open(
        options: TuneTargetOptions<'_>,
        image: impl FnOnce(&Path, Option<ImageFormat>, Option<u64>) -> anyhow::Result<InspectedImage>,
    ) -> anyhow::Result<Self> {
        let name = options.path.display();
        let metadata = fs::metadata(options.path).with_context(|| format!("{name}: cannot be measured"))?;
        let is_device = metadata.file_type().is_block_device();
        ensure!(
            is_device || !(options.write || options.force),
            "{name}: is no device, and --write and --force are for devices (leave them out)"
        );
        if metadata.is_dir() {
            ensure!(
                options.format.is_none(),
                "{name}: is a directory, and --format is for an image (leave it out)"
            );
            return Self::directory(options);
        }
        let mut remarks = Vec::new();
        let (kind, whole_bytes) = if is_device {
            // The claim is held until the end, so that the device cannot be mounted meanwhile.
            let claim = if options.write {
                in_use::claim(options.path, metadata.rdev(), options.force)?
            } else {
                in_use::claim_to_read(options.path)?
            };
            // A device has no holes to count.
            let seen = image(options.path, Some(ImageFormat::Raw), Some(0))?;
            (TuneTargetKind::Device { writable: options.write, _claim: claim }, seen.size_bytes)
        } else if metadata.is_file() {
            let seen = image(options.path, options.format, options.size_bytes)?;
            let measured = options.size_bytes.unwrap_or(seen.size_bytes).min(seen.size_bytes);
            remarks.extend(holes(options.path, measured, seen.data_bytes)?);
            (
                TuneTargetKind::Image { format: options.format, cluster_bytes: seen.cluster_bytes },
                seen.size_bytes,
            )
        } else {
            bail!(
                "{name}: is neither a directory nor a block device nor an image (name the \
                 directory that it is in)"
            )
        };
        let size_bytes = whole_blocks(options.size_bytes.unwrap_or(whole_bytes).min(whole_bytes));
        check_size(options.path, size_bytes)?;
        Ok(Self { kind, path: options.path.to_owned(), size_bytes, whole_bytes, remarks })
    }

    fn directory(options: TuneTargetOptions<'_>) -> anyhow::Result<Self> {
        let name = options.path.display();
        let remarks = remove_stale(options.path);
        let space = statvfs(options.path).with_context(|| format!("{name}: its free space is unknown"))?;
        let free = space.fragment_size().saturating_mul(space.blocks_available());
        let by_time = options.budget_seconds.saturating_mul(BYTES_PER_SECOND);
        // A sixteenth of the free space leaves room for all images and for other programs.
        let usual = by_time.min(free / 16).clamp(MIN_SIZE, USUAL_SIZE);
        let size_bytes = whole_blocks(options.size_bytes.unwrap_or(usual));
        check_size(options.path, size_bytes)?;
        let needed = needed_bytes(size_bytes);
        ensure!(
            needed <= free,
            "{name}: needs {} bytes for images of {}, and {free} are free (make room, or give a \
             smaller --size)",
            needed,
            exact_size(size_bytes)
        );
        let created = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{}-", process::id()))
            .tempdir_in(options.path)
            .with_context(|| {
                format!(
                    "{name}: no directory can be created there (choose a directory with write permission)"
                )
            })?;
        // The lock belongs to the open directory and ends with the process, even if it is killed.
        let open_directory =
            fs::File::open(created.path()).with_context(|| format!("{name}: cannot be opened"))?;
        let lock = lock(open_directory);
        let kind = TuneTargetKind::Made { directory: created, _lock: lock };
        Ok(Self { kind, path: options.path.to_owned(), size_bytes, whole_bytes: size_bytes, remarks })
    }

    pub(super) fn register_for_removal(&self, stop: &TuneStop) {
        if let TuneTargetKind::Made { directory, .. } = &self.kind {
            stop.removes(directory.path());
        }
    }

    pub(super) fn space(&self) -> ConfigurationSpace {
        match self.kind {
            TuneTargetKind::Made { .. } => ConfigurationSpace::of_made_images(self.size_bytes),
            TuneTargetKind::Device { .. } => ConfigurationSpace::of_image(self.size_bytes, None),
            TuneTargetKind::Image { cluster_bytes, .. } => {
                ConfigurationSpace::of_image(self.size_bytes, cluster_bytes)
            }
        }
    }

    pub(super) fn patterns(&self) -> Vec<RequestPattern> {
        let can = |pattern: &RequestPattern| match self.kind {
            TuneTargetKind::Made { .. } => true,
            TuneTargetKind::Device { writable, .. } => {
                !pattern.writes() || writable && pattern.operation != PatternOperation::FirstWrite
            }
            TuneTargetKind::Image { .. } => !pattern.writes(),
        };
        RequestPattern::all().into_iter().filter(can).collect()
    }

    pub(super) fn remarks(&self) -> Vec<String> {
        let not_measured = self.not_measured().map(|part| format!("Not measured: {part}."));
        self.remarks.iter().cloned().chain(not_measured).collect()
    }

    fn not_measured(&self) -> Option<&'static str> {
        match self.kind {
            TuneTargetKind::Made { .. } => None,
            TuneTargetKind::Device { writable: false, .. } => Some(
                "writes: they would destroy the data on the device (--write); cluster sizes and L2 \
                 caches: a device has none",
            ),
            TuneTargetKind::Device { writable: true, .. } => {
                Some("cluster sizes, L2 caches and first writes: a device has none")
            }
            TuneTargetKind::Image { .. } => Some(
                "writes and cluster sizes: an existing image is only read (name its directory to \
                 create and write images)",
            ),
        }
    }

    pub(super) fn created_path(&self, name: &str) -> Option<PathBuf> {
        match &self.kind {
            TuneTargetKind::Made { directory, .. } => Some(directory.path().join(name)),
            TuneTargetKind::Device { .. } | TuneTargetKind::Image { .. } => None,
        }
    }
}

fn needed_bytes(size_bytes: u64) -> u64 {
    // An image for each cluster size, and the raw base.
    let images = (CLUSTERS.len() as u64 + 1).saturating_mul(size_bytes);
    // Each write to an overlay allocates a cluster.
    let overlay = size_bytes.min(OVERLAY_BYTES);
    images.saturating_add(overlay + SPARE_BYTES).saturating_add(images / 256)
}

/// `None` if another process holds the lock or the file system has no locks.
fn lock(directory: fs::File) -> Option<Flock<fs::File>> {
    Flock::lock(directory, FlockArg::LockExclusiveNonblock).ok()
}

/// Removes the directories of killed runs and returns remarks; those of live runs are locked.
fn remove_stale(path: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    let remove = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let process: u32 = name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()?;
        // Both checks: a run in another PID namespace seems gone, and a new one has no lock yet.
        let is_gone = !Path::new("/proc").join(process.to_string()).exists();
        if !entry.file_type().ok()?.is_dir() || !is_gone {
            return None;
        }
        let _lock = lock(fs::File::open(entry.path()).ok()?)?;
        fs::remove_dir_all(entry.path()).ok()?;
        Some(format!("Removed {}, left by a killed run.", entry.path().display()))
    };
    entries.filter_map(Result::ok).filter_map(remove).collect()
}

/// A remark on an image's holes; fails if it is mostly holes.
fn holes(path: &Path, measured_bytes: u64, data_bytes: u64) -> anyhow::Result<Option<String>> {
    let percent = data_bytes.saturating_mul(100) / measured_bytes.max(1);
    ensure!(
        percent >= MIN_DATA_PERCENT,
        "{}: {percent} % of it hold data, and the rest are holes, which are read without the disk \
         (name the directory it is in, to have full images made and measured there)",
        path.display()
    );
    Ok((percent < 99).then(|| {
        format!(
            "Of the image {percent} % hold data: the rest are holes, which are read without the \
             disk, so reads look faster than they are."
        )
    }))
}

fn check_size(path: &Path, size_bytes: u64) -> anyhow::Result<()> {
    ensure!(
        size_bytes >= MIN_SIZE,
        "{}: {size_bytes} bytes are too few to be measured (it takes {} at least)",
        path.display(),
        exact_size(MIN_SIZE)
    );
    Ok(())
}

fn whole_blocks(bytes: u64) -> u64 {
    // Whole clusters of the largest size, 2 MiB.
    bytes >> 21 << 21
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target_options(path: &Path) -> TuneTargetOptions<'_> {
        TuneTargetOptions {
            path,
            size_bytes: None,
            format: None,
            write: false,
            force: false,
            budget_seconds: 600,
        }
    }

    fn open(options: TuneTargetOptions<'_>) -> anyhow::Result<TuneTarget> {
        opened(options, 60 << 20)
    }

    fn opened(options: TuneTargetOptions<'_>, data_bytes: u64) -> anyhow::Result<TuneTarget> {
        let size_bytes = 100 << 20;
        TuneTarget::open(options, |_, _, _| {
            Ok(InspectedImage { size_bytes, cluster_bytes: Some(65_536), data_bytes })
        })
    }

    #[test]
    fn unsuitable_targets_are_rejected_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let usual = target_options(path);
        let sized = |size_bytes| TuneTargetOptions { size_bytes: Some(size_bytes), ..usual };
        for (options, why) in [
            (sized(1 << 60), "are free (make room, or give a smaller --size)"),
            (sized(1 << 20), "too few to be measured (it takes 16M"),
            (TuneTargetOptions { write: true, ..usual }, "is no device, and --write"),
            (TuneTargetOptions { format: Some(ImageFormat::Raw), ..usual }, "--format is for an image"),
            (target_options(&path.join("none")), "cannot be measured: No such file"),
            (target_options(Path::new("/dev/null")), "is neither a directory nor"),
        ] {
            let refused = format!("{:#}", open(options).unwrap_err());
            assert!(refused.contains(why), "{refused}");
        }
        assert_eq!(fs::read_dir(path).unwrap().count(), 0);
    }

    #[test]
    fn created_files_are_removed_on_drop() {
        let directory = tempfile::tempdir().unwrap();
        let place = open(target_options(directory.path())).unwrap();
        fs::write(place.created_path("64K.qcow2").unwrap(), "x").unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        drop(place);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn stale_directories_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let running = open(target_options(directory.path())).unwrap();
        // Larger than any pid (proc_sys_kernel(5), pid_max).
        let [left, locked] =
            ["4194305-aaaaaa", "4194306-bbbbbb"].map(|name| directory.path().join(format!("{PREFIX}{name}")));
        let foreign = directory.path().join(".weir-tune-mine");
        for path in [&left, &locked, &foreign] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("base.raw"), "x").unwrap();
        }
        let _lock = lock(fs::File::open(&locked).unwrap()).unwrap();
        let place = open(target_options(directory.path())).unwrap();
        assert!(place.remarks()[0].contains("4194305-aaaaaa"), "{:?}", place.remarks());
        assert_eq!([&left, &locked, &foreign].map(|path| path.exists()), [false, true, true]);
        assert!(running.created_path("").unwrap().exists());
    }

    #[test]
    fn existing_image_is_opened_read_only_with_its_cluster_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.qcow2");
        fs::write(&path, "x").unwrap();
        let place = open(target_options(&path)).unwrap();
        assert_eq!((place.size_bytes, place.space().clusters), (100 << 20, vec![65_536]));
        assert!(place.patterns().iter().all(|pattern| !pattern.writes()));
        let remarks = place.remarks();
        assert!(remarks[0].starts_with("Of the image 60 % hold data"), "{remarks:?}");
        assert!(remarks[1].contains("only read"), "{remarks:?}");
        let refused = opened(target_options(&path), 49 << 20).unwrap_err().to_string();
        assert!(refused.contains("a.qcow2: 49 % of it hold data"), "{refused}");
        assert_eq!(
            opened(target_options(&path), 100 << 20).unwrap().remarks().len(),
            1,
            "full: nothing to say"
        );
        assert_eq!(place.created_path("x"), None);
    }
}
