//! Admission of read-ahead: on spare capacity, while no guest waits for it.
//!
//! Independent of schedules and time: read-ahead is never queued. It changes only the spare levels
//! of the buckets on its path, so guests' requests are admitted at the same instants and in the
//! same order.

use super::super::bucket::NodeBuckets;
use super::super::cause::CauseKind;
use super::super::cost::RequestCost;
use super::super::enforcement::Enforcement;
use super::super::node::ThrottleNode;
use super::super::refund::SpareRefund;
use super::{LevelCause, NodeId, ROOT, ThrottleTree};
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

    /// Lowest limit or cap on the path of a disk that has no spare capacity, after a refusal of
    /// [`ThrottleTree::try_admit_read_ahead`] at the same instant.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn spare_cause(&mut self, disk: NodeId, now: Instant) -> Option<LevelCause> {
        let slot = self.slot(disk);
        let (mut level, mut cause) = (0, None);
        self.each_up(slot, |node| {
            let limits = node.limited.as_ref().filter(|_| node.enforcement != Enforcement::Lifted);
            let limit = limits.and_then(|limited| limited.buckets.without_spare(now)).map(CauseKind::Limit);
            let cap = || node.cap.as_ref().filter(|cap| !cap.buckets.has_spare(now));
            let kind = limit.or_else(|| cap().map(|_| CauseKind::LatencyTarget));
            // Or the limit that clients' requests wait for here.
            let kind = kind.or_else(|| node.summary(now).throttle_cause);
            cause = cause.or(kind.map(|kind| LevelCause { level, kind }));
            level += 1;
        });
        cause
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
