//! Levels of all bursts, saved beside the limits file, so that the next watch grants no burst
//! twice.
//!
//! Each level is saved with the counters at that time, so that I/O during a gap is charged as well.
//! Written while levels change, and at the end. A lost file grants one burst too many, so an
//! unreadable file only causes a warning.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use block::device::DeviceNumber;
use policy::{steering::IoCounters, throttle::AdmissionCounters, time::Instant};
use serde::{Deserialize, Serialize};
use settings::state::atomic_file;

const MAX_FILE_BYTES: u64 = 16 << 20;

/// Differs after each boot (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct StoredLevels {
    /// Boot that the times and counters belong to.
    boot: String,
    pools: BTreeMap<String, SavedBursts>,
}

/// Saved bursts of one pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct SavedBursts {
    /// Nanoseconds since boot, including suspend.
    at_ns: u64,
    /// In the order of `policy::steering::SteeringPool::levels`.
    pub(super) levels: [u64; 6],
    /// Counters by control group and device: read and written bytes, then read and write
    /// operations.
    passed: BTreeMap<String, [u64; 4]>,
}

impl SavedBursts {
    pub(super) fn new(
        at: Instant,
        levels: [u64; 6],
        passed: impl Iterator<Item = (PathBuf, DeviceNumber, IoCounters)>,
    ) -> Self {
        let flat = |[read, write]: IoCounters| [read.bytes, write.bytes, read.requests, write.requests];
        let passed = passed.map(|(group, device, passed)| (name(&group, device), flat(passed)));
        Self { at_ns: at.as_nanos(), levels, passed: passed.collect() }
    }

    pub(super) fn at(&self) -> Instant {
        Instant::from_nanos(self.at_ns)
    }

    /// Counters of a control group at that time.
    pub(super) fn passed(&self, group: &Path, device: DeviceNumber) -> Option<IoCounters> {
        let [read_bytes, written_bytes, reads, writes] = *self.passed.get(&name(group, device))?;
        let counters =
            |requests, bytes| AdmissionCounters { requests, bytes, ..AdmissionCounters::default() };
        Some([counters(reads, read_bytes), counters(writes, written_bytes)])
    }
}

fn name(group: &Path, device: DeviceNumber) -> String {
    format!("{} on {device}", group.display())
}

fn file(limits: &Path) -> PathBuf {
    let mut name = limits.as_os_str().to_owned();
    name.push(".levels");
    PathBuf::from(name)
}

/// Saved bursts by pool name. Entries later than `now` are dropped: they belong to another boot.
pub(super) fn load(limits: &Path, now: Instant) -> BTreeMap<String, SavedBursts> {
    let path = file(limits);
    let read = || -> anyhow::Result<StoredLevels> {
        let text = atomic_file::read(&path, MAX_FILE_BYTES)?;
        Ok(text.map(|text| serde_json::from_slice(&text)).transpose()?.unwrap_or_default())
    };
    let stored = read().unwrap_or_else(|error| {
        // Full buckets grant one burst too many, which is no reason to stop.
        tracing::warn!("{}: saved bursts cannot be read, all bursts start full: {error:#}", path.display());
        StoredLevels::default()
    });
    // The kernel's counters restart at a boot, so differences to the saved ones are meaningless.
    if stored.boot != boot() {
        return BTreeMap::new();
    }
    stored.pools.into_iter().filter(|(_, saved)| saved.at() <= now).collect()
}

/// The boot id; empty if the kernel lacks it, in which case only the times are compared.
fn boot() -> String {
    fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned()
}

pub(super) fn save(limits: &Path, saved: &BTreeMap<String, SavedBursts>) -> anyhow::Result<()> {
    let path = file(limits);
    let stored = StoredLevels { boot: boot(), pools: saved.clone() };
    let written = serde_json::to_vec(&stored).map_err(anyhow::Error::from);
    written
        .and_then(|written| Ok(atomic_file::write(&path, &written, false)?))
        .with_context(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_levels_are_loaded() {
        let directory = tempfile::tempdir().unwrap();
        let limits = directory.path().join("cgroups.json");
        let device = DeviceNumber { major: 254, minor: 0 };
        let counters =
            |requests, bytes| AdmissionCounters { requests, bytes, ..AdmissionCounters::default() };
        let passed = [counters(1, 4096), counters(2, 1 << 40)];
        let at = Instant::from_nanos(5_000_000_000);
        let expected =
            SavedBursts::new(at, [1, 2, 3, 4, 5, u64::MAX], [("/a b".into(), device, passed)].into_iter());
        save(&limits, &BTreeMap::from([("group x".to_owned(), expected.clone())])).unwrap();
        let found = load(&limits, at);
        assert_eq!(found["group x"], expected);
        assert_eq!(found["group x"].passed(Path::new("/a b"), device), Some(passed));
        assert_eq!(found["group x"].passed(Path::new("/a"), device), None);
        assert!(load(&limits, Instant::from_nanos(4_000_000_000)).is_empty());
        let text = fs::read_to_string(file(&limits)).unwrap();
        fs::write(file(&limits), text.replace(&boot(), "another")).unwrap();
        assert!(load(&limits, Instant::MAX).is_empty(), "the clock of another start, and its counters");
    }

    #[test]
    fn unreadable_file_is_empty() {
        let directory = tempfile::tempdir().unwrap();
        let limits = directory.path().join("cgroups.json");
        assert!(load(&limits, Instant::MAX).is_empty());
        fs::write(file(&limits), "{\"x\":").unwrap();
        assert!(load(&limits, Instant::MAX).is_empty());
    }
}
