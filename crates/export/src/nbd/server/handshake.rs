//! Handshake of an accepted client, with a deadline, and the part of the server that the client may
//! see.
//!
//! Never holds more memory than the handshake needs: the client is not authenticated yet.

use std::{
    cell::Cell,
    net::{IpAddr, TcpStream},
    os::fd::OwnedFd,
    rc::Rc,
    sync::{Arc, atomic::Ordering},
};

use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getsockname, setsockopt, sockopt};
use policy::access::{AccessRules, ClientIdentity};
use reactor::operation::Fd;

use super::{NbdServer, connected_clients::ConnectedClient};
use crate::nbd::{
    catalog::{ExportCatalog, ExportInfo},
    connection::NbdConnection,
    exports,
    negotiate::{self, Handshake, TlsPolicy},
    quiesce::ArrivalGuard,
    receive_buffer::ReceiveBuffer,
    session::NbdSession,
    stop_signal::StopSignal,
    stream::NbdStream,
};

impl NbdServer {
    pub(super) async fn serve_client(
        &self,
        socket: OwnedFd,
        number: u64,
        address: Option<IpAddr>,
        arrival_guard: ArrivalGuard,
    ) {
        set_socket_options(&socket);
        let socket = Fd::from(socket);
        let live = ConnectedClient::new(socket.clone(), address, reactor::now());
        let stop = Arc::clone(&live.stop);
        self.lock().insert(number, live);
        drop(arrival_guard);
        // A stop between accepting and registering would be missed otherwise.
        if !self.stopping.load(Ordering::SeqCst) {
            tracing::debug!(client = number, "connected");
            match self.negotiate_and_serve(NbdStream::Plain(socket), &stop, number).await {
                Ok(()) => tracing::debug!(client = number, "disconnected"),
                Err(reason) => match self.endings.try_log(reactor::coarse_now()) {
                    Some(suppressed) => {
                        tracing::info!(client = number, %reason, suppressed, "connection ended");
                    }
                    None => tracing::debug!(client = number, %reason, "connection ended"),
                },
            }
        }
    }

    /// Runs the handshake, then transmission.
    async fn negotiate_and_serve(
        &self,
        stream: NbdStream,
        stop: &Arc<StopSignal>,
        number: u64,
    ) -> Result<(), String> {
        match self.open(stream, stop, number).await? {
            Some((connection, inbox)) => {
                connection.serve(inbox).await.map(drop).map_err(|broken| broken.to_string())
            }
            None => Ok(()),
        }
    }

    /// Runs the handshake; returns a connection ready for requests and the bytes that arrived after
    /// it. `None` if the client left without choosing an export.
    pub(in crate::nbd) async fn open(
        &self,
        stream: NbdStream,
        stop: &Arc<StopSignal>,
        number: u64,
    ) -> Result<Option<(Rc<NbdConnection>, ReceiveBuffer)>, String> {
        let negotiated = reactor::timeout(self.terms.handshake_timeout, self.negotiate(stream, number)).await;
        let Some((stream, inbox, session)) =
            negotiated.unwrap_or_else(|reactor::Timeout| Err("the handshake took too long".to_owned()))?
        else {
            return Ok(None);
        };
        let connection = self.connection(stream, session, stop, number).ok_or(REMOVED)?;
        Ok(Some((connection, inbox)))
    }

    async fn negotiate(
        &self,
        mut stream: NbdStream,
        number: u64,
    ) -> Result<Option<(NbdStream, ReceiveBuffer, NbdSession)>, String> {
        let policy = match &self.tls {
            None => TlsPolicy::Off,
            Some(tls) if tls.required => TlsPolicy::Required,
            Some(_) => TlsPolicy::Allowed,
        };
        let address = self.lock().get(number).and_then(|live| live.address);
        let mut offer = VisibleExports {
            server: self,
            client: ClientIdentity { address, name: None },
            shown: Cell::new(None),
        };
        let mut out = Vec::new();
        let mut handshake = Handshake::start(policy, &mut out);
        let mut inbox = ReceiveBuffer::new();
        loop {
            // The state before the step, because the step may have to be repeated, see below.
            let (before, filled) = (handshake.clone(), out.len());
            let mut step = handshake.advance(inbox.bytes(), &offer, &mut out);
            // The reply contains the export's size. Refreshing the size takes time, which `advance`
            // must not, so it is done here and the option is processed again from the saved state.
            if let Some(export) = offer.shown.take() {
                self.refresh_size_of(export).await;
                handshake = before;
                out.truncate(filled);
                step = handshake.advance(inbox.bytes(), &offer, &mut out);
                offer.shown.set(None);
            }
            inbox.consume(step.consumed);
            // Before the reply: otherwise the client could use an export that is counted as unused.
            if let negotiate::HandshakeEvent::Transmission(session) = &step.event
                && !self.choose_export(session.export, number, &offer.client)
            {
                return Err(REMOVED.to_owned());
            }
            if let Some(reply) = take_replies(step.event, &mut out) {
                stream.send(reply.into()).await.map_err(|error| error.to_string())?;
            }
            match step.event {
                negotiate::HandshakeEvent::NeedInput => {
                    if !inbox.fill(&stream).await.map_err(|error| error.to_string())? {
                        return Ok(None);
                    }
                }
                negotiate::HandshakeEvent::Replied => {}
                negotiate::HandshakeEvent::StartTls => {
                    // The handshake now waits for the server, so the client must not be
                    // disconnected for it.
                    self.lock().spare(number);
                    let memory = self.connection_memory(TLS_BYTES).await;
                    let memory = memory.ok_or("the server stops: TLS was not started")?;
                    self.lock().start_tls(number, memory);
                    let keys = &self.tls.as_ref().expect("offered only with keys").keys;
                    let tls = keys.accept().map_err(|error| error.to_string())?;
                    // Bytes behind STARTTLS go to TLS, where plaintext fails, so that an attacker
                    // on the network cannot inject options.
                    stream = stream.start_tls(tls, inbox.bytes()).await.map_err(|error| error.to_string())?;
                    inbox = ReceiveBuffer::new();
                    offer.client.name = stream.tls().and_then(|tls| tls::peer_name(tls.borrow().ssl()));
                    if !self.admission.admits_name(&offer.client) {
                        stream.finish().await;
                        return Ok(None);
                    }
                    handshake.tls_established();
                }
                negotiate::HandshakeEvent::Transmission(session) => {
                    return Ok(Some((stream, inbox, session)));
                }
                negotiate::HandshakeEvent::Close(negotiate::HandshakeClose::Aborted) => {
                    stream.finish().await;
                    return Ok(None);
                }
                negotiate::HandshakeEvent::Close(reason) => return Err(reason.to_string()),
            }
        }
    }
}

