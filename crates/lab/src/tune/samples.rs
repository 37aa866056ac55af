//! The samples so far, and comparisons of configurations.
//!
//! Two configurations are compared by the ratios of common rounds, so effects common to a round
//! cancel out; or through the default, which is in every round. A goal's round is the geometric
//! mean of its patterns. Outliers are clamped to their pattern's usual noise (Tukey's fences: three
//! times the median distance).

use std::collections::{BTreeMap, HashMap};

use super::configurations::{DiskConfiguration, RequestPattern};
use crate::statistics::{RankComparison, compare, compare_rounds, median};

/// Distance of the fences, in median distances from the median.
const FENCE: f64 = 3.0;
/// Minimum number of ratios for an estimate of the usual noise.
const MIN_FENCED: usize = 5;
/// Minimum number of rounds for reporting a difference.
pub(super) const MIN_ROUNDS: usize = 6;

/// Samples in operations per second.
#[derive(Clone, Debug, Default)]
pub(super) struct TuneSamples {
    /// Values by round.
    cells: HashMap<(DiskConfiguration, RequestPattern), BTreeMap<u32, f64>>,
    /// In order of the first sample, so that no result depends on a hash.
    pub(super) configurations: Vec<DiskConfiguration>,
}

impl TuneSamples {
    /// Adds a sample; ignores values that are not above zero, and a second sample of the same
    /// round.
    pub(super) fn add(
        &mut self,
        configuration: DiskConfiguration,
        pattern: RequestPattern,
        round: u32,
        value: f64,
    ) {
        if !(value.is_finite() && value > 0.0) {
            return;
        }
        if !self.configurations.contains(&configuration) {
            self.configurations.push(configuration);
        }
        self.cells.entry((configuration, pattern)).or_default().entry(round).or_insert(value);
    }

    pub(super) fn of(&self, configuration: &DiskConfiguration, pattern: &RequestPattern) -> Vec<f64> {
        self.cell(configuration, pattern).map(|(_, value)| value).collect()
    }

    pub(super) fn cell(
        &self,
        configuration: &DiskConfiguration,
        pattern: &RequestPattern,
    ) -> impl Iterator<Item = (u32, f64)> {
        let cell = self.cells.get(&(*configuration, *pattern));
        cell.into_iter().flatten().map(|(&round, &value)| (round, value))
    }

    /// Number of rounds in which all of these patterns were measured.
    pub(super) fn rounds(&self, configuration: &DiskConfiguration, patterns: &[RequestPattern]) -> usize {
        patterns.iter().map(|pattern| self.cell(configuration, pattern).count()).min().unwrap_or(0)
    }

    pub(super) fn next_round(&self) -> u32 {
        self.cells.values().flatten().map(|(&round, _)| round.saturating_add(1)).max().unwrap_or(0)
    }

    /// Relative speed in each round in which both have all of these patterns.
    pub(super) fn quotients(
        &self,
        base: &DiskConfiguration,
        other: &DiskConfiguration,
        patterns: &[RequestPattern],
    ) -> Vec<f64> {
        let mut rounds: BTreeMap<u32, (usize, f64)> = BTreeMap::new();
        for pattern in patterns {
            for (round, log) in fenced(self.logs((base, pattern), (other, pattern))) {
                let (count, sum) = rounds.entry(round).or_default();
                *count += 1;
                *sum += log;
            }
        }
        // A round counts only if every pattern was measured in it.
        rounds.retain(|_, (count, _)| *count == patterns.len());
        rounds.into_values().map(|(count, sum)| (sum / count as f64).exp()).collect()
    }

    pub(super) fn compare_cells(
        &self,
        base: (&DiskConfiguration, &RequestPattern),
        other: (&DiskConfiguration, &RequestPattern),
    ) -> Option<RankComparison> {
        let quotients: Vec<f64> = self.logs(base, other).into_iter().map(|(_, log)| log.exp()).collect();
        (!quotients.is_empty()).then(|| compare_rounds(&quotients))
    }

    /// Speed of `other` relative to `base`, and the number of rounds that it is based on; `through`
    /// was measured in every round.
    pub(super) fn compare(
        &self,
        base: &DiskConfiguration,
        other: &DiskConfiguration,
        patterns: &[RequestPattern],
        through: &DiskConfiguration,
    ) -> (RankComparison, usize) {
        let together = self.quotients(base, other, patterns);
        let [of_base, of_other] =
            [base, other].map(|configuration| self.quotients(through, configuration, patterns));
        let separate_rounds = of_base.len().min(of_other.len());
        // Common rounds exclude drift. If there are too few, both are compared with `through`.
        if together.len() >= MIN_ROUNDS || separate_rounds < MIN_ROUNDS {
            (compare_rounds(&together), together.len())
        } else {
            (compare(&of_base, &of_other), separate_rounds)
        }
    }

