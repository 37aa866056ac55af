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
        let set: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
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
                let request =
                    if signal == Signal::SIGHUP { Request::HangUp } else { Request::End(signal.as_str()) };
                if !hear(request) {
                    return;
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
    }
}
