//! Requests of one disk that wait for memory, in fair order between the disk's clients.
//!
//! Fair queueing (Demers, Keshav and Shenker, *Analysis and Simulation of a Fair Queueing
//! Algorithm*, SIGCOMM 1989): a request gets a tag when it is queued, the larger of the queue's
//! virtual time and the tag of its client's last request, plus its length. The request with the
//! smallest tag is served first. Each request that is served advances the virtual time by its
//! length divided by the number of waiting requests.
//!
//! Waiting clients are served equally in bytes. A small request overtakes large ones, and a request
//! waits for at most about its own length of each other client.
//!
//! Never decides if memory is available for a request:
//! [`RequestMemory`](super::requests::RequestMemory) does.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};

use event_listener::Event;

/// Position of one client (a connection, or a queue of a device) in a disk's fair queue.
#[derive(Debug, Default)]
pub struct FairQueueFlow {
    /// Tag of the client's last queued request. Accessed under the budget's lock.
    tag: AtomicU64,
}

/// A waiting request.
#[derive(Debug)]
pub(super) struct MemoryWaiter {
    pub(super) bytes: u64,
    /// True if the memory is charged to the account.
    pub(super) is_granted: AtomicBool,
    /// True for the request that also checks for clients without progress.
    pub(super) checks_for_stalls: AtomicBool,
    /// Notified when one of the flags is set.
    pub(super) changed: Event,
}

impl MemoryWaiter {
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes,
            is_granted: AtomicBool::new(false),
            checks_for_stalls: AtomicBool::new(false),
            changed: Event::new(),
        })
    }
}

/// Position in the queue: the tag, and the number among requests with equal tags.
pub(super) type QueuePosition = (u64, u64);

/// A fair queue: see the [module](self). Every operation takes O(log n).
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    waiting: BTreeMap<QueuePosition, Arc<MemoryWaiter>>,
    by_size: BTreeSet<(u64, QueuePosition)>,
    virtual_time: u64,
    largest_tag: u64,
    next_number: u64,
}

impl FairQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn push(&mut self, flow: &FairQueueFlow, waiter: &Arc<MemoryWaiter>) -> QueuePosition {
        let tag = self.virtual_time.max(flow.tag.load(SeqCst)).saturating_add(waiter.bytes);
        flow.tag.store(tag, SeqCst);
        self.largest_tag = self.largest_tag.max(tag);
        self.next_number += 1;
        let position = (tag, self.next_number);
        self.waiting.insert(position, Arc::clone(waiter));
        self.by_size.insert((waiter.bytes, position));
        position
    }

    /// The request that is served next.
    pub(super) fn first(&self) -> Option<(QueuePosition, &Arc<MemoryWaiter>)> {
        self.waiting.first_key_value().map(|(place, waiter)| (*place, waiter))
    }

    /// The request that is served last.
    pub(super) fn last(&self) -> Option<&Arc<MemoryWaiter>> {
        self.waiting.last_key_value().map(|(_, waiter)| waiter)
    }

    /// A request of at most `room` bytes: the next one, or else the smallest.
    pub(super) fn fitting(&self, room: u64) -> Option<(QueuePosition, u64)> {
        let next = self.first().map(|(place, waiter)| (place, waiter.bytes));
        let smallest = || self.by_size.first().map(|(bytes, place)| (*place, *bytes));
        let fits = |(_, bytes): &(QueuePosition, u64)| *bytes <= room;
        next.filter(fits).or_else(|| smallest().filter(fits))
    }

    /// Removes a request that is served now.
    pub(super) fn serve(&mut self, place: QueuePosition) -> Option<Arc<MemoryWaiter>> {
        let waiting = self.waiting.len() as u64;
        let served = self.remove(place)?;
        self.virtual_time += served.bytes.div_ceil(waiting);
        Some(served)
    }

    /// Removes a request without serving it.
    pub(super) fn remove(&mut self, place: QueuePosition) -> Option<Arc<MemoryWaiter>> {
        let waiter = self.waiting.remove(&place)?;
        self.by_size.remove(&(waiter.bytes, place));
        if self.waiting.is_empty() {
            // Ensures that a client that was served is not behind one that arrives later.
            self.virtual_time = self.largest_tag;
        }
        Some(waiter)
    }
}
