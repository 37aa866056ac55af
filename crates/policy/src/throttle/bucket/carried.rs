//! The bucket contents that a disk carries from one group to another.
//!
//! ```text
//!   group's bucket, level and deferred: 900 ─┐
//!                                            ├─ the minimum: 400 ──► added to the next group's
//!   carried into the group plus work ────────┘                      bucket, up to its size
//!   admitted since: 400
//! ```
//!
//! A disk's own part of a bucket is not tracked, because that would cost every request. An upper
//! bound is known. Contents are combined so that both the level and level plus deferred work are no
//! less than in either bucket. All later operations (charges, leaks, changes of limits) preserve
//! that order, so requests are admitted only if a bucket filled by this disk alone would admit
//! them. The guarantee of `bucket.rs` therefore holds for a disk that moves, as for one whose
//! limits change.

use super::{LEVEL_SCALE, LeakyBucket, NodeBuckets, SpareLevels};
use crate::throttle::limits::LimitKind;
use crate::throttle::stats::AdmissionCounters;

impl LeakyBucket {
    /// Reduces the bucket of a group to the part of one disk, which carried in `brought` and had
    /// `passed` admitted since. A limit that is not in force keeps all that was carried in,
    /// unchanged.
    fn keep(&mut self, brought: Option<&Self>, passed: u128, in_force: bool) {
        let group = *self;
        let part = |(level, deferred): (u128, u128), size: u128, came_with: (u128, u128)| {
            // Excess by the request that overran the bucket. After a watermark has scaled the
            // bucket down it may be larger; members of the next group must not wait for that.
            let over = level.max(came_with.0).saturating_sub(size);
            let fullest =
                size + if group.rate > 0 { over.min(u128::from(group.rate) * LEVEL_SCALE) } else { over };
            let came_with = came_with.0.saturating_add(came_with.1);
            // The minimum of two upper bounds: the whole bucket, and what this disk can have
            // caused.
            let most = level.saturating_add(deferred).min(came_with.saturating_add(passed));
            let total = if in_force { most } else { most.max(came_with) };
            // Members of the next group wait for at most a full bucket; the rest is deferred.
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

    /// Adds the contents that a disk carries, already converted to this limit.
    fn join(&mut self, brought: &Self) {
        let of = |bucket: &Self| (bucket.level, bucket.deferred);
        (self.level, self.deferred) = combined(self.size, of(self), of(brought));
        if self.burst_rate > 0 {
            let of = |bucket: &Self| (bucket.burst_level, bucket.burst_deferred);
            (self.burst_level, self.burst_deferred) = combined(self.burst_size, of(self), of(brought));
        }
    }

    /// Raises the contents to at least those that a disk carries, a part of which is here already.
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

/// Sum of two contents (level, deferred) in a bucket of this size. Capped at the size plus deferred
/// work: a disk that returns has left a part in this bucket.
fn combined(size: u128, one: (u128, u128), other: (u128, u128)) -> (u128, u128) {
    let [one_total, other_total] = [one, other].map(|(level, deferred)| level.saturating_add(deferred));
    let deferred = one.1.max(other.1);
    // Not simply the sum: contents that a returning disk left here would be counted twice.
    let most = size.saturating_add(deferred).max(one_total).max(other_total);
    let total = one_total.saturating_add(other_total).min(most);
    let level = one.0.max(other.0).max(total.saturating_sub(deferred));
    (level, total - level)
}

impl NodeBuckets {
    /// Reduces the buckets to the part of one disk: see [`LeakyBucket::keep`]. Spare levels are
    /// dropped, because their share of each disk is unknown.
    pub(in crate::throttle) fn keep(
        &mut self,
        brought: Option<&Self>,
        [reads, writes]: [AdmissionCounters; 2],
        in_force: bool,
    ) {
        for kind in LimitKind::ALL {
            let passed = match kind {
                LimitKind::BpsRead | LimitKind::IopsRead => [Some(reads), None],
                LimitKind::BpsWrite | LimitKind::IopsWrite => [None, Some(writes)],
                LimitKind::BpsTotal | LimitKind::IopsTotal => [Some(reads), Some(writes)],
            };
            let units = |passed: AdmissionCounters| self.max_units(kind, passed);
            let passed = passed.into_iter().flatten().map(units).fold(0, u128::saturating_add);
            let bucket = &mut self.buckets[kind.index()];
            let brought = brought.map(|brought| &brought.buckets[kind.index()]);
            bucket.keep(brought, passed, in_force && bucket.rate > 0);
        }
        self.spare = SpareLevels::default();
    }

    /// Upper bound of the units of this work for a limit, in billionths, whatever the request
    /// sizes.
    fn max_units(&self, kind: LimitKind, passed: AdmissionCounters) -> u128 {
        let bytes = u128::from(passed.bytes) * LEVEL_SCALE;
        if kind.counts_bytes() {
            return bytes;
        }
        u128::from(passed.requests) * LEVEL_SCALE
            + bytes.checked_div(u128::from(self.least_iops_size)).unwrap_or(0)
    }

    /// Adds the contents that a disk carries to the selected buckets that are in force.
    pub(in crate::throttle) fn join(&mut self, brought: &Self, of: impl Fn(LimitKind) -> bool) {
        for kind in LimitKind::ALL {
            let bucket = &mut self.buckets[kind.index()];
            if bucket.rate > 0 && of(kind) {
                bucket.join(&brought.buckets[kind.index()]);
            }
        }
    }

    /// Raises the buckets in force to at least the contents that a disk carries.
    pub(in crate::throttle) fn hold(&mut self, brought: &Self) {
        for (bucket, brought) in self.buckets.iter_mut().zip(&brought.buckets) {
            if bucket.rate > 0 {
                bucket.hold(brought);
            }
        }
    }

    /// True if all admitted work has leaked.
    pub(in crate::throttle) fn are_empty(&self) -> bool {
        self.buckets.iter().all(LeakyBucket::is_empty)
    }
}
