//! Consumption of groups as a multiple of their limits. The controller of a watermark uses it while
//! limits are lifted, to find the factor at which they would start to throttle.

use crate::counter;
use crate::throttle::{AdmissionCounters, LimitKind, Limits};
use crate::time::{Duration, NANOS_PER_SECOND};

/// Consumption of one group or disk in an interval.
#[derive(Clone, Copy, Debug)]
pub struct GroupConsumption {
    limits: Limits,
    elapsed: Duration,
    bytes: [u64; 2],
    /// Reads and writes, each as lower and upper bound: requests above `iops-size` count as several
    /// operations, and their sizes are unknown.
    operations: [[u64; 2]; 2],
}

impl GroupConsumption {
    /// Units admitted since `before` under these limits; `None` if a counter fell.
    pub fn since(
        before: &[AdmissionCounters; 2],
        passed: &[AdmissionCounters; 2],
        elapsed: Duration,
        limits: Limits,
    ) -> Option<Self> {
        let since = |part: fn(&AdmissionCounters) -> u64| {
            counter::growths(&before.each_ref().map(part), &passed.each_ref().map(part))
        };
        let (requests, bytes) = (since(|counters| counters.requests)?, since(|counters| counters.bytes)?);
        let operations = [0, 1].map(|direction: usize| match limits.iops_size {
            0 => [requests[direction]; 2],
            size => {
                let parts = bytes[direction] / size;
                [requests[direction].max(parts), requests[direction].saturating_add(parts)]
            }
        });
        Some(Self { limits, elapsed, bytes, operations })
    }
}

/// Consumption of all groups on one device, compared with their limits.
#[derive(Debug, Default)]
pub struct DeviceConsumption {
    /// By [`LimitKind::index`]: units consumed, and units allowed times 10⁹.
    totals: [(u128, u128); LimitKind::ALL.len()],
    /// The largest multiple of a limit consumed by a single group, in thousandths.
    max_multiple: u64,
}

impl DeviceConsumption {
    /// Adds one group's consumption.
    pub fn add(&mut self, consumption: &GroupConsumption) {
        for kind in LimitKind::ALL {
            let rate = consumption.limits.limit(kind).rate;
            if rate == 0 {
                continue;
            }
            let [read, written] = if kind.counts_bytes() {
                consumption.bytes.map(|bytes| [bytes; 2])
            } else {
                consumption.operations
            };
            let [lower, upper] = [0, 1].map(|bound: usize| match kind {
                LimitKind::BpsTotal | LimitKind::IopsTotal => read[bound].saturating_add(written[bound]),
                LimitKind::BpsRead | LimitKind::IopsRead => read[bound],
                LimitKind::BpsWrite | LimitKind::IopsWrite => written[bound],
            });
            let allowed_units = u128::from(rate).saturating_mul(consumption.elapsed.as_nanos());
            // An upper bound here, a lower bound below: both err on the side of enforcing the
            // limits.
            self.max_multiple = self.max_multiple.max(multiple((upper.into(), allowed_units)));
            let (passed, allowed) = &mut self.totals[kind.index()];
            *passed += u128::from(lower);
            *allowed += allowed_units;
        }
    }

    /// Consumption of all groups as a multiple of their limits, in thousandths; 0 without limits.
    pub fn combined_multiple(&self) -> u64 {
        let limited = self.totals.iter().filter(|(_, allowed)| *allowed > 0);
        limited.copied().map(multiple).max().unwrap_or(0)
    }

    /// Multiple of the greediest group, in thousandths. An upper bound.
    pub fn max_multiple(&self) -> u64 {
        self.max_multiple
    }
}

fn multiple((passed, allowed): (u128, u128)) -> u64 {
    let scaled = passed.saturating_mul(1000 * u128::from(NANOS_PER_SECOND));
    u64::try_from(scaled / allowed.max(1)).unwrap_or(u64::MAX)
}
