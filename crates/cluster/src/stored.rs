//! The limits of the cluster as this host knew them last, kept between runs: a daemon that starts
//! while etcd is away begins with its safe share of these.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use policy::{cluster::Spec, time::Instant};
use serde::{Deserialize, Serialize};
use settings::state::{Store, whole_file};
use tokio::task::JoinHandle;

use super::{
    outside::now,
    values::{self, Group},
};

/// Of a thousand groups with all their limits.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// A group's limits as they stand in etcd.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) group: Group,
    pub(super) spec: Spec,
    /// In which revision; 0 where etcd has lost it.
    pub(super) changed: i64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Known {
    groups: BTreeMap<String, Group>,
    /// Of which etcd has said that it has no limits.
    #[serde(default)]
    without_limits: BTreeSet<String>,
    /// Which were removed, as far as etcd knows that still.
    #[serde(default)]
    removed: BTreeSet<String>,
}

/// Between two times that limits are kept.
const BETWEEN: Duration = Duration::from_secs(1);

/// Keeps limits that change, often many at once, and beside the thread that has leases to keep: to
/// write them may take long.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    changed: bool,
    kept_at: Instant,
    keeping: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Some have changed.
    pub(super) const fn note(&mut self) {
        self.changed = true;
    }

    /// When they are to be kept; never while they are being kept as they were.
    pub(super) fn due(&self) -> Option<Instant> {
        let is_kept = self.keeping.as_ref().is_some_and(|keeping| !keeping.is_finished());
        (self.changed && !is_kept).then(|| self.kept_at + BETWEEN)
    }

    /// Begins to keep them where that is due by then.
    pub(super) fn keep(&mut self, file: &Path, groups: &BTreeMap<String, Stored>, by: Instant) {
        if self.due().is_none_or(|due| due > by) {
            return;
        }
        (self.changed, self.kept_at) = (false, now());
        let (file, groups) = (file.to_owned(), groups.clone());
        self.keeping = Some(tokio::task::spawn_blocking(move || save(&file, &groups)));
    }

    /// Keeps what was not yet.
    pub(super) async fn end(&mut self, file: &Path, groups: &BTreeMap<String, Stored>) {
        if let Some(keeping) = self.keeping.take() {
            let _ = keeping.await;
        }
        if self.changed {
            save(file, groups);
        }
    }
}

/// Held while the file is read and written again.
static WRITING: Mutex<()> = Mutex::new(());

/// Where it is kept, in the state directory.
pub(super) fn file(state: Option<&Path>, cluster: &str) -> PathBuf {
    // Beside what devices can do.
    let capacity = Store::new(state).file("x");
    let state = capacity.parent().and_then(Path::parent).unwrap_or(Path::new(""));
    state.join("cluster").join(format!("{cluster}.json"))
}

/// What is there; nothing, where there is no file.
///
/// # Errors
/// If it cannot be read, or is not weir's.
pub(super) fn load(file: &Path) -> io::Result<BTreeMap<String, Group>> {
    known(file).map(|known| known.groups)
}

/// Groups that had no limits when they were asked for.
pub(super) fn without_limits(file: &Path) -> BTreeSet<String> {
    let known = known(file).unwrap_or_default();
    known.without_limits.into_iter().chain(known.removed).collect()
}

fn known(file: &Path) -> io::Result<Known> {
    let Some(bytes) = whole_file::read(file, MAX_FILE_BYTES)? else { return Ok(Known::default()) };
    values::read(&bytes).map_err(io::Error::other)
}

/// What was kept, for a session to begin with.
pub(super) fn recall(file: &Path) -> BTreeMap<String, Stored> {
    let groups = load(file).unwrap_or_default().into_iter();
    groups
        .filter_map(|(name, group)| {
            let spec = group.spec().ok()?;
            Some((name, Stored { group, spec, changed: 0 }))
        })
        .collect()
}

