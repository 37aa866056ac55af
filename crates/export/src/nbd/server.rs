//! An NBD server: listening sockets, their exports, and access control.
//!
//! ```text
//!   listener ─► accept ─► free slot? address allowed? ─► next worker ─► handshake (with a deadline) ─► connection
//! ```
//!
//! One reactor accepts; each connection then stays on one worker thread. Exports are added and
//! removed while the server runs.

mod connected_clients;
mod handshake;

use std::{
    collections::HashMap,
    future::{Future, poll_fn},
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    pin::pin,
    rc::Rc,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::Poll,
};

use event_listener::Event;
use policy::{
    access::{AccessRules, ClientIdentity},
    time::Duration,
};

use self::connected_clients::{ConnectedClient, ConnectedClients};
use super::{
    admission::{self, NbdAccessControl, RejectedClientCounts},
    catalog::ExportInfo,
    client_observer::{ClientObserver, NbdClientInfo},
    connection::NbdConnection,
    exports::{NbdServerExport, RegisteredExports},
    quiesce::{ArrivalGuard, ConnectionQuiesce, QuiesceStage, QuiescedNbdConnection},
    receive_buffer::ReceiveBuffer,
    session::NbdSession,
    stop_signal::StopSignal,
    stream::NbdStream,
    transfers::ClientTransfers,
};
use crate::{peer_process::PeerProcess, trim};
use reactor::{
    ReactorWorker,
    log_rate_limit::LogRateLimit,
    memory::{ConnectionMemory, MemoryBudget},
    operation::{self, Fd},
    select::first,
};
use tls::TlsServer;

/// Bounds and access rules of a server.
#[derive(Clone, Debug)]
pub struct NbdServerTerms {
    /// Largest number of connections, 0 for no bound; further clients wait in the listener's queue.
    pub max_connections: usize,
    /// Largest number of connections of one address, 0 for no bound; further ones are closed.
    /// `None`: nine tenths of `max_connections`, so that one address cannot shut out all others and
    /// one host with many virtual machines is served.
    pub max_of_one_address: Option<usize>,
    /// Clients that may connect.
    pub access: AccessRules,
    /// Time for the whole handshake, TLS included.
    pub handshake_timeout: Duration,
    /// Observer of clients that connect and disconnect.
    pub observer: Option<Arc<dyn ClientObserver>>,
}

impl Default for NbdServerTerms {
    /// QEMU's defaults: 100 connections, a handshake timeout of 10 seconds.
    fn default() -> Self {
        Self {
            max_connections: 100,
            max_of_one_address: None,
            access: AccessRules::default(),
            handshake_timeout: Duration::from_secs(10),
            observer: None,
        }
    }
}

impl NbdServerTerms {
    pub(super) fn max_connections_per_address(&self) -> usize {
        match (self.max_of_one_address, self.max_connections) {
            (Some(0), _) | (None, 0) => usize::MAX,
            (Some(limit), _) => limit,
            (None, limit) => limit - limit / 10,
        }
    }
}

/// TLS settings of a server.
#[derive(Clone, Debug)]
pub struct NbdServerTls {
    /// Reject every client that does not start TLS.
    pub required: bool,
    /// Certificates or pre-shared keys.
    pub keys: TlsServer,
}

/// Exports behind one or more listening sockets.
#[derive(Debug)]
pub struct NbdServer {
    /// Lock order: `exports` before `connections`.
    exports: RwLock<RegisteredExports>,
    tls: Option<NbdServerTls>,
    terms: NbdServerTerms,
    admission: NbdAccessControl,
    stopping: AtomicBool,
    pub(super) quiesce_state: Arc<ConnectionQuiesce>,
    served: AtomicBool,
    connections: Mutex<ConnectedClients>,
    next_number: AtomicU64,
    /// Slots in use. `freed` is notified of every change, and when a client finishes its
    /// handshake.
    used_slots: AtomicUsize,
    freed: Event,
    endings: LogRateLimit,
    refusals: LogRateLimit,
}

/// Treatment of the connected clients of an export that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Do not remove the export while it has clients.
    IfUnused,
    /// Disconnect them: requests in flight are completed, requests that wait for limits are
    /// dropped.
    Hard,
}

