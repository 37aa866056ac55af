//! Common part of the two rank tests: from the distribution of a statistic to a verdict and its
//! interval.
//!
//! A number of ordered ratios is dropped at each end. The rest is the interval, and the verdict is
//! whether it contains 1, so the two never contradict each other.

use super::estimate::{Estimate, median};

/// One-sided error; one in twenty-five in both directions together.
pub(super) const ONE_SIDED_ERROR: f64 = 0.02;
/// Number of samples above which the normal approximation is good to the third digit.
pub(super) const MAX_EXACT_SAMPLES: usize = 25;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RankComparison {
    /// Other to base, with its 95 % interval; the full range for fewer than four samples of each.
    pub(crate) ratio: Estimate,
    pub(crate) verdict: RankVerdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankVerdict {
    Same,
    Higher,
    Lower,
}

/// Drops `places` ordered values at each end (`None`: too few samples). The function converts
/// values to ratios.
pub(super) fn comparison(
    ordered: &[f64],
    places: Option<usize>,
    inverse: impl Fn(f64) -> f64,
) -> RankComparison {
    let Some(last) = ordered.len().checked_sub(1) else {
        return RankComparison {
            ratio: Estimate { median: 1.0, low: 1.0, high: 1.0 },
            verdict: RankVerdict::Same,
        };
    };
    // At least the middle remains.
    let cut = places.unwrap_or(0).min(last / 2);
    let ratio = Estimate {
        median: inverse(median(ordered)),
        low: inverse(ordered[cut]),
        high: inverse(ordered[last - cut]),
    };
    let verdict = match places {
        Some(_) if ratio.low > 1.0 => RankVerdict::Higher,
        Some(_) if ratio.high < 1.0 => RankVerdict::Lower,
        _ => RankVerdict::Same,
    };
    RankComparison { ratio, verdict }
}

/// Largest number of places with a probability below [`ONE_SIDED_ERROR`], from the ways to each
/// value; `None`: too few samples.
pub(super) fn exact_places(ways: &[f64]) -> Option<usize> {
    let all: f64 = ways.iter().sum();
    let mut chance = 0.0;
    let within = ways.iter().take_while(|&&count| {
        chance += count / all;
        chance <= ONE_SIDED_ERROR
    });
    within.count().checked_sub(1)
}

/// Like [`exact_places`], for a nearly normal statistic.
pub(super) fn normal_places(mean: f64, deviation: f64) -> Option<usize> {
    // The normal distribution's quantile at 98 %, and a continuity correction of half a place.
    let places = mean - 2.053_749 * deviation - 0.5;
    (places >= 0.0).then_some(places as usize)
}
