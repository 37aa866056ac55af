//! New image files that a command creates for the daemon: a file belongs to the user, and the
//! daemon needs no permission for its directory.
//!
//! Never replaces a file, and never writes through the path of a file that it has opened: another
//! user of the directory could replace it.

use std::{
    fs::{self, File},
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, anyhow};
use console::{CommandFailure, on_reactor};
use image::qcow2::create::{CreateOptions, create};
use reactor::operation::PassedFd;
use storage::{ImageFormat, OpenOptions as StorageOptions, open_storage};

/// Size of a new qcow2 file before it has a header: storage rejects an empty file.
const MIN_FILE_BYTES: u64 = 512;

/// A file that this process has created.
pub(crate) struct CreatedFile {
    path: PathBuf,
    /// Device and inode number.
    identity: (u64, u64),
}

/// A file that the daemon does not use yet. Its drop removes it.
pub(crate) struct UnusedFile(Option<CreatedFile>);

impl UnusedFile {
    /// The file at `path`, which this process has just created and opened.
    ///
    /// # Errors
    /// Fails if the system call fails.
    pub(crate) fn new(file: &File, path: &Path) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self(Some(CreatedFile { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) })))
    }

    /// The file, which the daemon may use from now on.
    pub(crate) fn keep(mut self) -> Option<CreatedFile> {
        self.0.take()
    }
}

impl Drop for UnusedFile {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            let _ = file.remove();
        }
    }
}

impl CreatedFile {
    /// Removes the file.
    ///
    /// # Errors
    /// Fails if the path names another file by now, or cannot be removed.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let found = fs::symlink_metadata(&self.path)?;
        if (found.dev(), found.ino()) != self.identity {
            return Err(io::Error::other("another file has its name"));
        }
        fs::remove_file(&self.path)
    }
}

/// Writes an empty qcow2 image to a new file at `path`.
pub(crate) fn write_qcow2(file: &File, path: &Path, options: CreateOptions) -> anyhow::Result<()> {
    file.set_len(MIN_FILE_BYTES)?;
    // For messages only: the descriptor is used.
    let spec = format!("file:{}", path.to_str().context("its name is not UTF-8")?);
    let descriptor = PassedFd::from(OwnedFd::from(file.try_clone()?));
    let created = on_reactor(async move {
        let storage_options = StorageOptions {
            format: Some(ImageFormat::Raw),
            descriptor: Some(Arc::new(descriptor)),
            ..StorageOptions::default()
        };
        let storage = open_storage(&spec, storage_options).map_err(anyhow::Error::from)?;
        create(&storage, None, &options).await.map_err(anyhow::Error::from)?;
        Ok(())
    });
    created.map_err(|failure| match failure {
        CommandFailure::Usage(error) | CommandFailure::Failed(error) => error,
        CommandFailure::Found(status) => anyhow!("status {status}"),
    })
}
