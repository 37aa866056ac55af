//! What those with limits took, beside what their limits would have let pass.
//!
//! The controller of a watermark looks at this besides the device's use: while limits are lifted and the device is short, it says how far
//! above their limits all of them together are. The daemon's sampler and the simulator ask the same question here.
//!
//! Never knows how what has passed was counted.

use crate::throttle::{Counters, LimitKind, Limits};
use crate::time::{Duration, NANOS_PER_SECOND};

/// What one group or disk took in a time.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    limits: Limits,
    elapsed: Duration,
    /// Read, written.
    bytes: [u64; 2],
    /// Read, written.
    operations: [u64; 2],
}

impl Taken {
    /// What has passed since `before`, reads and writes each, so long ago, under these limits.
    pub fn since(before: &[Counters; 2], passed: &[Counters; 2], elapsed: Duration, limits: Limits) -> Self {
        let since = |part: fn(&Counters) -> u64| {
            let one = |direction: usize| part(&passed[direction]).saturating_sub(part(&before[direction]));
            [one(0), one(1)]
        };
        let (requests, bytes) = (since(|counters| counters.requests), since(|counters| counters.bytes));
        let operations = [0, 1].map(|direction: usize| match limits.iops_size {
            0 => requests[direction],
            size => requests[direction].max(bytes[direction] / size),
        });
        Self { limits, elapsed, bytes, operations }
    }
}

/// What all on one device took together, in units, and what their limits would have let pass, in billionths of them: by
/// [`LimitKind::index`].
#[derive(Debug, Default)]
pub struct Consumed([(u128, u128); LimitKind::ALL.len()]);

impl Consumed {
    /// Adds what one of them took.
    pub fn add(&mut self, taken: &Taken) {
        for kind in LimitKind::ALL {
            let rate = taken.limits.limit(kind).rate;
            if rate == 0 {
                continue;
            }
            let [read, written] = if kind.counts_bytes() { taken.bytes } else { taken.operations };
            let units = match kind {
                LimitKind::BpsTotal | LimitKind::IopsTotal => read.saturating_add(written),
                LimitKind::BpsRead | LimitKind::IopsRead => read,
                LimitKind::BpsWrite | LimitKind::IopsWrite => written,
            };
            let (passed, allowed) = &mut self.0[kind.index()];
            *passed += u128::from(units);
            *allowed += u128::from(rate).saturating_mul(taken.elapsed.as_nanos());
        }
    }

    /// How many times their limits, by the limit they exceed most; in thousandths, 0 if nothing is limited.
    pub fn thousandths(&self) -> u64 {
        let times = |&(passed, allowed): &(u128, u128)| {
            let scaled = passed.saturating_mul(1000 * u128::from(NANOS_PER_SECOND));
            u64::try_from(scaled / allowed.max(1)).unwrap_or(u64::MAX)
        };
        self.0.iter().filter(|(_, allowed)| *allowed > 0).map(times).max().unwrap_or(0)
    }
}
