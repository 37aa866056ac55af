//! Ctrl-C in a measuring command: the first one stops the measurement as the command defines; the
//! second ends the process ([`console::signals`] defines what counts as a second).

use std::{
    io::{Write as _, stderr},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::Context as _;
use console::signals::{BlockedSignals, SignalRequest};

/// True after SIGINT, SIGTERM or SIGHUP.
#[derive(Clone, Debug, Default)]
pub struct SignalInterruption(Arc<AtomicBool>);

impl SignalInterruption {
    /// Runs `first` at the first signal; at the second runs `second` and exits. Must be called
    /// before threads start.
    ///
    /// # Errors
    /// Fails if signals cannot be awaited.
    pub fn watch(
        first: impl Fn() + Send + 'static,
        second: impl Fn() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let interruption = Self::default();
        let received = interruption.clone();
        let signals = BlockedSignals::block().context("signals cannot be awaited")?;
        let on_signal = move |request| {
            if matches!(request, SignalRequest::EndAtOnce(_)) {
                second();
                let _ = writeln!(stderr(), "weir: interrupted twice: results discarded");
                process::exit(1);
            }
            received.0.store(true, Ordering::SeqCst);
            first();
            true
        };
        signals.forward(on_signal).context("no thread can be started")?;
        Ok(interruption)
    }

    #[cfg(test)]
    pub(super) fn interrupt(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// True if the first signal has arrived.
    pub fn is_interrupted(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
