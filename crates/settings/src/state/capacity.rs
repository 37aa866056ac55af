//! Measured capacities of devices, stored between runs: a JSON file for each, named after the
//! device.
//!
//! ```text
//!   /var/lib/weir/capacity/serial_S4EWNX0N123456-9f3c….json
//! ```
//!
//! A file of another format or another device is rejected with an error: a watermark over a wrong
//! capacity would lift limits when it must not.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use policy::watermark::MeasuredCapacity;
use serde::{Deserialize, Serialize};

use crate::state::atomic_file;

/// Largest file in bytes; usual files have two kilobytes.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// Characters of a device's key in the name of its file.
const MAX_NAME_CHARS: usize = 80;

/// Root's directory, by the Filesystem Hierarchy Standard.
const SYSTEM_STATE: &str = "/var/lib/weir";

/// Result of measuring a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CapacityRecord {
    /// Stable key of the device.
    pub key: String,
    /// Name of the device at the time of the measurement.
    pub device: String,
    /// Time of the measurement, in seconds since 1970.
    pub time: u64,
    /// Measured capacity.
    pub capacity: CapacityFigures,
}

/// [`MeasuredCapacity`] in the file's format; 0 was not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CapacityFigures {
    /// Random reads of 4 KiB per second.
    pub read_iops: u64,
    /// Random writes of 4 KiB per second.
    pub write_iops: u64,
    /// Bytes read per second, in requests of 1 MiB.
    pub read_bps: u64,
    /// Bytes written per second, in requests of 1 MiB.
    pub write_bps: u64,
}

impl From<CapacityFigures> for MeasuredCapacity {
    fn from(figures: CapacityFigures) -> Self {
        let CapacityFigures { read_iops, write_iops, read_bps, write_bps } = figures;
        Self { read_iops, write_iops, read_bps, write_bps }
    }
}

/// Directory of the records.
#[derive(Clone, Debug)]
pub struct CapacityStore(PathBuf);

impl CapacityStore {
    /// Store in the given state directory, or in the default one.
    pub fn new(state: Option<&Path>) -> Self {
        Self(state.map_or_else(default_state_directory, Path::to_path_buf).join("capacity"))
    }

    /// File of the device with this key.
    pub fn file(&self, key: &str) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '_' };
        let name: String = key.chars().take(MAX_NAME_CHARS).map(plain).collect();
        // The hash distinguishes keys whose characters were replaced or cut off.
        self.0.join(format!("{name}-{:016x}.json", fnv1a(key.as_bytes())))
    }

    /// Record of a device.
    ///
    /// # Errors
    /// Fails if there is a file and it is unusable.
    pub fn load(&self, key: &str) -> anyhow::Result<Option<CapacityRecord>> {
        let path = self.file(key);
        let read = atomic_file::read(&path, MAX_FILE_BYTES);
        let Some(text) = read.with_context(|| format!("{} (remove it and probe again)", shown(&path)))?
        else {
            return Ok(None);
        };
        let record: CapacityRecord = serde_json::from_slice(&text).with_context(|| {
            format!("{}: is not a capacity record (remove it and probe again)", shown(&path))
        })?;
        // A copied file, or a hash collision.
        if record.key != key {
            bail!("{}: is of another device, {} (remove it and probe again)", shown(&path), record.key);
        }
        Ok(Some(record))
    }

    /// Capacity of a device; `None`, and logged, if its file is unusable.
    pub fn capacity(&self, key: &str) -> Option<MeasuredCapacity> {
        self.measured(key).map(|(capacity, _)| capacity)
    }

    /// As [`capacity`](Self::capacity), with the time of the measurement in seconds since 1970.
    pub fn measured(&self, key: &str) -> Option<(MeasuredCapacity, u32)> {
        let record = self.load(key).unwrap_or_else(|error| {
            tracing::warn!("{error:#}");
            None
        })?;
        // Seconds fit 32 bits until 2106.
        Some((record.capacity.into(), u32::try_from(record.time).unwrap_or(u32::MAX)))
    }

    /// Checks that a record could be saved: creates the directory and a temporary file in it.
    ///
    /// # Errors
    /// Fails in the cases in which [`CapacityStore::save`] fails.
    pub fn check_writable(&self) -> anyhow::Result<()> {
        let write = || -> anyhow::Result<()> {
            fs::create_dir_all(&self.0)?;
            tempfile::NamedTempFile::new_in(&self.0)?;
            Ok(())
        };
        write().with_context(|| {
            format!("{} cannot be written to (choose another directory with --state)", shown(&self.0))
        })
    }

    /// Saves a record, replacing an earlier one of the device. Returns the file's path.
    ///
    /// # Errors
    /// Fails without changing the earlier record.
    pub fn save(&self, record: &CapacityRecord) -> anyhow::Result<PathBuf> {
        let path = self.file(&record.key);
        let write = || -> anyhow::Result<()> {
            fs::create_dir_all(&self.0)?;
            let mut text = serde_json::to_vec_pretty(record)?;
            text.push(b'\n');
            atomic_file::write(&path, &text, true)?;
            Ok(())
        };
        write().with_context(|| {
            format!("{} cannot be written (choose another directory with --state)", shown(&path))
        })?;
        Ok(path)
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Default directory; for users other than root by the XDG Base Directory Specification.
fn default_state_directory() -> PathBuf {
    if nix::unistd::geteuid().is_root() {
        return SYSTEM_STATE.into();
    }
    let absolute =
        |variable: &str| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    // Relative values are invalid by the specification.
    absolute("XDG_STATE_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local/state")))
        .map_or_else(|| SYSTEM_STATE.into(), |directory| directory.join("weir"))
}

