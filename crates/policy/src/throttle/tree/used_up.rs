//! Quotas by volume that are used up: a limit of bytes per second in addition to the other limits
//! of a node.
//!
//! ```text
//!   limits of the node ───────────────► reservations are checked against these
//!        │
//!   `quota-rate`, or the reservations at and below the node if they are higher ──► limits in force
//! ```
//!
//! The limit follows the reservations, so that each configuration that is valid with bytes left is
//! also valid without. Never counts bytes: see [`volume_quota`](crate::volume_quota).

use super::super::limits::Limits;
use super::super::node::{NodeId, UsedUpQuota};
use super::ThrottleTree;
use crate::time::Instant;
use alloc::boxed::Box;

impl<T> ThrottleTree<T> {
    /// Limits reads and writes of a node together to this rate in bytes per second, or to its
    /// reservations if they are higher; 0 removes the limit. Poll afterwards. The limit has the
    /// meaning of [`Limits::with_used_up_rate`].
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn set_used_up_rate(&mut self, node: NodeId, rate_bps: u64, now: Instant) {
        let slot = self.slot(node);
        self.advance_to(now);
        let node = &mut self.nodes[slot];
        if node.used_up.as_ref().map_or(0, |used_up| used_up.rate_bps) == rate_bps {
            return;
        }
        let limits = node.limits_without_quota();
        node.used_up = (rate_bps > 0).then(|| Box::new(UsedUpQuota { limits, rate_bps }));
        self.apply_configured(slot, limits);
        self.apply_enforcement(slot);
    }

    /// Puts limits in force, together with those of a used-up quota.
    pub(super) fn apply_configured(&mut self, slot: usize, limits: Limits) {
        let node = &mut self.nodes[slot];
        if let Some(used_up) = &mut node.used_up {
            used_up.limits = limits;
        }
        let limits = node.limits_with_quota(&limits);
        if limits != node.limits() {
            self.apply_limits(slot, limits);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::enforcement::Enforcement;
    use super::super::super::limits::LimitKind;
    use super::super::super::share::NodeShare;
    use super::*;

    const NOW: Instant = Instant::ZERO;

    fn rate(tree: &ThrottleTree<u32>, node: NodeId) -> u64 {
        tree.limits(node).limit(LimitKind::BpsTotal).rate
    }

    fn reserving(bps: u64) -> NodeShare {
        NodeShare::default().with_reservation(0, bps)
    }

    fn bps(rate: u64) -> Limits {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::BpsTotal).rate = rate;
        limits
    }

    #[test]
    fn reservations_fit_while_a_quota_is_used_up_and_raise_its_limit() {
        let mut tree = ThrottleTree::new(NOW);
        let top = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
        let group = tree.add(Some(top), bps(1000), NodeShare::default()).unwrap();
        tree.set_used_up_rate(top, 100, NOW);
        tree.set_used_up_rate(group, 50, NOW);
        assert_eq!((rate(&tree, top), rate(&tree, group)), (100, 50));
        let first = tree.add(Some(group), Limits::default(), reserving(300)).unwrap();
        let second = tree.add(Some(group), Limits::default(), reserving(400)).unwrap();
        assert_eq!((rate(&tree, top), rate(&tree, group)), (700, 700));
        // The limit without the quota bounds them, as before.
        tree.add(Some(group), Limits::default(), reserving(301)).unwrap_err();
        tree.configure(group, bps(600), NodeShare::default(), NOW).unwrap_err();
        tree.configure(group, bps(900), NodeShare::default(), NOW).unwrap();
        assert_eq!(rate(&tree, group), 700);
        tree.configure(second, Limits::default(), NodeShare::default(), NOW).unwrap();
        assert_eq!((rate(&tree, top), rate(&tree, group)), (300, 300));
        tree.remove(first);
        assert_eq!((rate(&tree, top), rate(&tree, group)), (100, 50));
        tree.set_used_up_rate(group, 0, NOW);
        assert_eq!((rate(&tree, top), rate(&tree, group)), (100, 900));
    }

    #[test]
    fn limit_of_a_used_up_quota_is_not_lifted() {
        let mut tree = ThrottleTree::<u32>::new(NOW);
        let group = tree.add(None, bps(1000), NodeShare::default()).unwrap();
        tree.enforce(group, Enforcement::Lifted, NOW);
        assert_eq!(tree.enforcement(group), Enforcement::Lifted);
        tree.set_used_up_rate(group, 50, NOW);
        assert_eq!(tree.enforcement(group), Enforcement::Enforced);
        assert_eq!(tree.set_enforcement(group), Enforcement::Lifted);
        tree.enforce(group, Enforcement::Enforced, NOW);
        tree.enforce(group, Enforcement::Lifted, NOW);
        assert_eq!(tree.enforcement(group), Enforcement::Enforced);
        tree.set_used_up_rate(group, 0, NOW);
        assert_eq!(tree.enforcement(group), Enforcement::Lifted);
    }
}
