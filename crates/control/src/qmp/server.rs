//! QMP socket: authentication and number of clients, and the task of each connection.
//!
//! ```text
//!   listener ─► accept ─► root or own user? ─► below the limit? ─► greeting ─► session ⇄ commands
//!                                                                             │
//!                                                              outbox ─► sending task
//! ```
//!
//! Runs on the thread that listens, which also changes the running state: commands of two clients
//! interleave only at an await. A client that does not read delays only its own session, at most
//! [`READ_TIMEOUT`].

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
    pin::Pin,
    rc::Rc,
};

use cluster::actor::ChangeOrigin;
use nix::{
    errno::Errno,
    sys::socket::{Shutdown, getsockopt, shutdown, sockopt::PeerCredentials},
    unistd::{Uid, geteuid},
};
use policy::time::Duration;
use reactor::{
    buffer::IoBuffer,
    operation::{self, Fd},
};
use serde_json::json;

use super::{
    arguments::QmpArguments,
    descriptors::ClientDescriptors,
    error::QmpError,
    event::QmpEvents,
    outbox::QmpOutbox,
    session::{CommandResult, QmpReply, QmpSession, RequestId, SessionStep, greeting},
};

const MAX_CLIENTS: usize = 64;
/// Time for a client to read a reply.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for a client to read the rest when the daemon ends.
const FINAL_SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for running commands when the daemon ends.
const COMMAND_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of checks whether clients may connect again.
const CLOSED_POLL_INTERVAL: Duration = Duration::from_millis(10);
const RECEIVE_BYTES: usize = 16 << 10;
const SEND_BYTES: usize = 256 << 10;

pub(crate) type RunningCommand = Pin<Box<dyn Future<Output = Result<CommandResult, QmpError>>>>;

pub(crate) trait CommandExecutor {
    /// Starts a command. Errors: unknown command or wrong arguments; nothing has changed then.
    fn execute(&self, name: &str, arguments: QmpArguments) -> Result<RunningCommand, QmpError>;

    /// True while clients must not be accepted.
    fn is_closed(&self) -> bool {
        false
    }
}

/// Reason for the end of the daemon, with QEMU's names (`ShutdownCause`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownCause {
    /// A signal.
    Signal,
    /// The command `quit`.
    Quit,
    /// A failure.
    Failure,
}

impl ShutdownCause {
    const fn reason(self) -> &'static str {
        match self {
            Self::Signal => "host-signal",
            Self::Quit => "host-qmp-quit",
            Self::Failure => "host-error",
        }
    }
}

pub(crate) struct QmpServer {
    commands: Rc<dyn CommandExecutor>,
    events: QmpEvents,
    stopping: Cell<bool>,
    /// Connected clients by number.
    clients: RefCell<HashMap<u64, Fd>>,
    next_number: Cell<u64>,
    /// Raised when the last client has disconnected.
    no_clients: reactor::Signal,
}

impl QmpServer {
    pub(crate) fn new(commands: Rc<dyn CommandExecutor>, events: QmpEvents) -> Rc<Self> {
        Rc::new(Self {
            commands,
            events,
            stopping: Cell::new(false),
            clients: RefCell::default(),
            next_number: Cell::new(1),
            no_clients: reactor::Signal::default(),
        })
    }

