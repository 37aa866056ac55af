//! Admission of read-ahead: on spare capacity, while no guest waits for it.
//!
//! Independent of schedules and time: read-ahead is never queued. It changes only the spare levels
//! of the buckets on its path, so guests' requests are admitted at the same instants and in the
//! same order.

use super::super::cost::Cost;
use super::super::node::Node;
use super::super::spare::GivenBack;
use super::{NodeId, ROOT, Tree};
use crate::request::Direction;
use crate::time::Instant;

impl<T> Tree<T> {
    /// Admits read-ahead for a disk if possible, and charges it to the spare level of every limit
    /// on the path; returns true if it did. Otherwise ask again at the next opportunity.
    ///
    /// It is admitted if, at every level, no request waits that it would overtake and no bucket for
    /// reads exceeds its size including earlier read-ahead, whatever the size of this one.
    /// `given_back` is refunded first, in any case; levels stop at 0.
    ///
    /// Never changes the admission of a request, so no poll is needed afterwards. An instant before
    /// the last one counts as the last one.
    pub fn spare(&mut self, disk: NodeId, cost: &Cost, given_back: GivenBack, now: Instant) -> bool {
        self.run_out_by(now);
        let slot = self.slot(disk);
        // All levels, even if one refuses: each must get its refund.
        let mut free = true;
        self.each_up(slot, |node| {
            if let Some(buckets) = node.enforced_as_they_are() {
                buckets.give_back(given_back);
            }
            free = free && is_free(node, now);
        });
        if free {
            self.each_up(slot, |node| {
                if let Some(buckets) = node.enforced_as_they_are() {
                    buckets.charge_spare(cost, now);
                }
            });
        }
        free
    }

    fn each_up(&mut self, slot: usize, mut visit: impl FnMut(&mut Node<T>)) {
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
fn is_free<T>(node: &mut Node<T>, now: Instant) -> bool {
    let reads_wait = node.has_work(Direction::Read);
    // If writes share a limit with reads, they wait for it, unless a limit of their own throttles
    // them.
    let writes_wait = node.shared && node.has_work(Direction::Write);
    match node.enforced_as_they_are() {
        Some(buckets) => {
            !reads_wait && (!writes_wait || buckets.hold_back_writes_alone(now)) && buckets.has_spare(now)
        }
        None => !reads_wait && !writes_wait,
    }
}
