//! The thread that answers over HTTP: who may be connected, and for how long.
//!
//! ```text
//!   accept ─► Connections: room for one more ─► TLS, where there is ─► Patient ─► a router
//! ```
//!
//! Prometheus's connections have one request, and last [`LONGEST`] at most, whatever their clients
//! do. The page's may have more, one after the other, and those of its streams last as long as
//! their clients read. There is a number of either at a time; who comes then takes the place of the
//! one that has been there longest, of those that are no streams. So neither a client that sends a
//! byte a second nor a thousand that send none keep others from being answered, and memory is
//! bounded.
//!
//! Never looks at what is asked.

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

/// Prometheus gives up after ten seconds, unless it is told otherwise.
const LONGEST: Duration = Duration::from_secs(10);
/// Several may scrape one daemon, where one of them may fail.
const MOST_SCRAPERS: usize = 16;
/// Those of the page: streams, and as many again that ask. A browser opens six for one page.
const MOST_READERS: usize = super::stream::MOST_STREAMS + 64;
/// Of a request's head, in bytes; hyper takes no less than 8 KiB.
const MOST_HEAD: usize = 16 << 10;
/// What the kernel may have of a connection's answers, in bytes; it doubles the figure (socket(7)).
const MOST_SENT: usize = 64 << 10;
/// How long to wait where the process has no descriptor left.
const PAUSE: Duration = Duration::from_secs(1);

/// What is behind an address.
pub(super) struct Place {
    pub(super) listeners: Vec<Listener>,
    pub(super) router: Router,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    Metrics,
    /// Encrypted, if there are keys.
    Page(Option<TlsServer>),
}

/// Answers until `stopped` is heard, or its other end is dropped. Calls `begin` on the runtime.
pub(super) fn run(
    places: Vec<Place>,
    begin: impl FnOnce(),
    stopped: oneshot::Receiver<()>,
) -> io::Result<()> {
    // The other threads of it write long answers.
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_io().enable_time().thread_name("metrics").build()?;
    runtime.block_on(async {
        // Files of Unix sockets are removed once nobody listens.
        let mut files = Vec::new();
        for Place { listeners, router, kind } in places {
            let most = match &kind {
                Kind::Metrics => MOST_SCRAPERS,
                Kind::Page(_) => MOST_READERS,
            };
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

/// Whoever reads here may not take those that disks and their clients need.
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
                // Without these it works as well.
                let _ = stream.set_nodelay(true);
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, MOST_SENT);
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
                if let Some(place) = door.connections.enter() {
                    let (door, connection) = (Arc::clone(&door), place.connection());
                    let serving = tokio::spawn(async move { door.serve(stream, peer, connection).await });
                    place.fill(serving.abort_handle());
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut has_said, true) {
                    tracing::warn!(%error, "connections over HTTP cannot be accepted now");
                }
                sleep(PAUSE).await;
            }
        }
    }
}

/// The stream under TLS, once the handshake is complete.
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
                // It has been told what there was time for.
                let _ = timeout(LONGEST, whole).await;
            }
            Kind::Page(None) => self.answer(stream, true, peer, connection).await,
            Kind::Page(Some(keys)) => {
                // Whoever cannot, or does not hurry, has gone.
                if let Ok(Ok(stream)) = timeout(LONGEST, encrypted(stream, keys)).await {
                    self.answer(Box::new(stream), true, peer, connection).await;
                }
            }
        }
    }

    async fn answer(&self, stream: Box<dyn Stream>, has_more: bool, peer: Peer, connection: Connection) {
        let mut protocol = http1::Builder::new();
        protocol.timer(TokioTimer::new()).header_read_timeout(LONGEST);
        protocol.keep_alive(has_more).max_buf_size(MOST_HEAD);
        let router = TowerToHyperService::new(self.router.clone());
        // Not by layers: those are put around each route, for each connection anew, and that was
        // most of what a connection cost.
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            request.extensions_mut().insert(connection.clone());
            router.call(request)
        });
        // What a client does wrong is its own affair: it is told so, or has gone.
        let _ = protocol.serve_connection(TokioIo::new(Patient::new(stream)), service).await;
    }
}