    pub(crate) async fn listen(self: Rc<Self>, listener: Fd) -> io::Result<()> {
        while !self.stopping.get() {
            if self.commands.is_closed() {
                reactor::sleep_until(reactor::now() + CLOSED_POLL_INTERVAL).await;
                continue;
            }
            match operation::accept(&listener).await {
                Ok(socket) => reactor::spawn(Rc::clone(&self).serve_client(socket)),
                Err(_) if self.stopping.get() => break,
                Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                    Some(Errno::EBADF | Errno::EINVAL | Errno::ENOTSOCK | Errno::EOPNOTSUPP) => {
                        return Err(error);
                    }
                    // Interrupted by `set_control_closed`, or the client disconnected before it was
                    // accepted.
                    Some(Errno::ECANCELED | Errno::ECONNABORTED | Errno::EINTR | Errno::EAGAIN) => {}
                    // Out of descriptors or memory: transient, without a notification of its end.
                    _ => {
                        tracing::warn!(%error, "cannot accept a QMP client, trying again");
                        reactor::sleep_until(reactor::now() + Duration::from_secs(1)).await;
                    }
                },
            }
        }
        Ok(())
    }

    /// Announces the end of the daemon to every client, and returns after all replies are sent and
    /// all clients have disconnected. Clients that do not read are disconnected after
    /// [`FINAL_SEND_TIMEOUT`]. Commands that run longer than [`COMMAND_STOP_TIMEOUT`] are
    /// abandoned: they may wait for storage that never answers, and the disks must be flushed
    /// before the service manager kills the daemon.
    pub(crate) async fn stop(&self, ending: ShutdownCause) {
        self.events.emit("SHUTDOWN", json!({ "guest": false, "reason": ending.reason() }));
        self.stopping.set(true);
        for socket in self.clients.borrow().values() {
            // Wakes sessions that wait for a command; replies are still sent.
            shut_down(socket, Shutdown::Read);
        }
        let all_gone = async {
            while !self.clients.borrow().is_empty() {
                self.no_clients.wait().await;
            }
        };
        if reactor::timeout(COMMAND_STOP_TIMEOUT, all_gone).await.is_err() {
            let commands = self.clients();
            tracing::warn!(commands, "ending while commands of clients are still running");
        }
    }

    pub(crate) fn clients(&self) -> usize {
        self.clients.borrow().len()
    }

    async fn serve_client(self: Rc<Self>, socket: OwnedFd) {
        let admitted = self.admit(&socket);
        let socket = Fd::from(socket);
        // A clone of the descriptor handle, so that the outbox can shut down the connection.
        let handle = socket.clone();
        let outbox = Rc::new(QmpOutbox::new(move || shut_down(&handle, Shutdown::Both)));
        let sending = reactor::spawn_joinable(send_all(socket.clone(), Rc::clone(&outbox)));
        match admitted {
            Ok(()) => {
                let number = self.next_number.get();
                self.next_number.set(number + 1);
                self.clients.borrow_mut().insert(number, socket.clone());
                tracing::debug!(client = number, "QMP client connected");
                // Also removes the client if this task is cancelled.
                let _registered = ClientRegistration { server: &self, number };
                outbox.push(&greeting());
                self.run_session(&socket, &outbox).await;
                send_rest(&outbox, sending).await;
                tracing::debug!(client = number, "QMP client gone");
            }
            Err(error) => {
                // Rejected clients receive the reason instead of a greeting.
                outbox.push(&RequestId::default().answer(Err(error)));
                send_rest(&outbox, sending).await;
            }
        }
    }

    fn admit(&self, socket: &OwnedFd) -> Result<(), QmpError> {
        let peer = getsockopt(socket, PeerCredentials).map(|peer| Uid::from_raw(peer.uid()));
        if !peer.is_ok_and(is_trusted) {
            tracing::warn!(?peer, "a QMP client of another user was refused");
            let us = geteuid();
            let why =
                format!("this socket is for root and the user with the number {us} (run as one of them)");
            return Err(QmpError::generic(why));
        }
        if self.clients() >= MAX_CLIENTS {
            let why = format!("there are {MAX_CLIENTS} clients already (end one of them first)");
            return Err(QmpError::generic(why));
        }
        if self.stopping.get() { Err(QmpError::generic("weir is stopping")) } else { Ok(()) }
    }

    async fn run_session(&self, socket: &Fd, outbox: &Rc<QmpOutbox>) {
        let mut session = QmpSession::default();
        let passed = Rc::new(ClientDescriptors::default());
        let actor = client_actor(socket);
        let mut buffer = vec![0; RECEIVE_BYTES];
        loop {
            let mut input = match passed.receive(socket, &mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => &buffer[..count],
            };
            while let Some(answer) = self.next_answer(&mut session, &mut input, &passed, &actor, outbox).await
            {
                outbox.push(&answer);
                if !matches!(reactor::timeout(READ_TIMEOUT, outbox.until_drained()).await, Ok(true)) {
                    tracing::info!("a QMP client that does not read was disconnected");
                    return outbox.disconnect();
                }
                // A batch of commands must not starve other tasks of this thread.
                reactor::yield_now().await;
            }
            if self.stopping.get() {
                return;
            }
        }
    }

    async fn next_answer(
        &self,
        session: &mut QmpSession,
        input: &mut &[u8],
        passed: &Rc<ClientDescriptors>,
        actor: &ChangeOrigin,
        outbox: &Rc<QmpOutbox>,
    ) -> Option<QmpReply> {
        if self.stopping.get() {
            return None;
        }
        let was_negotiated = session.is_negotiated();
        let step = session.advance(input)?;
        // QMP sends no events before the negotiation.
        if session.is_negotiated() && !was_negotiated {
            self.events.subscribe(outbox);
        }
        Some(match step {
            SessionStep::Answer(answer) => answer,
            SessionStep::Execute(call) => {
                let result = match self.commands.execute(&call.name, call.arguments.with_descriptors(passed))
                {
                    // Events that the command causes carry this actor.
                    Ok(running) => actor.clone().attribute(running).await,
                    Err(error) => Err(error),
                };
                if let Err(error) = &result {
                    tracing::debug!(command = call.name, %error, "QMP command failed");
                }
                call.id.answer(result)
            }
        })
    }
}

