//! How long a client may keep memory that others wait for.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use block::{
    disk::Disk,
    memory::{Account, Budget, Holder},
    reactor::{
        self,
        op::{self, Fd},
    },
};
use policy::time::Duration;

use super::stream::{self, Stream};

/// What every client has, to begin with.
const GRACE: Duration = Duration::from_secs(10);
/// And then this much is expected to move in a second, in bytes.
const SLOWEST_BPS: u64 = 1 << 20;

/// What is awaited of one client, seen from the other threads.
#[derive(Debug)]
pub(super) struct Holding {
    /// The rest of a write's data.
    pub(super) receiving: Due,
    /// That replies are read.
    pub(super) sending: Due,
    /// What it keeps.
    memory: Arc<Account>,
    socket: Option<Fd>,
}

impl Holding {
    /// With the client at the other end of `stream`, as far as others have to wait for it.
    pub(super) fn with(stream: &Stream, disk: &Disk) -> Arc<Self> {
        let memory = Arc::clone(disk.memory());
        let (receiving, sending) = (Due::default(), Due::default());
        let holding = Arc::new(Self { receiving, sending, memory, socket: stream.socket().cloned() });
        let watched: Arc<dyn Holder> = holding.clone();
        Budget::watch(holding.memory.budget(), Arc::downgrade(&watched));
        holding
    }
}

impl Holding {
    /// While a message is on its way to the client: what tells it from the next one, and the bytes
    /// that the client has yet to read.
    pub(super) fn in_a_message(&self) -> Option<(u64, usize)> {
        let due = self.sending.due()?;
        Some((due, op::unread_bytes(self.socket.as_ref()?).unwrap_or(0)))
    }

    /// Disconnects the client.
    pub(super) fn push_out_now(&self) {
        self.socket.iter().for_each(stream::shut_down);
    }
}

impl Holder for Holding {
    fn is_overdue(&self) -> bool {
        self.memory.is_over_its_part() && (self.receiving.is_past() || self.sending.is_past())
    }

    fn push_out(&self) {
        self.push_out_now();
    }
}

/// When something should have happened; the largest value while nothing is awaited.
#[derive(Debug)]
pub(super) struct Due(AtomicU64);

impl Default for Due {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl Due {
    /// So many bytes are awaited until what this returns is dropped.
    pub(super) fn waits_for(&self, bytes: usize) -> Waiting<'_> {
        let allowed = GRACE + Duration::from_secs(bytes as u64 / SLOWEST_BPS);
        self.0.store((reactor::recently() + allowed).as_nanos(), Relaxed);
        Waiting(self)
    }

    fn is_past(&self) -> bool {
        self.0.load(Relaxed) < reactor::now().as_nanos()
    }

    /// In nanoseconds, while something is awaited.
    fn due(&self) -> Option<u64> {
        Some(self.0.load(Relaxed)).filter(|due| *due != u64::MAX)
    }
}

/// See [`Due::waits_for`].
#[must_use = "it lasts until it is dropped"]
pub(super) struct Waiting<'a>(&'a Due);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.0.store(u64::MAX, Relaxed);
    }
}
