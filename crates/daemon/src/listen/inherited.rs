//! Sockets that the service manager (systemd's `LISTEN_FDS`) or `nbdinfo [ … ]` passed.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{anyhow, bail};
use listenfd::ListenFd;
use nix::sys::socket::{getsockopt, sockopt::AcceptConn};

use super::{Authority, Listener};

/// Those sockets, until they are taken.
pub struct Inherited(ListenFd);

impl Inherited {
    /// Takes them out of the environment, so that no child takes them for its own. To be called
    /// once, before other threads start.
    pub fn take() -> Self {
        Self(ListenFd::from_env())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn into_listeners(mut self) -> anyhow::Result<Vec<Listener>> {
        (0..self.0.len()).map(|index| self.listener(index)).collect()
    }

    fn listener(&mut self, index: usize) -> anyhow::Result<Listener> {
        let (socket, authority) = if let Ok(Some(unix)) = self.0.take_unix_listener(index) {
            let authority = match unix.local_addr()?.as_pathname() {
                Some(path) => Authority::of_unix(path),
                None => Authority::Unnamed(index),
            };
            (OwnedFd::from(unix), authority)
        } else if let Ok(Some(tcp)) = self.0.take_tcp_listener(index) {
            let address = tcp.local_addr()?;
            (OwnedFd::from(tcp), Authority::of_tcp(&address.ip().to_string(), address.port()))
        } else {
            bail!(
                "LISTEN_FDS: inherited socket {index} is neither a Unix nor a TCP stream socket (check ListenStream=)"
            );
        };
        check_listening(&socket, index)?;
        Ok(Listener { socket, authority, file: None })
    }
}

fn check_listening(socket: impl AsFd, index: usize) -> anyhow::Result<()> {
    match getsockopt(&socket, AcceptConn) {
        Ok(true) => Ok(()),
        Ok(false) => Err(anyhow!(
            "LISTEN_FDS: inherited socket {index} is not listening (set Accept=no in the socket unit)"
        )),
        Err(errno) => Err(anyhow!("LISTEN_FDS: inherited socket {index}: {}", std::io::Error::from(errno))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn only_listening_sockets_are_accepted() {
        let path = std::env::temp_dir().join(format!("weir-inherited-{}", std::process::id()));
        let listening = UnixListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        check_listening(&listening, 0).unwrap();
        let (connected, _peer) = UnixStream::pair().unwrap();
        assert_eq!(
            check_listening(&connected, 3).unwrap_err().to_string(),
            "LISTEN_FDS: inherited socket 3 is not listening (set Accept=no in the socket unit)"
        );
    }
}