/// Keeps them. What fails is said: the next start may have to do without.
fn save(file: &Path, groups: &BTreeMap<String, Stored>) {
    let all = groups.iter().map(|(name, stored)| (name.clone(), stored.group.clone()));
    let (removed, groups): (BTreeMap<_, _>, BTreeMap<_, _>) = all.partition(|(_, group)| group.removed);
    change(file, |known| Known {
        without_limits: known.without_limits.into_iter().filter(|name| !groups.contains_key(name)).collect(),
        groups,
        removed: removed.into_keys().collect(),
    });
}

/// Keeps that etcd has no limits for these groups.
pub(super) fn save_without_limits(file: &Path, groups: impl IntoIterator<Item = String>) {
    change(file, |mut known| {
        for name in groups {
            known.groups.remove(&name);
            known.without_limits.insert(name);
        }
        known
    });
}

fn change(file: &Path, change: impl FnOnce(Known) -> Known) {
    let _writing = WRITING.lock();
    let content = values::write(&change(known(file).unwrap_or_default()));
    if whole_file::read(file, MAX_FILE_BYTES).is_ok_and(|there| there.as_ref() == Some(&content)) {
        return;
    }
    if let Err(error) = whole_file::write(file, &content, true) {
        tracing::warn!(file = %file.display(), %error, "the cluster's limits cannot be kept for the next start");
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::Limits;

    use super::*;

    #[test]
    fn what_was_known_is_known_after_a_start() {
        let directory = tempfile::tempdir().unwrap();
        let path = file(Some(directory.path()), "lab");
        assert!(load(&path).unwrap().is_empty());
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        let group = Group::of(&Limits::default(), 16, None, 1, 1);
        let stored = Stored { spec: group.spec().unwrap(), group: group.clone(), changed: 1 };
        save(&path, &BTreeMap::from([("gold".to_owned(), stored)]));
        assert_eq!(load(&path).unwrap(), BTreeMap::from([("gold".to_owned(), group.clone())]));
        // Nor is it forgotten that there are none, until there are some.
        save_without_limits(&path, ["bare".to_owned(), "later".to_owned()]);
        let bare = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(without_limits(&path), bare(&["bare", "later"]));
        let stored = Stored { spec: group.spec().unwrap(), group: group.clone(), changed: 1 };
        save(&path, &["gold", "later"].map(|name| (name.to_owned(), stored.clone())).into());
        assert_eq!((without_limits(&path), load(&path).unwrap().len()), (bare(&["bare"]), 2));
        // What was removed has none either, and is not written to etcd again.
        let gone = Group { removed: true, ..group.clone() };
        let gone = Stored { spec: gone.spec().unwrap(), group: gone, changed: 2 };
        save(&path, &[("gold", gone), ("later", stored)].map(|(name, one)| (name.to_owned(), one)).into());
        assert_eq!(without_limits(&path), bare(&["bare", "gold"]));
        assert!(recall(&path).keys().eq(["later"]));
        std::fs::write(&path, "{").unwrap();
        assert!(load(&path).is_err());
    }

    #[test]
    fn limits_that_change_again_and_again_are_kept_once_in_a_while() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lab.json");
        let group = Group::of(&Limits::default(), 16, None, 1, 1);
        let known = |count: usize| -> BTreeMap<String, Stored> {
            let one = Stored { spec: group.spec().unwrap(), group: group.clone(), changed: 1 };
            (0..count).map(|number| (format!("g{number}"), one.clone())).collect()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut keeper = Keeper::default();
        runtime.block_on(async {
            // As many as a session begins with, each of which is a change.
            for count in 1..=1000 {
                keeper.note();
                let at = if count == 1 { Instant::ZERO + BETWEEN } else { keeper.kept_at };
                keeper.keep(&path, &known(count.min(2)), at);
                assert_eq!(keeper.changed, count > 1, "one is under way, or was a moment ago");
            }
            keeper.end(&path, &known(3)).await;
        });
        assert_eq!(load(&path).unwrap().len(), 3);
    }
}
