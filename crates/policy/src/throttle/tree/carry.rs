//! What has passed a node, for a tree in another process that goes on in its place.

use super::super::bucket::{Buckets, Filled};
use super::super::limits::Invalid;
use super::super::node::{Limited, NodeId};
use super::super::stats::Counted;
use super::Tree;
use crate::time::Instant;
use alloc::boxed::Box;

impl<T> Tree<T> {
    /// How full the buckets of a node are; `None` where it never had a limit.
    ///
    /// # Panics
    /// If the node was removed.
    pub fn filled(&self, node: NodeId, now: Instant) -> Option<Filled> {
        let mut limited = *self.nodes[self.slot(node)].charged()?;
        limited.buckets.leak_to(self.now.max(now));
        Some(Filled { limits: limited.limits, levels: limited.buckets.levels() })
    }

    /// Has the limits of a node take over what has passed elsewhere, as [`Tree::configure`] has
    /// them take over what passed under others: poll afterwards.
    ///
    /// # Errors
    /// [`Invalid`] limits; then nothing has changed.
    ///
    /// # Panics
    /// If the node was removed.
    pub fn fill(&mut self, node: NodeId, filled: &Filled, now: Instant) -> Result<(), Invalid> {
        filled.limits.validate()?;
        let slot = self.slot(node);
        self.pass_time(now);
        let buckets = Buckets::filled(filled, self.now);
        self.nodes[slot].take_over(Box::new(Limited { limits: filled.limits, buckets }), self.now);
        self.settle_both_up(slot);
        Ok(())
    }

    /// What a node has counted so far.
    ///
    /// # Panics
    /// If the node was removed.
    pub fn counted(&self, node: NodeId, now: Instant) -> Counted {
        self.nodes[self.slot(node)].counted(self.now.max(now))
    }

    /// Counts on from what was counted elsewhere. Decides nothing.
    ///
    /// # Panics
    /// If the node was removed.
    pub fn count_on(&mut self, node: NodeId, counted: &Counted) {
        let (slot, now) = (self.slot(node), self.now);
        self.nodes[slot].count_on(counted, now);
    }
}
