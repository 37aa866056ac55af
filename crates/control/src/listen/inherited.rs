//! Sockets that the service manager (systemd's `LISTEN_FDS`) or `nbdinfo [ … ]` passed. Each has a
//! number, and may have a name (`LISTEN_FDNAMES`).
//!
//! The parent process may also leave a socket open without announcing it, as for QEMU. Such a
//! socket is named by its number only.

use std::{
    env, fs,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
};

use anyhow::{Context as _, anyhow, bail};
use listenfd::ListenFd;
use nix::{
    sys::socket::{
        self, Backlog, ControlMessage, MsgFlags, SockaddrStorage, getsockopt, sendmsg,
        sockopt::{AcceptConn, SockType},
    },
    unistd::close,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::{BoundListener, UriAuthority};

/// Number of the first passed descriptor (`sd_listen_fds(3)`).
const FIRST_PASSED_FD: usize = 3;

/// Passed sockets that no endpoint uses yet.
pub struct InheritedSockets {
    sockets: ListenFd,
    /// Names by index; `None` for a socket that is in use.
    names: Vec<Option<String>>,
    /// Indices of sockets that are requested by name; `take_all` leaves them.
    requested: Vec<usize>,
    /// Socket passed at run time, with its name.
    later: Option<(String, OwnedFd)>,
    /// Named sockets whose endpoint was rolled back.
    returned: Vec<(String, OwnedFd)>,
    /// Sockets of the old process, for vhost-user endpoints.
    adopted: Vec<(String, BoundListener)>,
    /// Descriptors that were open at the start and are not counted in `LISTEN_FDS`.
    left_open: Vec<RawFd>,
}

impl InheritedSockets {
    /// Reads the sockets and removes the variables from the environment, so that no child uses
    /// them. Must run once, before other threads start.
    pub fn from_environment() -> Self {
        let variable = env::var("LISTEN_FDNAMES").unwrap_or_default();
        let sockets = ListenFd::from_env();
        let mut listed_names = variable.split(':').map(str::to_owned);
        let names = (0..sockets.len()).map(|_| Some(listed_names.next().unwrap_or_default())).collect();
        // Scanned before weir opens descriptors, which would be indistinguishable.
        let left_open = open_descriptors_from(FIRST_PASSED_FD + sockets.len());
        Self { sockets, names, left_open, ..Self::empty() }
    }

    /// Empty set.
    pub fn empty() -> Self {
        Self {
            sockets: ListenFd::empty(),
            names: Vec::new(),
            requested: Vec::new(),
            later: None,
            returned: Vec::new(),
            adopted: Vec::new(),
            left_open: Vec::new(),
        }
    }

    /// Number of sockets that are not in use.
    pub fn unused(&self) -> usize {
        self.names.iter().flatten().count()
    }

    /// Takes all remaining sockets that are not reserved.
    pub(crate) fn take_all(&mut self) -> anyhow::Result<Vec<BoundListener>> {
        let mut free = (0..self.names.len()).collect::<Vec<_>>();
        // Sockets reserved by name stay for their endpoints.
        free.retain(|index| self.names[*index].is_some() && !self.requested.contains(index));
        free.into_iter().map(|index| self.take_index(index)).collect()
    }

    /// Reserves the socket with this name or number for a later [`InheritedSockets::take_named`].
    pub fn reserve(&mut self, name: &str) -> anyhow::Result<()> {
        if self.adopted.iter().any(|(known, _)| known.strip_prefix("fd:") == Some(name)) {
            return Ok(());
        }
        match self.find(name) {
            Ok(index) => self.requested.push(index),
            Err(_) if self.unannounced_index(name).is_some() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Takes the socket with this name or number.
    pub(crate) fn take_named(&mut self, name: &str) -> anyhow::Result<BoundListener> {
        if let Some((_, socket)) = self.later.take_if(|(known, _)| known == name) {
            return listener_of_socket(socket, &format!("fd:{name}"));
        }
        if let Some(at) = self.returned.iter().position(|(known, _)| known == name) {
            return listener_of_socket(self.returned.remove(at).1, &format!("fd:{name}"));
        }
        match (self.find(name), self.unannounced_index(name)) {
            (Ok(index), _) => self.take_index(index),
            (Err(_), Some(place)) => {
                let shown = format!("fd:{name}");
                listener_of_socket(
                    own_descriptor(self.left_open.remove(place)).with_context(|| shown.clone())?,
                    &shown,
                )
            }
            (Err(error), None) => Err(error),
        }
    }

    /// Index among the unannounced descriptors.
    fn unannounced_index(&self, number: &str) -> Option<usize> {
        let number: RawFd = number.parse().ok()?;
        self.left_open.iter().position(|open| *open == number)
    }

    /// Adds a socket passed at run time; replaces an unused one.
    pub(crate) fn add(&mut self, name: &str, socket: OwnedFd) {
        self.later = Some((name.to_owned(), socket));
    }

    /// Returns a socket of [`InheritedSockets::take_named`], for the next attempt to use it.
    pub(crate) fn give_back(&mut self, name: &str, socket: OwnedFd) {
        self.returned.push((name.to_owned(), socket));
    }

    /// Adds a socket of the old process, under its full name.
    pub(crate) fn adopt(&mut self, name: &str, listener: BoundListener) {
        self.adopted.push((name.to_owned(), listener));
    }

    /// Takes a socket of the old process.
    pub(crate) fn take_adopted(&mut self, name: &str) -> Option<BoundListener> {
        let at = self.adopted.iter().position(|(known, _)| known == name)?;
        Some(self.adopted.remove(at).1)
    }

    /// Index of a passed socket; for a name that several have, the first unused one.
    fn find(&self, name: &str) -> anyhow::Result<usize> {
        let index = self.names.iter().position(|known| known.as_deref() == Some(name));
        // A name takes precedence over a number of the same text.
        let by_number = || {
            let index = name.parse::<usize>().ok()?.checked_sub(FIRST_PASSED_FD)?;
            self.names.get(index)?.is_some().then_some(index)
        };
        index.or_else(by_number).with_context(|| {
            let left: Vec<_> = self.names.iter().flatten().filter(|name| !name.is_empty()).cloned().collect();
            let known = if left.is_empty() { String::new() } else { format!("; names: {}", left.join(", ")) };
            format!(
                "fd:{name}: no such socket was passed, or it is in use (sockets left: {}{known}; a \
                 service manager passes them when weir starts, and systemd names them by \
                 FileDescriptorName=: write unix:PATH, or restart weir with that socket)",
                self.unused()
            )
        })
    }

    fn take_index(&mut self, index: usize) -> anyhow::Result<BoundListener> {
        let named = self.names[index].take().filter(|name| !name.is_empty());
        let shown = socket_text(index, named.as_deref());
        let (socket, authority) = if let Ok(Some(unix)) = self.sockets.take_unix_listener(index) {
            let authority = match unix.local_addr()?.as_pathname() {
                Some(path) => UriAuthority::of_unix(path),
                None => UriAuthority::Unnamed(index),
            };
            // The type is probed by trial: `listenfd` checks the socket's family and keeps it on a
            // mismatch.
            (OwnedFd::from(unix), authority)
        } else if let Ok(Some(tcp)) = self.sockets.take_tcp_listener(index) {
            let address = tcp.local_addr()?;
            (OwnedFd::from(tcp), UriAuthority::of_tcp(&address.ip().to_string(), address.port()))
        } else {
            bail!("LISTEN_FDS: {shown} is neither a Unix nor a TCP stream socket (check ListenStream=)");
        };
        check_listening(&socket, &shown)?;
        Ok(BoundListener { socket, authority, file: None })
    }
}

/// Open descriptors with this number or a higher one.
fn open_descriptors_from(first: usize) -> Vec<RawFd> {
    let Ok(list) = fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let mut open: Vec<RawFd> = list.filter_map(number).collect();
    // Excludes the descriptor of the directory itself, which is closed by now.
    open.retain(|number| fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok());
    open.retain(|number| usize::try_from(*number).is_ok_and(|number| number >= first));
    open
}

/// Takes ownership of an unowned descriptor without `unsafe`: sending it over a socket pair yields
/// an owned duplicate, and the original is closed.
fn own_descriptor(number: RawFd) -> io::Result<OwnedFd> {
    let (sender, receiver) = UnixStream::pair()?;
    let passed = [ControlMessage::ScmRights(&[number])];
    sendmsg::<()>(sender.as_raw_fd(), &[IoSlice::new(&[0])], &passed, MsgFlags::empty(), None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut received = RecvAncillaryBuffer::new(&mut space);
    recvmsg(&receiver, &mut [IoSliceMut::new(&mut [0])], &mut received, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor = received.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let owned = descriptor.ok_or_else(|| io::Error::other("the duplicate descriptor was not received"))?;
    // Closed only after the duplicate has arrived.
    close(number)?;
    Ok(owned)
}

/// Turns a bound socket into a listener. Calls `listen` if necessary, as QEMU does.
fn listener_of_socket(socket: OwnedFd, name: &str) -> anyhow::Result<BoundListener> {
    let kind = getsockopt(&socket, SockType)
        .map_err(|_| anyhow!("{name}: is no socket (pass one that is bound)"))?;
    if kind != socket::SockType::Stream {
        bail!("{name}: is no stream socket (pass a SOCK_STREAM one)");
    }
    let address: SockaddrStorage = socket::getsockname(socket.as_raw_fd())?;
    let authority = match (address.as_unix_addr(), address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(unix), ..) => match unix.path() {
            Some(path) => UriAuthority::of_unix(path),
            None if unix.as_abstract().is_some() => UriAuthority::Unnamed(0),
            None => bail!("{name}: the socket is not bound (bind it to an address first)"),
        },
        (_, Some(v4), _) => UriAuthority::of_tcp(&v4.ip().to_string(), v4.port()),
        (.., Some(v6)) => UriAuthority::of_tcp(&v6.ip().to_string(), v6.port()),
        _ => bail!("{name}: is neither a Unix nor a TCP socket (pass one of those)"),
    };
    if !getsockopt(&socket, AcceptConn)? {
        let wrong = "cannot listen (is it connected already?)";
        socket::listen(&socket, Backlog::MAXCONN).with_context(|| format!("{name}: the socket {wrong}"))?;
    }
    Ok(BoundListener { socket, authority, file: None })
}

/// Number as the passing process counts, and the name.
fn socket_text(index: usize, name: Option<&str>) -> String {
    let name = name.map(|name| format!(" ({name})")).unwrap_or_default();
    format!("fd:{}{name}", index + FIRST_PASSED_FD)
}

fn check_listening(socket: impl AsFd, shown: &str) -> anyhow::Result<()> {
    match getsockopt(&socket, AcceptConn) {
        Ok(true) => Ok(()),
        Ok(false) => Err(anyhow!("LISTEN_FDS: {shown} is not listening (set Accept=no in the socket unit)")),
        Err(errno) => Err(anyhow!("LISTEN_FDS: {shown}: {}", io::Error::from(errno))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn only_listening_sockets_are_accepted() {
        let path = env::temp_dir().join(format!("weir-inherited-{}", std::process::id()));
        let listening = UnixListener::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        check_listening(&listening, "fd:3").unwrap();
        let (connected, _peer) = UnixStream::pair().unwrap();
        assert_eq!(
            check_listening(&connected, &socket_text(0, Some("vm1"))).unwrap_err().to_string(),
            "LISTEN_FDS: fd:3 (vm1) is not listening (set Accept=no in the socket unit)"
        );
    }
}
