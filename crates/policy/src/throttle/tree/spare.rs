//! Admission of read-ahead: on spare capacity, while no guest waits for it.
//!
//! Independent of schedules and time: read-ahead is never queued. It changes only the spare levels
//! of the buckets on its path, so guests' requests are admitted at the same instants and in the
//! same order.

use super::super::bucket::NodeBuckets;
use super::super::cost::RequestCost;
use super::super::node::ThrottleNode;
use super::super::refund::SpareRefund;
use super::{NodeId, ROOT, ThrottleTree};
use crate::request::Direction;
use crate::time::Instant;

impl<T> ThrottleTree<T> {
    /// Admits read-ahead for a disk if possible, and charges it to the spare level of every limit
    /// on the path; returns true if it did. Otherwise, try again at the next opportunity.
    ///
    /// It is admitted if, at every level, no request waits that it would overtake and no bucket for
    /// reads exceeds its size including earlier read-ahead, whatever the size of this one. `refund`
    /// is applied first, in any case; levels stop at 0.
    ///
    /// Never changes the admission of a request, so no poll is needed afterwards. An instant before
    /// the last one counts as the last one.
    pub fn try_admit_read_ahead(
        &mut self,
        disk: NodeId,
        cost: &RequestCost,
        refund: SpareRefund,
        now: Instant,
    ) -> bool {
        self.expire_leases_by(now);
        let slot = self.slot(disk);
        // All levels, even if one refuses: each must get its refund.
        let mut has_spare = true;
        self.each_up(slot, |node| {
            node.enforced_buckets_unadvanced().for_each(|buckets| buckets.refund_spare(refund));
            has_spare = has_spare && admits_read_ahead(node, now);
        });
        if has_spare {
            self.each_up(slot, |node| {
                node.enforced_buckets_unadvanced().for_each(|buckets| buckets.charge_spare(cost, now));
            });
        }
        has_spare
    }

    pub(super) fn each_up(&mut self, slot: usize, mut visit: impl FnMut(&mut ThrottleNode<T>)) {
        let mut at = slot;
        loop {
            let node = &mut self.nodes[at];
            visit(node);
            if at == ROOT {
                return;
            }
            at = node.parent;
        }
    }
}

/// True if this level admits read-ahead.
fn admits_read_ahead<T>(node: &mut ThrottleNode<T>, now: Instant) -> bool {
    let reads_wait = node.has_work(Direction::Read);
    // If writes share a limit with reads, they wait for it, unless a limit of their own throttles
    // them.
    let writes_wait = node.has_shared_limit && node.has_work(Direction::Write);
    let throttles_writes_only = |buckets: &mut NodeBuckets| buckets.throttles_writes_only(now);
    if reads_wait || (writes_wait && !node.enforced_buckets_unadvanced().any(throttles_writes_only)) {
        return false;
    }
    node.enforced_buckets_unadvanced().all(|buckets| buckets.has_spare(now))
}
