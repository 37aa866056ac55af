//! The HTTP thread: which connections are accepted, and for how long.
//!
//! ```text
//!   accept ─► Connections: a free slot ─► TLS, if configured ─► Patient ─► a router
//! ```
//!
//! A connection of Prometheus carries one request and ends after [`LONGEST`] at most, whatever its
//! client does. A connection of the page may carry several requests, and a stream lasts as long as
//! its client reads. Both kinds are bounded in number; a new connection replaces the oldest one
//! that is not a stream. So neither a client that sends a byte a second nor a thousand idle clients
//! keep the rest out, and memory is bounded.
//!
//! Never inspects requests.

use std::{io, pin::Pin, sync::Arc, time::Duration};

use axum::Router;
use control::listen::{Authority, Listener};
use hyper::{
    Request,
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use rustix::process::{Resource, getrlimit};
use tls::TlsServer;
use tokio::{
    net::{TcpListener, UnixListener},
    sync::oneshot,
    time::{sleep, timeout},
};
use tokio_openssl::SslStream;

use super::{
    connections::{Connection, Connections, Stream},
    patient::Patient,
    peer::Peer,
};

/// Prometheus's default scrape timeout.
const LONGEST: Duration = Duration::from_secs(10);
/// Scrapers at a time: several may scrape one daemon for redundancy.
const MOST_SCRAPERS: usize = 16;
/// Connections of the page: all streams, and 64 for requests. A browser opens six for one page.
const MOST_READERS: usize = super::stream::MOST_STREAMS + 64;
/// Largest request head in bytes; hyper's minimum is 8 KiB.
const MOST_HEAD: usize = 16 << 10;
/// Send buffer of a connection in bytes; the kernel doubles the value (socket(7)).
const MOST_SENT: usize = 64 << 10;
/// Pause after `accept` failed, for example without free descriptors.
const PAUSE: Duration = Duration::from_secs(1);

/// Listeners and their routes.
pub(super) struct Place {
    pub(super) listeners: Vec<Listener>,
    pub(super) router: Router,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    Metrics,
    /// Encrypted, if credentials are set.
    Page(Option<TlsServer>),
}

/// Serves until `stopped` is sent or its sender is dropped. Calls `begin` on the runtime.
pub(super) fn run(
    places: Vec<Place>,
    begin: impl FnOnce(),
    stopped: oneshot::Receiver<()>,
) -> io::Result<()> {
    // Long responses are written on the runtime's blocking threads.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_io().enable_time().thread_name("metrics").build()?;
    runtime.block_on(async {
        // Dropping a handle removes the socket's file.
        let mut files = Vec::new();
        for Place { listeners, router, kind } in places {
            let most = match &kind {
                Kind::Metrics => MOST_SCRAPERS,
                Kind::Page(_) => MOST_READERS,
            };
            // With few descriptors allowed, the page yields to disks.
            let most = most.min(some_descriptors());
            let door = Arc::new(Door { router, kind, connections: Connections::new(most) });
            for Listener { socket, authority, file } in listeners {
                files.push(file);
                let socket = match authority {
                    Authority::Tcp(_) => {
                        let socket = std::net::TcpListener::from(socket);
                        socket.set_nonblocking(true)?;
                        Socket::Tcp(TcpListener::from_std(socket)?)
                    }
                    Authority::Unix(_) | Authority::Unnamed(_) => {
                        let socket = std::os::unix::net::UnixListener::from(socket);
                        socket.set_nonblocking(true)?;
                        Socket::Unix(UnixListener::from_std(socket)?)
                    }
                };
                tokio::spawn(accept(socket, Arc::clone(&door)));
            }
        }
        begin();
        let _ = stopped.await;
        Ok(())
    })
}

/// Bound by descriptors, so that enough remain for disks and their clients.
fn some_descriptors() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 4).unwrap_or(usize::MAX)
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

struct Door {
    router: Router,
    kind: Kind,
    connections: Connections,
}

impl Socket {
    async fn next(&self) -> io::Result<(Box<dyn Stream>, Peer)> {
        Ok(match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Best effort: the connection works without these options.
                let _ = stream.set_nodelay(true);
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, MOST_SENT);
                // An IPv4 client of a dual-stack socket counts by its IPv4 address.
                (Box::new(stream), Peer::Address(address.ip().to_canonical()))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, MOST_SENT);
                let user = stream.peer_cred().ok().map(|peer| peer.uid());
                (Box::new(stream), Peer::User(user))
            }
        })
    }
}

async fn accept(socket: Socket, door: Arc<Door>) {
    let mut has_said = false;
    loop {
        match socket.next().await {
            Ok((stream, peer)) => {
                has_said = false;
                // Without a free slot the stream is dropped, which closes the connection.
                if let Some(place) = door.connections.enter() {
                    let (door, connection) = (Arc::clone(&door), place.connection());
                    let serving = tokio::spawn(async move { door.serve(stream, peer, connection).await });
                    place.fill(serving.abort_handle());
                }
            }
            Err(error) => {
                // Logged once until an accept succeeds.
                if !std::mem::replace(&mut has_said, true) {
                    tracing::warn!(%error, "HTTP connections cannot be accepted now");
                }
                sleep(PAUSE).await;
            }
        }
    }
}

/// Performs a TLS handshake.
async fn encrypted(stream: Box<dyn Stream>, keys: &TlsServer) -> io::Result<SslStream<Box<dyn Stream>>> {
    let mut stream = SslStream::new(keys.ssl()?, stream)?;
    Pin::new(&mut stream).accept().await.map_err(io::Error::other)?;
    Ok(stream)
}

impl Door {
    async fn serve(&self, stream: Box<dyn Stream>, peer: Peer, connection: Connection) {
        match &self.kind {
            Kind::Metrics => {
                let whole = self.answer(stream, false, peer, connection);
                // After the timeout the connection is closed; the response may be incomplete.
                let _ = timeout(LONGEST, whole).await;
            }
            Kind::Page(None) => self.answer(stream, true, peer, connection).await,
            Kind::Page(Some(keys)) => {
                // A client whose handshake fails or is slow is disconnected.
                if let Ok(Ok(stream)) = timeout(LONGEST, encrypted(stream, keys)).await {
                    self.answer(Box::new(stream), true, peer, connection).await;
                }
            }
        }
    }

    async fn answer(&self, stream: Box<dyn Stream>, has_more: bool, peer: Peer, connection: Connection) {
        let mut protocol = http1::Builder::new();
        protocol.timer(TokioTimer::new()).header_read_timeout(LONGEST);
        // Bounds the time and size of a head, against slow clients.
        protocol.keep_alive(has_more).max_buf_size(MOST_HEAD);
        let router = TowerToHyperService::new(self.router.clone());
        // Not a layer of the router: layers are applied to each route for each connection, which
        // dominated the cost of a connection.
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            request.extensions_mut().insert(connection.clone());
            router.call(request)
        });
        // After an error the client has a response, or has disconnected.
        let _ = protocol.serve_connection(TokioIo::new(Patient::new(stream)), service).await;
    }
}
