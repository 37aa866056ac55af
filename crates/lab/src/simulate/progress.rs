//! How far a simulation is: on a terminal, on standard error. Nothing elsewhere, where a log would fill with it.

use std::{
    io::{IsTerminal as _, stderr},
    time::Duration,
};

use console::figures;
use indicatif::{ProgressBar, ProgressStyle};

/// How often the bar shows that it is alive.
const TICK: Duration = Duration::from_millis(200);

/// The telling.
#[derive(Debug)]
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    /// Begins.
    pub(crate) fn new() -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            // The template is a constant; a bar in the standard style is still a bar.
            bar.set_style(
                ProgressStyle::with_template("{spinner} {msg} {elapsed}")
                    .unwrap_or_else(|_| ProgressStyle::default_spinner()),
            );
            bar.enable_steady_tick(TICK);
            bar
        });
        Self(bar)
    }

    /// So many requests have come, the last at this instant.
    pub(crate) fn requests(&self, requests: u64, at: u64) {
        if let Some(bar) = &self.0 {
            bar.set_message(format!(
                "{} requests, {} simulated",
                figures::count(requests as f64),
                figures::time(at)
            ));
        }
    }

    /// So many of so many simulations are done.
    pub(crate) fn runs(&self, done: usize, of: usize) {
        if let Some(bar) = &self.0 {
            bar.set_message(format!("{done} of {of} simulations"));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}
