//! Signals as messages: blocked in every thread, awaited in one.

use std::{io, thread};

use nix::sys::signal::{SigSet, Signal};

/// What the process was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// SIGTERM or SIGINT, with its name.
    End(&'static str),
    /// SIGHUP.
    HangUp,
    /// One that weir has no meaning for, with its name: it would end a process that ignores
    /// nothing.
    Meaningless(&'static str),
}

/// The signals that are awaited, blocked in the calling thread and in those it starts afterwards.
pub struct Signals(SigSet);

impl Signals {
    /// Blocks them. To be called before other threads start: a signal goes to any thread that does
    /// not block it, and would end the process there.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn block() -> io::Result<Self> {
        Self::block_all([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])
    }

    /// Blocks also those that would end a daemon for nothing: see [`Signals::block`].
    ///
    /// # Errors
    /// If the system call fails.
    pub fn block_for_daemon() -> io::Result<Self> {
        use Signal::{SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM};
        Self::block_all([SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM])
    }

    fn block_all(signals: impl IntoIterator<Item = Signal>) -> io::Result<Self> {
        let set: SigSet = signals.into_iter().collect();
        set.thread_block()?;
        Ok(Self(set))
    }

    /// Calls `hear` for each signal, on a thread of its own, until it returns false.
    ///
    /// # Errors
    /// Where no thread can be had.
    pub fn forward(self, hear: impl Fn(Request) -> bool + Send + 'static) -> io::Result<()> {
        let wait = move || {
            while let Ok(signal) = self.0.wait() {
                let request = match signal {
                    Signal::SIGHUP => Request::HangUp,
                    Signal::SIGTERM | Signal::SIGINT => Request::End(signal.as_str()),
                    other => Request::Meaningless(other.as_str()),
                };
                if !hear(request) {
                    return;
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
    }
}
