//! A file that gets its name when it is complete.
//!
//! Data is written to a temporary file in the same directory, which is then renamed. However the
//! command ends, the name refers either to the previous file or to a complete one. SIGINT, SIGTERM
//! and SIGHUP remove the temporary file. A device is written in place.

use std::{
    fs::{self, Permissions},
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use console::signal_cleanup::SignalCleanup;
use tempfile::NamedTempFile;

use super::opening::{self, OpenMode};

// Mode of a new file before the umask.
const NEW_FILE: u32 = 0o666;

#[derive(Debug)]
pub(super) struct UnfinishedFile {
    target: PathBuf,
    /// Temporary file; `None` if the target is written in place.
    file: Option<NamedTempFile>,
    /// The previous file, kept open and locked so that no other process starts to write to it.
    _locked: Option<storage::Storage>,
}

impl UnfinishedFile {
    /// Creates the temporary file. Fails if another process uses the previous file.
    pub(super) fn new(target: &Path, cleanup: &SignalCleanup) -> anyhow::Result<Self> {
        // A symbolic link stays: the file that it refers to is replaced.
        let target = fs::canonicalize(target).unwrap_or_else(|_| target.to_owned());
        let existing = fs::metadata(&target).ok();
        if let Some(existing) = &existing {
            let kind = existing.file_type();
            // Renaming would replace the device node by a file.
            if kind.is_block_device() || kind.is_char_device() {
                return Ok(Self { target, file: None, _locked: None });
            }
        }
        // Opened for writing, because that takes the locks that QEMU and weir respect.
        let locked = match &existing {
            Some(_) => Some(opening::storage(&target, OpenMode { write: true, ..OpenMode::default() })?),
            None => None,
        };
        let name = target.file_name().with_context(|| format!("{}: is not a file", target.display()))?;
        let directory = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !directory.is_dir() {
            bail!("{}: is not a directory (create it first)", directory.display());
        }
        // Atomic with respect to signals: either there is no file yet, or its removal is
        // registered.
        let file = cleanup.with_cleanup(|| {
            let file = tempfile::Builder::new()
                .prefix(&format!(".{}.", name.to_string_lossy()))
                .suffix(".unfinished")
                .permissions(Permissions::from_mode(NEW_FILE))
                .tempfile_in(directory)
                .with_context(|| format!("{}: no file can be created there", directory.display()))?;
            let path = file.path().to_owned();
            let removal = move || drop(fs::remove_file(&path));
            Ok((file, removal))
        })?;
        if let Some(existing) = existing {
            // The new file replaces the previous one and keeps a mode that excludes other users.
            let _ = file.as_file().set_permissions(existing.permissions());
        }
        Ok(Self { target, file: Some(file), _locked: locked })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.as_ref().map_or(&self.target, NamedTempFile::path)
    }

    pub(super) fn is_new(&self) -> bool {
        self.file.is_some()
    }

    pub(super) fn finish(self) -> anyhow::Result<()> {
        let Some(file) = self.file else { return Ok(()) };
        // rename(2) is atomic: a reader of the name finds one of the two files.
        file.persist(&self.target)
            .with_context(|| format!("{}: cannot be renamed to this name", self.target.display()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn target_is_replaced_only_when_complete() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("disk");
        fs::write(&target, "old").unwrap();
        fs::set_permissions(&target, Permissions::from_mode(0o640)).unwrap();
        let unfinished = UnfinishedFile::new(&target, &SignalCleanup::default()).unwrap();
        fs::write(unfinished.path(), "new").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "old");
        unfinished.finish().unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(names(directory.path()), ["disk"]);
    }

    #[test]
    fn abandoned_target_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("disk");
        let unfinished = UnfinishedFile::new(&target, &SignalCleanup::default()).unwrap();
        assert_eq!(names(directory.path()).len(), 1);
        drop(unfinished);
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn symbolic_link_is_preserved() {
        let directory = tempfile::tempdir().unwrap();
        let (target, link) = (directory.path().join("disk"), directory.path().join("link"));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink("disk", &link).unwrap();
        let unfinished = UnfinishedFile::new(&link, &SignalCleanup::default()).unwrap();
        fs::write(unfinished.path(), "new").unwrap();
        unfinished.finish().unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn target_in_use_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("disk");
        fs::write(&target, [0; 512]).unwrap();
        let _user = opening::storage(&target, OpenMode { write: true, ..OpenMode::default() }).unwrap();
        UnfinishedFile::new(&target, &SignalCleanup::default()).unwrap_err();
        assert_eq!(names(directory.path()), ["disk"]);
    }
}
