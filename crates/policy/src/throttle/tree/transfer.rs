//! Transfer of a node's contents and counters to a tree in another process.

use super::super::bucket::{BucketSnapshot, NodeBuckets};
use super::super::limits::InvalidLimit;
use super::super::node::{NodeId, NodeLimits};
use super::super::stats::CumulativeStats;
use super::ThrottleTree;
use crate::time::Instant;
use alloc::boxed::Box;

impl<T> ThrottleTree<T> {
    /// Bucket contents of a node; `None` if it never had a limit.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn snapshot(&self, node: NodeId, now: Instant) -> Option<BucketSnapshot> {
        let mut limited = *self.nodes[self.slot(node)].charged_contents()?;
        limited.buckets.leak_to(self.now.max(now));
        Some(BucketSnapshot { limits: limited.limits, levels: limited.buckets.levels() })
    }

    /// Takes over contents of a node in another process, as [`ThrottleTree::configure`] takes over
    /// those of previous limits: poll afterwards.
    ///
    /// # Errors
    /// [`InvalidLimit`] limits change nothing.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn restore(
        &mut self,
        node: NodeId,
        snapshot: &BucketSnapshot,
        now: Instant,
    ) -> Result<(), InvalidLimit> {
        snapshot.limits.validate_in_force()?;
        let slot = self.slot(node);
        self.advance_to(now);
        let buckets = NodeBuckets::from_snapshot(snapshot, self.now);
        self.nodes[slot]
            .inherit_contents(Box::new(NodeLimits { limits: snapshot.limits, buckets }), self.now);
        self.settle_both_up(slot);
        Ok(())
    }

    /// Cumulative counters of a node.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn cumulative(&self, node: NodeId, now: Instant) -> CumulativeStats {
        self.nodes[self.slot(node)].cumulative(self.now.max(now))
    }

    /// Adds the counters of a node in another process. Does not affect decisions.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn add_cumulative(&mut self, node: NodeId, stats: &CumulativeStats) {
        let (slot, now) = (self.slot(node), self.now);
        self.nodes[slot].add_cumulative(stats, now);
    }
}
