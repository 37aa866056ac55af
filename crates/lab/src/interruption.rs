//! Ctrl-C in the lab: the first ends what is under way, which the command defines; the second ends
//! the process.

use std::{
    cell::Cell,
    io::{Write as _, stderr},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context as _;
use console::signals::Signals;

/// Two signals within so long are one: `timeout` sends its own to the process and to its group.
const TOGETHER: Duration = Duration::from_secs(1);

/// Whether SIGINT, SIGTERM or SIGHUP has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Interruption(Arc<AtomicBool>);

impl Interruption {
    /// Runs `first` at the first signal, then `second` and the end. To be called before threads
    /// start.
    pub(super) fn watch(
        first: impl Fn() + Send + 'static,
        second: impl Fn() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let this = Self::default();
        let heard = this.clone();
        let signals = Signals::block().context("signals cannot be awaited")?;
        let first_at = Cell::new(None::<Instant>);
        let hear = move |_| {
            if heard.0.swap(true, Ordering::SeqCst) {
                if first_at.get().is_some_and(|first| first.elapsed() < TOGETHER) {
                    return true;
                }
                second();
                let _ = writeln!(stderr(), "weir: interrupted twice: results discarded");
                process::exit(1);
            }
            first_at.set(Some(Instant::now()));
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

    pub(super) fn happened(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
