//! How full the buckets of a node are, as plain numbers: to go on from in another process, which
//! has a clock of its own.
//!
//! What leaks on the way is lost to whoever waits, so nobody gains by it. Of read-ahead nothing is
//! told: it begins anew, and takes no more than guests leave.

use super::{Buckets, UNIT};
use crate::throttle::limits::{LimitKind, Limits, MAX_BURST_LENGTH_S, MAX_VALUE};
use crate::time::Instant;

/// No bucket holds more: the largest burst there is, and the largest request on top.
const MOST: u128 = MAX_VALUE as u128 * (MAX_BURST_LENGTH_S as u128 + 1) * UNIT;

/// The buckets of a node, and the limits that they are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    /// In force, or the last that were.
    pub limits: Limits,
    /// By [`LimitKind::index`].
    pub levels: [Contents; 6],
}

/// What has passed and not run out of one bucket, in billionths of its unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// What is waited for.
    pub main: u128,
    /// What is not: see `bucket.rs`.
    pub deferred: u128,
    /// The first, of the rate of the burst.
    pub burst: u128,
    /// The second of it.
    pub burst_deferred: u128,
}

impl Buckets {
    /// Of these limits, as full as they are told to be. The limits are valid.
    pub(in crate::throttle) fn filled(filled: &Filled, now: Instant) -> Self {
        let mut buckets = Self::new(&filled.limits, now);
        for (bucket, level) in buckets.buckets.iter_mut().zip(filled.levels) {
            bucket.level = level.main.min(MOST);
            bucket.deferred = level.deferred.min(MOST);
            bucket.burst_level = level.burst.min(MOST);
            bucket.burst_deferred = level.burst_deferred.min(MOST);
        }
        buckets
    }

    /// How full they are, at their instant.
    pub(in crate::throttle) fn levels(&self) -> [Contents; 6] {
        LimitKind::ALL.map(|kind| {
            let bucket = &self.buckets[kind.index()];
            Contents {
                main: bucket.level,
                deferred: bucket.deferred,
                burst: bucket.burst_level,
                burst_deferred: bucket.burst_deferred,
            }
        })
    }
}
