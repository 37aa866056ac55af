//! Signals as messages: blocked in every thread, awaited in one: a thread of their own, or the
//! reactor of the one that asks.
//!
//! The first signal that asks for the end asks for an orderly one, and a second one for an end at
//! once. What comes right behind the first is no second wish: `timeout` of coreutils signals its
//! child and then its process group, and a terminal's Ctrl-C may reach a process twice.
//!
//! ```text
//!   SIGTERM  SIGTERM            SIGINT
//!      │        │                  │
//!      ▼        ▼                  ▼
//!     End    the same one      EndAtOnce
//!      ├───── TOGETHER ─────┤
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
use reactor::op::{self, Fd};

/// Signals within so long after the first that asks for the end are the same wish as that.
pub const TOGETHER: Duration = Duration::from_secs(1);

/// What the process was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To end: SIGTERM or SIGINT, with its name, and SIGHUP except for a daemon.
    End(&'static str),
    /// Not to wait for an orderly end: another of them, no sooner than [`TOGETHER`] after the
    /// first.
    EndAtOnce(&'static str),
    /// SIGHUP to a daemon.
    HangUp,
    /// SIGUSR1 to a daemon: the log's file was moved away, and nothing else is to be read again.
    ReopenLog,
    /// One that weir has no meaning for, with its name: it would end a process that ignores
    /// nothing.
    Meaningless(&'static str),
}

/// The signals that are awaited, blocked in the calling thread and in those it starts afterwards.
pub struct Signals {
    set: SigSet,
    is_daemon: bool,
}

impl Signals {
    /// Blocks them. To be called before other threads start: a signal goes to any thread that does
    /// not block it, and would end the process there.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn block() -> io::Result<Self> {
        Self::block_all([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP], false)
    }

    /// Blocks also those that would end a daemon for nothing: see [`Signals::block`].
    ///
    /// # Errors
    /// If the system call fails.
    pub fn block_for_daemon() -> io::Result<Self> {
        use Signal::{SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM};
        Self::block_all([SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM], true)
    }

    fn block_all(signals: impl IntoIterator<Item = Signal>, is_daemon: bool) -> io::Result<Self> {
        let set: SigSet = signals.into_iter().collect();
        set.thread_block()?;
        Ok(Self { set, is_daemon })
    }

    /// Calls `hear` for each request, on a thread of its own, until it returns false.
    ///
    /// # Errors
    /// Where no thread can be had.
    pub fn forward(self, hear: impl Fn(Request) -> bool + Send + 'static) -> io::Result<()> {
        let wait = move || {
            let mut wishes = Wishes { is_daemon: self.is_daemon, first: None };
            while let Ok(signal) = self.set.wait() {
                let Some(request) = wishes.understand(signal, Instant::now()) else { continue };
                if !hear(request) {
                    return;
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
    }

    /// Requests for a task of this thread's reactor.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn hear(self) -> io::Result<Heard> {
        let signals = SignalFd::with_flags(&self.set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let readable = Fd::from(signals.as_fd().try_clone_to_owned()?);
        Ok(Heard { signals, readable, wishes: Wishes { is_daemon: self.is_daemon, first: None } })
    }
}

/// Signals that the reactor of this thread waits for.
pub struct Heard {
    signals: SignalFd,
    readable: Fd,
    wishes: Wishes,
}

impl Heard {
    /// The next request.
    ///
    /// # Errors
    /// If the system call fails.
    pub async fn next(&mut self) -> io::Result<Request> {
        loop {
            while let Some(told) = self.signals.read_signal()? {
                let signal =
                    i32::try_from(told.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok());
                let request = signal.and_then(|signal| self.wishes.understand(signal, Instant::now()));
                if let Some(request) = request {
                    return Ok(request);
                }
            }
            op::readable(&self.readable).await?;
        }
    }
}

/// What signals mean, one after the other.
struct Wishes {
    is_daemon: bool,
    /// When the first came that asks for the end.
    first: Option<Instant>,
}

impl Wishes {
    /// None for a signal that says again what the first has said.
    fn understand(&mut self, signal: Signal, now: Instant) -> Option<Request> {
        match signal {
            Signal::SIGHUP if self.is_daemon => return Some(Request::HangUp),
            Signal::SIGUSR1 if self.is_daemon => return Some(Request::ReopenLog),
            Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP => {}
            other => return Some(Request::Meaningless(other.as_str())),
        }
        let Some(first) = self.first else {
            self.first = Some(now);
            return Some(Request::End(signal.as_str()));
        };
        let again = now.saturating_duration_since(first) >= TOGETHER;
        again.then_some(Request::EndAtOnce(signal.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use Signal::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

    use super::*;

    #[test]
    fn signals_right_behind_the_first_are_the_same_wish() {
        let meant = |is_daemon, signals: &[(u64, Signal)]| {
            let mut wishes = Wishes { is_daemon, first: None };
            let start = Instant::now();
            let hear = |&(at, signal)| wishes.understand(signal, start + Duration::from_millis(at));
            signals.iter().map(hear).collect::<Vec<_>>()
        };
        let end = |name| Some(Request::End(name));
        let at_once = |name| Some(Request::EndAtOnce(name));
        for (is_daemon, signals, expect) in [
            (true, &[(0, SIGTERM), (0, SIGTERM)][..], vec![end("SIGTERM"), None]),
            (true, &[(5, SIGINT), (1004, SIGTERM)], vec![end("SIGINT"), None]),
            (true, &[(5, SIGINT), (1005, SIGTERM)], vec![end("SIGINT"), at_once("SIGTERM")]),
            // Not from one to the next: who presses Ctrl-C all the time is heard.
            (
                true,
                &[(0, SIGINT), (600, SIGINT), (1200, SIGINT)],
                vec![end("SIGINT"), None, at_once("SIGINT")],
            ),
            // What asks for nothing is not the first.
            (
                true,
                &[(0, SIGHUP), (1, SIGUSR1), (2, SIGUSR2), (1002, SIGTERM)],
                vec![
                    Some(Request::HangUp),
                    Some(Request::ReopenLog),
                    Some(Request::Meaningless("SIGUSR2")),
                    end("SIGTERM"),
                ],
            ),
            (false, &[(0, SIGHUP), (1, SIGTERM)], vec![end("SIGHUP"), None]),
            (false, &[(0, SIGINT), (1000, SIGHUP)], vec![end("SIGINT"), at_once("SIGHUP")]),
        ] {
            assert_eq!(meant(is_daemon, signals), expect, "{signals:?}");
        }
    }
}