/// Failure to remove an export.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotRemoved {
    #[error("there is no such export")]
    Unknown,
    #[error("clients are connected to it: {connections}")]
    InUse { connections: usize },
}

impl NbdServer {
    /// A server without exports: see [`NbdServer::add`].
    pub fn new(tls: Option<NbdServerTls>, terms: NbdServerTerms) -> Arc<Self> {
        Arc::new(Self {
            exports: RwLock::default(),
            tls,
            admission: NbdAccessControl::new(terms.access.clone(), terms.max_connections_per_address()),
            terms,
            stopping: AtomicBool::new(false),
            quiesce_state: Arc::default(),
            served: AtomicBool::new(false),
            connections: Mutex::default(),
            next_number: AtomicU64::new(1),
            used_slots: AtomicUsize::new(0),
            freed: Event::new(),
            endings: LogRateLimit::default(),
            refusals: LogRateLimit::default(),
        })
    }

    /// Reserves numbers for exports with these names, in this order. The first reserved one is the
    /// default export even before it is added.
    pub fn reserve(&self, names: impl Iterator<Item = String>) {
        self.exports.write().unwrap_or_else(PoisonError::into_inner).reserve(names);
    }

    /// Reserves the former number of a removed export that will be added again under this name.
    pub fn reserve_again(&self, name: &str, number: usize) {
        self.exports.write().unwrap_or_else(PoisonError::into_inner).reserve_again(name, number);
    }

    /// Releases the number reserved for this name.
    pub fn release_reserved(&self, name: &str) {
        self.exports.write().unwrap_or_else(PoisonError::into_inner).release(name);
    }

    /// Offers `export` and returns its number; `None` if the name is in use. The default export is
    /// the one named "", or the oldest.
    pub fn add(&self, export: NbdServerExport) -> Option<usize> {
        self.exports.write().unwrap_or_else(PoisonError::into_inner).add(export)
    }

    /// Stops offering an export. [`NbdServer::wait_until_unused`] waits for its disconnected
    /// clients.
    ///
    /// # Errors
    /// [`NotRemoved`]; the export stays, and its clients are not disturbed.
    pub fn remove(&self, export: usize, removal: Removal) -> Result<(), NotRemoved> {
        // While this lock is held, no handshake can choose the export: see
        // `NbdServer::choose_export`.
        let mut exports = self.exports.write().unwrap_or_else(PoisonError::into_inner);
        if exports.get(export).is_none() {
            return Err(NotRemoved::Unknown);
        }
        let live = self.lock();
        let connections = live.count_of(export);
        if removal == Removal::IfUnused && connections > 0 {
            return Err(NotRemoved::InUse { connections });
        }
        exports.remove(export);
        for (_, client) in live.iter().filter(|(_, live)| live.export() == Some(export)) {
            // The connection sees a hard disconnect. Fails if the client has already closed.
            let _ = nix::sys::socket::shutdown(raw(&client.socket), nix::sys::socket::Shutdown::Both);
        }
        Ok(())
    }

    /// Waits until no client is connected to the export.
    pub async fn wait_until_unused(&self, export: usize) {
        self.wait_while(|server| server.connections_of(export) > 0).await;
    }

    /// True if a client has ever chosen an export.
    pub fn has_served(&self) -> bool {
        self.served.load(Ordering::SeqCst)
    }

    /// Waits until `busy` is false; `busy` is evaluated now and whenever a client has disconnected.
    pub async fn wait_while(&self, busy: impl Fn(&Self) -> bool) {
        loop {
            // Listens before the check, or the last disconnect could happen in between.
            let freed = self.freed.listen();
            if !busy(self) {
                return;
            }
            freed.await;
        }
    }

    /// Number of clients connected to the export.
    pub fn connections_of(&self, export: usize) -> usize {
        self.lock().count_of(export)
    }

