//! Signals as messages. They are blocked in every thread and awaited in one place: a dedicated
//! thread, or the reactor of the calling thread.
//!
//! The first terminating signal requests an orderly end, and a second one an immediate end.
//! Signals shortly after the first do not count as a second request: `timeout` of coreutils
//! signals its child and then its process group, and Ctrl-C on a terminal may reach a process
//! twice.
//!
//! ```text
//!   SIGTERM  SIGTERM            SIGINT
//!      │        │                  │
//!      ▼        ▼                  ▼
//!     End    ignored           EndAtOnce
//!      ├─ SECOND_SIGNAL_DELAY ─┤
//! ```

use std::{
    io,
    os::fd::AsFd as _,
    thread,
    time::{Duration, Instant},
};

use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use reactor::operation::{self, Fd};

/// Time after the first terminating signal in which further ones are ignored.
pub const SECOND_SIGNAL_DELAY: Duration = Duration::from_secs(1);

/// Request that a signal stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalRequest {
    /// Orderly end, with the signal's name: SIGTERM or SIGINT, and SIGHUP unless the process is a
    /// daemon.
    End(&'static str),
    /// Immediate end, with the signal's name: a second terminating signal, at least
    /// [`SECOND_SIGNAL_DELAY`] after the first.
    EndAtOnce(&'static str),
    /// SIGHUP to a daemon: read the configuration again.
    HangUp,
    /// SIGUSR1 to a daemon: open the log file again, and nothing else.
    ReopenLog,
    /// Signal without a meaning for weir, with its name. It is blocked and reported because its
    /// default action would end the daemon.
    Meaningless(&'static str),
}

/// Signals that are blocked in the calling thread and in all threads that it starts afterwards.
pub struct BlockedSignals {
    set: SigSet,
    is_daemon: bool,
}

impl BlockedSignals {
    /// Blocks the terminating signals. Call it before other threads start: the kernel delivers a
    /// signal to any thread that does not block it, and the default action would end the process.
    ///
    /// # Errors
    /// Fails if the system call fails.
    pub fn block() -> io::Result<Self> {
        Self::block_all([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP], false)
    }

    /// Blocks the terminating signals, and others whose default action would end a daemon. See
    /// [`BlockedSignals::block`].
    ///
    /// # Errors
    /// Fails if the system call fails.
    pub fn block_for_daemon() -> io::Result<Self> {
        use Signal::{SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM};
        Self::block_all([SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM], true)
    }

    fn block_all(signals: impl IntoIterator<Item = Signal>, is_daemon: bool) -> io::Result<Self> {
        let set: SigSet = signals.into_iter().collect();
        set.thread_block()?;
        Ok(Self { set, is_daemon })
    }

    /// Calls `on_request` for each request, on a dedicated thread, until it returns false.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub fn forward(self, on_request: impl Fn(SignalRequest) -> bool + Send + 'static) -> io::Result<()> {
        let wait = move || {
            let mut interpreter = SignalInterpreter { is_daemon: self.is_daemon, first: None };
            while let Ok(signal) = self.set.wait() {
                let Some(request) = interpreter.interpret(signal, Instant::now()) else { continue };
                if !on_request(request) {
                    return;
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
    }

    /// Requests for a task on this thread's reactor, through signalfd(2).
    ///
    /// # Errors
    /// Fails if the system call fails.
    pub fn stream(self) -> io::Result<SignalStream> {
        let signals = SignalFd::with_flags(&self.set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let readable = Fd::from(signals.as_fd().try_clone_to_owned()?);
        Ok(SignalStream {
            signals,
            readable,
            interpreter: SignalInterpreter { is_daemon: self.is_daemon, first: None },
        })
    }
}

/// Stream of requests, awaited on the reactor of this thread.
pub struct SignalStream {
    signals: SignalFd,
    readable: Fd,
    interpreter: SignalInterpreter,
}

impl SignalStream {
    /// Waits for the next request.
    ///
    /// # Errors
    /// Fails if the system call fails.
    pub async fn next(&mut self) -> io::Result<SignalRequest> {
        loop {
            // Nonblocking: drains all pending signals before it waits for the descriptor again.
            while let Some(info) = self.signals.read_signal()? {
                let signal =
                    i32::try_from(info.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok());
                let request = signal.and_then(|signal| self.interpreter.interpret(signal, Instant::now()));
                if let Some(request) = request {
                    return Ok(request);
                }
            }
            operation::readable(&self.readable).await?;
        }
    }
}

// Interpretation of a sequence of signals.
struct SignalInterpreter {
    is_daemon: bool,
    // Time of the first terminating signal.
    first: Option<Instant>,
}

impl SignalInterpreter {
    /// Request of a signal; `None` for a terminating signal within [`SECOND_SIGNAL_DELAY`] of the
    /// first.
    fn interpret(&mut self, signal: Signal, now: Instant) -> Option<SignalRequest> {
        match signal {
            Signal::SIGHUP if self.is_daemon => return Some(SignalRequest::HangUp),
            Signal::SIGUSR1 if self.is_daemon => return Some(SignalRequest::ReopenLog),
            Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP => {}
            other => return Some(SignalRequest::Meaningless(other.as_str())),
        }
        // Measured from the first signal, not from the previous one: repeated Ctrl-C must take
        // effect.
        let Some(first) = self.first else {
            self.first = Some(now);
            return Some(SignalRequest::End(signal.as_str()));
        };
        let is_second = now.saturating_duration_since(first) >= SECOND_SIGNAL_DELAY;
        is_second.then_some(SignalRequest::EndAtOnce(signal.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use Signal::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

    use super::*;

    #[test]
    fn signals_shortly_after_the_first_are_ignored() {
        let requests = |is_daemon, signals: &[(u64, Signal)]| {
            let mut interpreter = SignalInterpreter { is_daemon, first: None };
            let start = Instant::now();
            let interpret = |&(at, signal)| interpreter.interpret(signal, start + Duration::from_millis(at));
            signals.iter().map(interpret).collect::<Vec<_>>()
        };
        let end = |name| Some(SignalRequest::End(name));
        let at_once = |name| Some(SignalRequest::EndAtOnce(name));
        for (is_daemon, signals, expect) in [
            (true, &[(0, SIGTERM), (0, SIGTERM)][..], vec![end("SIGTERM"), None]),
            (true, &[(5, SIGINT), (1004, SIGTERM)], vec![end("SIGINT"), None]),
            (true, &[(5, SIGINT), (1005, SIGTERM)], vec![end("SIGINT"), at_once("SIGTERM")]),
            // Counted from the first signal, not from the previous one: repeated Ctrl-C takes
            // effect.
            (
                true,
                &[(0, SIGINT), (600, SIGINT), (1200, SIGINT)],
                vec![end("SIGINT"), None, at_once("SIGINT")],
            ),
            // Signals that are not terminating do not count as the first.
            (
                true,
                &[(0, SIGHUP), (1, SIGUSR1), (2, SIGUSR2), (1002, SIGTERM)],
                vec![
                    Some(SignalRequest::HangUp),
                    Some(SignalRequest::ReopenLog),
                    Some(SignalRequest::Meaningless("SIGUSR2")),
                    end("SIGTERM"),
                ],
            ),
            (false, &[(0, SIGHUP), (1, SIGTERM)], vec![end("SIGHUP"), None]),
            (false, &[(0, SIGINT), (1000, SIGHUP)], vec![end("SIGINT"), at_once("SIGHUP")]),
        ] {
            assert_eq!(requests(is_daemon, signals), expect, "{signals:?}");
        }
    }
}
