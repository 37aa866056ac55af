//! Clients that hold memory while they send a request's data or read a reply, and the order in
//! which they are disconnected when other requests wait for that memory.
//!
//! ```text
//!   start of a transfer     on schedule until `due`        `due` + grace
//!         ├───────────────────────────┼──────────────────────────┤ disconnected, if requests wait
//!         └─ each MiB that arrives advances `due` by a second ─►
//! ```
//!
//! The grace is [`GRACE`] divided by the number of waiting requests, and at least
//! [`MIN_GRACE`]. A client that transfers [`MIN_TRANSFER_BPS`] is never disconnected.
//!
//! Starting a transfer takes no lock while its client is listed. A client is listed at its first
//! transfer, and remains so until a check finds it without one.
//!
//! Never visits a client before its due time: the list is ordered by it.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use policy::time::{Duration, Instant};

/// Time that a client may lag behind its schedule while one request waits for memory.
pub const GRACE: Duration = Duration::from_secs(10);
/// Shortest time that a client may lag behind its schedule, however many requests wait.
pub const MIN_GRACE: Duration = Duration::from_secs(1);
/// Slowest transfer that is on schedule, in bytes per second.
pub const MIN_TRANSFER_BPS: u64 = 1 << 20;

/// Time that a client may lag behind its schedule while `waiting` requests wait.
pub(super) fn grace(waiting: u64) -> Duration {
    let divided = Duration::from_nanos(GRACE.as_nanos() as u64 / waiting.max(1));
    divided.max(MIN_GRACE)
}

/// A client that can hold memory for an unlimited time.
pub trait MemoryHolder: std::fmt::Debug + Send + Sync {
    /// The instant until which the client is on schedule; `None` while no transfer is in progress.
    fn on_schedule_until(&self) -> Option<Instant>;
    /// Disconnects the client, so that its memory is returned soon. Called once.
    fn disconnect(&self);
    /// The client's entry in the list.
    fn listing(&self) -> &HolderEntry;
}

/// A client's entry in the list of its account.
#[derive(Debug)]
pub struct HolderEntry {
    /// Nanoseconds, or one of the states below. Written under the budget's lock.
    due: AtomicU64,
    number: u64,
}

const UNLISTED: u64 = u64::MAX;
/// State of a client that was disconnected and is not listed again.
const DISCONNECTED: u64 = u64::MAX - 1;

impl Default for HolderEntry {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { due: AtomicU64::new(UNLISTED), number: NEXT.fetch_add(1, SeqCst) }
    }
}

impl HolderEntry {
    /// False if [`HolderList::add`] has to be called for a transfer that has started.
    pub(super) fn is_done(&self) -> bool {
        self.due.load(SeqCst) != UNLISTED
    }

    /// True if [`HolderList::remove`] has to be called.
    pub(super) fn is_listed(&self) -> bool {
        self.due.load(SeqCst) < DISCONNECTED
    }
}

/// The clients of one account, ordered by the instant until which each was known to be on schedule.
#[derive(Debug, Default)]
pub(super) struct HolderList(BTreeMap<(u64, u64), Weak<dyn MemoryHolder>>);

impl HolderList {
    /// Lists a client that is not listed yet.
    pub(super) fn add(&mut self, holder: &Arc<dyn MemoryHolder>) {
        if !holder.listing().is_done() {
            self.insert(holder);
        }
    }

    fn insert(&mut self, holder: &Arc<dyn MemoryHolder>) {
        let listing = holder.listing();
        loop {
            let Some(due) = holder.on_schedule_until() else {
                listing.due.store(UNLISTED, SeqCst);
                // A transfer that started before the state was stored found the client listed and
                // did not list it again.
                if holder.on_schedule_until().is_none() {
                    return;
                }
                continue;
            };
            let due = due.as_nanos().min(DISCONNECTED - 1);
            listing.due.store(due, SeqCst);
            self.0.insert((due, listing.number), Arc::downgrade(holder));
            return;
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Removes a client that has disconnected.
    pub(super) fn remove(&mut self, listing: &HolderEntry) {
        self.0.remove(&(listing.due.load(SeqCst), listing.number));
    }

    /// Removes up to `max_holders` clients that were behind their schedule at `latest`, in
    /// nanoseconds, and appends them to `overdue`. Every other client that was visited is appended
    /// to `seen`, to be dropped without the lock. Returns the due time of the first remaining
    /// client.
    pub(super) fn take_overdue(
        &mut self,
        latest: Option<u64>,
        max_holders: usize,
        overdue: &mut Vec<Arc<dyn MemoryHolder>>,
        seen: &mut Vec<Arc<dyn MemoryHolder>>,
    ) -> Option<Instant> {
        while let Some(latest) = latest
            && overdue.len() < max_holders
            && let Some(entry) = self.0.first_entry()
            && entry.key().0 <= latest
        {
            let Some(holder) = entry.remove().upgrade() else { continue };
            if holder.on_schedule_until().is_some_and(|due| due.as_nanos() <= latest) {
                holder.listing().due.store(DISCONNECTED, SeqCst);
                overdue.push(holder);
            } else {
                self.insert(&holder);
                seen.push(holder);
            }
        }
        self.0.first_key_value().map(|((due, _), _)| Instant::from_nanos(*due))
    }
}
