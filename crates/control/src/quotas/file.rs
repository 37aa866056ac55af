//! The state file of quotas: bytes that were counted, stored between runs.
//!
//! ```text
//!   /var/lib/weir/quota/_etc_weir_weir.toml-9f3c….json      one file for each daemon of the host
//! ```
//!
//! A file of another format or another daemon is an error: the counts then start at 0, and the next
//! write replaces it. Never contains settings, which the config has.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use policy::volume_quota::{PeriodCount, QuotaCounts, QuotaPeriod, VolumeCount};
use serde::{Deserialize, Serialize};
use settings::state::{CapacityStore, atomic_file};

/// Maximum length of the file: many thousand disks.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Version of the format. A later version may change the meaning of the fields.
const FORMAT: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct QuotaFile {
    format: u32,
    daemon: String,
    members: BTreeMap<String, StoredCounts>,
}

/// Version of a file, whose other fields may be unknown.
#[derive(Debug, Deserialize)]
struct FileVersion {
    format: u32,
}

/// Form of [`QuotaCounts`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredCounts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    total: Option<StoredCount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    writes: Option<StoredCount>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredCount {
    period: String,
    /// Index of each period, with its bytes; the present one first.
    counts: Vec<(i64, u64)>,
}

impl StoredCounts {
    pub(super) fn of(counts: &QuotaCounts) -> Self {
        let stored = |count: &VolumeCount| StoredCount {
            period: count.period().name().to_owned(),
            counts: count.counts().iter().map(|count| (count.index, count.bytes)).collect(),
        };
        let QuotaCounts { total, writes } = counts;
        Self { total: total.as_ref().map(stored), writes: writes.as_ref().map(stored) }
    }

    /// Unknown periods are left out: their counts start at 0.
    pub(super) fn to_counts(&self) -> QuotaCounts {
        let count = |stored: &StoredCount| {
            let counts: Vec<_> =
                stored.counts.iter().map(|&(index, bytes)| PeriodCount { index, bytes }).collect();
            VolumeCount::restore(QuotaPeriod::from_name(&stored.period)?, &counts)
        };
        let Self { total, writes } = self;
        QuotaCounts { total: total.as_ref().and_then(count), writes: writes.as_ref().and_then(count) }
    }
}

/// Path in the state directory. `daemon` identifies the daemon on its host.
pub fn file(state: Option<&Path>, daemon: &str) -> PathBuf {
    // The state directory is the parent of the directory with the devices' capacities, whose files
    // have names of the same form.
    let capacity = CapacityStore::new(state).file(daemon);
    let state = capacity.parent().and_then(Path::parent).unwrap_or(Path::new(""));
    state.join("quota").join(capacity.file_name().unwrap_or_default())
}

/// Stored counts; empty without a file.
///
/// # Errors
/// Fails if the file is unreadable, or is of another format or daemon.
pub(super) fn load(file: &Path, daemon: &str) -> anyhow::Result<HashMap<String, QuotaCounts>> {
    let Some(bytes) = atomic_file::read(file, MAX_FILE_BYTES)? else { return Ok(HashMap::new()) };
    let FileVersion { format } = serde_json::from_slice(&bytes).context("it has no counts of quotas")?;
    ensure!(format == FORMAT, "its format {format} is of another version of weir (this one has {FORMAT})");
    let stored: QuotaFile = serde_json::from_slice(&bytes).context("it has no counts of quotas")?;
    ensure!(stored.daemon == daemon, "it is of another daemon, {}", stored.daemon);
    Ok(stored.members.into_iter().map(|(name, counts)| (name, counts.to_counts())).collect())
}

/// Replaces the file.
///
/// # Errors
/// Fails without changing the file, also if it would be too long to be read back.
pub(super) fn save(file: &Path, daemon: &str, counts: &HashMap<String, QuotaCounts>) -> io::Result<()> {
    let members = counts.iter().map(|(name, counts)| (name.clone(), StoredCounts::of(counts))).collect();
    let stored = QuotaFile { format: FORMAT, daemon: daemon.to_owned(), members };
    let mut text = serde_json::to_vec_pretty(&stored)?;
    text.push(b'\n');
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("there are too many: more than {MAX_FILE_BYTES} bytes")));
    }
    atomic_file::write(file, &text, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_survive_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let path = file(Some(directory.path()), "/etc/weir/weir.toml");
        assert_eq!(load(&path, "a").unwrap(), HashMap::new());
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        let mut total = VolumeCount::new(QuotaPeriod::Month, 7);
        total.add(u64::MAX);
        total.advance(8);
        let counts = QuotaCounts { total: Some(total), writes: Some(VolumeCount::new(QuotaPeriod::Day, -1)) };
        let all = HashMap::from([("vm1".to_owned(), counts)]);
        save(&path, "a", &all).unwrap();
        assert_eq!(load(&path, "a").unwrap(), all);
        assert_eq!(load(&path, "b").unwrap_err().to_string(), "it is of another daemon, a");
    }

    #[test]
    fn unusable_files_are_errors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        for (content, expect) in [
            ("", "it has no counts of quotas"),
            ("{\"groups\": {}}", "it has no counts of quotas"),
            ("{\"format\": 2, \"disks\": []}", "its format 2 is of another version of weir (this one has 1)"),
            ("{\"format\": 0}", "its format 0 is of another version of weir (this one has 1)"),
            ("{\"format\": 1, \"daemon\": \"a\", \"members\": 5}", "it has no counts of quotas"),
        ] {
            std::fs::write(&path, content).unwrap();
            assert_eq!(load(&path, "a").unwrap_err().to_string(), expect, "{content}");
        }
        // A period that is unknown here starts at 0.
        let other = "{\"format\": 1, \"daemon\": \"a\", \"members\": {\"d\": {\"total\": {\"period\": \
                     \"year\", \"counts\": [[1, 2]]}, \"writes\": {\"period\": \"day\", \"counts\": []}}}}";
        std::fs::write(&path, other).unwrap();
        assert_eq!(load(&path, "a").unwrap()["d"], QuotaCounts::default());
    }
}
