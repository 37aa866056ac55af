//! The bucket contents that a disk carries from one group to another.
//!
//! ```text
//!   group's bucket, level and deferred: 900 ─┐
//!                                            ├─ the minimum: 400 ──► added to the next group's
//!   carried into the group plus work ────────┘                      bucket, up to its size
//!   admitted since: 400
//! ```
//!
//! A disk's own part of a bucket is not tracked, because that would cost time in every request;
//! only an upper bound is known. Contents are combined so that the level, and the level plus
//! deferred work, are no less than in either bucket. All later operations (charges, leaks, changes
//! of limits) preserve that order, so requests are admitted only if a bucket filled by this disk
//! alone would admit them. The guarantee of `bucket.rs` therefore holds for a disk that moves, as
//! for one whose limits change.

use super::{LEVEL_SCALE, LeakyBucket, NodeBuckets, SpareLevels};
use crate::throttle::limits::LimitKind;
use crate::throttle::stats::AdmissionCounters;

impl LeakyBucket {
    /// Reduces the bucket of a group to the part of one disk, which carried in `carried` and had
    /// `passed` admitted since. A limit that is not in force keeps all that was carried in,
    /// unchanged.
    fn reduce_to_disk(&mut self, carried: Option<&Self>, passed: u128, in_force: bool) {
        let group = *self;
        let part = |(level, deferred): (u128, u128), size: u128, carried_contents: (u128, u128)| {
            // Excess by the request that overran the bucket. After a watermark has scaled the
            // bucket down it may be larger; members of the next group must not wait for that.
            let excess = level.max(carried_contents.0).saturating_sub(size);
            let max_level =
                size + if group.rate > 0 { excess.min(u128::from(group.rate) * LEVEL_SCALE) } else { excess };
            let carried_total = carried_contents.0.saturating_add(carried_contents.1);
            // The minimum of two upper bounds: the whole bucket, and what this disk can have
            // caused.
            let max_total = level.saturating_add(deferred).min(carried_total.saturating_add(passed));
            let total = if in_force { max_total } else { max_total.max(carried_total) };
            // Members of the next group wait for at most a full bucket; the rest is deferred.
            let level = total.min(max_level);
            (level, total - level)
        };
        if let Some(carried) = carried
            && !in_force
        {
            *self = *carried;
        }
        let carried_contents = carried.map_or((0, 0), |carried| (carried.level, carried.deferred));
        (self.level, self.deferred) = part((group.level, group.deferred), self.size, carried_contents);
        let carried_contents =
            carried.map_or((0, 0), |carried| (carried.burst_level, carried.burst_deferred));
        (self.burst_level, self.burst_deferred) =
            part((group.burst_level, group.burst_deferred), self.burst_size, carried_contents);
    }

    /// Adds the contents that a disk carries, already converted to this limit.
    fn add_carried(&mut self, carried: &Self) {
        let contents = |bucket: &Self| (bucket.level, bucket.deferred);
        (self.level, self.deferred) = combined(self.size, contents(self), contents(carried));
        if self.burst_rate > 0 {
            let contents = |bucket: &Self| (bucket.burst_level, bucket.burst_deferred);
            (self.burst_level, self.burst_deferred) =
                combined(self.burst_size, contents(self), contents(carried));
        }
    }

    /// Raises the contents to at least those that a disk carries, a part of which is here already.
    fn raise_to_carried(&mut self, carried: &Self) {
        let raise = |value: &mut u128, other| *value = (*value).max(other);
        let total = (self.level + self.deferred).max(carried.level + carried.deferred);
        raise(&mut self.level, carried.level);
        self.deferred = total.saturating_sub(self.level);
        if self.burst_rate > 0 {
            let total =
                (self.burst_level + self.burst_deferred).max(carried.burst_level + carried.burst_deferred);
            raise(&mut self.burst_level, carried.burst_level);
            self.burst_deferred = total.saturating_sub(self.burst_level);
        }
    }

    const fn is_empty(&self) -> bool {
        self.level == 0 && self.deferred == 0 && self.burst_level == 0 && self.burst_deferred == 0
    }
}

/// Sum of two contents (level, deferred) in a bucket of this size. Capped at the size plus deferred
/// work: a disk that returns has left a part in this bucket.
fn combined(size: u128, first: (u128, u128), second: (u128, u128)) -> (u128, u128) {
    let [first_total, second_total] = [first, second].map(|(level, deferred)| level.saturating_add(deferred));
    let deferred = first.1.max(second.1);
    // Not simply the sum: contents that a returning disk left here would be counted twice.
    let max_total = size.saturating_add(deferred).max(first_total).max(second_total);
    let total = first_total.saturating_add(second_total).min(max_total);
    let level = first.0.max(second.0).max(total.saturating_sub(deferred));
    (level, total - level)
}

impl NodeBuckets {
    /// Reduces the buckets to the part of one disk: see [`LeakyBucket::reduce_to_disk`]. Spare
    /// levels are dropped, because their share of each disk is unknown.
    pub(in crate::throttle) fn reduce_to_disk(
        &mut self,
        carried: Option<&Self>,
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
            let carried = carried.map(|brought| &brought.buckets[kind.index()]);
            bucket.reduce_to_disk(carried, passed, in_force && bucket.rate > 0);
        }
        self.spare = SpareLevels::default();
        self.restart_trend();
    }

    /// Upper bound of the units of this work for a limit, in billionths, whatever the request
    /// sizes.
    fn max_units(&self, kind: LimitKind, passed: AdmissionCounters) -> u128 {
        let bytes = u128::from(passed.bytes) * LEVEL_SCALE;
        if kind.counts_bytes() {
            return bytes;
        }
        u128::from(passed.requests) * LEVEL_SCALE
            + bytes.checked_div(u128::from(self.min_iops_size)).unwrap_or(0)
    }

    /// Adds the contents that a disk carries to the selected buckets that are in force.
    pub(in crate::throttle) fn add_carried(
        &mut self,
        carried: &Self,
        is_selected: impl Fn(LimitKind) -> bool,
    ) {
        for kind in LimitKind::ALL {
            let bucket = &mut self.buckets[kind.index()];
            if bucket.rate > 0 && is_selected(kind) {
                bucket.add_carried(&carried.buckets[kind.index()]);
            }
        }
        self.restart_trend();
    }

    /// Raises the buckets in force to at least the contents that a disk carries.
    pub(in crate::throttle) fn raise_to_carried(&mut self, carried: &Self) {
        for (bucket, carried_bucket) in self.buckets.iter_mut().zip(&carried.buckets) {
            if bucket.rate > 0 {
                bucket.raise_to_carried(carried_bucket);
            }
        }
        self.restart_trend();
    }

    /// True if all admitted work has leaked.
    pub(in crate::throttle) fn are_empty(&self) -> bool {
        self.buckets.iter().all(LeakyBucket::is_empty)
    }
}
