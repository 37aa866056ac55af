//! Compares two things that were measured side by side, round by round.
//!
//! The signed-rank test (Wilcoxon, 1945), inverted to an interval (Hodges and Lehmann, 1963): the
//! median of all ratios and of the geometric means of each two is the difference. Effects common to
//! a round, such as a slower machine, cancel out. A difference needs at least six rounds.

use super::{
    compare::representatives,
    ranks::{MAX_EXACT_SAMPLES, RankComparison, comparison, exact_places, normal_places},
};

/// Compares ratios of other to base, one for each round, above 0; without any, the two count as
/// equal.
pub(crate) fn compare_rounds(quotients: &[f64]) -> RankComparison {
    let logs: Vec<f64> = representatives(quotients).iter().map(|quotient| quotient.ln()).collect();
    let mut means: Vec<f64> = logs
        .iter()
        .enumerate()
        .flat_map(|(index, one)| logs[index..].iter().map(move |other| f64::midpoint(*one, *other)))
        .filter(|mean| mean.is_finite())
        .collect();
    means.sort_unstable_by(f64::total_cmp);
    comparison(&means, dropped_means(logs.len()), f64::exp)
}

/// Number of means to drop at each end, as in `compare::dropped_ratios`.
fn dropped_means(rounds: usize) -> Option<usize> {
    if rounds > MAX_EXACT_SAMPLES {
        let rounds = rounds as f64;
        // Mean and deviation of Wilcoxon's signed-rank statistic without a difference.
        let deviation = (rounds * (rounds + 1.0) * (2.0 * rounds + 1.0) / 24.0).sqrt();
        return normal_places(rounds * (rounds + 1.0) / 4.0, deviation);
    }
    exact_places(&signed_rank_ways(rounds))
}

/// Number of ways to sign the ranks so that the positive ones have each sum.
fn signed_rank_ways(rounds: usize) -> Vec<f64> {
    let mut ways = vec![0.0; rounds * (rounds + 1) / 2 + 1];
    ways[0] = 1.0;
    for rank in 1..=rounds {
        // Downward, so that each rank is used at most once.
        for sum in (rank..ways.len()).rev() {
            ways[sum] += ways[sum - rank];
        }
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::{super::ranks::RankVerdict, *};

    fn run(random: &mut fastrand::Rng, value: f64, noise: f64) -> f64 {
        let normal = (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
        let disturbed = if random.f64() < 0.05 { 0.5 + 0.5 * random.f64() } else { 1.0 };
        value * (noise * normal).exp() * disturbed
    }

    fn found(count: u32, noise: f64, factor: f64, verdict: RankVerdict) -> f64 {
        let mut random = fastrand::Rng::with_seed(7);
        let found = (0..2000).filter(|_| {
            let quotient = |round| {
                let speed = 1.0 - 0.5 * f64::from(round) / f64::from(count);
                run(&mut random, speed * factor, noise) / run(&mut random, speed, noise)
            };
            compare_rounds(&(0..count).map(quotient).collect::<Vec<_>>()).verdict == verdict
        });
        found.count() as f64 / 2000.0
    }

    #[test]
    fn false_differences_are_rare() {
        for count in [5, 6, 8, 12, 20, 40] {
            let same = found(count, 0.05, 1.0, RankVerdict::Same);
            assert!(same >= 0.95, "{count} rounds: {same}");
        }
    }

    #[test]
    fn difference_of_ten_percent_is_found() {
        for (count, noise) in [(18, 0.02), (18, 0.04), (24, 0.05)] {
            for (factor, verdict) in [(1.1, RankVerdict::Higher), (0.9, RankVerdict::Lower)] {
                let found = found(count, noise, factor, verdict);
                assert!(found >= 0.95, "{count} rounds, noise {noise}, {factor}: {found}");
            }
        }
    }

    #[test]
    fn distribution_matches_enumeration_of_all_signs() {
        let mut counted = vec![0.0; 16];
        for signs in 0_u32..1 << 5 {
            counted[(0..5).filter(|rank| signs >> rank & 1 == 1).map(|rank| rank + 1).sum::<usize>()] += 1.0;
        }
        assert_eq!(signed_rank_ways(5), counted);
        assert_eq!((dropped_means(5), dropped_means(6)), (None, Some(0)));
        let (exact, approximate) = (dropped_means(25).unwrap(), dropped_means(26).unwrap());
        assert!(approximate > exact && approximate - exact <= 13, "{exact}, {approximate}");
    }

    #[test]
    fn few_or_invalid_quotients_show_no_difference() {
        for quotients in [&[][..], &[9.0], &[2.0; 5], &[1.0; 9], &[0.0; 9], &[f64::NAN; 9]] {
            assert_eq!(compare_rounds(quotients).verdict, RankVerdict::Same, "{quotients:?}");
        }
        assert_eq!(compare_rounds(&[2.0; 6]).verdict, RankVerdict::Higher);
        assert_eq!(compare_rounds(&[0.5; 6]).verdict, RankVerdict::Lower);
        assert_eq!(compare_rounds(&[1.1; 6]).ratio.median, compare_rounds(&[1.1; 6]).ratio.low);
    }
}
