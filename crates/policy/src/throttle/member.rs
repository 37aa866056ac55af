//! One disk of a throttle group: its share, its two queues, its counters.
//!
//! Requests wait here in the order in which they came, reads apart from writes. Whether the first may pass is the
//! group's business; nothing here knows a limit or the time.

use super::cost::Cost;
use super::node::NodeId;
use super::share::Share;
use super::stats::Counters;
use crate::request::Direction;
use crate::time::Instant;
use alloc::collections::VecDeque;

/// A member of one particular group. Never valid again once that member has left.
pub type MemberId = NodeId;

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
