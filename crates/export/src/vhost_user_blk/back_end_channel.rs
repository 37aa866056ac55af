//! The back end's channel (SET_BACKEND_REQ_FD), on which the front end receives CONFIG_CHANGE_MSG:
//! one of a pair of sockets that the front end has created.
//!
//! The descriptor is held while the front end is connected, so it must not keep the front end
//! connected. A front end that passes the other end of its own connection, directly or inside a
//! socket, would never hang up, even after its death.

use std::{
    io,
    net::Shutdown,
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use reactor::operation::Fd;
use rustix::{
    io::Errno,
    net::{RecvFlags, SocketType, recv, sockopt::socket_type},
};

/// The descriptor is no usable channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its descriptor is not one of a pair of new Unix sockets: see socketpair(2)")]
pub struct InvalidChannel;

/// Checks a socket and shuts down its receiving direction.
///
/// # Errors
/// [`InvalidChannel`]. A socket that listens has a name, and so has the peer of a socket that
/// connected to it. An unnamed pair therefore never is an end of a connection with this process.
pub(super) fn channel(socket: OwnedFd) -> Result<Fd, InvalidChannel> {
    let socket = UnixStream::from(socket);
    if !is_unnamed_pair(&socket).unwrap_or(false) {
        return Err(InvalidChannel);
    }
    // After the shutdown nothing can arrive, so a message found now was sent before.
    socket.shutdown(Shutdown::Read).map_err(|_| InvalidChannel)?;
    match recv(&socket, &mut [0], RecvFlags::DONTWAIT) {
        // ECONNRESET: the peer was closed with unread data, see unix(7).
        Ok((_, 0)) | Err(Errno::CONNRESET) => Ok(OwnedFd::from(socket).into()),
        _ => Err(InvalidChannel),
    }
}

/// True for an unnamed stream socket; fails for another family and for no socket.
fn is_unnamed_pair(socket: &UnixStream) -> io::Result<bool> {
    // Both ends: a socket that connected to a listener is unnamed itself, but its peer has a name.
    let is_unnamed = socket.local_addr()?.is_unnamed() && socket.peer_addr()?.is_unnamed();
    Ok(is_unnamed && socket_type(socket)? == SocketType::STREAM)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read as _, Write as _},
        os::unix::net::UnixListener,
    };

    use super::*;

    #[test]
    fn end_of_a_socket_pair_is_a_channel() {
        let (back_end, mut front_end) = UnixStream::pair().expect("sockets");
        let back_end = OwnedFd::from(back_end);
        for _ in 0..2 {
            let channel = channel(back_end.try_clone().expect("a descriptor")).expect("it is one");
            rustix::io::write(&channel, b"changed").expect("there is room");
            front_end.read_exact(&mut [0; 7]).expect("it came");
        }
        assert!(front_end.write_all(&[1]).is_err(), "its peer is closed");
    }

    #[test]
    fn named_or_nonempty_sockets_are_no_channels() {
        let path = std::env::temp_dir().join(format!("weir-channel-{}", std::process::id()));
        let listener = UnixListener::bind(&path).expect("a socket");
        let connects = UnixStream::connect(&path).expect("a listener exists");
        let (accepted, _) = listener.accept().expect("a client is connected");
        std::fs::remove_file(&path).expect("it is there");
        let (full, mut other) = UnixStream::pair().expect("sockets");
        other.write_all(&[1]).expect("there is room");
        let file = File::open("/dev/null").expect("it is there");
        for none in [connects.into(), accepted.into(), listener.into(), full.into(), file.into()] {
            assert_eq!(channel(none).map(drop), Err(InvalidChannel));
        }
    }

    #[test]
    fn closed_peer_is_still_a_channel() {
        let (mut back_end, front_end) = UnixStream::pair().expect("sockets");
        back_end.write_all(&[1]).expect("there is room");
        drop(front_end);
        channel(back_end.into()).expect("a front end may close what it likes");
    }
}
