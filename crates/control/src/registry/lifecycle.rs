//! Phases of the daemon's life: start, service, handover, end; with the state that concerns the
//! service manager and the control sockets.

use std::{
    cell::{Cell, RefCell},
    path::PathBuf,
};

use anyhow::ensure;
use policy::time::{Duration, Instant};
use reactor::operation::{self, Fd};

use super::DaemonEndRequest;
use crate::{listen::ListeningSocket, structure_lock::StructureLock};

/// Phases of a daemon's life.
pub struct Lifecycle {
    started: Instant,
    /// Lock on the set of running objects: see [`StructureLock`].
    pub structure_lock: StructureLock,
    /// True during an upgrade: the running state must not change.
    pub is_upgrading: Cell<bool>,
    /// True once the daemon is ending.
    pub is_ending: Cell<bool>,
    /// True during a start: see [`Registry::delay_clients`](super::Registry::delay_clients).
    pub(super) are_clients_delayed: Cell<bool>,
    /// True if the daemon ends once the last client has disconnected.
    pub ends_when_idle: Cell<bool>,
    /// True if a device of this host was removed externally, and its export with it.
    pub(super) was_device_removed: Cell<bool>,
    /// Watchdog interval of the service manager.
    pub watchdog: Cell<Option<Duration>>,
    /// True if a new process accepts the clients of the control sockets.
    pub(crate) is_control_closed: Cell<bool>,
    /// Control sockets, by path.
    pub(crate) control: RefCell<Vec<(PathBuf, Fd)>>,
    /// Sockets of HTTP services, by the names that both processes of an upgrade use.
    pub http_sockets: RefCell<Vec<(String, Vec<ListeningSocket>)>>,
    pub(crate) request_end: DaemonEndRequest,
}

impl Lifecycle {
    pub(super) fn new(ender: DaemonEndRequest) -> Self {
        Self {
            started: reactor::now(),
            structure_lock: StructureLock::default(),
            is_upgrading: Cell::new(false),
            is_ending: Cell::new(false),
            are_clients_delayed: Cell::new(false),
            ends_when_idle: Cell::new(false),
            was_device_removed: Cell::new(false),
            watchdog: Cell::new(None),
            is_control_closed: Cell::new(false),
            control: RefCell::default(),
            http_sockets: RefCell::default(),
            request_end: ender,
        }
    }

    /// Stops or resumes accepting clients of the control sockets. If two processes wait for clients
    /// of one socket, the kernel wakes only one of them.
    pub(crate) fn set_control_closed(&self, is_closed: bool) {
        self.is_control_closed.set(is_closed);
        if is_closed {
            // Cancels pending accepts, which would still take the next client.
            self.control.borrow().iter().for_each(|(_, socket)| operation::cancel_all_on(socket));
        }
    }

    /// Fails if the daemon is stopping. Immediately before a job is listed: all listed jobs are
    /// cancelled when the end of the daemon begins.
    ///
    /// # Errors
    /// The daemon is stopping.
    pub(crate) fn check_not_ending(&self) -> anyhow::Result<()> {
        ensure!(!self.is_ending.get(), "weir is stopping");
        Ok(())
    }

    /// Time since the start.
    pub fn uptime(&self) -> Duration {
        reactor::now() - self.started
    }
}
