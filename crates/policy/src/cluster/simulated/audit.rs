//! Checks the admissions of all hosts together against the limits of the group: one bucket, filled
//! at every admission. It overflows if and only if some window admits more than the limits allow.

use super::NANOS_PER_S;
use crate::throttle::{LimitKind, Limits};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;

/// Share by which floating-point levels may be off.
const ROUNDING: f64 = 0.000_05;

#[derive(Clone, Copy, Debug, Default)]
struct AuditLevel {
    admitted: f64,
    ceiling: f64,
}

/// The bucket, and the limits that may be in force.
#[derive(Debug)]
pub struct AdmissionAudit {
    /// Limits, each with the time until which it may be in force.
    limits: VecDeque<(Limits, u64)>,
    levels: [[AuditLevel; 2]; 6],
    at: u64,
    /// Bucket sizes that may be in force on hosts that have not received newer limits.
    old_sizes: [[f64; 2]; 6],
    /// Allowed excess, in operations and bytes: one request of each client may overflow the bucket.
    /// Of a request that is charged in slices, all bytes count when it is admitted, so bytes are
    /// doubled.
    allowed_excess: [f64; 2],
    /// Time that new limits may take to reach all hosts.
    slack: u64,
    /// Factor on the leak rate: clocks of hosts run fast.
    clock_factor: f64,
}

impl AdmissionAudit {
    pub(super) fn new(limits: Limits, operations: u64, bytes: u64, slack: u64, drift_ppm: u64) -> Self {
        let clock_factor = 1.0 + drift_ppm as f64 / 1e6 + ROUNDING;
        let limits = VecDeque::from([(limits, u64::MAX)]);
        Self {
            limits,
            levels: Default::default(),
            at: 0,
            old_sizes: [[0.0; 2]; 6],
            allowed_excess: [operations as f64, 2.0 * bytes as f64],
            slack,
            clock_factor,
        }
    }

    /// Changes the limits. A host that does not receive the change keeps `fallback_fraction` of the
    /// old limits, including their bursts.
    pub(super) fn change(&mut self, limits: Limits, fallback_fraction: f64, now: u64) {
        self.leak_to(now);
        for kind in LimitKind::ALL {
            let [(_, size), (_, second)] = self.rates_and_sizes(kind);
            let old_size = &mut self.old_sizes[kind.index()];
            let finite = |size: f64| if size.is_finite() { size * fallback_fraction } else { 0.0 };
            *old_size = [old_size[0].max(finite(size)), old_size[1].max(finite(second))];
        }
        if let Some((_, until)) = self.limits.back_mut() {
            *until = now + self.slack;
        }
        self.limits.push_back((limits, u64::MAX));
    }

    /// The highest rate that may be in force.
    pub fn rate(&self, kind: LimitKind) -> u64 {
        self.limits.iter().map(|(limits, _)| limits.limit(kind).rate).max().unwrap_or(0)
    }

    /// Rate and size of both levels. A level that some of the limits lack is unbounded.
    fn rates_and_sizes(&self, kind: LimitKind) -> [(f64, f64); 2] {
        let mut max = [(0.0_f64, 0.0_f64); 2];
        for (limits, _) in &self.limits {
            let limit = limits.limit(kind);
            let (rate, size) = (limit.rate as f64, limit.capacity());
            let second = if limit.has_burst_rate_bucket() { limit.burst_rate as f64 } else { 0.0 };
            for (max, (rate, size)) in max.iter_mut().zip([(rate, size), (second, second / 10.0)]) {
                let (rate, size) = if rate > 0.0 { (rate, size) } else { (f64::INFINITY, f64::INFINITY) };
                *max = (max.0.max(rate), max.1.max(size));
            }
        }
        max
    }

    /// Forgets the excess of one process, which has ended and lost the state of its buckets.
    pub(super) fn forget_process_excess(&mut self, operations: u64, bytes: u64) {
        for kind in LimitKind::ALL {
            let units = if kind.counts_bytes() { bytes } else { operations } as f64;
            self.levels[kind.index()]
                .iter_mut()
                .for_each(|level| level.admitted = (level.admitted - units).max(0.0));
        }
    }

    fn leak_to(&mut self, now: u64) {
        while self.at < now {
            let end = self.limits.front().map_or(now, |(_, until)| (*until).min(now)).max(self.at);
            let seconds = (end - self.at) as f64 / NANOS_PER_S as f64;
            for kind in LimitKind::ALL {
                // An unlimited kind has nothing to leak and cannot overflow.
                if self.limits.iter().all(|(limits, _)| limits.limit(kind).rate == 0) {
                    continue;
                }
                for (at, (rate, size)) in self.rates_and_sizes(kind).into_iter().enumerate() {
                    let excess = self.allowed_excess[usize::from(kind.counts_bytes())]
                        + self.old_sizes[kind.index()][at];
                    let level = &mut self.levels[kind.index()][at];
                    let leaks = if rate.is_finite() { rate * self.clock_factor * seconds } else { f64::MAX };
                    level.admitted = (level.admitted - leaks).max(0.0);
                    // After limits are lowered, the excess of earlier admissions counts until it
                    // leaks.
                    level.ceiling = level.ceiling.min(level.admitted).max(size + excess);
                }
            }
            self.at = end;
            while self.limits.front().is_some_and(|(_, until)| *until <= self.at) {
                self.limits.pop_front();
            }
        }
    }

    /// Counts the admission of one read of `bytes`. Fails if that exceeds a limit.
    pub(super) fn admit(&mut self, bytes: u64, now: u64) -> Result<(), String> {
        self.leak_to(now);
        let mut result = Ok(());
        for kind in [LimitKind::IopsTotal, LimitKind::IopsRead, LimitKind::BpsTotal, LimitKind::BpsRead] {
            let units = if kind.counts_bytes() { bytes as f64 } else { 1.0 };
            for (at, (rate, size)) in self.rates_and_sizes(kind).into_iter().enumerate() {
                if rate.is_finite() {
                    let excess = self.allowed_excess[usize::from(kind.counts_bytes())]
                        + self.old_sizes[kind.index()][at];
                    let level = &mut self.levels[kind.index()][at];
                    level.admitted += units;
                    let allowed = level.ceiling.max(size + excess) + 1e-6 * size;
                    if level.admitted > allowed {
                        let passed = level.admitted;
                        result = Err(format!(
                            "{kind:?}, level {at}: {passed} admitted, {allowed} allowed at {now} ns"
                        ));
                    }
                }
            }
        }
        result
    }
}
