//! An overlay that the daemon creates for a client: `blockdev-snapshot-sync` without an existing
//! file.
//!
//! Never replaces a file. A file that no snapshot uses is removed, and never another one that has
//! its name by then.

use std::{
    fs::{self, OpenOptions, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf, absolute},
};

use anyhow::{Context as _, anyhow};
use image::{
    open::backing_name,
    qcow2::{
        create::{CreateOptions, create},
        header::BackingReference,
    },
};
use storage::{ImageFormat, OpenOptions as StorageOptions, open_async};

use crate::registry::{Registry, RunningDisk};

/// Size of a new file before it has a header: storage rejects an empty file.
const MIN_FILE_BYTES: u64 = 512;

/// A file that this process has created.
#[derive(Debug)]
pub(crate) struct CreatedOverlay {
    path: PathBuf,
    /// Device and inode number.
    identity: (u64, u64),
}

impl CreatedOverlay {
    /// Creates an empty overlay over the image of a disk, with the mode of that image.
    ///
    /// # Errors
    /// It exists, or cannot be created; the sandbox would not permit its use; nothing is left
    /// behind.
    pub(crate) async fn create(
        registry: &Registry,
        running: &RunningDisk,
        path: PathBuf,
    ) -> anyhow::Result<Self> {
        let shown = path.display().to_string();
        let image = running.config().image.clone();
        let base = image.path().map(absolute).transpose()?;
        let base = base.with_context(|| format!("disk {}: its image is not a file", running.disk.name()))?;
        let path = absolute(path)?;
        // The file does not exist, and so cannot be checked itself.
        let directory = path.parent().unwrap_or(Path::new("/")).display();
        registry.check_image(&format!("file:{directory}").parse()?).await?;
        let backing = BackingReference {
            name: backing_name(&path, &base),
            format: Some(running.disk.image().format().name().to_owned()),
        };
        let new = path.clone();
        let created = reactor::run_blocking(move || create_file(&new, &base)).await;
        let identity = created.map_err(|error| {
            anyhow!(
                "{shown}: cannot be created: {error} (create it with `qemu-img create -b`, and use \
                 mode 'existing')"
            )
        })?;
        let created = Self { path, identity };
        match created.write(running.disk.size_bytes(), backing).await {
            Ok(()) => Ok(created),
            Err(error) => {
                created.remove().await;
                Err(error.context(format!("{shown}: cannot be created")))
            }
        }
    }

    async fn write(&self, size_bytes: u64, backing: BackingReference) -> anyhow::Result<()> {
        let spec = format!("file:{}", self.path.to_str().context("its name is not UTF-8")?);
        let options = StorageOptions { format: Some(ImageFormat::Raw), ..StorageOptions::default() };
        let (storage, _) = open_async(&spec, &options).await?;
        let options = CreateOptions { size_bytes, backing: Some(backing), ..CreateOptions::default() };
        create(&storage, None, &options).await?;
        storage.flush().await?;
        // The snapshot opens it again, and must find it unlocked.
        let closed = storage.closed_channel();
        drop(storage);
        if let Some(closed) = closed {
            // The channel carries no values; it closes.
            let _ = closed.recv().await;
        }
        let directory = self.path.parent().unwrap_or(Path::new("/")).to_owned();
        // The name is durable once its directory is synced.
        reactor::run_blocking(move || fs::File::open(directory)?.sync_all()).await?;
        Ok(())
    }

    /// Removes the file; a failure is only logged.
    pub(crate) async fn remove(self) {
        let file = self.path.display().to_string();
        if let Err(error) = reactor::run_blocking(move || remove_file(&self.path, self.identity)).await {
            tracing::error!(file, %error, "the overlay of a snapshot that has failed cannot be removed");
        }
    }
}

/// Creates the file; returns its device and inode number. Nothing is left behind by a failure.
fn create_file(path: &Path, base: &Path) -> io::Result<(u64, u64)> {
    // It will hold the new data of the disk: readable as the present image is.
    let mode = fs::metadata(base)?.permissions().mode() & 0o666;
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    let metadata = file.metadata()?;
    let identity = (metadata.dev(), metadata.ino());
    // The mask of this process has been applied to the mode.
    let prepared =
        file.set_permissions(Permissions::from_mode(mode)).and_then(|()| file.set_len(MIN_FILE_BYTES));
    if let Err(error) = prepared {
        // The first error is the reason.
        let _ = remove_file(path, identity);
        return Err(error);
    }
    Ok(identity)
}

/// Removes the file if the path still names it.
fn remove_file(path: &Path, identity: (u64, u64)) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    if (found.dev(), found.ino()) != identity {
        return Err(io::Error::other("another file has its name"));
    }
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_is_that_of_the_base_and_another_file_is_not_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let (base, new) = (directory.path().join("base"), directory.path().join("new"));
        fs::write(&base, "").expect("written");
        fs::set_permissions(&base, Permissions::from_mode(0o666)).expect("its owner");
        let identity = create_file(&new, &base).expect("it is new");
        assert_eq!(fs::metadata(&new).expect("created").mode() & 0o777, 0o666, "whatever the umask");
        create_file(&new, &base).expect_err("it exists");
        let old = directory.path().join("old");
        fs::rename(&new, &old).expect("renamed");
        fs::write(&new, "other").expect("written");
        remove_file(&new, identity).expect_err("another file");
        assert_eq!(fs::read(&new).expect("still there"), b"other");
        remove_file(&old, identity).expect("the same file");
    }
}
