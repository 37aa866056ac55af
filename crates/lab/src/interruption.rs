//! Ctrl-C in a command that measures: the first ends what is under way, which the command defines;
//! the second ends the process ([`console::signals`] says what a second is).

use std::{
    io::{Write as _, stderr},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Context as _;
use console::signals::{Request, Signals};

/// Whether SIGINT, SIGTERM or SIGHUP has come.
#[derive(Clone, Debug, Default)]
pub struct Interruption(Arc<AtomicBool>);

impl Interruption {
    /// Runs `first` at the first signal, then `second` and the end. To be called before threads
    /// start.
    ///
    /// # Errors
    /// Where signals cannot be awaited.
    pub fn watch(
        first: impl Fn() + Send + 'static,
        second: impl Fn() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let this = Self::default();
        let heard = this.clone();
        let signals = Signals::block().context("signals cannot be awaited")?;
        let hear = move |request| {
            if matches!(request, Request::EndAtOnce(_)) {
                second();
                let _ = writeln!(stderr(), "weir: interrupted twice: results discarded");
                process::exit(1);
            }
            heard.0.store(true, Ordering::SeqCst);
            first();
            true
        };
        signals.forward(hear).context("no thread can be started")?;
        Ok(this)
    }

    #[cfg(test)]
    pub(super) fn happens(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether the first has come.
    pub fn happened(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
