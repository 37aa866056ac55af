//! A place where clients connect: a server with its listening sockets, accepting on the main
//! thread.
//!
//! Ends in two steps, because the daemon closes all servers before it waits for the clients of any:
//! [`Serving::close`], then [`Serving::stop`].

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use anyhow::anyhow;
use export::nbd;
use reactor::{JoinHandle, ReactorWorker, operation::Fd};
use settings::{ListenEndpoint, TlsConfig};

use crate::listen::{self, Authority, Listener, Listening, SocketFile};

/// An NBD server with its sockets.
pub struct Serving {
    /// What it was to listen at.
    pub endpoint: ListenEndpoint,
    /// By a client of the control socket: no config has it.
    pub(crate) added: Cell<Option<Added>>,
    /// For disks that are added and do not say where: whether they are read-only here.
    pub standard: Cell<Option<bool>>,
    authorities: Vec<Authority>,
    /// The server.
    pub server: Arc<nbd::NbdServer>,
    /// Those where nobody is let in yet.
    closed: RefCell<Vec<Listener>>,
    /// Dropping one ends the accepting and removes the socket's file.
    accepting: RefCell<Vec<Accepting>>,
    /// The threads end, and the clients with them, once nobody holds these.
    workers: Rc<Vec<ReactorWorker>>,
}

/// What was said of a server that was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Added {
    pub(crate) max_connections: usize,
    /// It asks clients for TLS, with keys or rules that are objects of this daemon.
    pub(crate) has_objects: bool,
}

/// A socket where clients are let in.
struct Accepting {
    _task: JoinHandle<()>,
    file: Option<SocketFile>,
    socket: Fd,
}

impl Serving {
    /// Lets nobody in yet: clients that connect wait in the sockets' queues.
    pub fn new(
        server: Arc<nbd::NbdServer>,
        endpoint: ListenEndpoint,
        listeners: Vec<Listener>,
        workers: &Rc<Vec<ReactorWorker>>,
    ) -> Rc<Self> {
        let authorities = listeners.iter().map(|listener| listener.authority.clone()).collect();
        Rc::new(Self {
            endpoint,
            added: Cell::new(None),
            standard: Cell::new(None),
            authorities,
            server,
            closed: RefCell::new(listeners),
            accepting: RefCell::default(),
            workers: Rc::clone(workers),
        })
    }

    /// Lets clients in. Calls `broken` if accepting ends before it should.
    pub(crate) fn accept(&self, broken: impl Fn(anyhow::Error) + Clone + 'static) {
        let accept = |Listener { socket, file, .. }| {
            let (server, workers, broken) =
                (Arc::clone(&self.server), Rc::clone(&self.workers), broken.clone());
            let socket = Fd::from(socket);
            let listening = socket.clone();
            let task = reactor::spawn_joinable(async move {
                if let Err(error) = server.listen(listening, workers).await {
                    broken(anyhow!("connections cannot be accepted any more: {error} (restart weir)"));
                }
            });
            Accepting { _task: task, file, socket }
        };
        self.accepting.borrow_mut().extend(self.closed.take().into_iter().map(accept));
    }

    /// Where it listens, as text: `unix:PATH` or `HOST:PORT`, the first where there are several.
    pub fn address(&self) -> String {
        self.authorities.first().map(Authority::to_string).unwrap_or_default()
    }

    /// What a config file calls it; none where it has no words for it.
    pub(crate) fn written(&self) -> Option<String> {
        (self.endpoint != ListenEndpoint::Inherited).then(|| self.endpoint.absolute().to_string())
    }

    /// Whether it is the one at this address, as text, however a path to its socket is spelled.
    pub(crate) fn is_at(&self, address: &str) -> bool {
        let is_there = |at: &str| listen::is_same_place(at, address);
        is_there(&self.address()) || self.written().as_deref().is_some_and(is_there)
    }

    /// Its sockets while it accepts, each with its file if it has made one.
    pub(crate) fn sockets(&self) -> Vec<Listening> {
        let path = |file: &Option<SocketFile>| file.as_ref().map(|file| file.path().to_owned());
        let accepting = self.accepting.borrow();
        accepting.iter().map(|Accepting { file, socket, .. }| (socket.clone(), path(file))).collect()
    }

    pub(crate) fn uris(&self, export: &str, tls: &TlsConfig) -> Vec<String> {
        let mut uris: Vec<_> = self.authorities.iter().map(|authority| authority.uri(export, tls)).collect();
        // A host name may stand for two addresses.
        uris.dedup();
        uris
    }

    /// Lets nobody in any more, and removes the files of its sockets.
    pub fn close(&self) {
        self.closed.take();
        self.accepting.take();
    }

    /// Lets every client finish what it has in flight; returns when the last is gone.
    pub async fn stop(&self) {
        self.close();
        self.server.stop().await;
    }
}
