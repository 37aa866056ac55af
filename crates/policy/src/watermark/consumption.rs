//! What those with limits took, compared with what their limits would have let pass. The controller
//! of a watermark uses it while limits are lifted: how far above their limits all are together.

use crate::counter;
use crate::throttle::{Counters, LimitKind, Limits};
use crate::time::{Duration, NANOS_PER_SECOND};

/// What one group or disk took in a time.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    limits: Limits,
    elapsed: Duration,
    bytes: [u64; 2],
    /// Read, written: at least, and at most. Requests larger than `iops-size` count as several.
    operations: [[u64; 2]; 2],
}

impl Taken {
    /// Units admitted since `before` under these limits; `None` if a counter fell.
    pub fn since(
        before: &[Counters; 2],
        passed: &[Counters; 2],
        elapsed: Duration,
        limits: Limits,
    ) -> Option<Self> {
        let since = |part: fn(&Counters) -> u64| {
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

/// What all on one device took, beside what their limits would have let pass.
#[derive(Debug, Default)]
pub struct Consumed {
    /// By [`LimitKind::index`]: units that passed, and what was allowed, in billionths of them.
    together: [(u128, u128); LimitKind::ALL.len()],
    /// The largest multiple that one took of one of its limits, in thousandths.
    most: u64,
}

impl Consumed {
    /// Adds what one of them took.
    pub fn add(&mut self, taken: &Taken) {
        for kind in LimitKind::ALL {
            let rate = taken.limits.limit(kind).rate;
            if rate == 0 {
                continue;
            }
            let [read, written] =
                if kind.counts_bytes() { taken.bytes.map(|bytes| [bytes; 2]) } else { taken.operations };
            let [least, most] = [0, 1].map(|bound: usize| match kind {
                LimitKind::BpsTotal | LimitKind::IopsTotal => read[bound].saturating_add(written[bound]),
                LimitKind::BpsRead | LimitKind::IopsRead => read[bound],
                LimitKind::BpsWrite | LimitKind::IopsWrite => written[bound],
            });
            let own = u128::from(rate).saturating_mul(taken.elapsed.as_nanos());
            self.most = self.most.max(times((most.into(), own)));
            let (passed, allowed) = &mut self.together[kind.index()];
            *passed += u128::from(least);
            *allowed += own;
        }
    }

    /// How many times their limits all took together, in thousandths; 0 if nothing is limited.
    pub fn together(&self) -> u64 {
        let limited = self.together.iter().filter(|(_, allowed)| *allowed > 0);
        limited.copied().map(times).max().unwrap_or(0)
    }

    /// How many times its limits the greediest took; in thousandths, never too little.
    pub fn most(&self) -> u64 {
        self.most
    }
}

fn times((passed, allowed): (u128, u128)) -> u64 {
    let scaled = passed.saturating_mul(1000 * u128::from(NANOS_PER_SECOND));
    u64::try_from(scaled / allowed.max(1)).unwrap_or(u64::MAX)
}
