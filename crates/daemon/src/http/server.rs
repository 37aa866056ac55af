//! The thread that answers over HTTP: who may be connected, and for how long.
//!
//! A connection has one request, and lasts [`LONGEST`] at most, whatever its client does. There are
//! [`MOST_CONNECTIONS`] at a time; who comes then takes the place of the one that has been there
//! longest. So neither a client that sends a byte a second nor a thousand that send none keep
//! others from being answered, and memory is bounded.
//!
//! Never looks at what is asked.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::oneshot,
    task::AbortHandle,
    time::{sleep, timeout},
};

use crate::listen::{Authority, Listener};

/// Prometheus gives up after ten seconds, unless it is told otherwise.
const LONGEST: Duration = Duration::from_secs(10);
/// Several may scrape one daemon, where one of them may fail.
const MOST_CONNECTIONS: usize = 16;
/// Of a request's head, in bytes; hyper takes no less than 8 KiB.
const MOST_HEAD: usize = 16 << 10;
/// How long to wait where the process has no descriptor left.
const PAUSE: Duration = Duration::from_secs(1);

/// Answers until `stopped` is heard, or its other end is dropped.
pub(super) fn run(
    listeners: Vec<Listener>,
    router: &Router,
    stopped: oneshot::Receiver<()>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(async {
        let connections = Arc::new(Connections::default());
        // Files of Unix sockets are removed once nobody listens.
        let mut files = Vec::new();
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
            tokio::spawn(accept(socket, router.clone(), Arc::clone(&connections)));
        }
        let _ = stopped.await;
        Ok(())
    })
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Socket {
    async fn next(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

async fn accept(socket: Socket, router: Router, connections: Arc<Connections>) {
    let mut has_said = false;
    loop {
        match socket.next().await {
            Ok(stream) => {
                has_said = false;
                connections.make_room();
                let serving = tokio::spawn(timeout(LONGEST, serve(stream, router.clone())));
                connections.add(serving.abort_handle());
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

async fn serve(stream: Box<dyn Stream>, router: Router) {
    let mut protocol = http1::Builder::new();
    protocol.keep_alive(false).max_buf_size(MOST_HEAD);
    // What a client does wrong is its own affair: it is told so, or has gone.
    let _ = protocol.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await;
}

/// Those that are open, the oldest first.
#[derive(Default)]
struct Connections(Mutex<VecDeque<AbortHandle>>);

impl Connections {
    fn make_room(&self) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|connection| !connection.is_finished());
        while open.len() >= MOST_CONNECTIONS {
            open.pop_front().inspect(AbortHandle::abort);
        }
    }

    fn add(&self, connection: AbortHandle) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_back(connection);
    }
}
