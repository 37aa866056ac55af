//! Writes of the counts of quotas to their state file: one at a time, so that an older one never
//! replaces a newer one.
//!
//! A failed write is tried again after the interval. The first failure and the recovery are logged.
//! Never blocks the main thread.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    rc::Rc,
};

use event_listener::Event;
use policy::{
    time::{Duration, Instant},
    volume_quota::QuotaCounts,
};

use super::file;

/// Maximum age of a stored count that has changed: bounds the loss of a crash in time.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);
/// Time for the last write: a file system that does not answer must not keep the process.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Counts by name of the disk or group.
type AllCounts = HashMap<String, QuotaCounts>;

/// State file of a daemon.
#[derive(Clone, Debug)]
pub(super) struct StoredFile {
    pub(super) path: PathBuf,
    /// Identifies the daemon in the file.
    pub(super) daemon: String,
}

/// State file with its content. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct QuotaStore(Rc<StoreState>);

#[derive(Debug)]
struct StoreState {
    file: StoredFile,
    /// Content of the file, as far as writes have succeeded.
    saved: RefCell<AllCounts>,
    /// Start of the last write.
    tried_at: Cell<Instant>,
    is_writing: Cell<bool>,
    has_failed: Cell<bool>,
    /// Notified at the end of a write.
    ended: Event,
}

impl QuotaStore {
    /// A file that has this content.
    pub(super) fn new(file: StoredFile, saved: AllCounts) -> Self {
        Self(Rc::new(StoreState {
            file,
            saved: RefCell::new(saved),
            tried_at: Cell::new(reactor::now()),
            is_writing: Cell::new(false),
            has_failed: Cell::new(false),
            ended: Event::new(),
        }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0.file.path
    }

    /// Starts a write of changed counts at the end of the interval, or earlier if they are far from
    /// the stored ones. Does nothing while a write is in flight.
    pub(super) fn save_if_due(&self, counts: &AllCounts, are_far: impl FnOnce(&AllCounts) -> bool) {
        let state = &self.0;
        if state.is_writing.get() {
            return;
        }
        let saved = state.saved.borrow();
        let is_early = reactor::now() - state.tried_at.get() < SAVE_INTERVAL;
        if *counts == *saved || (is_early && (state.has_failed.get() || !are_far(&saved))) {
            return;
        }
        drop(saved);
        let (store, counts) = (self.clone(), counts.clone());
        // Set here: the task starts later.
        state.is_writing.set(true);
        reactor::spawn(async move { store.write(counts).await });
    }

    /// Stores changed counts after the write in flight, within a bounded time.
    pub(super) async fn save(&self, counts: AllCounts) {
        let state = &self.0;
        let write = async {
            loop {
                let ended = state.ended.listen();
                if !state.is_writing.replace(true) {
                    break;
                }
                ended.await;
            }
            let is_saved = *state.saved.borrow() == counts;
            match is_saved {
                true => state.is_writing.set(false),
                false => self.write(counts).await,
            }
        };
        if reactor::timeout(END_TIMEOUT, write).await.is_err() {
            self.log_failure(&"the file system does not answer");
        }
    }

    /// Writes the counts. `is_writing` is set.
    async fn write(&self, counts: AllCounts) {
        let state = &self.0;
        state.tried_at.set(reactor::now());
        let file = state.file.clone();
        let write = move || (file::save(&file.path, &file.daemon, &counts), counts);
        let (result, counts): (io::Result<()>, _) = reactor::run_blocking(write).await;
        match result {
            Ok(()) => {
                *state.saved.borrow_mut() = counts;
                if state.has_failed.replace(false) {
                    tracing::info!(file = %self.path().display(), "the bytes counted against quotas are stored again");
                }
            }
            Err(error) => self.log_failure(&error),
        }
        state.is_writing.set(false);
        state.ended.notify(usize::MAX);
    }

    fn log_failure(&self, why: &dyn std::fmt::Display) {
        if !self.0.has_failed.replace(true) {
            tracing::warn!(
                file = %self.path().display(),
                "the bytes counted against quotas cannot be stored, and would be lost with this process: {why}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use policy::volume_quota::{QuotaPeriod, VolumeCount};

    use super::*;

    fn counts(bytes: u64) -> AllCounts {
        let mut total = VolumeCount::new(QuotaPeriod::Day, 1);
        total.add(bytes);
        HashMap::from([("a".to_owned(), QuotaCounts { total: Some(total), writes: None })])
    }

    /// Runs until the write in flight has ended.
    async fn write_ended(store: &QuotaStore) {
        while store.0.is_writing.get() {
            let ended = store.0.ended.listen();
            ended.await;
        }
    }

    #[test]
    fn one_write_is_in_flight_and_a_failed_one_is_repeated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("quota/a.json");
        let file = StoredFile { path: path.clone(), daemon: "d".to_owned() };
        reactor::sim::run(1, async move {
            let store = QuotaStore::new(file, HashMap::new());
            store.save_if_due(&counts(1), |_| false);
            assert!(!store.0.is_writing.get(), "not due");
            store.save_if_due(&counts(1), |_| true);
            assert!(store.0.is_writing.get());
            store.save_if_due(&counts(2), |_| panic!("a write is in flight"));
            write_ended(&store).await;
            // Its directory does not exist: nothing is stored, and the interval passes first.
            assert!(store.0.has_failed.get() && store.0.saved.borrow().is_empty());
            store.save_if_due(&counts(3), |_| true);
            assert!(!store.0.is_writing.get(), "not yet");
            std::fs::create_dir(path.parent().unwrap()).unwrap();
            reactor::sleep_until(reactor::now() + SAVE_INTERVAL).await;
            store.save_if_due(&counts(3), |_| false);
            // The last write follows the one in flight.
            store.save(counts(4)).await;
            assert!(!store.0.has_failed.get() && !store.0.is_writing.get());
            assert_eq!(*store.0.saved.borrow(), counts(4));
            assert_eq!(file::load(&path, "d").unwrap(), counts(4));
        });
    }
}