    /// First few clients of the export for messages, with their addresses or processes: `client 7
    /// of 192.0.2.1`, `client 8 of qemu-io (123)`.
    pub fn clients_of(&self, export: usize) -> String {
        let mut clients: Vec<_> = self
            .lock()
            .iter()
            .filter(|(_, live)| live.export() == Some(export))
            .map(|(number, live)| (number, live.address, live.socket.clone()))
            .collect();
        clients.sort_by_key(|(number, ..)| *number);
        let more = clients.len().saturating_sub(MAX_NAMED_CLIENTS);
        let named = clients.into_iter().take(MAX_NAMED_CLIENTS).map(|(number, address, socket)| {
            let owner = match address {
                Some(address) => Some(address.to_string()),
                None => PeerProcess::of_peer(&socket).map(|process| process.to_string()),
            };
            format!("client {number}{}", owner.map(|owner| format!(" of {owner}")).unwrap_or_default())
        });
        let named = named.collect::<Vec<_>>().join(", ");
        if more == 0 { named } else { format!("{named} and {more} more") }
    }

    /// Number of clients of each export that has any, at one instant.
    pub fn connections_by_export(&self) -> HashMap<usize, usize> {
        self.lock().counts().clone()
    }

    /// Counts connection `number` to its export; false if the export was removed meanwhile.
    fn choose_export(&self, export: usize, number: u64, client: &ClientIdentity) -> bool {
        let exports = self.exports();
        let Some(chosen) = exports.get(export) else { return false };
        let client_info = self.client_info(chosen, number, client);
        let is_connected = self.lock().choose(number, export, client_info.clone());
        // Dropped after the client is counted: see `NbdServer::remove`.
        drop(exports);
        if is_connected {
            self.served.store(true, Ordering::SeqCst);
            self.freed.notify(usize::MAX);
            if let (Some(observer), Some(client_info)) = (&self.terms.observer, client_info) {
                observer.connected(&client_info);
            }
        }
        true
    }

    /// `None` if there is no observer.
    fn client_info(
        &self,
        export: &NbdServerExport,
        number: u64,
        client: &ClientIdentity,
    ) -> Option<Box<NbdClientInfo>> {
        self.terms.observer.as_ref()?;
        let (disk, export) = (Arc::clone(export.disk.name()), Arc::clone(&export.name));
        Some(Box::new(NbdClientInfo {
            number,
            export,
            disk,
            address: client.address,
            name: client.name.clone(),
        }))
    }

    /// Accepts connections and assigns them to `workers` in turn, until [`NbdServer::stop`].
    ///
    /// # Errors
    /// Fails if `accept(2)` cannot work on this socket.
    pub async fn listen(self: Arc<Self>, listener: Fd, workers: Rc<Vec<ReactorWorker>>) -> io::Result<()> {
        let mut next_worker = 0;
        loop {
            // The slot is taken before the client is accepted, so that excess clients wait in the
            // kernel.
            let Some(mut slot) = ConnectionSlot::take(&self, &listener).await else { return Ok(()) };
            let (socket, arrival_guard) = loop {
                let Some((socket, arrival_guard)) = self.accept(&listener).await? else { return Ok(()) };
                if slot.is_for(&socket) {
                    break (socket, arrival_guard);
                }
            };
            // After accept, because the kernel has already completed the connection: an accepted
            // client waits here, and no further one is accepted meanwhile.
            let Some(memory) = self.connection_memory(CONNECTION_BYTES).await else { continue };
            slot.memory = Some(memory);
            workers[next_worker % workers.len()].spawn(move || slot.serve_in_slot(socket, arrival_guard));
            next_worker += 1;
        }
    }

    /// Charges `bytes` for an accepted connection or for its TLS; waits while memory is used up.
    /// Meanwhile it disconnects clients that have not finished their handshake in time, at most one
    /// for each client that leaves and one in each [`HANDSHAKE_GRACE`]. `None` if the server stops,
    /// or stops accepting, before memory is available.
    async fn connection_memory(&self, bytes: u64) -> Option<ConnectionMemory> {
        loop {
            let freed = self.freed.listen();
            if let Some(memory) = ConnectionMemory::new(MemoryBudget::process(), bytes) {
                return Some(memory);
            }
            if self.stopping.load(Ordering::SeqCst) || self.quiesce_state.stage() != QuiesceStage::Open {
                return None;
            }
            if let Some(suppressed) = self.refusals.try_log(reactor::coarse_now()) {
                tracing::warn!(
                    suppressed,
                    "a client waits for a connection: the memory budget is exhausted (raise \
                     --memory)"
                );
            }
            // Memory is also returned by others than the clients of this server, so the wait is
            // bounded.
            let next_look = self.disconnect_oldest().unwrap_or(HANDSHAKE_GRACE);
            let changed =
                first(freed, self.quiesce_state.wait_for_stage(|stage| stage != QuiesceStage::Open));
            let _ = reactor::timeout(next_look, changed).await;
        }
    }

