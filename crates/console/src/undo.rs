//! Commands that make something only while they run: a signal undoes it before it ends them.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;

use crate::{logging, say, signals::Signals};

/// What is to be undone if SIGINT, SIGTERM or SIGHUP ends the process: last made, first undone.
#[derive(Clone, Default)]
pub struct Undo(Arc<Mutex<Vec<Step>>>);

type Step = Box<dyn Fn() + Send>;

impl Undo {
    /// From now on signals undo what was made and end the process. Call it before other threads
    /// start.
    ///
    /// # Errors
    /// Where signals cannot be awaited, or no thread can be had.
    pub fn watch() -> anyhow::Result<Self> {
        let this = Self::default();
        let made = this.clone();
        let signals = Signals::block().context("signals cannot be awaited")?;
        let hear = move |_| {
            // Held to the end: nothing is made any more.
            let steps = made.0.lock().unwrap_or_else(PoisonError::into_inner);
            steps.iter().rev().for_each(|step| step());
            say("interrupted: nothing was left behind (run the command again)");
            logging::exit(1)
        };
        signals.forward(hear).context("no thread can be started")?;
        Ok(this)
    }

    /// Makes something, and knows how to undo it before a signal is heard; twice does no harm.
    pub fn making<T, U: Fn() + Send + 'static>(
        &self,
        make: impl FnOnce() -> anyhow::Result<(T, U)>,
    ) -> anyhow::Result<T> {
        let mut steps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (made, how) = make()?;
        steps.push(Box::new(how));
        Ok(made)
    }
}
