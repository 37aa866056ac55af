//! Messages to the service manager (sd_notify(3)), over one socket that is opened at the start: the
//! sandbox permits no connections later.
//!
//! Never blocks on a manager that does not read; its queue is short (`net.unix.max_dgram_qlen` in
//! unix(7)).

use std::{
    collections::VecDeque,
    fmt::Write as _,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use event_listener::Event;
use reactor::{
    buffer::IoBuffer,
    operation::{self, Fd},
};
use rustix::net::SendFlags;
use sd_notify::NotifyState;

static MANAGER: OnceLock<Option<Arc<ServiceManager>>> = OnceLock::new();

#[derive(Debug)]
struct ServiceManager {
    socket: Fd,
    /// Messages that the socket had no space for, in order.
    waiting: Mutex<VecDeque<Vec<u8>>>,
    sent: Event,
}

/// Connects to the service manager; logs a failure.
pub fn open() {
    // Must run before the sandbox is entered.
    MANAGER.get_or_init(|| {
        connect().unwrap_or_else(|error| {
            log_failure(&error);
            None
        })
    });
}

fn connect() -> io::Result<Option<Arc<ServiceManager>>> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let socket = UnixDatagram::unbound()?;
    match name.as_bytes().strip_prefix(b"@") {
        // A leading `@` denotes the abstract namespace (sd_notify(3)).
        Some(name) => socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => socket.connect(name)?,
    }
    Ok(Some(ServiceManager::new(socket)))
}

/// Sends the states in one message, if there is a service manager; queues it if the socket is full.
///
/// # Panics
/// If no reactor runs on this thread.
pub fn send(states: &[NotifyState<'_>]) {
    if let Some(Some(manager)) = MANAGER.get() {
        manager.send(states);
    }
}

/// Waits until all messages are sent.
pub(crate) async fn until_sent() {
    let Some(Some(manager)) = MANAGER.get() else { return };
    loop {
        let sent = manager.sent.listen();
        if manager.lock_queue().is_empty() {
            return;
        }
        sent.await;
    }
}

impl ServiceManager {
    fn new(socket: UnixDatagram) -> Arc<Self> {
        Arc::new(Self { socket: socket.into(), waiting: Mutex::default(), sent: Event::new() })
    }

    fn lock_queue(&self) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(self: &Arc<Self>, states: &[NotifyState<'_>]) {
        let mut message = String::new();
        for state in states {
            // Writing to a string does not fail.
            let _ = writeln!(message, "{state}");
        }
        let mut waiting = self.lock_queue();
        // Only with an empty queue: a direct send must not overtake queued messages.
        if waiting.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, message.as_bytes(), flags) {
                Err(rustix::io::Errno::AGAIN) => {}
                result => return result.map(drop).unwrap_or_else(|error| log_failure(&error.into())),
            }
        }
        // A watchdog message is superseded by the next one, and not worth queueing.
        if matches!(states, [NotifyState::Watchdog]) {
            return;
        }
        waiting.push_back(message.into());
        let is_first = waiting.len() == 1;
        // Released first: the spawned task may run at once.
        drop(waiting);
        if is_first {
            reactor::spawn(Arc::clone(self).send_queued());
        }
    }

    async fn send_queued(self: Arc<Self>) {
        loop {
            let Some(message) = self.lock_queue().front().map(|message| IoBuffer::copy_of(message)) else {
                return;
            };
            if let (Err(error), _) = operation::send(&self.socket, message.into()).await {
                log_failure(&error);
            }
            // Removed after the send: `until_sent` waits until the queue is empty.
            self.lock_queue().pop_front();
            self.sent.notify(usize::MAX);
        }
    }
}

fn log_failure(error: &io::Error) {
    tracing::warn!(%error, "cannot send to the service manager at NOTIFY_SOCKET");
}

#[cfg(test)]
mod tests {
    use reactor::PollingMode;

    use super::*;

    #[test]
    fn slow_service_manager_receives_all_messages_in_order() {
        let result = reactor::run(PollingMode::Off, async {
            let (peer, ours) = UnixDatagram::pair().unwrap();
            let manager = ServiceManager::new(ours);
            let mut sent = 0;
            // Fills the socket's queue until the first message is queued here.
            while manager.lock_queue().is_empty() {
                manager.send(&[NotifyState::Status(&sent.to_string())]);
                sent += 1;
            }
            manager.send(&[NotifyState::Watchdog]);
            manager.send(&[NotifyState::MainPid(7), NotifyState::Ready]);
            let peer = Fd::from(peer);
            let mut received = String::new();
            while !received.contains("READY") {
                operation::readable(&peer).await.unwrap();
                let mut bytes = [0; 64];
                let length = nix::unistd::read(&peer, &mut bytes).unwrap();
                received.push_str(std::str::from_utf8(&bytes[..length]).unwrap());
            }
            let all: String = (0..sent).map(|number| format!("STATUS={number}\n")).collect();
            (received, all + "MAINPID=7\nREADY=1\n")
        });
        let (received, all) = result.unwrap();
        assert_eq!(received, all);
    }
}
