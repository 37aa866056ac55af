//! Progress of a client's transfers, by which the memory budget decides whether to disconnect a
//! client that holds memory while other requests wait ([`reactor::memory`]).
//!
//! Costs two atomic operations for a transfer, and one for each part of it.

use std::sync::{
    Arc,
    atomic::{
        AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use block::disk::Disk;
use policy::time::{Duration, Instant};
use reactor::{
    memory::{Account, Holder, Listing, SLOWEST_BPS},
    op::{self, Fd},
};

use super::stream::{self, Stream};

/// Transfers of one client, as other threads see them.
#[derive(Debug)]
pub(super) struct Holding {
    /// Remaining payload of a write.
    receiving: Transfer,
    /// A message of replies.
    sending: Transfer,
    memory: Arc<Account>,
    socket: Option<Fd>,
    listing: Listing,
}

impl Holding {
    /// Creates the state of the client that is connected by `stream` and uses `disk`.
    pub(super) fn with(stream: &Stream, disk: &Disk) -> Arc<Self> {
        let memory = Arc::clone(disk.memory());
        let (receiving, sending) = (Transfer::default(), Transfer::default());
        let (socket, listing) = (stream.socket().cloned(), Listing::default());
        Arc::new(Self { receiving, sending, memory, socket, listing })
    }

    /// Begins receiving a payload; it ends when the result is dropped. The client is on schedule
    /// while the bytes reported by [`UnderWay::moved`] last at the slowest rate.
    pub(super) fn receives(self: &Arc<Self>) -> UnderWay<'_> {
        self.receiving.start(0);
        self.memory.watch(self);
        UnderWay(&self.receiving)
    }

    /// Begins sending a message of `bytes`; it ends when the result is dropped.
    pub(super) fn sends(self: &Arc<Self>, bytes: usize) -> UnderWay<'_> {
        self.sending.start(bytes);
        self.memory.watch(self);
        UnderWay(&self.sending)
    }

    /// State of a message that is being sent: a number that changes with each part of a message,
    /// and the bytes that the client has yet to read. `None` between messages.
    pub(super) fn in_a_message(&self) -> Option<(u64, usize)> {
        let due = self.sending.due()?;
        // SIOCOUTQ: bytes that the peer has not read (Unix) or not acknowledged (TCP).
        Some((due, op::unread_bytes(self.socket.as_ref()?).unwrap_or(0)))
    }

    /// Disconnects the client.
    pub(super) fn push_out_now(&self) {
        self.socket.iter().for_each(stream::shut_down);
    }
}

impl Holder for Holding {
    fn due(&self) -> Option<Instant> {
        let due = self.receiving.due().into_iter().chain(self.sending.due()).min();
        due.map(Instant::from_nanos)
    }

    fn push_out(&self) {
        self.push_out_now();
    }

    fn listing(&self) -> &Listing {
        &self.listing
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.memory.forget(&self.listing);
    }
}

/// Instant until which a transfer is on schedule, in nanoseconds; the largest value if there is no
/// transfer.
#[derive(Debug)]
struct Transfer(AtomicU64);

impl Default for Transfer {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl Transfer {
    /// Starts a transfer that is on schedule for the time that `bytes` take at the slowest rate.
    fn start(&self, bytes: usize) {
        // Ordered before the check of the listing: see `Account::watch`.
        self.0.store((reactor::recently() + lasts(bytes)).as_nanos(), SeqCst);
    }

    fn due(&self) -> Option<u64> {
        Some(self.0.load(SeqCst)).filter(|due| *due != u64::MAX)
    }
}

/// Duration of `bytes` at the slowest rate.
fn lasts(bytes: usize) -> Duration {
    Duration::from_nanos(bytes as u64 * 1_000_000_000 / SLOWEST_BPS)
}

/// A transfer in progress; ends on drop.
#[must_use = "the transfer lasts until it is dropped"]
pub(super) struct UnderWay<'a>(&'a Transfer);

impl UnderWay<'_> {
    /// Counts bytes of a payload that have arrived.
    pub(super) fn moved(&self, bytes: usize) {
        self.0.0.fetch_add(lasts(bytes).as_nanos() as u64, Relaxed);
    }

    /// Starts the next part of a message, of `bytes`.
    pub(super) fn continues(&self, bytes: usize) {
        self.0.start(bytes);
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.0.store(u64::MAX, Relaxed);
    }
}