/// FNV-1a, 64 bits: stable across versions, unlike the standard library's hash.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str) -> CapacityRecord {
        let capacity = CapacityFigures { read_iops: 1, write_iops: 2, read_bps: 3, write_bps: 4 };
        CapacityRecord { key: key.to_owned(), device: "/dev/vda".to_owned(), time: 5, capacity }
    }

    fn store() -> (tempfile::TempDir, CapacityStore) {
        let directory = tempfile::tempdir().unwrap();
        let store = CapacityStore::new(Some(&directory.path().join("state")));
        (directory, store)
    }

    #[test]
    fn records_round_trip_and_are_replaced() {
        let (_directory, store) = store();
        assert_eq!(store.load("serial a/b").unwrap(), None);
        store.save(&record("serial a/b")).unwrap();
        let newer = CapacityRecord { time: 6, ..record("serial a/b") };
        let path = store.save(&newer).unwrap();
        assert_eq!(store.load("serial a/b").unwrap(), Some(newer));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
        let (capacity, time_s) = store.measured("serial a/b").unwrap();
        assert_eq!((capacity.write_bps, time_s), (4, 6));
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c, "the hash's published test value");
    }

    #[test]
    fn similar_keys_have_different_files() {
        let (_directory, store) = store();
        assert_ne!(store.file("a/b"), store.file("a_b"));
        let long = "x".repeat(5000);
        assert_ne!(store.file(&long), store.file(&format!("{long}y")));
        assert!(store.file(&long).file_name().unwrap().len() < 200);
    }

    #[test]
    fn unusable_files_are_errors() {
        let (_directory, store) = store();
        let path = store.save(&record("k")).unwrap();
        let broken = |text: &str| {
            fs::write(&path, text).unwrap();
            assert_eq!(store.capacity("k"), None);
            format!("{:#}", store.load("k").unwrap_err())
        };
        assert!(broken("{").contains("is not a capacity record (remove it and probe again)"));
        assert!(broken("[[[[").contains("is not a capacity record"));
        let other = serde_json::to_string(&record("other")).unwrap();
        assert!(broken(&other).contains("is of another device, other (remove it and probe again)"));
        assert!(broken(&"x".repeat(1 << 17)).contains("is too large"));
    }
}
