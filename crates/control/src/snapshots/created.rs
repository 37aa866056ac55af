//! An overlay that the daemon creates for a client: `blockdev-snapshot-sync` without an existing
//! file.
//!
//! Never replaces a file. A file that no snapshot uses is removed, and never another one that has
//! its name by then.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
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
use storage::{
    FilesClosed, ImageFormat, OpenOptions as StorageOptions,
    new_file::{check_directory, create_like},
    open_async,
};

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
    /// Creates an empty overlay over the image of a disk, with the owner and the mode of
    /// that image, as far as possible.
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
        let (new, root) = (path.clone(), registry.image_root().cloned());
        let created = reactor::run_blocking(move || {
            check_directory(&new)?;
            if let (Some(root), Some(directory)) = (root, new.parent()) {
                root.check(directory).map_err(|error| error.to_string())?;
            }
            create_file(&new, &base).map_err(|error| {
                format!("{error} (create it with `qemu-img create -b`, and use mode 'existing')")
            })
        });
        let identity = created.await.map_err(|why| anyhow!("{shown}: cannot be created: {why}"))?;
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
        let closed = FilesClosed::of(std::iter::once(&storage));
        drop(storage);
        closed.all().await;
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
    let file = create_like(path, base)?;
    let metadata = file.metadata()?;
    let identity = (metadata.dev(), metadata.ino());
    if let Err(error) = file.set_len(MIN_FILE_BYTES) {
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
    fn another_file_is_not_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let (base, new) = (directory.path().join("base"), directory.path().join("new"));
        fs::write(&base, "").expect("written");
        let identity = create_file(&new, &base).expect("it is new");
        create_file(&new, &base).expect_err("it exists");
        let old = directory.path().join("old");
        fs::rename(&new, &old).expect("renamed");
        fs::write(&new, "other").expect("written");
        remove_file(&new, identity).expect_err("another file");
        assert_eq!(fs::read(&new).expect("still there"), b"other");
        remove_file(&old, identity).expect("the same file");
    }
}