    fn logs(
        &self,
        base: (&DiskConfiguration, &RequestPattern),
        other: (&DiskConfiguration, &RequestPattern),
    ) -> Vec<(u32, f64)> {
        let Some(of_base) = self.cells.get(&(*base.0, *base.1)) else { return Vec::new() };
        let log = |(round, value): (u32, f64)| Some((round, (value / of_base.get(&round)?).ln()));
        self.cell(other.0, other.1).filter_map(log).collect()
    }
}

fn fenced(mut logs: Vec<(u32, f64)>) -> Vec<(u32, f64)> {
    if logs.len() >= MIN_FENCED {
        // Outliers are moved to the fence instead of removed, so that their rounds still count.
        let centre = median(&logs.iter().map(|&(_, log)| log).collect::<Vec<_>>());
        let distances: Vec<_> = logs.iter().map(|&(_, log)| (log - centre).abs()).collect();
        let fence = FENCE * median(&distances);
        logs.iter_mut().for_each(|(_, log)| *log = log.clamp(centre - fence, centre + fence));
    }
    logs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{statistics::RankVerdict, tune::configurations::ConfigurationSpace};

    #[test]
    fn comparison_ignores_drift_and_one_outlier() {
        let list = ConfigurationSpace::of_made_images(1 << 30).one_at_a_time();
        let (default, faster) = (list[0], list[13]);
        let patterns = RequestPattern::all();
        let mut samples = TuneSamples::default();
        for round in 0..8 {
            // The machine slows down by half; the last configuration is 20 % faster.
            let drift = 1.0 - f64::from(round) / 14.0;
            for configuration in &list {
                let speed = if *configuration == faster { 1.2 } else { 1.0 };
                for pattern in &patterns {
                    let held_up = round == 3 && pattern == &patterns[0] && configuration == &list[1];
                    let value = 1000.0 * drift * speed * if held_up { 0.001 } else { 1.0 };
                    samples.add(*configuration, *pattern, round, value);
                }
            }
        }
        let quotients = samples.quotients(&default, &faster, &patterns);
        assert!(quotients.iter().all(|quotient| (quotient - 1.2).abs() < 1e-9), "{quotients:?}");
        let quotients = samples.quotients(&default, &list[1], &patterns);
        assert!(quotients.iter().all(|quotient| (quotient - 1.0).abs() < 1e-9), "{quotients:?}");
    }

    #[test]
    fn configurations_without_common_rounds_are_compared_through_the_default() {
        let list = ConfigurationSpace::of_made_images(1 << 30).one_at_a_time();
        let patterns = RequestPattern::all();
        let mut samples = TuneSamples::default();
        for round in 0..16 {
            // In the second half the machine is twice as fast.
            let (other, speed) = if round < 8 { (list[1], 1.5) } else { (list[2], 1.0) };
            let machine = if round < 8 { 1000.0 } else { 2000.0 };
            for pattern in &patterns {
                let noise = 1.0 + f64::from(round % 4) * 0.002;
                samples.add(list[0], *pattern, round, machine);
                samples.add(other, *pattern, round, machine * speed * noise);
            }
        }
        let (comparison, rounds) = samples.compare(&list[1], &list[2], &patterns, &list[0]);
        assert_eq!((comparison.verdict, rounds), (RankVerdict::Lower, 8));
        assert!((comparison.ratio.median - 1.0 / 1.5).abs() < 0.01, "{comparison:?}");
    }

    #[test]
    fn only_complete_rounds_are_counted() {
        let list = ConfigurationSpace::of_made_images(1 << 30).one_at_a_time();
        let patterns = RequestPattern::all();
        let mut samples = TuneSamples::default();
        for pattern in &patterns {
            samples.add(list[0], *pattern, 0, 100.0);
            samples.add(list[1], *pattern, 0, 200.0);
        }
        samples.add(list[0], patterns[0], 0, 999.0);
        samples.add(list[0], patterns[0], 1, 100.0);
        samples.add(list[1], patterns[0], 1, f64::NAN);
        assert_eq!(samples.quotients(&list[0], &list[1], &patterns), [2.0]);
        assert_eq!((samples.rounds(&list[0], &patterns), samples.next_round()), (1, 2));
        assert!(samples.quotients(&list[0], &list[2], &patterns).is_empty());
        samples.add(list[0], patterns[0], u32::MAX, 100.0);
        assert_eq!(samples.next_round(), u32::MAX);
    }
}
