//! What happens at an export that its operators are to hear of: front ends that come and go, and
//! rings that cannot be served.
//!
//! Told on the thread that it happens on: rings are on workers. Never waits for who is told.

use std::{fmt, fs, os::fd::AsFd, sync::Arc};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use policy::time::Duration;

use super::connection::Ended;

/// The process of a front end, as the kernel knew it when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number, above 0.
    pub pid: u32,
    /// At most 15 bytes; it has chosen them itself. Empty where it cannot be seen.
    pub name: Arc<str>,
}

impl Process {
    /// The one at the other end of a socket; `None` where it is in another container.
    pub(super) fn of(socket: impl AsFd) -> Option<Self> {
        let peer = getsockopt(&socket, PeerCredentials).ok()?;
        let pid = u32::try_from(peer.pid()).ok().filter(|pid| *pid > 0)?;
        let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let name = String::from_utf8_lossy(name.trim_ascii_end());
        Some(Self { pid, name: name.replace(char::is_control, "?").into() })
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name } = self;
        if name.is_empty() { write!(f, "process {pid}") } else { write!(f, "{name} ({pid})") }
    }
}

/// What has happened. `process` is of the front end.
pub enum Happening<'a> {
    /// A front end has begun to use the disk: its first ring is about to be served. One that has
    /// come from another process has begun there.
    Came {
        /// None where it is not known, as below.
        process: Option<&'a Process>,
    },
    /// It has gone, and with it the last of its rings.
    Went {
        /// The same.
        process: Option<&'a Process>,
        /// Since it has begun, or since it has come from another process.
        lasted: Duration,
    },
    /// A front end is at fault, and was disconnected, whether it had begun or not.
    Disconnected {
        /// Which.
        process: Option<&'a Process>,
        /// What it did.
        why: &'a Ended,
    },
    /// A front end was turned away, because another is connected.
    TurnedAway {
        /// Which.
        process: Option<&'a Process>,
        /// The other.
        connected: Option<&'a Process>,
    },
    /// A ring cannot be served until its driver is set up again.
    RingBroken {
        /// Its number.
        ring: u16,
        /// What is wrong with it.
        why: &'a dyn fmt::Display,
    },
    /// A ring of which that was told is served again.
    RingServed {
        /// Its number.
        ring: u16,
        /// Since it was told.
        after: Duration,
    },
}

/// Whoever is told.
pub trait Told: Send + Sync + fmt::Debug {
    /// This has happened at the export with this id, of the disk with this name; `left_out` are
    /// those like it that nobody was told of, since the last: of those that one client could cause
    /// by the thousand there is one a second.
    fn hear(&self, export: &str, disk: &str, happening: &Happening<'_>, left_out: u64);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_process_is_known_by_its_number_and_its_name() {
        let (here, _there) = UnixStream::pair().unwrap();
        let process = Process::of(&here).expect("it is ours");
        let name = fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!((process.pid, &*process.name), (std::process::id(), name.trim_end()));
        assert_eq!(process.to_string(), format!("{} ({})", name.trim_end(), std::process::id()));
        assert_eq!(
            Process { name: "".into(), ..process.clone() }.to_string(),
            format!("process {}", process.pid)
        );
    }
}
