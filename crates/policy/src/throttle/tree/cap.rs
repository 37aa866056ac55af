//! Caps of nodes in a tree; see `throttle/cap.rs`.

use super::super::cap::NodeCap;
use super::super::cause::CauseKind;
use super::super::limits::{InvalidLimit, Limits};
use super::super::node::{NodeId, ThrottleNode};
use super::ThrottleTree;
use crate::request::Direction;
use crate::time::Instant;
use alloc::boxed::Box;

impl<T> ThrottleTree<T> {
    /// Sets or removes the cap of a node, also for waiting requests: poll afterwards.
    ///
    /// A cap is a second set of limits, which holds beside the node's limits or quota: a request is
    /// admitted if both admit it, and charged to both. It is enforced whatever the [`Enforcement`]
    /// of the limits. Its buckets begin full, and those of a larger cap gain no capacity, so
    /// changes grant no burst. Its throttle cause is [`CauseKind::LatencyTarget`]. A removal admits
    /// requests that waited only for the cap at the next poll.
    ///
    /// A cap is not a setting: it ends with the node, and neither a node that replaces it nor
    /// [`ThrottleTree::restore`] inherits it. It applies to reservations too: no more is admitted
    /// than the cap, so the caller must not set one below the reservations at or below the node.
    ///
    /// [`Enforcement`]: crate::throttle::Enforcement
    ///
    /// # Errors
    /// [`InvalidLimit`] limits change nothing.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn set_cap(&mut self, node: NodeId, cap: Option<Limits>, now: Instant) -> Result<(), InvalidLimit> {
        let limits = cap.unwrap_or_default();
        limits.validate()?;
        let slot = self.slot(node);
        self.advance_to(now);
        self.nodes[slot].set_cap(limits, self.now);
        self.update_shared_limits(slot);
        self.settle_both_up(slot);
        Ok(())
    }

    /// The cap of a node, if it has one.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn cap(&self, node: NodeId) -> Option<Limits> {
        Some(self.nodes[self.slot(node)].cap.as_ref()?.limits())
    }

    /// Records that background work of a disk, which has no queue, waits for the caps on its path
    /// that have no spare capacity.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn record_cap_wait(&mut self, disk: NodeId, now: Instant) {
        let slot = self.slot(disk);
        self.each_up(slot, |node| {
            if let Some(cap) = &mut node.cap {
                cap.has_waited |= !cap.buckets.has_spare(now);
            }
        });
    }

    /// True if requests have waited for the cap of a node since the last call, or wait for it now.
    /// Waits for its limits, for groups above and for siblings do not count.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn take_cap_wait(&mut self, node: NodeId) -> bool {
        let slot = self.slot(node);
        self.nodes[slot].take_cap_wait()
    }
}

impl<T> ThrottleNode<T> {
    /// Sets the limits of the cap, which must be valid; unlimited ones remove it.
    fn set_cap(&mut self, limits: Limits, now: Instant) {
        if limits.is_unlimited() {
            self.cap = None;
        } else {
            self.cap.get_or_insert_with(|| Box::new(NodeCap::new(now))).set(limits, now);
        }
    }

    fn take_cap_wait(&mut self) -> bool {
        let waits_now = Direction::ALL.into_iter().any(|direction| {
            let cause = self.last_throttled(direction).map(|(kind, _)| kind);
            self.blocked[direction.index()] && cause == Some(CauseKind::LatencyTarget)
        });
        let Some(cap) = &mut self.cap else { return false };
        core::mem::replace(&mut cap.has_waited, waits_now) || waits_now
    }
}
