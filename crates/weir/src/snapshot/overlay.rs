//! A new overlay over the image of a disk, created by this process and synced with its name.
//!
//! It has the owner and the mode of the present image, so that the daemon can open it as that one
//! at the next start.

use std::{
    fs::{self, File, OpenOptions},
    io::ErrorKind,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf, absolute},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use api::DiskStatus;
use image::{
    open::backing_name,
    qcow2::{create::CreateOptions, header::BackingReference},
};

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
    /// Creates an overlay at `path`, or beside the image.
    pub(super) fn create(disk: &DiskStatus, path: Option<&Path>) -> anyhow::Result<Self> {
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
        let path = match path {
            Some(path) => absolute(path)?,
            None => free_name(&base),
        };
        let shown = path.display().to_string();
        let present = fs::metadata(&base).with_context(|| format!("{name}: {}", base.display()))?;
        let mode = if present.is_file() { present.permissions().mode() & 0o666 } else { 0o600 };
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(mode).open(&path);
        let file = file.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => {
                anyhow!("{shown}: exists already (remove it, or choose another file)")
            }
            _ => anyhow!("{shown}: cannot be created: {error} (check the directory)"),
        })?;
        let unused = UnusedFile::new(&file, &path)?;
        let own = file.metadata()?;
        if present.is_file() && (own.uid(), own.gid()) != (present.uid(), present.gid()) {
            fchown(&file, Some(present.uid()), Some(present.gid())).with_context(|| {
                format!("{shown}: cannot have the owner of {} (run this as root)", base.display())
            })?;
        }
        // The mask of this process has been applied to the mode.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
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
        let first = NewOverlay::create(&disk(&at("vm1.raw")), None).expect("free");
        assert_eq!(first.path, at("vm1.snap-1.qcow2"));
        let mode = fs::metadata(&first.path).expect("created").permissions().mode();
        assert_eq!(mode & 0o777, 0o640, "as the image");
        assert_eq!(free_name(&first.path), at("vm1.snap-2.qcow2"));
        drop(first);
        assert!(!at("vm1.snap-1.qcow2").exists(), "an unused overlay is removed");
        NewOverlay::create(&disk(&at("vm1.raw")), None).expect("free").keep();
        assert!(at("vm1.snap-1.qcow2").exists());
    }

    #[test]
    fn a_file_is_not_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("vm1.raw");
        fs::write(&path, [7; 512]).expect("written");
        let error = NewOverlay::create(&disk(&path), Some(&path)).err().expect("it exists");
        assert!(error.to_string().contains("exists already"), "{error}");
        assert_eq!(fs::read(&path).expect("readable"), [7; 512]);
    }
}
