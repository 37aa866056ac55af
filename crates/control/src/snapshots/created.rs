//! An overlay that the daemon creates for a client: `blockdev-snapshot-sync` without an existing
//! file.
//!
//! Never replaces a file. A file that no snapshot uses is removed.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
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

use crate::registry::RunningDisk;

/// Size of a new file before it has a header: storage rejects an empty file.
const MIN_FILE_BYTES: u64 = 512;

/// A file that this process has created.
#[derive(Debug)]
pub(crate) struct CreatedOverlay(PathBuf);

impl CreatedOverlay {
    /// Creates an empty overlay over the image of a disk, with the mode of that image.
    ///
    /// # Errors
    /// It exists, or cannot be created; nothing is left behind.
    pub(crate) async fn create(running: &RunningDisk, path: PathBuf) -> anyhow::Result<Self> {
        let shown = path.display().to_string();
        let image = running.config().image.clone();
        let base = image.path().map(absolute).transpose()?;
        let base = base.with_context(|| format!("disk {}: its image is not a file", running.disk.name()))?;
        let path = absolute(path)?;
        let backing = BackingReference {
            name: backing_name(&path, &base),
            format: Some(running.disk.image().format().name().to_owned()),
        };
        let new = path.clone();
        let created = reactor::run_blocking(move || create_file(&new, &base)).await;
        created.map_err(|error| {
            anyhow!(
                "{shown}: cannot be created: {error} (create it with `qemu-img create -b`, and use \
                 mode 'existing')"
            )
        })?;
        let created = Self(path);
        match created.write(running.disk.size_bytes(), backing).await {
            Ok(()) => Ok(created),
            Err(error) => {
                created.remove().await;
                Err(error.context(format!("{shown}: cannot be created")))
            }
        }
    }

    async fn write(&self, size_bytes: u64, backing: BackingReference) -> anyhow::Result<()> {
        let spec = format!("file:{}", self.0.to_str().context("its name is not UTF-8")?);
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
        let directory = self.0.parent().unwrap_or(Path::new("/")).to_owned();
        // The name is durable once its directory is synced.
        reactor::run_blocking(move || fs::File::open(directory)?.sync_all()).await?;
        Ok(())
    }

    /// Removes the file; a failure is only logged.
    pub(crate) async fn remove(self) {
        let Self(path) = self;
        let file = path.display().to_string();
        if let Err(error) = reactor::run_blocking(move || fs::remove_file(path)).await {
            tracing::error!(file, %error, "the overlay of a snapshot that has failed cannot be removed");
        }
    }
}

fn create_file(path: &Path, base: &Path) -> std::io::Result<()> {
    // It will hold the new data of the disk: readable as the present image is.
    let mode = fs::metadata(base)?.permissions().mode() & 0o666;
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.set_len(MIN_FILE_BYTES)
}
