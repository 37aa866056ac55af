//! The HTTP thread: which connections are accepted, and for how long.
//!
//! ```text
//!   accept ─► ConnectionSlots: a free slot ─► TLS, if configured ─► StallTimeout ─► a router
//! ```
//!
//! A connection of Prometheus carries one request and ends after [`SCRAPE_TIMEOUT`] at most,
//! whatever its client does. A connection of the page may carry several requests, and a stream
//! lasts as long as its client reads. Both kinds are bounded in number; a new connection replaces
//! the oldest one that is not a stream. Memory is bounded, and other clients are still served
//! beside a client that sends a byte a second or a thousand idle clients.
//!
//! Never inspects requests.

use std::{io, pin::Pin, sync::Arc, time::Duration};

use axum::Router;
use control::listen::{BoundListener, UriAuthority};
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
    connections::{ConnectionHandle, ConnectionSlots, HttpStream},
    peer::HttpPeer,
    stall_timeout::StallTimeout,
};

/// Prometheus's default scrape timeout.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(10);
/// Scrapers at a time: several may scrape one daemon for redundancy.
const MAX_SCRAPERS: usize = 16;
/// Connections of the page: all streams, and 64 for requests. A browser opens six for one page.
const MAX_PAGE_CONNECTIONS: usize = super::stream::MAX_STREAMS + 64;
/// Largest request head in bytes; hyper's minimum is 8 KiB.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Send buffer of a connection in bytes; the kernel doubles the value (socket(7)).
const SEND_BUFFER_BYTES: usize = 64 << 10;
/// Pause after `accept` failed, for example without free descriptors.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// Listeners and their routes.
pub(super) struct HttpListeners {
    pub(super) listeners: Vec<BoundListener>,
    pub(super) router: Router,
    pub(super) kind: HttpServiceKind,
}

pub(super) enum HttpServiceKind {
    Metrics,
    /// Encrypted, if credentials are set.
    Page(Option<TlsServer>),
}

/// Serves until `stopped` is sent or its sender is dropped. Calls `begin` on the runtime.
pub(super) fn run(
    services: Vec<HttpListeners>,
    begin: impl FnOnce(),
    stopped: oneshot::Receiver<()>,
) -> io::Result<()> {
    // Long responses are written on the runtime's blocking threads.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_io().enable_time().thread_name("metrics").build()?;
    runtime.block_on(async {
        // Dropping a handle removes the socket's file.
        let mut files = Vec::new();
        for HttpListeners { listeners, router, kind } in services {
            let max = match &kind {
                HttpServiceKind::Metrics => MAX_SCRAPERS,
                HttpServiceKind::Page(_) => MAX_PAGE_CONNECTIONS,
            };
            // With few descriptors allowed, the page yields to disks.
            let max = max.min(connection_bound());
            let service = Arc::new(HttpService { router, kind, connections: ConnectionSlots::new(max) });
            for BoundListener { socket, authority, file } in listeners {
                files.push(file);
                let socket = match authority {
                    UriAuthority::Tcp(_) => {
                        let socket = std::net::TcpListener::from(socket);
                        socket.set_nonblocking(true)?;
                        HttpSocket::Tcp(TcpListener::from_std(socket)?)
                    }
                    UriAuthority::Unix(_) | UriAuthority::Unnamed(_) => {
                        let socket = std::os::unix::net::UnixListener::from(socket);
                        socket.set_nonblocking(true)?;
                        HttpSocket::Unix(UnixListener::from_std(socket)?)
                    }
                };
                tokio::spawn(accept(socket, Arc::clone(&service)));
            }
        }
        begin();
        let _ = stopped.await;
        Ok(())
    })
}

/// Bound by descriptors, so that enough remain for disks and their clients.
fn connection_bound() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 4).unwrap_or(usize::MAX)
}

enum HttpSocket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

struct HttpService {
    router: Router,
    kind: HttpServiceKind,
    connections: ConnectionSlots,
}

impl HttpSocket {
    async fn next(&self) -> io::Result<(Box<dyn HttpStream>, HttpPeer)> {
        Ok(match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Best effort: the connection works without these options.
                let _ = stream.set_nodelay(true);
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES);
                // An IPv4 client of a dual-stack socket counts by its IPv4 address.
                (Box::new(stream), HttpPeer::Address(address.ip().to_canonical()))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES);
                let user = stream.peer_cred().ok().map(|peer| peer.uid());
                (Box::new(stream), HttpPeer::User(user))
            }
        })
    }
}

async fn accept(socket: HttpSocket, service: Arc<HttpService>) {
    let mut has_logged = false;
    loop {
        match socket.next().await {
            Ok((stream, peer)) => {
                has_logged = false;
                // Without a free slot the stream is dropped, which closes the connection.
                if let Some(slot) = service.connections.enter() {
                    let (service, connection) = (Arc::clone(&service), slot.connection());
                    let task = tokio::spawn(async move { service.serve(stream, peer, connection).await });
                    slot.occupy(task.abort_handle());
                }
            }
            Err(error) => {
                // Logged once until an accept succeeds.
                if !std::mem::replace(&mut has_logged, true) {
                    tracing::warn!(%error, "HTTP connections cannot be accepted now");
                }
                sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// Performs a TLS handshake.
async fn encrypted(
    stream: Box<dyn HttpStream>,
    keys: &TlsServer,
) -> io::Result<SslStream<Box<dyn HttpStream>>> {
    let mut stream = SslStream::new(keys.ssl()?, stream)?;
    Pin::new(&mut stream).accept().await.map_err(io::Error::other)?;
    Ok(stream)
}

impl HttpService {
    async fn serve(&self, stream: Box<dyn HttpStream>, peer: HttpPeer, connection: ConnectionHandle) {
        match &self.kind {
            HttpServiceKind::Metrics => {
                let session = self.serve_http(stream, false, peer, connection);
                // After the timeout the connection is closed; the response may be incomplete.
                let _ = timeout(SCRAPE_TIMEOUT, session).await;
            }
            HttpServiceKind::Page(None) => self.serve_http(stream, true, peer, connection).await,
            HttpServiceKind::Page(Some(keys)) => {
                // A client whose handshake fails or is slow is disconnected.
                if let Ok(Ok(stream)) = timeout(SCRAPE_TIMEOUT, encrypted(stream, keys)).await {
                    self.serve_http(Box::new(stream), true, peer, connection).await;
                }
            }
        }
    }

    async fn serve_http(
        &self,
        stream: Box<dyn HttpStream>,
        has_more: bool,
        peer: HttpPeer,
        connection: ConnectionHandle,
    ) {
        let mut protocol = http1::Builder::new();
        protocol.timer(TokioTimer::new()).header_read_timeout(SCRAPE_TIMEOUT);
        // Bounds the time and size of a head, against slow clients.
        protocol.keep_alive(has_more).max_buf_size(MAX_HEAD_BYTES);
        let router = TowerToHyperService::new(self.router.clone());
        // Not a layer of the router: layers are applied to each route for each connection, which
        // dominated the cost of a connection.
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            request.extensions_mut().insert(connection.clone());
            router.call(request)
        });
        // After an error the client has a response, or has disconnected.
        let _ = protocol.serve_connection(TokioIo::new(StallTimeout::new(stream)), service).await;
    }
}