/// Memory of TLS for an idle client, in addition to [`CONNECTION_BYTES`](super::CONNECTION_BYTES):
/// a buffer for 64 KiB of ciphertext, and OpenSSL's state.
const TLS_BYTES: u64 = 128 << 10;

impl NbdServer {
    async fn refresh_size_of(&self, export: usize) {
        let disk = self.exports().get(export).map(|export| Arc::clone(&export.disk));
        if let Some(disk) = disk {
            exports::refresh_size(&disk).await;
        }
    }
}

const REMOVED: &str = "the export was removed during the handshake";

/// Bytes of replies that are gathered before they are sent, so that replies to many short options
/// leave in few messages. An unauthenticated client may never read them: together with the longest
/// reply and the receive buffer, they stay below 16 KiB.
const REPLY_BYTES: usize = 2 << 10;

/// Bytes to send before the handshake continues. Takes the memory of `out`, so that while a client
/// does not read, only the bytes being sent are held.
pub(super) fn take_replies(
    event: negotiate::HandshakeEvent,
    out: &mut Vec<u8>,
) -> Option<reactor::buffer::IoBuffer> {
    let more_may_come = matches!(event, negotiate::HandshakeEvent::Replied) && out.len() < REPLY_BYTES;
    if out.is_empty() || more_may_come {
        return None;
    }
    Some(reactor::buffer::IoBuffer::copy_of(&std::mem::take(out)))
}

/// Sets options of a new connection's socket. None is essential, so failures are ignored.
fn set_socket_options(socket: &OwnedFd) {
    let family = getsockname::<SockaddrStorage>(std::os::fd::AsRawFd::as_raw_fd(socket))
        .ok()
        .and_then(|address| address.family());
    // A Unix socket keeps the kernel's buffer size: with 4 MiB instead of 208 KiB, nbdcopy from
    // memory lost a tenth, because buffered data leaves the processor's cache.
    if family != Some(AddressFamily::Unix)
        && let Ok(clone) = socket.try_clone()
    {
        // Replies are already gathered; Nagle's algorithm would only delay them.
        let _ = TcpStream::from(clone).set_nodelay(true);
        let _ = setsockopt(socket, sockopt::KeepAlive, &true);
    }
}

/// The exports of a server that a client may see.
pub(super) struct VisibleExports<'a> {
    pub(super) server: &'a NbdServer,
    pub(super) client: ClientIdentity,
    /// Last export whose properties were sent to the client.
    pub(super) shown: Cell<Option<usize>>,
}

impl ExportCatalog for VisibleExports<'_> {
    fn find(&self, name: &str) -> Option<usize> {
        let exports = self.server.exports();
        let number = exports.find(name)?;
        let export = exports.get(number)?;
        if !self.server.admission.admits_to_export(&export.access, &self.client) {
            self.server.admission.reject_export(&self.client, &export.name);
            return None;
        }
        Some(number)
    }

    fn get(&self, export: usize) -> Option<ExportInfo> {
        self.shown.set(Some(export));
        self.server.exports().get(export).map(|export| self.server.adapted_info(export.info()))
    }

    fn next(&self, from: usize) -> Option<(usize, ExportInfo)> {
        let is_allowed = |access: &AccessRules| self.server.admission.admits_to_export(access, &self.client);
        let next = self.server.exports().next(from, is_allowed);
        next.map(|(number, info)| (number, self.server.adapted_info(info)))
    }
}
