//! The last known limits of the cluster, stored between runs: a daemon that starts without etcd
//! uses its fallback share of these.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use policy::{cluster::ClusterGroupLimits, time::Instant};
use serde::{Deserialize, Serialize};
use settings::state::{CapacityStore, atomic_file};
use tokio::task::JoinHandle;

use super::{
    environment::now,
    etcd_values::{self, GroupValue},
};

/// Maximum length of the file: a thousand groups with all limits.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Limits of a group, as in etcd.
#[derive(Clone, Debug)]
pub(super) struct StoredGroup {
    pub(super) group: GroupValue,
    pub(super) spec: ClusterGroupLimits,
    /// Revision of the last change; 0 if etcd lost it.
    pub(super) changed: i64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct StoredLimitsFile {
    groups: BTreeMap<String, GroupValue>,
    /// Groups for which etcd had no limits.
    #[serde(default)]
    without_limits: BTreeSet<String>,
    /// Removed groups, as far as etcd remembers them.
    #[serde(default)]
    removed: BTreeSet<String>,
}

/// Minimum interval between two writes.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// Stores changed limits, many changes in one write, on another thread: a write may take longer
/// than the agent's leases allow.
#[derive(Debug, Default)]
pub(super) struct LimitSaver {
    changed: bool,
    kept_at: Instant,
    keeping: Option<JoinHandle<()>>,
}

impl LimitSaver {
    /// Notes a change.
    pub(super) const fn mark_changed(&mut self) {
        self.changed = true;
    }

    /// Time of the next write. `None` while one is in flight, or if nothing changed.
    pub(super) fn due(&self) -> Option<Instant> {
        let is_saving = self.keeping.as_ref().is_some_and(|keeping| !keeping.is_finished());
        (self.changed && !is_saving).then(|| self.kept_at + SAVE_INTERVAL)
    }

    /// Starts a write that is due at `by`.
    pub(super) fn save_if_due(&mut self, file: &Path, groups: &BTreeMap<String, StoredGroup>, by: Instant) {
        if self.due().is_none_or(|due| due > by) {
            return;
        }
        (self.changed, self.kept_at) = (false, now());
        let (file, groups) = (file.to_owned(), groups.clone());
        self.keeping = Some(tokio::task::spawn_blocking(move || save(&file, &groups)));
    }

