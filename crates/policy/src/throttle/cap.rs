//! The cap of a node: a second set of limits, which a controller sets and often changes.
//!
//! ```text
//!     limits of the user, or a quota of them ──┐
//!                                              ├── both admit ──► charged to both
//!     cap ─────────────────────────────────────┘
//! ```
//!
//! Cap and limits have separate buckets, so a cap that comes and goes leaves the limits' levels and
//! bursts as they would be without it. Its buckets follow the rule of a quota (`bucket/quota.rs`):
//! they begin full and capacity that a change adds comes filled, so no sequence of caps grants more
//! than their leak, plus the one request that overruns the bucket.
//!
//! Never a setting: `limits`, snapshots for an upgrade and the charges that a moved disk carries
//! exclude it. A watermark that lifts the limits does not lift it.

use super::bucket::NodeBuckets;
use super::cause::CauseKind;
use super::limits::Limits;
use crate::request::Direction;
use crate::time::Instant;

/// Limits and buckets of a cap. Boxed, because most nodes have none.
#[derive(Debug)]
pub(super) struct NodeCap {
    limits: Limits,
    pub(super) buckets: NodeBuckets,
    /// True if requests have waited for the cap since the caller reset it.
    pub(super) has_waited: bool,
}

impl NodeCap {
    /// A cap without limits.
    pub(super) fn new(now: Instant) -> Self {
        let limits = Limits::default();
        Self { limits, buckets: NodeBuckets::new(&limits, now), has_waited: false }
    }

    pub(super) const fn limits(&self) -> Limits {
        self.limits
    }

    /// Changes the limits, which must be valid.
    pub(super) fn set(&mut self, limits: Limits, now: Instant) {
        self.buckets.leak_to(now);
        // Nothing to report: no other node receives capacity that a cap gives up.
        let _given_up = self.buckets.set_quota(&limits, [0; 6]);
        self.limits = limits;
    }

    /// The longer of the wait for the node's limits and that for the cap; that for the limits if
    /// both are equal. Not inlined, because most nodes have no cap.
    #[inline(never)]
    pub(super) fn longest_wait(
        &mut self,
        by_limit: Option<(u64, CauseKind)>,
        direction: Direction,
        now: Instant,
    ) -> Option<(u64, CauseKind)> {
        self.buckets.leak_to(now);
        let Some((cap_ns, _)) = self.buckets.longest_wait(direction) else { return by_limit };
        match by_limit {
            Some((limit_ns, _)) if limit_ns >= cap_ns => by_limit,
            _ => Some((cap_ns, CauseKind::LatencyTarget)),
        }
    }
}
