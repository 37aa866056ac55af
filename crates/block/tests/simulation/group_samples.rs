//! Counters of a group, sampled by tests that do not see the admissions themselves.

use std::sync::Arc;

use block::layer::throttle::ThrottleGroup;
use policy::{
    throttle::LimitKind,
    time::{Duration, Instant},
};
use reactor::now;

/// Samples of a group's counters.
pub(crate) struct GroupSamples {
    group: Arc<ThrottleGroup>,
    /// Instant, requests, bytes.
    samples: Vec<(Instant, [u64; 2])>,
    /// Size of the largest request, in bytes.
    longest_request: u64,
}

impl GroupSamples {
    pub(crate) fn new(group: &Arc<ThrottleGroup>, longest_request: u64) -> Self {
        Self { group: Arc::clone(group), samples: Vec::new(), longest_request }
    }

    /// Takes a sample.
    pub(crate) fn sample(&mut self) {
        let stats = self.group.stats();
        let passed = [stats.reads.requests + stats.writes.requests, stats.reads.bytes + stats.writes.bytes];
        self.samples.push((now(), passed));
    }

    /// Checks the total limits: in any second between two samples they are exceeded by at most the
    /// burst and one request that is paid for afterwards.
    pub(crate) fn check(&self) {
        for (unit, kind, last) in
            [(0, LimitKind::IopsTotal, 1), (1, LimitKind::BpsTotal, self.longest_request)]
        {
            let limit = self.group.settings().limits.limit(kind);
            if limit.rate == 0 {
                continue;
            }
            let burst =
                if limit.burst_rate == 0 { limit.rate / 10 } else { limit.burst_rate * limit.burst_length_s };
            let max = limit.rate + burst + last;
            let mut end = 0;
            for (at, passed) in &self.samples {
                // `end` is the first sample more than a second after `at`.
                while self.samples.get(end).is_some_and(|(later, _)| *later <= *at + Duration::from_secs(1)) {
                    end += 1;
                }
                let count = self.samples[end - 1].1[unit] - passed[unit];
                assert!(count <= max, "{kind:?}: {count} passed in the second after {at:?}, {max} may");
            }
        }
    }
}
