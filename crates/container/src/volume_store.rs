//! Volumes in the file system, which survive a restart.
//!
//! ```text
//!   DIRECTORY/.lock                     locked by the one plugin that uses it
//!   DIRECTORY/NAME/volume.json          options and users: a volume exists if this file does
//!   DIRECTORY/NAME/disk.qcow2 or .raw   its image
//!   DIRECTORY/NAME/mount                its mount point
//! ```
//!
//! The record is written last when a volume is created and deleted first when it is removed, both
//! atomically. A directory without a record is no volume and is cleaned up.
//!
//! Never removes files inside a mounted volume: files are removed only from the volume's own
//! directory, and directories only if they are empty.

use std::{
    collections::BTreeSet,
    fmt,
    fs::{self, DirBuilder, File, Permissions},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use settings::state::atomic_file;
use storage::ImageFormat;

use crate::options::{OptionValues, VolumeOptions};

/// Largest record; [`MAX_USERS`] and all options need a tenth of it.
const MAX_RECORD_BYTES: u64 = 1 << 20;
/// Largest number of containers that use one volume.
pub(crate) const MAX_USERS: usize = 1000;
/// Largest id of a user in bytes; Docker's have 64.
pub(crate) const MAX_USER_BYTES: usize = 256;
/// Other users may traverse the directory but not list it.
const DIRECTORY_MODE: u32 = 0o711;

/// Name of a volume and of its directory, by Docker's rule `[a-zA-Z0-9][a-zA-Z0-9_.-]*`, with at
/// most 128 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct VolumeName(String);

impl VolumeName {
    /// Parses a name. Fails with the rule.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        const MAX_BYTES: usize = 128;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        // Excludes `.`, `..` and hidden files, such as the lock.
        let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        if begins && text.len() <= MAX_BYTES && text.chars().all(is_plain) {
            return Ok(Self(text.to_owned()));
        }
        let shown: String = text.chars().take(MAX_BYTES).collect();
        Err(format!(
            "{shown:?}: is not a volume name; use 1 to {MAX_BYTES} characters of a-z, A-Z, 0-9, \
             _, . and -, the first a letter or a digit"
        ))
    }
}

