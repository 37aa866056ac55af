//! A load on a disk, as `qemu-img bench` sends it: some requests in flight, flushes in between.
//! Beyond that: reads among writes, a rate, a duration, several jobs.
//!
//! ```text
//!   places, zipf ─► where ─┐
//!   arrivals ─────► when ──┼─► run ─► target: a disk, or a server's
//!   watch ─────► how long ─┘    └───► measured: latencies, requests each second
//!                                jobs: several of these, on a thread each
//! ```
//!
//! The first request that fails ends the load.

mod arrivals;
mod jobs;
mod measured;
mod places;
mod run;
mod target;
#[cfg(test)]
mod tests;
mod watch;
mod zipf;

use policy::time::Duration;

pub(crate) use self::arrivals::{Spacing, exponential};
pub(super) use self::{
    arrivals::Arrivals,
    jobs::{PATIENCE, Ran, Source, put_all},
    measured::{Measured, Second, Sent},
    places::{Draw, Locality, Part, Places},
    run::put,
    target::Target,
    watch::{Count, Stop},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Load {
    /// Requests in all; not 0.
    pub(super) count: u64,
    /// Of each reader; not 0.
    pub(super) depth: u32,
    /// Independent positions, beginning at equal distances; not 0.
    pub(super) readers: u32,
    /// Bytes of a request; not 0, and at most the image's.
    pub(super) block_bytes: usize,
    pub(super) places: Places,
    pub(super) write: Option<u8>,
    pub(super) flush: Option<Flush>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flush {
    /// Writes between two flushes; not 0.
    pub(super) interval: u64,
    /// Wait for everything in flight before the flush, and send nothing until it is done.
    pub(super) drain: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) load: Load,
    /// Of a load that writes.
    pub(super) read_percent: u8,
    /// Even, unless places are random.
    pub(super) locality: Locality,
    /// `None` is a closed loop.
    pub(super) arrivals: Option<Arrivals>,
    /// Nothing counts before, neither as measured nor as sent.
    pub(super) ramp: Duration,
    /// After the ramp; then nothing more is sent.
    pub(super) runtime: Option<Duration>,
    pub(super) part: Part,
    pub(super) stop: Stop,
    pub(super) answered: Count,
}

impl From<Load> for Job {
    fn from(load: Load) -> Self {
        Self {
            load,
            read_percent: 0,
            locality: Locality::Even,
            arrivals: None,
            ramp: Duration::ZERO,
            runtime: None,
            part: Part::WHOLE,
            stop: Stop::default(),
            answered: Count::default(),
        }
    }
}

impl Job {
    /// Divides requests and rate among 1 to `load.count` jobs, each with as many in flight.
    pub(super) fn split(self, count: u32) -> Vec<Self> {
        let of = |number: u32| {
            let all = self.load.count;
            let share = all / u64::from(count) + u64::from(u64::from(number) < all % u64::from(count));
            let rate = |arrivals: Arrivals| Arrivals {
                per_second: arrivals.per_second / f64::from(count),
                ..arrivals
            };
            Self {
                load: Load { count: share, ..self.load.clone() },
                arrivals: self.arrivals.map(rate),
                part: Part { number, of: count },
                answered: Count::default(),
                ..self.clone()
            }
        };
        (0..count).map(of).collect()
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    /// From the first counted request to the last answer.
    pub(super) elapsed: Duration,
    /// Answers of the reader with the fewest.
    pub(super) slowest: u64,
    /// What a server had not answered long after the load was ended.
    pub(super) unanswered: u64,
    pub(super) measured: Measured,
}

impl Outcome {
    /// Never 0.
    pub(super) fn seconds(&self) -> f64 {
        self.elapsed.as_secs_f64().max(1e-9)
    }

    pub(super) fn iops(&self, requests: u64) -> f64 {
        requests as f64 / self.seconds()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{request}: {error}")]
pub(super) struct Failed {
    pub(super) request: Sent,
    pub(super) error: reactor::error::Error,
    pub(super) outcome: Box<Outcome>,
}
