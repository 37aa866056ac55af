//! End of a run: when the budget is used up, or on Ctrl-C.
//!
//! The first signal ends the run at the next batch, with cleanup and report. The second removes the
//! created files and ends the process.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::interruption::SignalInterruption;

#[derive(Clone, Debug)]
pub(super) struct TuneStop {
    deadline: Instant,
    interruption: SignalInterruption,
    removed: Arc<Mutex<Option<PathBuf>>>,
}

impl TuneStop {
    /// Stops after this time, or on a signal. Must be called before any other thread starts.
    pub(super) fn after(budget: Duration) -> anyhow::Result<Self> {
        let removed = Arc::default();
        let watched = Arc::clone(&removed);
        let remove = move || {
            if let Some(directory) = &*directory(&watched) {
                let _ = fs::remove_dir_all(directory);
            }
        };
        let interruption = SignalInterruption::watch(|| {}, remove)?;
        Ok(Self { interruption, removed, ..Self::unwatched(budget) })
    }

    fn unwatched(budget: Duration) -> Self {
        let deadline = Instant::now() + budget;
        Self { deadline, interruption: SignalInterruption::default(), removed: Arc::default() }
    }

    /// A copy that stops no later than this time from now.
    pub(super) fn within(&self, time: Duration) -> Self {
        Self { deadline: self.deadline.min(Instant::now() + time), ..self.clone() }
    }

    pub(super) fn removes(&self, path: &Path) {
        *directory(&self.removed) = Some(path.to_owned());
    }

    pub(super) fn is_due(&self) -> bool {
        self.left().is_zero() || self.is_interrupted()
    }

    pub(super) fn is_interrupted(&self) -> bool {
        self.interruption.is_interrupted()
    }

    pub(super) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

fn directory(mutex: &Mutex<Option<PathBuf>>) -> MutexGuard<'_, Option<PathBuf>> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_is_due_at_the_deadline() {
        let stop = TuneStop::unwatched(Duration::from_secs(1000));
        assert!(!stop.is_due());
        assert!(stop.within(Duration::ZERO).is_due());
        assert!(TuneStop::unwatched(Duration::ZERO).within(Duration::from_secs(9)).is_due());
        stop.interruption.interrupt();
        assert!(stop.is_due() && stop.within(Duration::from_secs(1)).is_interrupted());
    }
}
