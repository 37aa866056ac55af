//! What may be read ahead: on tokens that no guest has used, while none waits for any.
//!
//! Apart from turns and time: a read-ahead is never queued. It changes only the spare levels of the
//! buckets on its way, so guests' requests pass at the same instants and in the same order.

use super::super::cost::Cost;
use super::super::node::Node;
use super::super::spare::GivenBack;
use super::{NodeId, ROOT, Tree};
use crate::request::Direction;
use crate::time::Instant;

impl<T> Tree<T> {
    /// Whether a disk may be read ahead of now; it is charged to the spare level of every limit on
    /// the way if so. If not, ask again when there is a reason to.
    ///
    /// It may if nothing waits at any level that it would come before, and no bucket of reads there
    /// is more than full with earlier read-ahead on top, whatever the size of this one.
    /// `given_back` is taken off first, in any case; levels stop at 0.
    ///
    /// Never changes what becomes of a request, so there is no need to poll after it. An instant
    /// before the last counts as that one.
    pub fn spare(&mut self, disk: NodeId, cost: &Cost, given_back: GivenBack, now: Instant) -> bool {
        self.run_out_by(now);
        let slot = self.slot(disk);
        // All the way: each level is to have back what it is given.
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

/// Whether a read-ahead may pass this level.
fn is_free<T>(node: &mut Node<T>, now: Instant) -> bool {
    let reads_wait = node.has_work(Direction::Read);
    // Where writes draw from a limit of reads too, unless something else holds them up in any case.
    let writes_wait = node.shared && node.has_work(Direction::Write);
    match node.enforced_as_they_are() {
        Some(buckets) => {
            !reads_wait && (!writes_wait || buckets.hold_back_writes_alone(now)) && buckets.has_spare(now)
        }
        None => !reads_wait && !writes_wait,
    }
}
