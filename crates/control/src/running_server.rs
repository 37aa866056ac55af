//! NBD server with its listening sockets, accepting on the main thread.
//!
//! Ends in two steps, because the daemon closes all servers before it waits for the clients of any:
//! [`RunningServer::close`], then the end of all sessions.

use std::{
    cell::{Cell, RefCell},
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd as _, OwnedFd},
    rc::Rc,
    sync::Arc,
};

use ::nbd::client::NbdEndpoint;
use anyhow::anyhow;
use export::nbd;
use reactor::{JoinHandle, ReactorWorker, operation::Fd};
use settings::{ListenEndpoint, TlsConfig};

use crate::listen::{self, BoundListener, ListeningSocket, SocketFile, UriAuthority};

/// NBD server with its sockets.
pub struct RunningServer {
    /// Configured endpoint.
    pub endpoint: ListenEndpoint,
    /// Set if a client of the control socket added it and it is in no config file.
    pub(crate) added: Cell<Option<AddedServer>>,
    /// Set for servers of disks without explicit exports: true if these are read-only here.
    pub default_for_disks: Cell<Option<bool>>,
    authorities: Vec<UriAuthority>,
    /// The server.
    pub server: Arc<nbd::NbdServer>,
    /// Sockets that do not accept clients yet.
    not_accepting: RefCell<Vec<BoundListener>>,
    /// Accepting sockets. Dropping one stops the accepting and removes its socket file.
    accepting: RefCell<Vec<AcceptingSocket>>,
    /// Keeps the worker threads alive; they end, and their clients with them, after the last
    /// reference is dropped.
    workers: Rc<Vec<ReactorWorker>>,
}

/// Options of a server that a client added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddedServer {
    pub(crate) max_connections: usize,
    /// True if its TLS credentials or rules are objects of this daemon.
    pub(crate) has_objects: bool,
}

/// True if a client of this endpoint reaches a socket with this address.
fn reaches(endpoint: &NbdEndpoint, bound: SocketAddr) -> bool {
    let NbdEndpoint::Tcp { host, port } = endpoint else { return false };
    let address = host.parse::<IpAddr>().ok().map(|address| address.to_canonical());
    let is_loopback = host == "localhost" || address.is_some_and(|address| address.is_loopback());
    let own = bound.ip().to_canonical();
    // A wildcard accepts clients of every address of this host.
    let is_same = address == Some(own)
        || (is_loopback && own.is_unspecified())
        || (host == "localhost" && own.is_loopback());
    *port == bound.port() && is_same
}

/// Accepting socket.
struct AcceptingSocket {
    _task: JoinHandle<()>,
    file: Option<SocketFile>,
    socket: Fd,
}

impl RunningServer {
    /// Server that does not accept yet: connecting clients wait in the backlog.
    pub fn new(
        server: Arc<nbd::NbdServer>,
        endpoint: ListenEndpoint,
        listeners: Vec<BoundListener>,
        workers: &Rc<Vec<ReactorWorker>>,
    ) -> Rc<Self> {
        let authorities = listeners.iter().map(|listener| listener.authority.clone()).collect();
        Rc::new(Self {
            endpoint,
            added: Cell::new(None),
            default_for_disks: Cell::new(None),
            authorities,
            server,
            not_accepting: RefCell::new(listeners),
            accepting: RefCell::default(),
            workers: Rc::clone(workers),
        })
    }

    /// Starts accepting. Calls `broken` if accepting ends with an error.
    pub(crate) fn accept(&self, broken: impl Fn(anyhow::Error) + Clone + 'static) {
        let accept = |BoundListener { socket, file, .. }| {
            let (server, workers, broken) =
                (Arc::clone(&self.server), Rc::clone(&self.workers), broken.clone());
            let socket = Fd::from(socket);
            let listening = socket.clone();
            let task = reactor::spawn_joinable(async move {
                if let Err(error) = server.listen(listening, workers).await {
                    broken(anyhow!("connections cannot be accepted any more: {error} (restart weir)"));
                }
            });
            AcceptingSocket { _task: task, file, socket }
        };
        // Idempotent: `not_accepting` is empty after the first call.
        self.accepting.borrow_mut().extend(self.not_accepting.take().into_iter().map(accept));
    }

