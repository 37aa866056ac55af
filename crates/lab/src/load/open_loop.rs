//! Due times of the requests in an open loop, independent of the completion of earlier requests.
//!
//! A closed loop sends less while the disk is slow, and so measures least when waiting would be
//! longest (Gil Tene's "coordinated omission"). Here latency counts from the due time. The caller
//! passes the time.

use clap::ValueEnum;
use policy::time::{Duration, Instant, NANOS_PER_SECOND};

use super::offsets::JobPart;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OpenLoop {
    /// Above 0, finite.
    pub(crate) per_second: f64,
    pub(crate) spacing: Spacing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Spacing {
    /// Exponentially distributed, as from many independent clients
    Poisson,
    /// Equal
    Fixed,
}

#[derive(Debug)]
pub(super) struct ArrivalSchedule {
    arrivals: OpenLoop,
    began: Instant,
    /// Nanoseconds since the start; fractional, because rounding would distort a rate of a million.
    next_ns: f64,
    random: fastrand::Rng,
}

impl ArrivalSchedule {
    /// `arrivals` is the rate of this part alone.
    pub(super) fn new(arrivals: OpenLoop, began: Instant, seed: u64, part: JobPart) -> Self {
        let mut random = fastrand::Rng::with_seed(part.seed(seed));
        let gap_ns = NANOS_PER_SECOND as f64 / arrivals.per_second;
        // The first Poisson gap is drawn like all others: starting at 0 would synchronize the jobs.
        let next_ns = match arrivals.spacing {
            Spacing::Poisson => exponential(gap_ns, &mut random),
            // Parts are offset against each other, so that together they are equally spaced as
            // well.
            Spacing::Fixed => gap_ns * f64::from(part.number) / f64::from(part.count),
        };
        Self { arrivals, began, next_ns, random }
    }

    pub(super) fn next(&self) -> Instant {
        self.began + Duration::from_nanos(self.next_ns as u64)
    }

    /// Returns [`ArrivalSchedule::next`] and advances.
    pub(super) fn take(&mut self) -> Instant {
        let next = self.next();
        let gap_ns = NANOS_PER_SECOND as f64 / self.arrivals.per_second;
        self.next_ns += match self.arrivals.spacing {
            Spacing::Poisson => exponential(gap_ns, &mut self.random),
            Spacing::Fixed => gap_ns,
        };
        next
    }
}

pub(crate) fn exponential(mean: f64, random: &mut fastrand::Rng) -> f64 {
    // `f64()` is below 1, so the logarithm is finite.
    -(1.0 - random.f64()).ln() * mean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(spacing: Spacing, part: JobPart, count: usize) -> Vec<u64> {
        let arrivals = OpenLoop { per_second: 1000.0, spacing };
        let mut schedule = ArrivalSchedule::new(arrivals, Instant::from_nanos(5), 1, part);
        (0..count).map(|_| schedule.take().as_nanos() - 5).collect()
    }

    #[test]
    fn fixed_arrivals_are_equidistant_and_jobs_interleave() {
        assert_eq!(drawn(Spacing::Fixed, JobPart::WHOLE, 3), [0, 1_000_000, 2_000_000]);
        assert_eq!(drawn(Spacing::Fixed, JobPart { number: 1, count: 2 }, 2), [500_000, 1_500_000]);
    }

    #[test]
    fn poisson_gaps_are_exponential() {
        let drawn = drawn(Spacing::Poisson, JobPart::WHOLE, 100_000);
        let gaps: Vec<f64> = drawn.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / 1e6).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        for limit in [0.1, 1.0, 3.0] {
            let longer = gaps.iter().filter(|&&gap| gap > limit).count() as f64 / gaps.len() as f64;
            assert!((longer - (-limit).exp()).abs() < 0.01, "longer than {limit}: {longer}");
        }
    }
}
