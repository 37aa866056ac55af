//! What a measure's samples tell of it: an estimate, by what they are.
//!
//! Never takes the seconds of one run for so many runs: a disturbance lasts, so neighbours are
//! alike, and an interval of them all would be too narrow.

use std::borrow::Cow;

use crate::{
    result::{Measure, SamplesAre},
    statistics::{Estimate, estimate, steady},
};

/// Means of so many parts of a run stand for its seconds.
const PARTS: usize = 10;

/// Samples that are about independent of each other: the means of parts of a run's steady seconds,
/// or what there is.
pub(super) fn independent(measure: &Measure) -> Cow<'_, [f64]> {
    let samples = measure.samples.as_slice();
    if measure.samples_are != SamplesAre::Seconds || samples.len() <= PARTS {
        return samples.into();
    }
    let samples = &samples[steady(samples)];
    let parts = PARTS.min(samples.len());
    // Parts whose lengths differ by one at most.
    let part = |number: usize| &samples[samples.len() * number / parts..samples.len() * (number + 1) / parts];
    (0..parts).map(|number| mean(part(number))).collect::<Vec<_>>().into()
}

fn mean(samples: &[f64]) -> f64 {
    // Divided first: samples may be as large as numbers get.
    samples.iter().map(|sample| sample / samples.len() as f64).sum()
}

/// The median, and between what it lies.
pub(super) fn estimated(measure: &Measure) -> Estimate {
    estimate(&independent(measure))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::{Better, Unit};

    fn measure(samples_are: SamplesAre, samples: Vec<f64>) -> Measure {
        Measure { samples_are, ..Measure::new("it", Unit::Iops, Better::Higher, samples) }
    }

    #[test]
    fn seconds_become_means_of_parts_without_a_beginning_that_differs() {
        let seconds = || (0..60).map(|second| if second < 12 { 10.0 } else { 100.0 + f64::from(second % 3) });
        let means = independent(&measure(SamplesAre::Seconds, seconds().collect())).into_owned();
        assert_eq!(means.len(), PARTS);
        assert!(means.iter().all(|mean| (100.0..=102.0).contains(mean)), "{means:?}");
        assert_eq!(independent(&measure(SamplesAre::Runs, seconds().collect())).len(), 60);
        assert_eq!(independent(&measure(SamplesAre::Seconds, vec![1.0, 5.0])).as_ref(), [1.0, 5.0]);
    }
}
