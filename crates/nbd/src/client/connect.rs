//! Connecting to a server: addresses, socket, and handshake, within a time limit.

use std::{
    net::{SocketAddr, TcpStream, ToSocketAddrs as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
};

use nix::sys::{
    socket::{
        AddressFamily, SockFlag, SockType, UnixAddr, connect as connect_to, setsockopt, socket, sockopt,
    },
    time::TimeVal,
};
use policy::time::Duration;

use super::{
    super::{receive_buffer::ReceiveBuffer, stream::NbdStream},
    NbdClient,
    handshake::{HandshakeOptions, NbdConnectError, NbdExportInfo, negotiate},
};
use reactor::{operation::Fd, run_blocking, timeout};
use std::os::fd::AsRawFd as _;

/// Location of a server.
#[allow(missing_docs, reason = "the types say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdEndpoint {
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// Host name or address, IPv6 without brackets.
    Tcp { host: String, port: u16 },
}

impl NbdEndpoint {
    /// Port; `None` for a Unix socket.
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp { port, .. } => Some(*port),
        }
    }
}

/// Resolved address of a server.
#[allow(missing_docs, reason = "the types say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// A connection that has negotiated an export and has no request in flight. Can move to any thread.
#[derive(Debug)]
pub struct EstablishedConnection {
    pub(super) stream: NbdStream,
    pub(super) export: NbdExportInfo,
    /// Bytes received after the handshake.
    pub(super) received: Vec<u8>,
}

impl EstablishedConnection {
    /// Properties of the export.
    pub fn export(&self) -> &NbdExportInfo {
        &self.export
    }
}

/// Connects to an export.
///
/// # Errors
/// Fails if no server accepts the connection, it does not speak NBD, it has no such export, or the
/// handshake is not complete within `limit`.
pub async fn connect(
    endpoint: &NbdEndpoint,
    options: &HandshakeOptions,
    limit: Duration,
) -> Result<NbdClient, NbdConnectError> {
    let endpoint = endpoint.clone();
    let connecting = async {
        // Connecting to a Unix socket with a full backlog blocks, and so does resolving a name.
        let socket = run_blocking(move || dial(&endpoint, limit)).await?;
        shake_hands(NbdStream::Plain(Fd::from(socket)), options).await
    };
    with_timeout(limit, connecting).await.map(NbdClient::start)
}

/// Awaits `connecting` with a timeout.
///
/// # Errors
/// Errors of `connecting`, and [`NbdConnectError::TimedOut`].
pub async fn with_timeout<T>(
    limit: Duration,
    connecting: impl Future<Output = Result<T, NbdConnectError>>,
) -> Result<T, NbdConnectError> {
    match timeout(limit, connecting).await {
        Ok(result) => result,
        Err(_) => Err(NbdConnectError::TimedOut(limit.as_secs())),
    }
}

/// Performs the handshake, without a timeout.
///
/// # Errors
/// Fails if the server does not speak NBD, has no such export, or lacks the required TLS.
pub async fn shake_hands(
    stream: NbdStream,
    options: &HandshakeOptions,
) -> Result<EstablishedConnection, NbdConnectError> {
    let (stream, export, inbox) = negotiate(stream, options).await?;
    Ok(EstablishedConnection { stream, export, received: inbox.bytes().to_vec() })
}

impl EstablishedConnection {
    pub(super) fn into_parts(self) -> (NbdStream, NbdExportInfo, ReceiveBuffer) {
        (self.stream, self.export, ReceiveBuffer::with_content(&self.received, 0))
    }
}

pub(super) fn dial(endpoint: &NbdEndpoint, limit: Duration) -> Result<OwnedFd, NbdConnectError> {
    dial_any(&resolve(endpoint)?, limit)
}

/// Resolves the addresses of a server. Blocks.
///
/// # Errors
/// As reported by the system; [`NbdConnectError::NoAddress`] if there are none.
pub fn resolve(endpoint: &NbdEndpoint) -> Result<Vec<NbdAddress>, NbdConnectError> {
    let addresses: Vec<_> = match endpoint {
        NbdEndpoint::Unix(path) => vec![NbdAddress::Unix(path.clone())],
        NbdEndpoint::Tcp { host, port } => {
            (host.as_str(), *port).to_socket_addrs()?.map(NbdAddress::Tcp).collect()
        }
    };
    if addresses.is_empty() { Err(NbdConnectError::NoAddress) } else { Ok(addresses) }
}

/// Connects to the first address that answers. Blocks, for at most `limit` for each.
///
/// # Errors
/// The error of the last address.
pub fn dial_any(addresses: &[NbdAddress], limit: Duration) -> Result<OwnedFd, NbdConnectError> {
    let mut failed = NbdConnectError::NoAddress;
    for address in addresses {
        let dialled = match address {
            NbdAddress::Unix(path) => dial_unix(path, limit),
            NbdAddress::Tcp(address) => dial_tcp(address, limit),
        };
        match dialled {
            Ok(socket) => return Ok(socket),
            Err(error) => failed = NbdConnectError::Io(error),
        }
    }
    Err(failed)
}

/// Connects to a Unix socket. With a full backlog connect(2) waits, for the send timeout at most.
fn dial_unix(path: &PathBuf, limit: Duration) -> std::io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let time = |limit: Duration| TimeVal::new(i64::try_from(limit.as_secs()).unwrap_or(i64::MAX), 0);
    // SO_SNDTIMEO also bounds connect(2) on a Unix socket.
    setsockopt(&socket, sockopt::SendTimeout, &time(limit.max(Duration::from_secs(1))))?;
    connect_to(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    // Zero removes the timeout, which was for connect(2) only.
    setsockopt(&socket, sockopt::SendTimeout, &time(Duration::ZERO))?;
    Ok(UnixStream::from(socket).into())
}

/// Connects over TCP. Keepalive and the user timeout detect a dead host within half a minute.
fn dial_tcp(address: &SocketAddr, limit: Duration) -> std::io::Result<OwnedFd> {
    let socket = TcpStream::connect_timeout(address, limit)?;
    // Requests are sent in batches, so Nagle's algorithm would only add latency.
    socket.set_nodelay(true)?;
    setsockopt(&socket, sockopt::KeepAlive, &true)?;
    setsockopt(&socket, sockopt::TcpKeepIdle, &15)?;
    setsockopt(&socket, sockopt::TcpKeepInterval, &5)?;
    setsockopt(&socket, sockopt::TcpKeepCount, &3)?;
    setsockopt(&socket, sockopt::TcpUserTimeout, &30_000)?;
    Ok(socket.into())
}
