//! Reaching a server: a socket, and the handshake on it, within a time limit.

use std::{
    net::{TcpStream, ToSocketAddrs as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
};

use policy::time::Duration;

use super::{
    super::{inbox::Inbox, stream::Stream},
    Client,
    handshake::{NotConnected, negotiate},
};
use block::reactor::{blocking, op::Fd, timeout};

/// Where a server is.
#[allow(missing_docs, reason = "the types say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A socket's path.
    Unix(PathBuf),
    /// A host's name or address, IPv6 without brackets.
    Tcp { host: String, port: u16 },
}

/// Connects to an export.
///
/// # Errors
/// Nobody there, no such export, no protocol, or no answer within `limit`.
pub async fn connect(endpoint: &Endpoint, export: &str, limit: Duration) -> Result<Client, NotConnected> {
    let endpoint = endpoint.clone();
    let connecting = async {
        // A full backlog of a Unix socket blocks, and so does looking up a name.
        let socket = blocking(move || dial(&endpoint, limit)).await?;
        shake_hands(Stream::Plain(Fd::from(socket)), export).await
    };
    match timeout(limit, connecting).await {
        Ok(result) => result,
        Err(_) => Err(NotConnected::TooLate(limit.as_secs())),
    }
}

pub(super) async fn shake_hands(stream: Stream, export: &str) -> Result<Client, NotConnected> {
    let mut inbox = Inbox::new();
    let about = negotiate(&stream, &mut inbox, export).await?;
    Ok(Client::start(stream, about, inbox))
}

pub(super) fn dial(endpoint: &Endpoint, limit: Duration) -> Result<OwnedFd, NotConnected> {
    match endpoint {
        Endpoint::Unix(path) => Ok(UnixStream::connect(path)?.into()),
        Endpoint::Tcp { host, port } => {
            let mut failed = None;
            let at_once = |socket: TcpStream| socket.set_nodelay(true).map(|()| socket);
            for address in (host.as_str(), *port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, limit).and_then(at_once) {
                    Ok(socket) => return Ok(socket.into()),
                    Err(error) => failed = Some(error),
                }
            }
            Err(failed.map_or(NotConnected::NoAddress, NotConnected::Io))
        }
    }
}