    /// Address as text: `unix:PATH` or `HOST:PORT`; the first of several.
    pub fn address(&self) -> String {
        self.authorities.first().map(UriAuthority::to_string).unwrap_or_default()
    }

    /// Address in the syntax of a config file; `None` for inherited sockets, which have none.
    pub(crate) fn config_address(&self) -> Option<String> {
        (self.endpoint != ListenEndpoint::Inherited).then(|| self.endpoint.absolute().to_string())
    }

    /// True if this server listens at the address, for any spelling of a socket's path.
    pub(crate) fn listens_at(&self, address: &str) -> bool {
        let listens = |at: &str| listen::is_same_address(at, address);
        listens(&self.address()) || self.config_address().as_deref().is_some_and(listens)
    }

    /// True if a client of this NBD endpoint reaches this server, as far as the addresses show it.
    /// Host names other than `localhost` are compared as text.
    pub(crate) fn is_reached_at(&self, endpoint: &NbdEndpoint) -> bool {
        let address = match endpoint {
            NbdEndpoint::Unix(path) => format!("unix:{}", path.display()),
            NbdEndpoint::Tcp { host, port } if host.contains(':') => format!("[{host}]:{port}"),
            NbdEndpoint::Tcp { host, port } => format!("{host}:{port}"),
        };
        let is_listed =
            self.authorities.iter().any(|own| listen::is_same_address(&own.to_string(), &address));
        is_listed || self.listens_at(&address) || self.bound_addresses().any(|own| reaches(endpoint, own))
    }

    /// Addresses of accepting TCP sockets.
    fn bound_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.sockets().into_iter().filter_map(|(socket, _)| {
            TcpListener::from(socket.as_fd().try_clone_to_owned().ok()?).local_addr().ok()
        })
    }

    /// Accepting sockets, with the paths of the socket files that weir created.
    pub(crate) fn sockets(&self) -> Vec<ListeningSocket> {
        let path = |file: &Option<SocketFile>| file.as_ref().map(|file| file.path().to_owned());
        let accepting = self.accepting.borrow();
        accepting.iter().map(|AcceptingSocket { file, socket, .. }| (socket.clone(), path(file))).collect()
    }

    /// Another descriptor of the first socket.
    pub(crate) fn try_clone_socket(&self) -> Option<OwnedFd> {
        let not_accepting = self.not_accepting.borrow().first().map(|listener| listener.socket.try_clone());
        let accepting = || Some(self.accepting.borrow().first()?.socket.as_fd().try_clone_to_owned());
        not_accepting.or_else(accepting)?.ok()
    }

    pub(crate) fn uris(&self, export: &str, tls: &TlsConfig) -> Vec<String> {
        let mut uris: Vec<_> = self.authorities.iter().map(|authority| authority.uri(export, tls)).collect();
        // A host name may have resolved to two addresses with equal URIs.
        uris.dedup();
        uris
    }

    /// Stops accepting, and removes the socket files.
    pub fn close(&self) {
        self.not_accepting.take();
        self.accepting.take();
    }

    /// Drains all clients; returns after the last one has disconnected.
    pub async fn stop(&self) {
        self.close();
        self.server.stop().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_reach_addresses_and_wildcards_of_this_host() {
        for (host, port, bound, expected) in [
            ("127.0.0.1", 7, "127.0.0.1:7", true),
            ("127.0.0.1", 8, "127.0.0.1:7", false),
            ("localhost", 7, "127.0.0.1:7", true),
            ("localhost", 7, "[::1]:7", true),
            ("::1", 7, "[::]:7", true),
            ("127.0.0.1", 7, "0.0.0.0:7", true),
            ("192.0.2.1", 7, "192.0.2.1:7", true),
            ("192.0.2.1", 7, "127.0.0.1:7", false),
            ("::ffff:127.0.0.1", 7, "127.0.0.1:7", true),
            ("backup-host", 7, "127.0.0.1:7", false),
        ] {
            let endpoint = NbdEndpoint::Tcp { host: host.to_owned(), port };
            let bound = bound.parse().expect("an address");
            assert_eq!(reaches(&endpoint, bound), expected, "{host}:{port} at {bound}");
        }
    }
}
