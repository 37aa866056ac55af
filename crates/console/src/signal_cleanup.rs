//! Cleanup of commands that set something up only while they run: a signal undoes it, then ends
//! the process.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;

use crate::{logging, print_notice, signals::BlockedSignals};

/// Cleanup steps that run if SIGINT, SIGTERM or SIGHUP ends the process, in reverse order.
#[derive(Clone, Default)]
pub struct SignalCleanup(Arc<Mutex<Vec<CleanupStep>>>);

type CleanupStep = Box<dyn Fn() + Send>;

impl SignalCleanup {
    /// Starts to handle signals: they run the cleanup steps and end the process with status 1.
    /// Call it before other threads start.
    ///
    /// # Errors
    /// Fails if the signals cannot be awaited or no thread can be started.
    pub fn start() -> anyhow::Result<Self> {
        let cleanup = Self::default();
        let shared = cleanup.clone();
        let signals = BlockedSignals::block().context("signals cannot be awaited")?;
        let on_signal = move |_| {
            // The lock is held until the process ends: `with_cleanup` cannot add a step that would
            // not be undone.
            let steps = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
            steps.iter().rev().for_each(|step| step());
            print_notice("interrupted: all changes were undone (run the command again)");
            logging::exit(1)
        };
        signals.forward(on_signal).context("no thread can be started")?;
        Ok(cleanup)
    }

    /// Runs `make` and registers its cleanup. A signal in between waits for the registration. The
    /// cleanup may run although the command itself already undid the step, so it must tolerate
    /// that.
    pub fn with_cleanup<T, U: Fn() + Send + 'static>(
        &self,
        make: impl FnOnce() -> anyhow::Result<(T, U)>,
    ) -> anyhow::Result<T> {
        // Held during `make`: a signal must not end the process between the change and its
        // registration.
        let mut steps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (value, undo) = make()?;
        steps.push(Box::new(undo));
        Ok(value)
    }
}
