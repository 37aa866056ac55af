//! Median of samples, with its confidence interval.

use serde::Serialize;

/// Determines the ends of a 95 % interval to a few percent of its width.
const DRAWS: usize = 2000;
/// A fixed seed: the same samples always give the same result.
const SEED: u64 = 0x5EED;

/// A median and its 95 % interval, `low <= median <= high`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Estimate {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Median; the mean of the middle two for an even number, 0 for no samples.
pub(crate) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    median_of(&mut sorted)
}

fn median_of(samples: &mut [f64]) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    match samples.len() {
        0 => 0.0,
        count if count % 2 == 1 => samples[count / 2],
        count => f64::midpoint(samples[count / 2 - 1], samples[count / 2]),
    }
}

/// The median and its interval, by the percentile bootstrap (Efron and Tibshirani, *An Introduction
/// to the Bootstrap*, 1993, chapter 13). With fewer than six samples the interval is their range,
/// because resampling would suggest an unwarranted precision.
pub(crate) fn estimate(samples: &[f64]) -> Estimate {
    resampled(&[samples], |groups| median_of(&mut groups[0]))
}

/// Computes a statistic of groups, each resampled separately. Its interval is the full range for
/// five samples or fewer.
pub(super) fn resampled(groups: &[&[f64]], statistic: impl Fn(&mut [Vec<f64>]) -> f64) -> Estimate {
    let mut drawn: Vec<Vec<f64>> = groups.iter().map(|group| group.to_vec()).collect();
    let median = statistic(&mut drawn);
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut results: Vec<f64> = (0..DRAWS)
        .map(|_| {
            for (drawn, group) in drawn.iter_mut().zip(groups) {
                drawn.clear();
                drawn.extend((0..group.len()).map(|_| group[random.usize(..group.len())]));
            }
            statistic(&mut drawn)
        })
        .collect();
    results.sort_unstable_by(f64::total_cmp);
    let few = groups.iter().any(|group| group.len() < 6);
    let cut = if few { 0 } else { DRAWS / 40 };
    Estimate { median, low: results[cut].min(median), high: results[DRAWS - 1 - cut].max(median) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_lies_within_its_interval() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), 3.0);
    }

    #[test]
    fn interval_covers_the_true_value_in_nine_of_ten_cases() {
        let mut random = fastrand::Rng::with_seed(5);
        for count in [5, 8, 15, 40] {
            let holds = (0..300).filter(|_| {
                let samples: Vec<f64> =
                    (0..count).map(|_| 100.0 * (1.0 + 0.1 * (random.f64() - 0.5))).collect();
                let Estimate { median, low, high } = estimate(&samples);
                assert!(low <= median && median <= high);
                low <= 100.0 && 100.0 <= high
            });
            let share = holds.count() as f64 / 300.0;
            assert!(share >= 0.9, "{count} samples: {share}");
        }
    }

    #[test]
    fn the_same_samples_give_the_same_interval() {
        let samples: Vec<f64> = (1..30).map(f64::from).collect();
        assert_eq!(estimate(&samples), estimate(&samples));
        assert_eq!(estimate(&[7.0]), Estimate { median: 7.0, low: 7.0, high: 7.0 });
    }
}
