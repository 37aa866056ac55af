//! The middle of samples, and how sure it is.

/// How many times samples are drawn again: enough for the ends of an interval of 95 % to be known
/// to a few percent of its width.
const DRAWS: usize = 2000;
/// Drawing is pseudo-random, and the same for the same samples: a figure that changes each time it
/// is looked at convinces nobody.
const SEED: u64 = 0x5EED;

/// A median, and between what it lies in 95 of 100 cases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimate {
    pub(crate) median: f64,
    /// Not above the median.
    pub(crate) low: f64,
    /// Not below the median.
    pub(crate) high: f64,
}

/// The middle; between the two in the middle, if they are two. 0 of nothing.
pub(crate) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    median_of(&mut sorted)
}

/// As [`median`], and sorts.
fn median_of(samples: &mut [f64]) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    match samples.len() {
        0 => 0.0,
        count if count % 2 == 1 => samples[count / 2],
        count => f64::midpoint(samples[count / 2 - 1], samples[count / 2]),
    }
}

/// The median and its interval, by the percentile bootstrap (Efron and Tibshirani, *An Introduction
/// to the Bootstrap*, 1993, chapter 13).
///
/// With fewer than six samples the interval is from the smallest to the largest: there drawing
/// again invents a precision that is not there.
pub(crate) fn estimate(samples: &[f64]) -> Estimate {
    resampled(&[samples], |groups| median_of(&mut groups[0]))
}

/// What `of` makes of groups of samples, and its interval. Each group is drawn again by itself; of
/// five samples and fewer, all that can be drawn is likely enough to count.
pub(super) fn resampled(groups: &[&[f64]], of: impl Fn(&mut [Vec<f64>]) -> f64) -> Estimate {
    let mut drawn: Vec<Vec<f64>> = groups.iter().map(|group| group.to_vec()).collect();
    let median = of(&mut drawn);
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut results: Vec<f64> = (0..DRAWS)
        .map(|_| {
            for (drawn, group) in drawn.iter_mut().zip(groups) {
                drawn.clear();
                drawn.extend((0..group.len()).map(|_| group[random.usize(..group.len())]));
            }
            of(&mut drawn)
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
    fn the_middle_is_in_the_middle() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), 3.0);
    }

    #[test]
    fn the_interval_holds_what_is_true_in_nine_of_ten_cases_and_more() {
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
