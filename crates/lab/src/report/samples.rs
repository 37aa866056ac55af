//! Estimates of a measure, by the kind of its samples. The seconds of one run are not independent:
//! an interval from all of them would be too narrow.

use std::borrow::Cow;

use crate::{
    result::{Measure, SamplesAre},
    statistics::{Estimate, estimate, steady},
};

/// Number of parts into which a run's seconds are averaged.
const PARTS: usize = 10;

/// Nearly independent samples: the means of parts of a run's steady seconds, or all samples.
pub(super) fn independent(measure: &Measure) -> Cow<'_, [f64]> {
    let samples = measure.samples.as_slice();
    if measure.samples_are != SamplesAre::Seconds || samples.len() <= PARTS {
        return samples.into();
    }
    // Without a warm-up or a slow end, which would bias the mean of a part.
    let samples = &samples[steady(samples)];
    let parts = PARTS.min(samples.len());
    let part = |number: usize| &samples[samples.len() * number / parts..samples.len() * (number + 1) / parts];
    (0..parts).map(|number| mean(part(number))).collect::<Vec<_>>().into()
}

fn mean(samples: &[f64]) -> f64 {
    // Divided before summing, because a sum could overflow.
    samples.iter().map(|sample| sample / samples.len() as f64).sum()
}

/// Kind of a median's confidence interval, or the reason for its absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IntervalKind {
    /// The value was computed and has no interval.
    Exact,
    /// A single sample has no interval: the difference to another run is unknown.
    OneRun,
    Estimated,
}

impl IntervalKind {
    pub(super) fn of(measure: &Measure) -> Self {
        match (measure.samples_are, measure.samples.len()) {
            (SamplesAre::Exact, _) => Self::Exact,
            (_, 0..=1) => Self::OneRun,
            _ => Self::Estimated,
        }
    }

    /// The interval as text, or the reason why there is none.
    pub(super) fn text(self, low: &str, high: &str) -> String {
        match self {
            Self::Exact => "exact".to_owned(),
            Self::OneRun => "one run".to_owned(),
            Self::Estimated => format!("{low} … {high}"),
        }
    }

    /// Kind of an interval that depends on two measures.
    pub(super) fn both(self, other: Self) -> Self {
        match (self, other) {
            (Self::OneRun, _) | (_, Self::OneRun) => Self::OneRun,
            (Self::Exact, Self::Exact) => Self::Exact,
            _ => Self::Estimated,
        }
    }
}

pub(super) fn estimated(measure: &Measure) -> Estimate {
    estimate(&independent(measure))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::{Better, MeasureUnit};

    fn measure(samples_are: SamplesAre, samples: Vec<f64>) -> Measure {
        Measure { samples_are, ..Measure::new("it", MeasureUnit::Iops, Better::Higher, samples) }
    }

    #[test]
    fn seconds_are_averaged_without_a_differing_start() {
        let seconds = || (0..60).map(|second| if second < 12 { 10.0 } else { 100.0 + f64::from(second % 3) });
        let means = independent(&measure(SamplesAre::Seconds, seconds().collect())).into_owned();
        assert_eq!(means.len(), PARTS);
        assert!(means.iter().all(|mean| (100.0..=102.0).contains(mean)), "{means:?}");
        assert_eq!(independent(&measure(SamplesAre::Runs, seconds().collect())).len(), 60);
        assert_eq!(independent(&measure(SamplesAre::Seconds, vec![1.0, 5.0])).as_ref(), [1.0, 5.0]);
    }
}
