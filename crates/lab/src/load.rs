//! A load on a disk like that of `qemu-img bench`: requests in flight, flushes in between. In
//! addition: reads among writes, a rate, a duration, several jobs.
//!
//! ```text
//!   zipf ──────► offsets ─┐
//!   open_loop ─► times ───┼─► run ─► target: a disk, or a server's
//!   watch ─────► duration ┘    └───► measured: latencies, requests each second
//!                               jobs: several of these, on a thread each
//! ```
//!
//! The first failed request ends the load.

mod jobs;
mod measured;
mod offsets;
mod open_loop;
mod run;
mod target;
#[cfg(test)]
mod tests;
mod watch;
mod zipf;

use policy::time::Duration;

pub(crate) use self::open_loop::{Spacing, exponential};
pub(super) use self::{
    jobs::{CONNECT_TIMEOUT, JobResult, LoadSource, run_jobs},
    measured::{Measured, SecondCounts, SentRequest},
    offsets::{JobPart, Locality, OffsetPattern, RandomBlocks},
    open_loop::OpenLoop,
    run::run_job,
    target::LoadTarget,
    watch::{CompletedCount, LoadStop},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoadSpec {
    /// Total number of requests; not 0.
    pub(super) count: u64,
    /// Requests in flight of each reader; not 0.
    pub(super) depth: u32,
    /// Independent positions, starting at equal distances; not 0.
    pub(super) readers: u32,
    /// Request size in bytes; not 0, and at most the image's size.
    pub(super) block_bytes: usize,
    pub(super) pattern: OffsetPattern,
    pub(super) write: Option<u8>,
    pub(super) flush: Option<FlushSpec>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FlushSpec {
    /// Writes between two flushes; not 0.
    pub(super) interval: u64,
    /// True to drain requests in flight before the flush, and to send none during it.
    pub(super) drain: bool,
}

#[derive(Clone, Debug)]
pub(super) struct LoadJob {
    pub(super) load: LoadSpec,
    /// Percentage of reads in a load that writes.
    pub(super) read_percent: u8,
    /// `Even` unless places are random.
    pub(super) locality: Locality,
    /// `None` for a closed loop.
    pub(super) arrivals: Option<OpenLoop>,
    /// Warm-up: requests in it count neither as measured nor as sent.
    pub(super) ramp: Duration,
    /// Duration after the ramp, after which no request is sent.
    pub(super) runtime: Option<Duration>,
    pub(super) part: JobPart,
    pub(super) stop: LoadStop,
    pub(super) answered: CompletedCount,
}

impl From<LoadSpec> for LoadJob {
    fn from(load: LoadSpec) -> Self {
        Self {
            load,
            read_percent: 0,
            locality: Locality::Even,
            arrivals: None,
            ramp: Duration::ZERO,
            runtime: None,
            part: JobPart::WHOLE,
            stop: LoadStop::default(),
            answered: CompletedCount::default(),
        }
    }
}

impl LoadJob {
    /// Divides requests and rate among 1 to `load.count` jobs, each with the full depth.
    pub(super) fn split(self, count: u32) -> Vec<Self> {
        let job_of = |number: u32| {
            let all = self.load.count;
            // The remainder goes to the first jobs, one request each.
            let share = all / u64::from(count) + u64::from(u64::from(number) < all % u64::from(count));
            let rate = |arrivals: OpenLoop| OpenLoop {
                per_second: arrivals.per_second / f64::from(count),
                ..arrivals
            };
            Self {
                load: LoadSpec { count: share, ..self.load.clone() },
                arrivals: self.arrivals.map(rate),
                part: JobPart { number, count },
                answered: CompletedCount::default(),
                ..self.clone()
            }
        };
        (0..count).map(job_of).collect()
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LoadOutcome {
    /// Time from the first counted request to the last completion.
    pub(super) elapsed: Duration,
    /// Completed requests of the reader with the fewest.
    pub(super) slowest: u64,
    /// Requests that a server had not completed long after the end of the load.
    pub(super) unanswered: u64,
    pub(super) measured: Measured,
}

impl LoadOutcome {
    /// Elapsed seconds; never 0.
    pub(super) fn seconds(&self) -> f64 {
        self.elapsed.as_secs_f64().max(1e-9)
    }

    pub(super) fn iops(&self, requests: u64) -> f64 {
        requests as f64 / self.seconds()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{request}: {error}")]
pub(super) struct FailedLoad {
    pub(super) request: SentRequest,
    pub(super) error: reactor::error::Error,
    pub(super) outcome: Box<LoadOutcome>,
}
