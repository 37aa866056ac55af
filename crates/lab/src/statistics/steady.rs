//! Finds the steady part of a series over time, without a different beginning and end.
//!
//! A run starts with cold caches and ends when requests run out. The series is therefore divided
//! into parts with minimal variance of the ranks within them, at a price for each part (optimal
//! partitioning; Jackson et al., 2005). The longest part is the steady one. A single disturbed
//! second is too short for a part.

use std::ops::Range;

/// Minimum length of a part; fewer values are outliers.
const MIN_PART: usize = 5;
/// Longer series are averaged in groups.
const MAX_VALUES: usize = 600;
/// Price of a part, in log(values) × variance of ranks; it keeps nineteen of twenty steady series
/// whole.
const PRICE: f64 = 2.5;

/// The longest homogeneous part of a series; the whole of a series that is too short to divide.
pub(crate) fn steady(series: &[f64]) -> Range<usize> {
    if series.len() < 2 * MIN_PART {
        return 0..series.len();
    }
    // Dividing takes quadratic time.
    let group = series.len().div_ceil(MAX_VALUES);
    let means: Vec<f64> =
        series.chunks(group).map(|values| values.iter().sum::<f64>() / values.len() as f64).collect();
    let parts = divide(&ranks(&means));
    let longest = parts.into_iter().max_by_key(ExactSizeIterator::len).unwrap_or(0..means.len());
    // Back from groups to values; the last group may be shorter.
    longest.start * group..(longest.end * group).min(series.len())
}

/// Ranks of values; equal values have their mean rank.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    for equal in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let middle = from as f64 + (equal.len() - 1) as f64 / 2.0;
        for &index in equal {
            ranks[index] = middle;
        }
        from += equal.len();
    }
    ranks
}

fn divide(ranks: &[f64]) -> Vec<Range<usize>> {
    let count = ranks.len();
    let mut sums = vec![(0.0, 0.0)];
    for &rank in ranks {
        let (sum, squares) = sums[sums.len() - 1];
        sums.push((sum + rank, squares + rank * rank));
    }
    // Prefix sums give the variation of any part in constant time.
    let varies = |part: Range<usize>| {
        let sum = sums[part.end].0 - sums[part.start].0;
        (sums[part.end].1 - sums[part.start].1) - sum * sum / part.len() as f64
    };
    let variance = varies(0..count) / count as f64;
    if variance == 0.0 {
        return std::iter::once(0..count).collect();
    }
    let price = PRICE * (count as f64).ln() * variance;
    // `best[end]` is the least cost of dividing the first `end` ranks, and the start of the last
    // part.
    let mut best = vec![(f64::INFINITY, 0); count + 1];
    // The first part is free, as only changes have a price.
    best[0] = (-price, 0);
    for end in MIN_PART..=count {
        for start in (0..=end - MIN_PART).filter(|&start| start == 0 || start >= MIN_PART) {
            let cost = best[start].0 + price + varies(start..end);
            if cost < best[end].0 {
                best[end] = (cost, start);
            }
        }
    }
    let mut parts = Vec::new();
    // Follow the starts back from the end.
    let mut end = count;
    while end > 0 {
        let start = best[end].1;
        parts.push(start..end);
        end = start;
    }
    parts.reverse();
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noisy(random: &mut fastrand::Rng, value: f64) -> f64 {
        let normal = (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
        let disturbed = if random.f64() < 0.03 { 0.3 } else { 1.0 };
        value * (1.0 + 0.03 * normal) * disturbed
    }

    #[test]
    fn steady_series_is_not_cut() {
        let mut random = fastrand::Rng::with_seed(1);
        for length in [10, 30, 100, 300, 3000] {
            let uncut = (0..200).filter(|_| {
                let series: Vec<f64> = (0..length).map(|_| noisy(&mut random, 1000.0)).collect();
                steady(&series) == (0..length)
            });
            let share = uncut.count() as f64 / 200.0;
            assert!(share >= 0.95, "{length} values: {share}");
        }
    }

    #[test]
    fn differing_start_and_end_are_cut_off() {
        let mut random = fastrand::Rng::with_seed(2);
        for (first, last, factor) in [(20, 100, 0.5), (10, 90, 1.5), (0, 80, 0.7), (30, 100, 0.85)] {
            let right = (0..100).filter(|_| {
                let value = |at| if (first..last).contains(&at) { 1000.0 } else { 1000.0 * factor };
                let series: Vec<f64> = (0..100).map(|at| noisy(&mut random, value(at))).collect();
                let found = steady(&series);
                found.start.abs_diff(first) <= 4 && found.end.abs_diff(last) <= 4
            });
            let right = right.count();
            assert!(right >= 95, "{first}..{last} at {factor}: {right}");
        }
    }

    #[test]
    fn growing_start_is_cut_off() {
        let mut random = fastrand::Rng::with_seed(3);
        let series: Vec<f64> = (0..200)
            .map(|at| noisy(&mut random, 1000.0 * (1.0 - 0.8 * (-f64::from(at) / 12.0).exp())))
            .collect();
        let found = steady(&series);
        assert!((20..60).contains(&found.start) && found.end >= 195, "{found:?}");
    }

    #[test]
    fn short_and_level_series_are_not_cut() {
        for length in [0, 1, 9, 10, 700] {
            assert_eq!(steady(&vec![5.0; length]), 0..length);
        }
        assert_eq!(steady(&[1.0, 9.0, 9.0, 9.0]), 0..4);
    }
}