    /// Waits for the write in flight, and writes later changes.
    pub(super) async fn finish(&mut self, file: &Path, groups: &BTreeMap<String, StoredGroup>) {
        if let Some(keeping) = self.keeping.take() {
            let _ = keeping.await;
        }
        if self.changed {
            save(file, groups);
        }
    }
}

/// Serializes the file's read-modify-write.
static WRITING: Mutex<()> = Mutex::new(());

/// Path in the state directory.
pub(super) fn file(state: Option<&Path>, cluster: &str) -> PathBuf {
    // The state directory is the parent of the directory with the devices' capacities.
    let capacity = CapacityStore::new(state).file("x");
    let state = capacity.parent().and_then(Path::parent).unwrap_or(Path::new(""));
    state.join("cluster").join(format!("{cluster}.json"))
}

/// Stored limits; empty without a file.
///
/// # Errors
/// Fails if the file is unreadable or has another format.
pub(super) fn load(file: &Path) -> io::Result<BTreeMap<String, GroupValue>> {
    read_stored_limits(file).map(|known| known.groups)
}

/// Groups that had no limits in etcd, or were removed.
pub(super) fn without_limits(file: &Path) -> BTreeSet<String> {
    let known = read_stored_limits(file).unwrap_or_default();
    known.without_limits.into_iter().chain(known.removed).collect()
}

fn read_stored_limits(file: &Path) -> io::Result<StoredLimitsFile> {
    let Some(bytes) = atomic_file::read(file, MAX_FILE_BYTES)? else {
        return Ok(StoredLimitsFile::default());
    };
    etcd_values::read(&bytes).map_err(io::Error::other)
}

/// Stored limits in the form of a session.
pub(super) fn load_for_session(file: &Path) -> BTreeMap<String, StoredGroup> {
    let groups = load(file).unwrap_or_default().into_iter();
    groups
        .filter_map(|(name, group)| {
            let spec = group.spec().ok()?;
            Some((name, StoredGroup { group, spec, changed: 0 }))
        })
        .collect()
}

/// Stores all groups. A failure is logged: the next start then depends on etcd.
fn save(file: &Path, groups: &BTreeMap<String, StoredGroup>) {
    let all = groups.iter().map(|(name, stored)| (name.clone(), stored.group.clone()));
    let (removed, groups): (BTreeMap<_, _>, BTreeMap<_, _>) = all.partition(|(_, group)| group.removed);
    change(file, |known| StoredLimitsFile {
        without_limits: known.without_limits.into_iter().filter(|name| !groups.contains_key(name)).collect(),
        groups,
        removed: removed.into_keys().collect(),
    });
}

/// Stores that etcd has no limits for these groups.
pub(super) fn save_without_limits(file: &Path, groups: impl IntoIterator<Item = String>) {
    change(file, |mut known| {
        for name in groups {
            known.groups.remove(&name);
            known.without_limits.insert(name);
        }
        known
    });
}

fn change(file: &Path, change: impl FnOnce(StoredLimitsFile) -> StoredLimitsFile) {
    let _writing = WRITING.lock();
    let content = etcd_values::write(&change(read_stored_limits(file).unwrap_or_default()));
    // Unchanged content: saves an fsync.
    if atomic_file::read(file, MAX_FILE_BYTES).is_ok_and(|existing| existing.as_ref() == Some(&content)) {
        return;
    }
    if let Err(error) = atomic_file::write(file, &content, true) {
        tracing::warn!(
            file = %file.display(), %error,
            "the cluster's limits cannot be stored for the next start"
        );
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::Limits;

    use super::*;

    #[test]
    fn limits_survive_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let path = file(Some(directory.path()), "lab");
        assert!(load(&path).unwrap().is_empty());
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        let group = GroupValue::of(&Limits::default(), 16, None, 1, 1);
        let stored = StoredGroup { spec: group.spec().unwrap(), group: group.clone(), changed: 1 };
        save(&path, &BTreeMap::from([("gold".to_owned(), stored)]));
        assert_eq!(load(&path).unwrap(), BTreeMap::from([("gold".to_owned(), group.clone())]));
        // Groups without limits stay recorded until they get some.
        save_without_limits(&path, ["bare".to_owned(), "later".to_owned()]);
        let to_set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(without_limits(&path), to_set(&["bare", "later"]));
        let stored = StoredGroup { spec: group.spec().unwrap(), group: group.clone(), changed: 1 };
        save(&path, &["gold", "later"].map(|name| (name.to_owned(), stored.clone())).into());
        assert_eq!((without_limits(&path), load(&path).unwrap().len()), (to_set(&["bare"]), 2));
        // A removed group has no limits, and is not restored in etcd.
        let removed_group = GroupValue { removed: true, ..group.clone() };
        let removed_group =
            StoredGroup { spec: removed_group.spec().unwrap(), group: removed_group, changed: 2 };
        save(
            &path,
            &[("gold", removed_group), ("later", stored)]
                .map(|(name, entry)| (name.to_owned(), entry))
                .into(),
        );
        assert_eq!(without_limits(&path), to_set(&["bare", "gold"]));
        assert!(load_for_session(&path).keys().eq(["later"]));
        std::fs::write(&path, "{").unwrap();
        assert!(load(&path).is_err());
    }

    #[test]
    fn frequent_changes_share_a_write() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lab.json");
        let group = GroupValue::of(&Limits::default(), 16, None, 1, 1);
        let known = |count: usize| -> BTreeMap<String, StoredGroup> {
            let stored = StoredGroup { spec: group.spec().unwrap(), group: group.clone(), changed: 1 };
            (0..count).map(|number| (format!("g{number}"), stored.clone())).collect()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut keeper = LimitSaver::default();
        runtime.block_on(async {
            // A session begins with one change for each group.
            for count in 1..=1000 {
                keeper.mark_changed();
                let at = if count == 1 { Instant::ZERO + SAVE_INTERVAL } else { keeper.kept_at };
                keeper.save_if_due(&path, &known(count.min(2)), at);
                assert_eq!(keeper.changed, count > 1, "a write is in flight, or ended a moment ago");
            }
            keeper.finish(&path, &known(3)).await;
        });
        assert_eq!(load(&path).unwrap().len(), 3);
    }
}
