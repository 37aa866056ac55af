//! Whether the daemon starts, serves, hands over or ends, and what it tells its service manager and
//! its control sockets of that.

use std::{
    cell::{Cell, RefCell},
    path::PathBuf,
};

use policy::time::{Duration, Instant};
use reactor::operation::{self, Fd};

use super::Ender;
use crate::{listen::Listening, turns::Turns};

/// The phases of a daemon's life.
pub struct Lifecycle {
    started: Instant,
    /// One change by a config file at a time.
    pub turns: Turns,
    /// A new process is about to take over: nothing is changed meanwhile.
    pub leaving: Cell<bool>,
    /// The daemon ends.
    pub ending: Cell<bool>,
    /// The daemon still starts: see [`Registry::keep_clients_out`](super::Registry::keep_clients_out).
    pub(super) keeps_out: Cell<bool>,
    /// The daemon ends once the last client has disconnected.
    pub ends_when_idle: Cell<bool>,
    /// A device of this host has gone, and its export with it.
    pub(super) lost_device: Cell<bool>,
    /// Watchdog interval of the service manager.
    pub watchdog: Cell<Option<Duration>>,
    /// A new process accepts the clients of the control sockets.
    pub(crate) is_control_closed: Cell<bool>,
    /// The control sockets, by their paths.
    pub(crate) control: RefCell<Vec<(PathBuf, Fd)>>,
    /// Sockets of HTTP services, by the names that both processes of an upgrade give them.
    pub told: RefCell<Vec<(String, Vec<Listening>)>>,
    pub(crate) ender: Ender,
}

impl Lifecycle {
    pub(super) fn new(ender: Ender) -> Self {
        Self {
            started: reactor::now(),
            turns: Turns::default(),
            leaving: Cell::new(false),
            ending: Cell::new(false),
            keeps_out: Cell::new(false),
            ends_when_idle: Cell::new(false),
            lost_device: Cell::new(false),
            watchdog: Cell::new(None),
            is_control_closed: Cell::new(false),
            control: RefCell::default(),
            told: RefCell::default(),
            ender,
        }
    }

    /// Lets nobody in at the control sockets, or whoever comes from now on. Of two processes that
    /// wait for clients of one socket, the kernel tells only one.
    pub(crate) fn close_control(&self, is_closed: bool) {
        self.is_control_closed.set(is_closed);
        if is_closed {
            self.control.borrow().iter().for_each(|(_, socket)| operation::cancel_all_on(socket));
        }
    }

    /// Time since the start.
    pub fn uptime(&self) -> Duration {
        reactor::now() - self.started
    }
}