    /// Accepts the next client; `None` when the server stops.
    ///
    /// While file descriptors or memory are short it retries once a second, or when a client
    /// disconnects, and logs the state once. It holds the caller's slot meanwhile: freeing it
    /// would notify `freed`, which this function waits for.
    async fn accept(&self, listener: &Fd) -> io::Result<Option<(OwnedFd, ArrivalGuard)>> {
        let (mut failures, mut was_logged) = (0_u64, false);
        loop {
            let freed = self.freed.listen();
            let stage = self
                .quiesce_state
                .wait_for_stage(|stage| matches!(stage, QuiesceStage::Open | QuiesceStage::HandedOver))
                .await;
            if stage == QuiesceStage::HandedOver {
                return Ok(None);
            }
            let arrival_guard = self.quiesce_state.arriving();
            let socket = match operation::has_client_descriptors() {
                true => self.accept_while_open(listener).await,
                false => Err(io::Error::from_raw_os_error(libc::EMFILE)),
            };
            match socket {
                Ok(socket) => {
                    if was_logged {
                        tracing::info!(failures, "connections are accepted again");
                    }
                    return Ok(Some((socket, arrival_guard)));
                }
                Err(_) if self.stopping.load(Ordering::SeqCst) => return Ok(None),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EFAULT | libc::EOPNOTSUPP) => {
                        return Err(error);
                    }
                    // The server has stopped accepting for now.
                    Some(libc::ECANCELED) => {}
                    // The client closed before it was accepted.
                    Some(libc::ECONNABORTED | libc::EINTR | libc::EPROTO | libc::EAGAIN) => {}
                    // Short of descriptors or memory, a network error, a firewall: transient.
                    _ => {
                        if failures == 0
                            && let Some(suppressed) = self.refusals.try_log(reactor::coarse_now())
                        {
                            was_logged = true;
                            tracing::warn!(
                                %error, suppressed,
                                "cannot accept connections, retrying every second"
                            );
                        }
                        failures += 1;
                        drop(arrival_guard);
                        let _ = reactor::timeout(Duration::from_secs(1), freed).await;
                    }
                },
            }
        }
    }

    /// Accepts the next client; fails with `ECANCELED` when the server leaves
    /// [`QuiesceStage::Open`].
    async fn accept_while_open(&self, listener: &Fd) -> io::Result<OwnedFd> {
        let mut accepting = pin!(operation::accept(listener));
        let mut closed = pin!(self.quiesce_state.wait_for_stage(|stage| stage != QuiesceStage::Open));
        let mut was_closed = false;
        poll_fn(|context| {
            // The accept first: a client that has just been accepted must not be lost to the
            // interrupt.
            if let Poll::Ready(accepted) = accepting.as_mut().poll(context) {
                return Poll::Ready(accepted);
            }
            if !was_closed && closed.as_mut().poll(context).is_ready() {
                was_closed = true;
                operation::cancel_all_on(listener);
            }
            Poll::Pending
        })
        .await
    }

    /// Stops accepting, so that clients wait in the listeners' queues, and waits until every
    /// handshake has finished; clients that are still in their handshake after the timeout are
    /// disconnected. Continue with [`NbdServer::quiesce`] or [`NbdServer::resume`].
    pub async fn stop_accepting(&self, timeout: Duration) {
        self.quiesce_state.set(QuiesceStage::NotAccepting);
        let finished = async {
            loop {
                let (freed, changed) = (self.freed.listen(), self.quiesce_state.listen_to_progress());
                if self.quiesce_state.has_no_arrivals() && self.lock().oldest_unfinished().is_none() {
                    return;
                }
                first(freed, changed).await;
            }
        };
        if reactor::timeout(timeout, finished).await.is_err() {
            for live in self.lock().unfinished() {
                let _ = nix::sys::socket::shutdown(raw(&live.socket), nix::sys::socket::Shutdown::Both);
            }
        }
    }

    /// Quiesces every connection: requests in flight are completed and answered, requests that wait
    /// for limits are kept without being started. Returns false after the timeout.
    pub async fn quiesce(&self, timeout: Duration) -> bool {
        self.quiesce_state.set(QuiesceStage::Quiescing);
        reactor::timeout(timeout, async {
            loop {
                let (freed, changed) = (self.freed.listen(), self.quiesce_state.listen_to_progress());
                if self.quiesce_state.has_no_arrivals()
                    && self.quiesce_state.lock_quiesced_states().len() == self.connections()
                {
                    return;
                }
                first(freed, changed).await;
            }
        })
        .await
        .is_ok()
    }

    /// State of every quiesced connection with its export's name, in the order of arrival.
    pub fn quiesced_state(&self) -> Vec<(Arc<str>, QuiescedNbdConnection)> {
        let exports = self.exports();
        let states = self.quiesce_state.lock_quiesced_states();
        // Ascending numbers are the order of arrival, which the new process keeps.
        let mut numbers: Vec<_> = states.keys().copied().collect();
        numbers.sort_unstable();
        let named = |number: u64| {
            let state = states.get(&number)?.clone()?;
            Some((Arc::clone(&exports.get(state.session.export)?.name), state))
        };
        numbers.into_iter().filter_map(named).collect()
    }

    /// Resumes after [`NbdServer::stop_accepting`] or [`NbdServer::quiesce`].
    pub fn resume(&self) {
        self.quiesce_state.set(QuiesceStage::Open);
    }

    /// Ends after an upgrade: closes the connections that cannot be transferred, those with TLS,
    /// before it returns. Sockets without TLS are not touched.
    pub async fn hand_over(&self) {
        self.quiesce_state.set(QuiesceStage::HandedOver);
        let _ = reactor::timeout(STOP_TIMEOUT, self.wait_while(|server| server.connections() > 0)).await;
    }

    /// Continues with a client of another process, on `worker`. Its session must name an export of
    /// this server.
    pub fn adopt(self: &Arc<Self>, quiesced: QuiescedNbdConnection, worker: &ReactorWorker) {
        // Not bounded by `max_connections`: the client was already admitted by the old process.
        self.used_slots.fetch_add(1, Ordering::SeqCst);
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let address = admission::peer_address(&quiesced.socket);
        address.into_iter().for_each(|address| self.admission.count_transferred(address));
        let memory = Some(ConnectionMemory::transferred(MemoryBudget::process(), CONNECTION_BYTES));
        let slot = ConnectionSlot { server: Arc::clone(self), number, address, memory };
        let client = ClientIdentity { address, name: None };
        let client_info = self
            .exports()
            .get(quiesced.session.export)
            .and_then(|export| self.client_info(export, number, &client));
        let live = ConnectedClient::new(quiesced.socket.clone(), address, reactor::now());
        let stop = Arc::clone(&live.stop);
        {
            let mut clients = self.lock();
            clients.insert(number, live);
            clients.choose(number, quiesced.session.export, client_info);
        }
        self.served.store(true, Ordering::SeqCst);
        worker.spawn(move || async move {
            slot.server.serve_adopted(quiesced, &stop, number).await;
            drop(slot);
            trim::trim_memory_soon();
        });
    }

    async fn serve_adopted(&self, quiesced: QuiescedNbdConnection, stop: &Arc<StopSignal>, number: u64) {
        let QuiescedNbdConnection { socket, session, bytes, skip, .. } = quiesced;
        let inbox = ReceiveBuffer::with_content(&bytes, usize::try_from(skip).unwrap_or(usize::MAX));
        drop(bytes);
        // A stop before the registration would be missed otherwise.
        if self.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Some(connection) = self.connection(NbdStream::Plain(socket), session, stop, number) else {
            return;
        };
        if let Err(reason) = connection.serve(inbox).await {
            tracing::debug!(client = number, %reason, "connection ended");
        }
    }

    /// Disconnects the client that has been in its handshake for longest, if for at least
    /// [`HANDSHAKE_GRACE`]. Each client is disconnected once: its memory is free when its task has
    /// ended. If there is none, returns the time, above zero, after which to check again.
    fn disconnect_oldest(&self) -> Option<Duration> {
        let mut roster = self.lock();
        // None: all clients are being served, wait for memory themselves, or are not registered
        // yet.
        let Some((number, since)) = roster.oldest_to_disconnect() else { return Some(HANDSHAKE_GRACE) };
        let early = (since + HANDSHAKE_GRACE) - reactor::now();
        if early > Duration::ZERO {
            return Some(early);
        }
        // Its socket is shut down below; its task ends later, and must not be chosen again until
        // then.
        roster.spare(number);
        if let Some(live) = roster.get(number) {
            tracing::debug!(
                client = number,
                "disconnected before it had finished the handshake: others wait"
            );
            let _ = nix::sys::socket::shutdown(raw(&live.socket), nix::sys::socket::Shutdown::Both);
        }
        None
    }

    /// Stops accepting, waits for the requests in flight of connected clients, and returns after
    /// the last has disconnected. A client that does not read its last replies is disconnected
    /// after 10 s. Shut down the listeners' sockets (`shutdown(2)`) to end [`NbdServer::listen`].
    pub async fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Quiesced connections must run to end.
        self.quiesce_state.set(QuiesceStage::Open);
        self.freed.notify(usize::MAX);
        for (_, live) in self.lock().iter() {
            live.stop.raise();
            // Ends the receive that the connection waits in; fails if the client has already
            // closed.
            let _ = nix::sys::socket::shutdown(raw(&live.socket), nix::sys::socket::Shutdown::Read);
        }
        let disconnected = || self.wait_while(|server| server.connections() > 0);
        if reactor::timeout(STOP_TIMEOUT, disconnected()).await.is_err() {
            for (_, live) in self.lock().iter() {
                // Ends the send that the connection waits in.
                let _ = nix::sys::socket::shutdown(raw(&live.socket), nix::sys::socket::Shutdown::Both);
            }
            disconnected().await;
        }
    }

    /// Numbers of rejected clients.
    pub fn rejected_counts(&self) -> RejectedClientCounts {
        self.admission.rejected_counts()
    }

    /// Adds the clients that the old process has rejected.
    pub fn add_counts(&self, refused: RejectedClientCounts) {
        self.admission.add_counts(refused);
    }

    /// Number of connections of all exports.
    pub fn connections(&self) -> usize {
        self.lock().len()
    }

    /// Hides CAN_MULTI_CONN if only one connection is allowed: the client would open several and
    /// wait for slots.
    fn adapted_info(&self, mut info: ExportInfo) -> ExportInfo {
        info.features.multi_conn &= self.terms.max_connections != 1;
        info
    }

    /// Numbers of the clients that have finished the handshake.
    pub(super) fn client_numbers(&self) -> Vec<u64> {
        self.lock().iter().filter(|(_, live)| live.transfers.is_some()).map(|(number, _)| number).collect()
    }

    /// Transfers of a client that has finished the handshake.
    pub(super) fn transfers(&self, number: u64) -> Option<Arc<ClientTransfers>> {
        self.lock().get(number)?.transfers.clone()
    }

    /// Clients to which a message is being sent, with [`ClientTransfers::sending_state`].
    pub(super) fn sending_states(&self) -> Vec<(u64, (u64, usize))> {
        let live = self.lock();
        live.iter()
            .filter_map(|(number, live)| Some((number, live.transfers.as_ref()?.sending_state()?)))
            .collect()
    }

    /// Description of a client for messages: `client 7 of 192.0.2.1 at export vm1`.
    pub(super) fn describe_client(&self, number: u64) -> String {
        let (export, address) =
            self.lock().get(number).map_or((None, None), |live| (live.export(), live.address));
        let address_text = address.map(|address| format!(" of {address}")).unwrap_or_default();
        let exports = self.exports();
        let export = export.and_then(|export| exports.get(export));
        let export_text = export.map(|export| format!(" at export {}", export.name)).unwrap_or_default();
        format!("client {number}{address_text}{export_text}")
    }

    fn exports(&self) -> RwLockReadGuard<'_, RegisteredExports> {
        self.exports.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, ConnectedClients> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` if the export was removed.
    fn connection(
        &self,
        stream: NbdStream,
        session: NbdSession,
        stop: &Arc<StopSignal>,
        number: u64,
    ) -> Option<Rc<NbdConnection>> {
        let exports = self.exports();
        let export = exports.get(session.export)?;
        let (disk, bitmaps) = (Arc::clone(&export.disk), Arc::clone(&export.bitmaps));
        let connection = NbdConnection::new(stream, disk, bitmaps, session, Arc::clone(stop));
        if let Some(live) = self.lock().get_mut(number) {
            live.transfers = Some(Arc::clone(connection.transfers()));
        }
        Some(connection.with_quiesce(&self.quiesce_state, number))
    }
}

/// Memory of a connected idle client: buffers, tasks, and its entries in the tables. Measured by
/// the row `client-memory-idle` of the bench; a client that sends more is charged for its larger
/// buffer (`USUAL_BYTES` in `receive_buffer.rs` of the crate `nbd`).
pub const CONNECTION_BYTES: u64 = 12 << 10;

/// Number of clients that a message names.
const MAX_NAMED_CLIENTS: usize = 5;
/// Time for which a client in its handshake keeps its slot while all slots are taken and others
/// wait.
const HANDSHAKE_GRACE: Duration = Duration::from_secs(1);

/// Time for clients to receive their last replies when the server stops: less than service managers
/// wait before they kill.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A slot among the connections, taken before a client is accepted and freed on drop.
struct ConnectionSlot {
    server: Arc<NbdServer>,
    number: u64,
    /// Address of the client; `None` for a Unix socket, and before a client was accepted.
    address: Option<IpAddr>,
    /// Memory of the connection, once a client is connected.
    memory: Option<ConnectionMemory>,
}

impl ConnectionSlot {
    /// Waits for a free slot; `None` when the server stops. While all slots are taken and a
    /// client waits on `listener`, the oldest client in its handshake is disconnected.
    async fn take(server: &Arc<NbdServer>, listener: &Fd) -> Option<Self> {
        let limit = match server.terms.max_connections {
            0 => usize::MAX,
            limit => limit,
        };
        loop {
            let freed = server.freed.listen();
            if server.stopping.load(Ordering::SeqCst) {
                return None;
            }
            // Only a client that actually waits may displace another, hence the wait for
            // `readable`.
            let take_slot = |taken: usize| (taken < limit).then(|| taken + 1);
            if server.used_slots.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take_slot).is_ok() {
                let number = server.next_number.fetch_add(1, Ordering::Relaxed);
                return Some(Self { server: Arc::clone(server), number, address: None, memory: None });
            }
            let mut freed = pin!(freed);
            let mut displacement = pin!(async {
                if operation::readable(listener).await.is_ok() {
                    while let Some(next_look) = server.disconnect_oldest() {
                        reactor::sleep_until(reactor::now() + next_look).await;
                    }
                }
                std::future::pending::<()>().await;
            });
            poll_fn(|context| match freed.as_mut().poll(context) {
                Poll::Ready(()) => Poll::Ready(()),
                Poll::Pending => displacement.as_mut().poll(context),
            })
            .await;
        }
    }

    /// True if the access rules admit the accepted client.
    fn is_for(&mut self, socket: &OwnedFd) -> bool {
        let address = admission::peer_address(socket);
        let admitted = self.server.admission.admit(address);
        if admitted {
            self.address = address;
        }
        admitted
    }

    async fn serve_in_slot(self, socket: OwnedFd, arrival_guard: ArrivalGuard) {
        self.server.serve_client(socket, self.number, self.address, arrival_guard).await;
        trim::trim_memory_soon();
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let removed = self.server.lock().remove(self.number);
        // A transferred client has not disconnected: the new process reports its end.
        if let (Some(observer), Some(ConnectedClient { client_info: Some(visit), since, .. })) =
            (&self.server.terms.observer, removed)
            && !self.server.quiesce_state.is_handed_over(self.number)
        {
            observer.disconnected(&visit, reactor::real_time() - since);
        }
        if let Some(address) = self.address {
            self.server.admission.release(address);
        }
        // Slot and memory are returned before `freed`, which wakes the tasks that wait for them.
        self.server.used_slots.fetch_sub(1, Ordering::SeqCst);
        self.memory = None;
        self.server.freed.notify(usize::MAX);
    }
}

fn raw(socket: &Fd) -> std::os::fd::RawFd {
    use std::os::fd::AsRawFd;
    socket.as_fd().as_raw_fd()
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
