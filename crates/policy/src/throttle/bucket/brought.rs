//! What one disk has of the buckets of its group, and what becomes of it in those of another.
//!
//! ```text
//!   group's bucket, level and deferred: 900 ─┐
//!                                            ├─ the least of both: 400 ──► the next group's bucket
//!   what the disk brought here, and what ────┘                             is fuller by as much,
//!   it has passed since: 400                                               up to its size
//! ```
//!
//! A disk's own part of a bucket is not kept: that would cost every request. What is known is an
//! upper bound of it. Whatever a bucket takes from another is taken so that both the level and the
//! level with what is deferred are at least what they were in either. All that happens to a bucket
//! (charges, leaks, other limits) keeps that order, so requests pass only where they would in a
//! bucket that this disk alone had filled all the way. Hence the promise of `bucket.rs` holds for a
//! disk that moves, as for one whose limits change.

use super::{Bucket, Buckets, Spare, UNIT};
use crate::throttle::limits::LimitKind;
use crate::throttle::stats::Counters;

impl Bucket {
    /// Leaves what a disk has of it: it came with `brought` and has passed so much since. Under a
    /// limit that is not in force it has all that it came with, as it came.
    fn keep(&mut self, brought: Option<&Self>, passed: u128, in_force: bool) {
        let group = *self;
        let part = |(level, deferred): (u128, u128), size: u128, came_with: (u128, u128)| {
            // By the request that ran it over. It may be more in a bucket that a watermark has
            // narrowed, and then members of another group do not wait for it.
            let over = level.max(came_with.0).saturating_sub(size);
            let fullest = size + if group.rate > 0 { over.min(u128::from(group.rate) * UNIT) } else { over };
            let came_with = came_with.0.saturating_add(came_with.1);
            let most = level.saturating_add(deferred).min(came_with.saturating_add(passed));
            let total = if in_force { most } else { most.max(came_with) };
            let level = total.min(fullest);
            (level, total - level)
        };
        if let Some(brought) = brought
            && !in_force
        {
            *self = *brought;
        }
        let came_with = brought.map_or((0, 0), |brought| (brought.level, brought.deferred));
        (self.level, self.deferred) = part((group.level, group.deferred), self.size, came_with);
        let came_with = brought.map_or((0, 0), |brought| (brought.burst_level, brought.burst_deferred));
        (self.burst_level, self.burst_deferred) =
            part((group.burst_level, group.burst_deferred), self.burst_size, came_with);
    }

    /// Adds what a disk brings, which is as this limit would have it.
    fn join(&mut self, brought: &Self) {
        let of = |bucket: &Self| (bucket.level, bucket.deferred);
        (self.level, self.deferred) = joined(self.size, of(self), of(brought));
        if self.burst_rate > 0 {
            let of = |bucket: &Self| (bucket.burst_level, bucket.burst_deferred);
            (self.burst_level, self.burst_deferred) = joined(self.burst_size, of(self), of(brought));
        }
    }

    /// Holds at least what a disk has brought, of which a part is here already.
    fn hold(&mut self, brought: &Self) {
        let most = |one: &mut u128, other| *one = (*one).max(other);
        let total = (self.level + self.deferred).max(brought.level + brought.deferred);
        most(&mut self.level, brought.level);
        self.deferred = total.saturating_sub(self.level);
        if self.burst_rate > 0 {
            let total =
                (self.burst_level + self.burst_deferred).max(brought.burst_level + brought.burst_deferred);
            most(&mut self.burst_level, brought.burst_level);
            self.burst_deferred = total.saturating_sub(self.burst_level);
        }
    }

    const fn is_empty(&self) -> bool {
        self.level == 0 && self.deferred == 0 && self.burst_level == 0 && self.burst_deferred == 0
    }
}

/// Levels and what is deferred of two together, in a bucket of this size. As much as the bucket and
/// what was deferred can hold: a disk that comes back has a part of it in the bucket already.
fn joined(size: u128, one: (u128, u128), other: (u128, u128)) -> (u128, u128) {
    let [one_total, other_total] = [one, other].map(|(level, deferred)| level.saturating_add(deferred));
    let deferred = one.1.max(other.1);
    let most = size.saturating_add(deferred).max(one_total).max(other_total);
    let total = one_total.saturating_add(other_total).min(most);
    let level = one.0.max(other.0).max(total.saturating_sub(deferred));
    (level, total - level)
}

impl Buckets {
    /// Leaves what a disk has of these: see [`Bucket::keep`]. Nothing of read-ahead, of which
    /// nobody knows whose it is.
    pub(in crate::throttle) fn keep(
        &mut self,
        brought: Option<&Self>,
        [reads, writes]: [Counters; 2],
        in_force: bool,
    ) {
        for kind in LimitKind::ALL {
            let passed = match kind {
                LimitKind::BpsRead | LimitKind::IopsRead => [Some(reads), None],
                LimitKind::BpsWrite | LimitKind::IopsWrite => [None, Some(writes)],
                LimitKind::BpsTotal | LimitKind::IopsTotal => [Some(reads), Some(writes)],
            };
            let units = |passed: Counters| self.most_units(kind, passed);
            let passed = passed.into_iter().flatten().map(units).fold(0, u128::saturating_add);
            let bucket = &mut self.buckets[kind.index()];
            let brought = brought.map(|brought| &brought.buckets[kind.index()]);
            bucket.keep(brought, passed, in_force && bucket.rate > 0);
        }
        self.spare = Spare::default();
    }

    /// What so much counts as here at most, in billionths, however large each request was.
    fn most_units(&self, kind: LimitKind, passed: Counters) -> u128 {
        let bytes = u128::from(passed.bytes) * UNIT;
        if kind.counts_bytes() {
            return bytes;
        }
        u128::from(passed.requests) * UNIT + bytes.checked_div(u128::from(self.least_iops_size)).unwrap_or(0)
    }

    /// Adds what a disk brings to the buckets of these kinds that are in force.
    pub(in crate::throttle) fn join(&mut self, brought: &Self, of: impl Fn(LimitKind) -> bool) {
        for kind in LimitKind::ALL {
            let bucket = &mut self.buckets[kind.index()];
            if bucket.rate > 0 && of(kind) {
                bucket.join(&brought.buckets[kind.index()]);
            }
        }
    }

    /// Sees to it that the buckets in force hold at least what a disk has brought.
    pub(in crate::throttle) fn hold(&mut self, brought: &Self) {
        for (bucket, brought) in self.buckets.iter_mut().zip(&brought.buckets) {
            if bucket.rate > 0 {
                bucket.hold(brought);
            }
        }
    }

    /// Whether nothing has passed that has not run out.
    pub(in crate::throttle) fn are_empty(&self) -> bool {
        self.buckets.iter().all(Bucket::is_empty)
    }
}