impl VolumeName {
    /// Name of its disk while mounted. A name that is too long for `weir attach` (31 bytes) is cut
    /// and completed by a hash.
    pub(crate) fn disk_name(&self) -> String {
        const MAX_BYTES: usize = 31;
        let name = format!("volume-{}", self.0);
        if name.len() <= MAX_BYTES {
            return name;
        }
        // FNV-1a, 64 bits: equal in each process.
        let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        let number = self.0.bytes().fold(0xcbf2_9ce4_8422_2325, fold);
        let number = format!("-{number:016x}");
        format!("{}{number}", &name[..MAX_BYTES - number.len()])
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Content of `volume.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VolumeRecord {
    pub(crate) options: OptionValues,
    /// Users that mounted the volume and have not unmounted it.
    pub(crate) users: BTreeSet<String>,
}

impl VolumeRecord {
    /// Options, which were valid when the record was written.
    pub(crate) fn checked(&self) -> anyhow::Result<VolumeOptions> {
        VolumeOptions::read(self.options.clone()).map_err(|rule| anyhow!("{rule}"))
    }
}

/// Volumes of one directory.
#[derive(Debug)]
pub(crate) struct VolumeStore {
    root: PathBuf,
    _lock: Flock<File>,
}

impl VolumeStore {
    /// Opens the directory, which is created if it does not exist.
    ///
    /// # Errors
    /// Fails if another process uses it.
    pub(crate) fn open(root: &Path) -> anyhow::Result<Self> {
        let named = || root.display().to_string();
        let make = || {
            DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(root)?;
            let lock = File::options().write(true).create(true).truncate(false).open(root.join(".lock"))?;
            // Absolute and without links, as the kernel reports mounts.
            Ok::<_, io::Error>((root.canonicalize()?, lock))
        };
        let (root, lock) = make().with_context(named)?;
        // Docker receives paths in it as JSON.
        root.to_str()
            .with_context(|| format!("{}: is not UTF-8 (use another --directory)", root.display()))?;
        // Released by the kernel when the process ends, also after a crash.
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EAGAIN => anyhow!(
                "{}: another `weir docker-plugin` uses this directory (stop it, or use another --directory)",
                root.display()
            ),
            _ => anyhow!("{}: cannot be locked: {errno}", root.display()),
        })?;
        Ok(Self { root, _lock: lock })
    }

    fn directory(&self, name: &VolumeName) -> PathBuf {
        self.root.join(&name.0)
    }

    fn record(&self, name: &VolumeName) -> PathBuf {
        self.directory(name).join("volume.json")
    }

    pub(crate) fn image(&self, name: &VolumeName, format: ImageFormat) -> PathBuf {
        self.directory(name).join(format!("disk.{}", format.name()))
    }

    /// Mount point: an absolute path without links.
    pub(crate) fn mount_point(&self, name: &VolumeName) -> PathBuf {
        self.directory(name).join("mount")
    }

    /// Names of all entries that could be volumes, including leftovers.
    pub(crate) fn names(&self) -> anyhow::Result<Vec<VolumeName>> {
        let entries = fs::read_dir(&self.root).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let entries = entries.with_context(|| self.root.display().to_string())?;
        let mut names: Vec<_> =
            entries.iter().filter_map(|entry| VolumeName::read(entry.file_name().to_str()?).ok()).collect();
        names.sort();
        Ok(names)
    }

    /// Record of a volume; `None` if it does not exist.
    pub(crate) fn read(&self, name: &VolumeName) -> anyhow::Result<Option<VolumeRecord>> {
        let path = self.record(name);
        let bytes = match atomic_file::read(&path, MAX_RECORD_BYTES) {
            // The name belongs to something other than a directory.
            Err(error) if error.kind() == ErrorKind::NotADirectory => None,
            other => other.with_context(|| path.display().to_string())?,
        };
        let Some(bytes) = bytes else { return Ok(None) };
        let record = serde_json::from_slice(&bytes);
        record.map(Some).map_err(|error| {
            anyhow!("{}: is not a volume record: {error} (repair it, or move it away)", path.display())
        })
    }

    /// Writes a record atomically and durably.
    pub(crate) fn write(&self, name: &VolumeName, record: &VolumeRecord) -> anyhow::Result<()> {
        let path = self.record(name);
        let text = serde_json::to_vec_pretty(record).context("a record is JSON")?;
        atomic_file::write(&path, &text, true).with_context(|| path.display().to_string())
    }

    /// Creates the directories of a new volume.
    pub(crate) fn create_directories(&self, name: &VolumeName) -> anyhow::Result<()> {
        let make = |path: PathBuf| {
            // The mode of `create_dir` is subject to the umask.
            let result = fs::create_dir(&path)
                .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(DIRECTORY_MODE)));
            result.with_context(|| path.display().to_string())
        };
        make(self.directory(name))?;
        make(self.mount_point(name))
    }

    /// Removes an unmounted volume with its image, or the leftovers of one.
    ///
    /// # Errors
    /// May fail after the record was deleted; then the volume no longer exists, and leftovers are
    /// removed later.
    pub(crate) fn remove(&self, name: &VolumeName) -> anyhow::Result<()> {
        let directory = self.directory(name);
        let remove = || {
            // First and durably: without its record the volume does not exist any more.
            ignore_not_found(fs::remove_file(self.record(name)))?;
            File::open(&directory)?.sync_all()?;
            // Fails on a mount point and on a directory with content.
            ignore_not_found(fs::remove_dir(self.mount_point(name)))?;
            for entry in fs::read_dir(&directory)? {
                fs::remove_file(entry?.path())?;
            }
            fs::remove_dir(&directory)
        };
        remove().with_context(|| format!("{}: cannot be removed", directory.display()))
    }
}

fn ignore_not_found(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> VolumeName {
        VolumeName::read(text).unwrap()
    }

    fn record() -> VolumeRecord {
        VolumeRecord {
            options: [("size".to_owned(), "8M".to_owned())].into(),
            users: ["a".to_owned()].into(),
        }
    }

    #[test]
    fn names_cannot_leave_the_directory() {
        for text in ["a", "0", "my-volume_1.2", &"x".repeat(128)] {
            assert_eq!(VolumeName::read(text).unwrap().to_string(), text);
        }
        for text in
            ["", ".", "..", "../x", "a/b", "/etc", ".lock", "-x", "a\0", "a b", "é", "a\n", &"x".repeat(129)]
        {
            assert!(VolumeName::read(text).unwrap_err().contains("is not a volume name"), "{text:?}");
        }
    }

    #[test]
    fn long_names_have_unique_disk_names() {
        assert_eq!(name("db").disk_name(), "volume-db");
        let (one, other) = ("f".repeat(64), "f".repeat(63) + "e");
        let (one, other) = (name(&one).disk_name(), name(&other).disk_name());
        assert_eq!((one.len(), other.len()), (31, 31));
        assert!(one.starts_with("volume-fffffff-") && one != other, "{one} {other}");
    }

    #[test]
    fn volumes_survive_a_restart_until_removed() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("made/on/the/way");
        let store = VolumeStore::open(&root).unwrap();
        assert_eq!(store.read(&name("v")).unwrap(), None);
        store.create_directories(&name("v")).unwrap();
        assert_eq!(store.read(&name("v")).unwrap(), None, "it has no record yet");
        fs::write(store.image(&name("v"), ImageFormat::Raw), "x").unwrap();
        store.write(&name("v"), &record()).unwrap();
        drop(store);
        let store = VolumeStore::open(&root).unwrap();
        assert_eq!(store.names().unwrap(), [name("v")]);
        assert_eq!(store.read(&name("v")).unwrap(), Some(record()));
        store.remove(&name("v")).unwrap();
        assert_eq!(store.names().unwrap(), []);
    }

    #[test]
    fn directory_is_locked_by_one_process() {
        let directory = tempfile::tempdir().unwrap();
        let _store = VolumeStore::open(directory.path()).unwrap();
        let error = VolumeStore::open(directory.path()).unwrap_err().to_string();
        assert!(error.contains("another `weir docker-plugin` uses this directory"), "{error}");
    }

    /// A directory with content stands for a file system that is still mounted.
    #[test]
    fn mounted_content_is_never_removed() {
        let directory = tempfile::tempdir().unwrap();
        let store = VolumeStore::open(directory.path()).unwrap();
        store.create_directories(&name("v")).unwrap();
        let precious = store.mount_point(&name("v")).join("precious");
        fs::write(&precious, "x").unwrap();
        store.remove(&name("v")).unwrap_err();
        assert!(precious.exists());
    }

    #[test]
    fn invalid_records_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let store = VolumeStore::open(directory.path()).unwrap();
        store.create_directories(&name("v")).unwrap();
        for text in ["", "{", "[]", r#"{"options": {}}"#, r#"{"options": {}, "users": [], "more": 1}"#] {
            fs::write(store.record(&name("v")), text).unwrap();
            let error = store.read(&name("v")).unwrap_err().to_string();
            assert!(error.contains("v/volume.json: is not a volume record: "), "{error}");
        }
    }
}
