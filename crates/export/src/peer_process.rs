//! The peer process of a Unix socket.

use std::{fmt, fs, os::fd::AsFd, sync::Arc};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use reactor::sanitize::sanitize;

/// The process of a client, as the kernel recorded it at `connect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// Process ID, above 0.
    pub pid: u32,
    /// At most 15 bytes, chosen by the process itself. Empty if `/proc` does not show it.
    pub name: Arc<str>,
}

impl PeerProcess {
    /// Process of a socket's peer; `None` if it is in another PID namespace.
    pub(crate) fn of_peer(socket: impl AsFd) -> Option<Self> {
        let peer = getsockopt(&socket, PeerCredentials).ok()?;
        let pid = u32::try_from(peer.pid()).ok().filter(|pid| *pid > 0)?;
        let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let name = String::from_utf8_lossy(name.trim_ascii_end());
        Some(Self { pid, name: sanitize(&name).into() })
    }
}

impl fmt::Display for PeerProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name } = self;
        if name.is_empty() { write!(f, "process {pid}") } else { write!(f, "{name} ({pid})") }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn peer_process_has_pid_and_name() {
        let (socket, _there) = UnixStream::pair().unwrap();
        let process = PeerProcess::of_peer(&socket).expect("it is ours");
        let name = fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!((process.pid, &*process.name), (std::process::id(), name.trim_end()));
        assert_eq!(process.to_string(), format!("{} ({})", name.trim_end(), std::process::id()));
        assert_eq!(
            PeerProcess { name: "".into(), ..process.clone() }.to_string(),
            format!("process {}", process.pid)
        );
    }
}
