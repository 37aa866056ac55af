//! Bucket contents of a node as plain numbers, for transfer to another process with its own clock.
//!
//! Buckets do not leak during the transfer, so a transfer grants no additional capacity. Spare
//! levels are not transferred: read-ahead starts anew, within the capacity that guests leave.

use super::{LEVEL_SCALE, NodeBuckets};
use crate::throttle::limits::{LimitKind, Limits, MAX_BURST_LENGTH_S, MAX_VALUE};
use crate::time::Instant;

/// Upper bound of any contents: the largest burst plus the largest request.
const MAX_CONTENTS: u128 = MAX_VALUE as u128 * (MAX_BURST_LENGTH_S as u128 + 1) * LEVEL_SCALE;

/// Bucket contents of a node, and the limits they belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSnapshot {
    /// The limits in force, or last in force.
    pub limits: Limits,
    /// Contents by [`LimitKind::index`].
    pub levels: [BucketContents; 6],
}

/// Admitted work of one bucket that has not leaked, in billionths of its unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketContents {
    /// Level that requests wait for.
    pub main: u128,
    /// Deferred work (see `bucket.rs`).
    pub deferred: u128,
    /// Level of the second bucket, for the burst rate.
    pub burst: u128,
    /// Deferred work of the second bucket.
    pub burst_deferred: u128,
}

impl NodeBuckets {
    /// Buckets with these limits, which must be valid, and contents. Contents are capped, because
    /// another process sent them.
    pub(in crate::throttle) fn from_snapshot(snapshot: &BucketSnapshot, now: Instant) -> Self {
        let mut buckets = Self::new(&snapshot.limits, now);
        for (bucket, level) in buckets.buckets.iter_mut().zip(snapshot.levels) {
            bucket.level = level.main.min(MAX_CONTENTS);
            bucket.deferred = level.deferred.min(MAX_CONTENTS);
            bucket.burst_level = level.burst.min(MAX_CONTENTS);
            bucket.burst_deferred = level.burst_deferred.min(MAX_CONTENTS);
        }
        buckets.restart_trend();
        buckets
    }

    /// Contents at the instant of the buckets.
    pub(in crate::throttle) fn levels(&self) -> [BucketContents; 6] {
        LimitKind::ALL.map(|kind| {
            let bucket = &self.buckets[kind.index()];
            BucketContents {
                main: bucket.level,
                deferred: bucket.deferred,
                burst: bucket.burst_level,
                burst_deferred: bucket.burst_deferred,
            }
        })
    }
}
