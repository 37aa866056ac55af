//! A new overlay over the image of a disk, created by this process and synced with its name.
//!
//! It has the owner and the mode of the present image, so that the daemon can open it as that one
//! at the next start. Never in a directory that a reboot empties, unless the image is in one too.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf, absolute},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use api::DiskStatus;
use image::{
    open::backing_name,
    qcow2::{create::CreateOptions, header::BackingReference},
};
use storage::new_file::{check_directory, create_like, is_in_memory};

use crate::new_image::{UnusedFile, write_qcow2};

/// Unit of the size of a qcow2 image.
const SECTOR_BYTES: u64 = 512;

/// A new overlay, which is removed unless it is [kept](NewOverlay::keep).
pub(super) struct NewOverlay {
    pub(super) disk: String,
    /// Absolute.
    pub(super) path: PathBuf,
    pub(super) file: File,
    unused: UnusedFile,
}

impl NewOverlay {
    /// Creates an overlay at `path`, or beside the image. `is_saved` is true if the next start of
    /// the daemon opens it.
    pub(super) fn create(disk: &DiskStatus, path: Option<&Path>, is_saved: bool) -> anyhow::Result<Self> {
        let name = &disk.name;
        let base = disk.path.as_ref().map(PathBuf::from).with_context(|| {
            format!(
                "{name}: its image is not a file of this host, which an overlay needs (use `weir backup`)"
            )
        })?;
        ensure!(
            disk.size.is_multiple_of(SECTOR_BYTES),
            "{name}: its size of {} bytes is not a multiple of {SECTOR_BYTES}, as that of an overlay is \
             (resize the image first)",
            disk.size
        );
        let present = fs::metadata(&base).with_context(|| format!("{name}: {}", base.display()))?;
        let is_device = present.file_type().is_block_device();
        let path = match path {
            Some(path) => absolute(path)?,
            None => {
                let path = free_name(&base);
                let is_kept = check_directory(&path).is_ok();
                ensure!(
                    is_kept || !is_device,
                    "{name}: its image {} is a block device, and a reboot would delete an overlay beside it (name \
                     a file on disk with --to FILE)",
                    base.display()
                );
                path
            }
        };
        let shown = path.display().to_string();
        check_directory(&path).map_err(|why| anyhow!("{shown}: {why}"))?;
        let is_kept = !is_in_memory(path.parent().unwrap_or(Path::new("/")));
        ensure!(
            is_kept || !is_saved || !is_device && is_in_memory(&base),
            "{shown}: its directory is in memory, and a reboot would delete the file, which the next start of \
             weir needs (name a file on disk)"
        );
        let file = create_like(&path, &base).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => {
                anyhow!("{shown}: exists already (remove it, or choose another file)")
            }
            _ => anyhow!("{shown}: cannot be created: {error} (check the directory)"),
        })?;
        let unused = UnusedFile::new(&file, &path)?;
        let backing =
            BackingReference { name: backing_name(&path, &base), format: Some(disk.format.clone()) };
        let options =
            CreateOptions { size_bytes: disk.size, backing: Some(backing), ..CreateOptions::default() };
        let written = write_qcow2(&file, &path, options).and_then(|()| sync(&file, &path));
        written.with_context(|| format!("{shown}: cannot be created"))?;
        Ok(Self { disk: name.clone(), path, file, unused })
    }

    /// Keeps the file, which the daemon uses or may use.
    pub(super) fn keep(self) {
        let _ = self.unused.keep();
    }
}

/// Makes the file and its name durable.
fn sync(file: &File, path: &Path) -> anyhow::Result<()> {
    file.sync_all()?;
    let Some(directory) = path.parent() else { bail!("it has no directory") };
    Ok(File::open(directory)?.sync_all()?)
}

/// The first free name of an overlay beside the image: `vm1.snap-1.qcow2` for `vm1.qcow2` and for
/// its overlays.
fn free_name(base: &Path) -> PathBuf {
    let stem = base.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let number = |text: &str| text.parse::<u32>().ok();
    let stem = match stem.rsplit_once(".snap-") {
        Some((stem, last)) if number(last).is_some() => stem.to_owned(),
        _ => stem,
    };
    let names = (1_u64..).map(|number| base.with_file_name(format!("{stem}.snap-{number}.qcow2")));
    names.into_iter().find(|name| fs::symlink_metadata(name).is_err()).expect("there are enough numbers")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn disk(path: &Path) -> DiskStatus {
        DiskStatus {
            name: "vm1".to_owned(),
            path: Some(path.display().to_string()),
            format: "raw".to_owned(),
            size: 1 << 20,
            ..DiskStatus::default()
        }
    }

    #[test]
    fn overlays_are_numbered_beside_the_image() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        fs::write(at("vm1.raw"), [0; 512]).expect("written");
        fs::set_permissions(at("vm1.raw"), fs::Permissions::from_mode(0o640)).expect("its owner");
        let first = NewOverlay::create(&disk(&at("vm1.raw")), None, false).expect("free");
        assert_eq!(first.path, at("vm1.snap-1.qcow2"));
        let mode = fs::metadata(&first.path).expect("created").permissions().mode();
        assert_eq!(mode & 0o777, 0o640, "as the image");
        assert_eq!(free_name(&first.path), at("vm1.snap-2.qcow2"));
        drop(first);
        assert!(!at("vm1.snap-1.qcow2").exists(), "an unused overlay is removed");
        NewOverlay::create(&disk(&at("vm1.raw")), None, false).expect("free").keep();
        assert!(at("vm1.snap-1.qcow2").exists());
    }

    #[test]
    fn overlay_is_not_in_memory() {
        let refused = |base: &Path, path: Option<&Path>, is_saved| {
            let created = NewOverlay::create(&disk(base), path, is_saved);
            format!("{:#}", created.err().expect("a reboot would delete it"))
        };
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory on disk");
        let base = directory.path().join("vm1.raw");
        fs::write(&base, [0; 512]).expect("written");
        let error = refused(&base, Some(Path::new("/dev/weir-none.qcow2")), false);
        assert!(error.contains("is in the file system of /dev"), "{error}");
        let memory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        let path = memory.path().join("o.qcow2");
        let error = refused(&base, Some(&path), true);
        assert!(error.contains("the next start of weir needs"), "{error}");
        NewOverlay::create(&disk(&base), Some(&path), false).expect("it is not saved");
        let own = memory.path().join("vm1.raw");
        fs::write(&own, [0; 512]).expect("written");
        NewOverlay::create(&disk(&own), Some(&path), true).expect("its image is in memory too");
    }

    #[test]
    fn a_file_is_not_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("vm1.raw");
        fs::write(&path, [7; 512]).expect("written");
        let error = NewOverlay::create(&disk(&path), Some(&path), false).err().expect("it exists");
        assert!(error.to_string().contains("exists already"), "{error}");
        assert_eq!(fs::read(&path).expect("readable"), [7; 512]);
    }
}