struct ClientRegistration<'a> {
    server: &'a QmpServer,
    number: u64,
}

impl Drop for ClientRegistration<'_> {
    fn drop(&mut self) {
        let removed = self.server.clients.borrow_mut().remove(&self.number);
        drop(removed);
        if self.server.clients.borrow().is_empty() {
            self.server.no_clients.raise();
        }
    }
}

/// Process and user of a client at the time of its connection.
fn client_actor(socket: &Fd) -> ChangeOrigin {
    let peer = getsockopt(&socket.as_fd(), PeerCredentials);
    let (pid, uid) = peer.map_or((0, 0), |peer| (peer.pid(), peer.uid()));
    ChangeOrigin::Qmp { pid, uid }
}

fn is_trusted(peer: Uid) -> bool {
    peer.is_root() || peer == geteuid()
}

/// Sends the rest within [`FINAL_SEND_TIMEOUT`].
async fn send_rest(outbox: &QmpOutbox, sending: reactor::JoinHandle<()>) {
    outbox.close();
    if reactor::timeout(FINAL_SEND_TIMEOUT, sending).await.is_err() {
        outbox.disconnect();
    }
}

async fn send_all(socket: Fd, outbox: Rc<QmpOutbox>) {
    while let Some(bytes) = outbox.next_bytes().await {
        // In pieces, to bound the size of a send buffer.
        for piece in bytes.chunks(SEND_BYTES) {
            if send(&socket, piece).await.is_err() {
                return outbox.disconnect();
            }
        }
    }
    shut_down(&socket, Shutdown::Both);
}

async fn send(socket: &Fd, bytes: &[u8]) -> io::Result<()> {
    let mut left = IoBuffer::copy_of(bytes).into();
    loop {
        let (sent, rest) = operation::send(socket, left).await;
        left = rest;
        match sent {
            Ok(count) => left.advance(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if left.is_empty() {
            return Ok(());
        }
    }
}

/// Shuts down one or both directions, which wakes tasks that wait there.
fn shut_down(socket: &Fd, how: Shutdown) {
    // Fails only if the client has already disconnected.
    let _ = shutdown(socket.as_fd().as_raw_fd(), how);
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
