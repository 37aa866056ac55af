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
    memory::{HolderEntry, MIN_TRANSFER_BPS, MemoryAccount, MemoryHolder},
    operation::{self, Fd},
};

use super::stream::{self, NbdStream};

/// Transfers of one client, as other threads see them.
#[derive(Debug)]
pub(super) struct ClientTransfers {
    /// Remaining payload of a write.
    receiving: TransferDeadline,
    /// A message of replies.
    sending: TransferDeadline,
    memory: Arc<MemoryAccount>,
    socket: Option<Fd>,
    listing: HolderEntry,
}

impl ClientTransfers {
    /// Creates the state of the client that is connected by `stream` and uses `disk`.
    pub(super) fn with(stream: &NbdStream, disk: &Disk) -> Arc<Self> {
        let memory = Arc::clone(disk.memory());
        let (receiving, sending) = (TransferDeadline::default(), TransferDeadline::default());
        let (socket, listing) = (stream.socket().cloned(), HolderEntry::default());
        Arc::new(Self { receiving, sending, memory, socket, listing })
    }

    /// Begins receiving a payload; it ends when the result is dropped. The client is on schedule
    /// while the bytes reported by [`ActiveTransfer::moved`] last at the slowest rate.
    pub(super) fn receives(self: &Arc<Self>) -> ActiveTransfer<'_> {
        self.receiving.start(0);
        self.memory.watch(self);
        ActiveTransfer(&self.receiving)
    }

    /// Begins sending a message of `bytes`; it ends when the result is dropped.
    pub(super) fn sends(self: &Arc<Self>, bytes: usize) -> ActiveTransfer<'_> {
        self.sending.start(bytes);
        self.memory.watch(self);
        ActiveTransfer(&self.sending)
    }

    /// State of a message that is being sent: a number that changes with each part of a message,
    /// and the bytes that the client has yet to read. `None` between messages.
    pub(super) fn sending_state(&self) -> Option<(u64, usize)> {
        let due = self.sending.due()?;
        // SIOCOUTQ: bytes that the peer has not read (Unix) or not acknowledged (TCP).
        Some((due, operation::unread_bytes(self.socket.as_ref()?).unwrap_or(0)))
    }

    /// Disconnects the client.
    pub(super) fn disconnect(&self) {
        self.socket.iter().for_each(stream::shut_down);
    }
}

impl MemoryHolder for ClientTransfers {
    fn on_schedule_until(&self) -> Option<Instant> {
        let due = self.receiving.due().into_iter().chain(self.sending.due()).min();
        due.map(Instant::from_nanos)
    }

    fn disconnect(&self) {
        self.disconnect();
    }

    fn listing(&self) -> &HolderEntry {
        &self.listing
    }
}

impl Drop for ClientTransfers {
    fn drop(&mut self) {
        self.memory.forget(&self.listing);
    }
}

/// Instant until which a transfer is on schedule, in nanoseconds; the largest value if there is no
/// transfer.
#[derive(Debug)]
struct TransferDeadline(AtomicU64);

impl Default for TransferDeadline {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl TransferDeadline {
    /// Starts a transfer that is on schedule for the time that `bytes` take at the slowest rate.
    fn start(&self, bytes: usize) {
        // Ordered before the check of the listing: see `MemoryAccount::watch`.
        self.0.store((reactor::coarse_now() + duration_at_slowest(bytes)).as_nanos(), SeqCst);
    }

    fn due(&self) -> Option<u64> {
        Some(self.0.load(SeqCst)).filter(|due| *due != u64::MAX)
    }
}

/// Duration of `bytes` at the slowest rate.
fn duration_at_slowest(bytes: usize) -> Duration {
    Duration::from_nanos(bytes as u64 * 1_000_000_000 / MIN_TRANSFER_BPS)
}

/// A transfer in progress; ends on drop.
#[must_use = "the transfer lasts until it is dropped"]
pub(super) struct ActiveTransfer<'a>(&'a TransferDeadline);

impl ActiveTransfer<'_> {
    /// Counts bytes of a payload that have arrived.
    pub(super) fn moved(&self, bytes: usize) {
        self.0.0.fetch_add(duration_at_slowest(bytes).as_nanos() as u64, Relaxed);
    }

    /// Starts the next part of a message, of `bytes`.
    pub(super) fn continues(&self, bytes: usize) {
        self.0.start(bytes);
    }
}

impl Drop for ActiveTransfer<'_> {
    fn drop(&mut self) {
        self.0.0.store(u64::MAX, Relaxed);
    }
}
