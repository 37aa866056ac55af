//! When to stop: at the end of the budget, or when somebody asks (Ctrl-C).
//!
//! The first signal ends what is under way at the next batch of requests, so that everything is put
//! away and what was found is told. The second ends the process at once, after it has removed what
//! was made.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::interruption::Interruption;

/// Asked between batches of requests.
#[derive(Clone, Debug)]
pub(super) struct Stop {
    deadline: Instant,
    interruption: Interruption,
    /// What the second signal removes.
    removed: Arc<Mutex<Option<PathBuf>>>,
}

impl Stop {
    /// After so much time, or when a signal comes. To be called before any other thread starts.
    ///
    /// # Errors
    /// Where no thread can be had.
    pub(super) fn after(budget: Duration) -> anyhow::Result<Self> {
        let removed = Arc::default();
        let watched = Arc::clone(&removed);
        let remove = move || {
            if let Some(directory) = &*directory(&watched) {
                // What cannot be removed now cannot be removed later either.
                let _ = fs::remove_dir_all(directory);
            }
        };
        let interruption = Interruption::watch(|| {}, remove)?;
        Ok(Self { interruption, removed, ..Self::unwatched(budget) })
    }

    fn unwatched(budget: Duration) -> Self {
        let deadline = Instant::now() + budget;
        Self { deadline, interruption: Interruption::default(), removed: Arc::default() }
    }

    /// The same, but earlier: after so much time from now, at the latest.
    pub(super) fn within(&self, time: Duration) -> Self {
        Self { deadline: self.deadline.min(Instant::now() + time), ..self.clone() }
    }

    /// Has this directory removed by the second signal.
    pub(super) fn removes(&self, path: &Path) {
        *directory(&self.removed) = Some(path.to_owned());
    }

    pub(super) fn is_due(&self) -> bool {
        self.left().is_zero() || self.is_interrupted()
    }

    pub(super) fn is_interrupted(&self) -> bool {
        self.interruption.happened()
    }

    /// Until the end of the budget.
    pub(super) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

fn directory(of: &Mutex<Option<PathBuf>>) -> MutexGuard<'_, Option<PathBuf>> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_due_at_its_end_and_what_is_within_it_not_later() {
        let stop = Stop::unwatched(Duration::from_secs(1000));
        assert!(!stop.is_due());
        assert!(stop.within(Duration::ZERO).is_due());
        assert!(Stop::unwatched(Duration::ZERO).within(Duration::from_secs(9)).is_due());
        stop.interruption.happens();
        assert!(stop.is_due() && stop.within(Duration::from_secs(1)).is_interrupted());
    }
}
