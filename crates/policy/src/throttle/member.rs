//! One disk of a throttle group: its share, its two queues, its counters.
//!
//! Requests wait here in the order in which they came, reads apart from writes. Whether the first may pass is the
//! group's business; nothing here knows a limit or the time.

use super::cost::Cost;
use crate::request::Direction;
use crate::time::Instant;
use alloc::collections::VecDeque;

/// What a member is entitled to when its group is short.
///
/// Kept with the member and reported back; turns are round robin, every member's share counting the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    weight: u32,
}

impl Share {
    /// The range of weights.
    pub const WEIGHTS: core::ops::RangeInclusive<u32> = 1..=10_000;

    /// A share of this weight, or `None` outside [`Share::WEIGHTS`].
    pub fn new(weight: u32) -> Option<Self> {
        Self::WEIGHTS.contains(&weight).then_some(Self { weight })
    }

    /// The weight; 100 by default.
    pub const fn weight(self) -> u32 {
        self.weight
    }
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 100 }
    }
}

/// A member of one particular group. Never valid again once that member has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberId {
    pub(super) slot: usize,
    /// Tells the slot's earlier members from this one.
    pub(super) generation: u64,
}

/// A request that waits in a group, as needed to take it back with [`Group::cancel`](super::Group::cancel).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub(super) member: MemberId,
    pub(super) direction: Direction,
    /// Rises with every request that queues in the group.
    pub(super) number: u64,
}

/// What has passed a member or a group since it began. Only what was admitted is counted, when it is admitted.
///
/// Merged requests count as the requests the client sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests admitted, at once or after waiting.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those that had to wait.
    pub throttled: u64,
    /// How long those waited, in nanoseconds, all added up.
    pub waited_ns: u64,
}

impl Counters {
    /// Counts an admitted request. Saturates, as counters that are only ever shown may.
    pub(super) const fn count(&mut self, cost: &Cost, waited_ns: Option<u64>) {
        self.requests = self.requests.saturating_add(cost.requests());
        self.bytes = self.bytes.saturating_add(cost.bytes());
        if let Some(waited_ns) = waited_ns {
            self.throttled = self.throttled.saturating_add(cost.requests());
            self.waited_ns = self.waited_ns.saturating_add(waited_ns.saturating_mul(cost.requests()));
        }
    }
}

/// A request that waits.
#[derive(Debug)]
pub(super) struct Waiter<T> {
    pub(super) number: u64,
    pub(super) since: Instant,
    pub(super) cost: Cost,
    pub(super) token: T,
}

/// A slot of the group's table, occupied or waiting for the next member to join.
#[derive(Debug)]
pub(super) struct Member<T> {
    pub(super) generation: u64,
    pub(super) present: bool,
    pub(super) share: Share,
    pub(super) counters: Counters,
    queues: [VecDeque<Waiter<T>>; 2],
    /// Whether this slot stands in the group's ring of turns, by direction. Outlives the member: a ring entry is
    /// dropped when its turn comes and nothing waits, never searched for.
    pub(super) in_ring: [bool; 2],
}

impl<T> Member<T> {
    pub(super) fn vacant() -> Self {
        Self {
            generation: 0,
            present: false,
            share: Share::default(),
            counters: Counters::default(),
            queues: [VecDeque::new(), VecDeque::new()],
            in_ring: [false; 2],
        }
    }

    /// Whether it is the member of this id that occupies the slot.
    pub(super) const fn is(&self, id: MemberId) -> bool {
        self.present && self.generation == id.generation
    }

    pub(super) fn queue(&mut self, direction: Direction) -> &mut VecDeque<Waiter<T>> {
        &mut self.queues[direction.index()]
    }

    /// Takes the request of that number out of its queue, if it still waits.
    ///
    /// Finds it in O(log n) of what waits here; closing the gap moves the shorter side of the queue.
    pub(super) fn take(&mut self, direction: Direction, number: u64) -> Option<Waiter<T>> {
        let queue = self.queue(direction);
        let at = queue.binary_search_by_key(&number, |waiter| waiter.number).ok()?;
        queue.remove(at)
    }
}
