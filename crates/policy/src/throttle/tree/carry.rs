//! Transfer of a node's contents and counters to a tree in another process.

use super::super::bucket::{Buckets, Filled};
use super::super::limits::Invalid;
use super::super::node::{Limited, NodeId};
use super::super::stats::Counted;
use super::Tree;
use crate::time::Instant;
use alloc::boxed::Box;

impl<T> Tree<T> {
    /// Bucket contents of a node; `None` if it never had a limit.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn filled(&self, node: NodeId, now: Instant) -> Option<Filled> {
        let mut limited = *self.nodes[self.slot(node)].charged()?;
        limited.buckets.leak_to(self.now.max(now));
        Some(Filled { limits: limited.limits, levels: limited.buckets.levels() })
    }

    /// Takes over contents of a node in another process, as [`Tree::configure`] takes over those of
    /// previous limits: poll afterwards.
    ///
    /// # Errors
    /// [`Invalid`] limits change nothing.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn fill(&mut self, node: NodeId, filled: &Filled, now: Instant) -> Result<(), Invalid> {
        filled.limits.validate()?;
        let slot = self.slot(node);
        self.pass_time(now);
        let buckets = Buckets::filled(filled, self.now);
        self.nodes[slot].take_over(Box::new(Limited { limits: filled.limits, buckets }), self.now);
        self.settle_both_up(slot);
        Ok(())
    }

    /// Cumulative counters of a node.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn counted(&self, node: NodeId, now: Instant) -> Counted {
        self.nodes[self.slot(node)].counted(self.now.max(now))
    }

    /// Adds the counters of a node in another process. Does not affect decisions.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn count_on(&mut self, node: NodeId, counted: &Counted) {
        let (slot, now) = (self.slot(node), self.now);
        self.nodes[slot].count_on(counted, now);
    }
}
