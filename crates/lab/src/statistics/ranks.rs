//! What the two rank tests have in common: from how a statistic is distributed where nothing
//! differs, to a verdict with its interval.
//!
//! Of all the quotients that a test looks at, in their order, so many at each end do not count.
//! What is left is the interval, and whether 1 is in it the verdict, so the two can never
//! contradict each other.

use super::estimate::{Estimate, median};

/// How often chance may look like a difference in one direction: one in twenty-five times in both.
pub(super) const TAIL: f64 = 0.02;
/// Beyond so many samples of either the normal approximation is good to the third digit.
pub(super) const EXACT_UP_TO: usize = 25;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Comparison {
    /// How many times as much the other is, and between what that lies in 95 of 100 cases.
    ///
    /// With fewer than four samples of each nothing can be told: then it is between the smallest
    /// quotient and the largest.
    pub(crate) ratio: Estimate,
    pub(crate) verdict: Verdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// No difference that can be told from noise.
    Same,
    Higher,
    Lower,
}

/// The verdict on quotients in their order, of which so many at each end do not count (`None`: too
/// few to tell); `back` makes quotients of what they are given as. Without any, there is no
/// difference.
pub(super) fn comparison(ordered: &[f64], places: Option<usize>, back: impl Fn(f64) -> f64) -> Comparison {
    let Some(last) = ordered.len().checked_sub(1) else {
        return Comparison { ratio: Estimate { median: 1.0, low: 1.0, high: 1.0 }, verdict: Verdict::Same };
    };
    let cut = places.unwrap_or(0).min(last / 2);
    let ratio =
        Estimate { median: back(median(ordered)), low: back(ordered[cut]), high: back(ordered[last - cut]) };
    let verdict = match places {
        Some(_) if ratio.low > 1.0 => Verdict::Higher,
        Some(_) if ratio.high < 1.0 => Verdict::Lower,
        _ => Verdict::Same,
    };
    Comparison { ratio, verdict }
}

/// How many places a statistic lies below with a chance of less than [`TAIL`], by the number of
/// ways to each of its values. `None` if even the clearest outcome is more likely than that.
pub(super) fn exact_places(ways: &[f64]) -> Option<usize> {
    let all: f64 = ways.iter().sum();
    let mut chance = 0.0;
    let within = ways.iter().take_while(|&&count| {
        chance += count / all;
        chance <= TAIL
    });
    within.count().checked_sub(1)
}

/// The same of a statistic that is nearly normal, with this mean.
pub(super) fn normal_places(mean: f64, deviation: f64) -> Option<usize> {
    // The quantile of the normal distribution at 98 %, and half a place because ranks are whole.
    let places = mean - 2.053_749 * deviation - 0.5;
    (places >= 0.0).then_some(places as usize)
}
