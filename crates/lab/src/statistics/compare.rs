//! Compares two groups of samples: real difference or chance.
//!
//! The rank-sum test (Mann and Whitney, 1947), inverted to an interval (Hodges and Lehmann, 1963).
//! The median of all ratios of one sample from each group is the difference; the test determines
//! how many ratios at each end lie outside the 95 % interval. The noise may have any distribution,
//! and outliers have little effect.

use super::ranks::{MAX_EXACT_SAMPLES, RankComparison, comparison, exact_places, normal_places};

/// Maximum number of samples of a group: larger ones are represented by this many, evenly chosen by
/// rank.
const MAX_SAMPLES: usize = 400;

/// Compares samples, all above 0; without samples the groups count as equal.
pub(crate) fn compare(base: &[f64], other: &[f64]) -> RankComparison {
    let (base, other) = (representatives(base), representatives(other));
    let mut quotients: Vec<f64> =
        base.iter().flat_map(|base| other.iter().map(move |other| other / base)).collect();
    quotients.retain(|quotient| quotient.is_finite());
    quotients.sort_unstable_by(f64::total_cmp);
    comparison(&quotients, dropped_ratios(base.len(), other.len()), |quotient| quotient)
}

pub(super) fn representatives(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    if sorted.len() <= MAX_SAMPLES {
        return sorted;
    }
    // The middle of each of equally many parts of the ranks.
    (0..MAX_SAMPLES).map(|part| sorted[(2 * part + 1) * sorted.len() / (2 * MAX_SAMPLES)]).collect()
}

/// Number of ratios to drop at each end, by [`ONE_SIDED_ERROR`](super::ranks::ONE_SIDED_ERROR);
/// `None`: too few samples.
fn dropped_ratios(base: usize, other: usize) -> Option<usize> {
    if base.max(other) > MAX_EXACT_SAMPLES {
        let (base, other) = (base as f64, other as f64);
        // Mean and deviation of Mann and Whitney's U without a difference.
        let deviation = (base * other * (base + other + 1.0) / 12.0).sqrt();
        return normal_places(base * other / 2.0, deviation);
    }
    exact_places(&rank_sum_ways(base, other))
}

/// Mann and Whitney's distribution of U, by recursion over the group of the largest sample.
fn rank_sum_ways(base: usize, other: usize) -> Vec<f64> {
    let mut rows = vec![vec![1.0]; base + 1];
    for others in 1..=other {
        for bases in 1..=base {
            let mut row = vec![0.0; bases * others + 1];
            // The largest sample is of `other`: U stays the same.
            for (count, ways) in rows[bases].iter().enumerate() {
                row[count] += ways;
            }
            // The largest sample is of `base`, and exceeds all samples of `other`.
            for (count, ways) in rows[bases - 1].iter().enumerate() {
                row[count + others] += ways;
            }
            rows[bases] = row;
        }
    }
    rows.pop().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{super::ranks::RankVerdict, *};

    /// Noise of a shared machine: a few percent, and occasionally a disturbed run.
    fn runs(random: &mut fastrand::Rng, count: usize, value: f64, noise: f64) -> Vec<f64> {
        let normal = |random: &mut fastrand::Rng| (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
        let run = |_| {
            let disturbed = if random.f64() < 0.05 { 0.5 + 0.5 * random.f64() } else { 1.0 };
            value * (noise * normal(random)).exp() * disturbed
        };
        (0..count).map(run).collect()
    }

    fn found(count: usize, noise: f64, factor: f64) -> f64 {
        let mut random = fastrand::Rng::with_seed(7);
        let different = (0..2000).filter(|_| {
            let base = runs(&mut random, count, 50_000.0, noise);
            let other = runs(&mut random, count, 50_000.0 * factor, noise);
            compare(&base, &other).verdict != RankVerdict::Same
        });
        different.count() as f64 / 2000.0
    }

    #[test]
    fn false_differences_are_rare() {
        for count in [4, 5, 7, 10, 20, 40] {
            let false_ones = found(count, 0.03, 1.0);
            assert!(false_ones <= 0.05, "{count} samples: {false_ones}");
        }
    }

    #[test]
    fn difference_of_ten_percent_is_found() {
        for (count, noise) in [(8, 0.02), (10, 0.03), (15, 0.04), (20, 0.05)] {
            for factor in [1.1, 0.9] {
                let found = found(count, noise, factor);
                assert!(found >= 0.95, "{count} samples, noise {noise}, {factor}: {found}");
            }
        }
    }

    #[test]
    fn ratio_interval_covers_the_true_value() {
        let mut random = fastrand::Rng::with_seed(11);
        for count in [5, 12, 40] {
            let holds = (0..500).filter(|_| {
                let base = runs(&mut random, count, 100.0, 0.05);
                let other = runs(&mut random, count, 130.0, 0.05);
                let ratio = compare(&base, &other).ratio;
                ratio.low <= 1.3
                    && 1.3 <= ratio.high
                    && ratio.low <= ratio.median
                    && ratio.median <= ratio.high
            });
            let share = holds.count() as f64 / 500.0;
            assert!(share >= 0.95, "{count} samples: {share}");
        }
    }

    #[test]
    fn distribution_matches_enumeration_of_all_orders() {
        let mut counted = vec![0.0; 4 * 5 + 1];
        for order in (0_u32..1 << 9).filter(|order| order.count_ones() == 4) {
            let is_base = |at: u32| order >> at & 1 == 1;
            let others_before = |at: u32| (0..at).filter(|&before| !is_base(before)).count();
            counted[(0..9).filter(|&at| is_base(at)).map(others_before).sum::<usize>()] += 1.0;
        }
        assert_eq!(rank_sum_ways(4, 5), counted);
        // Of 252 orders, four have a U of 2 or less (1.6 %), seven one of 3 or less (2.8 %).
        assert_eq!(dropped_ratios(5, 5), Some(2));
        assert_eq!(dropped_ratios(3, 3), None, "a twentieth is the least that three and three can have");
        let (exact, approximate) = (dropped_ratios(25, 25).unwrap(), dropped_ratios(26, 24).unwrap());
        assert!(
            exact.abs_diff(approximate) <= 2,
            "{exact}, {approximate}: the approximation goes on where the exact ends"
        );
    }

    #[test]
    fn few_or_invalid_samples_show_no_difference() {
        for (base, other) in
            [(&[][..], &[][..]), (&[1.0], &[]), (&[1.0, 1.0], &[9.0, 9.0]), (&[0.0; 9], &[0.0; 9])]
        {
            assert_eq!(compare(base, other).verdict, RankVerdict::Same, "{base:?}, {other:?}");
        }
        assert_eq!(compare(&[2.0; 8], &[2.0; 8]).verdict, RankVerdict::Same);
        assert_eq!(compare(&[2.0; 8], &[1.0; 8]).verdict, RankVerdict::Lower);
        let many: Vec<f64> = (1..=100_000).map(f64::from).collect();
        assert_eq!(compare(&many, &many).verdict, RankVerdict::Same);
    }
}
