//! What was counted in the last second: counters of now beside those of a second ago.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// How far back rates look.
const SPAN: Duration = Duration::from_secs(1);
/// Looks that are kept, at most: more than ten a second are not taken.
const MOST: usize = 16;

/// `N` counters that only grow, as they were lately.
#[derive(Clone, Debug)]
pub(super) struct Lately<const N: usize> {
    /// The oldest first.
    looks: VecDeque<(Instant, [u64; N])>,
}

/// How much they grew, and in what time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Growth<const N: usize> {
    pub(super) by: [u64; N],
    pub(super) seconds: f64,
}

impl<const N: usize> Default for Lately<N> {
    fn default() -> Self {
        Self { looks: VecDeque::new() }
    }
}

impl<const N: usize> Lately<N> {
    /// Counts that were taken at an instant; the growth since a second before, or since the first
    /// that is known. None of the first. Counters that are smaller than before began anew.
    pub(super) fn look(&mut self, at: Instant, counts: [u64; N]) -> Option<Growth<N>> {
        let begun_anew = |(_, before): &(Instant, [u64; N])| before.iter().zip(&counts).any(|(a, b)| a > b);
        if self.looks.back().is_some_and(begun_anew) {
            self.looks.clear();
        }
        // The last that is a second old stays.
        while self.looks.get(1).is_some_and(|(then, _)| at.saturating_duration_since(*then) >= SPAN)
            || self.looks.len() >= MOST
        {
            self.looks.pop_front();
        }
        let growth = self.looks.front().and_then(|(then, before)| {
            let seconds = at.saturating_duration_since(*then).as_secs_f64();
            let by = std::array::from_fn(|index| counts[index] - before[index]);
            (seconds > 0.0).then_some(Growth { by, seconds })
        });
        self.looks.push_back((at, counts));
        growth
    }
}

impl<const N: usize> Growth<N> {
    pub(super) fn per_second(&self, index: usize) -> f64 {
        self.by[index] as f64 / self.seconds
    }

    /// Of a counter of nanoseconds, which part of the time it is.
    pub(super) fn part(&self, index: usize) -> f64 {
        (self.per_second(index) / 1e9).min(1.0)
    }

    /// Of two counters, the first one's part of the sum; none where neither has grown.
    pub(super) fn ratio(&self, some: usize, others: usize) -> Option<f64> {
        let (some, others) = (self.by[some], self.by[others]);
        (some + others > 0).then(|| some as f64 / (some + others) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_last_second() {
        let begin = Instant::now();
        let mut lately = Lately::<1>::default();
        assert_eq!(lately.look(begin, [0]), None);
        for tenth in 1..=30_u64 {
            // From the second second on twice as fast.
            let count = 10 * tenth + 10 * tenth.saturating_sub(10);
            let growth = lately.look(begin + Duration::from_millis(100 * tenth), [count]).unwrap();
            let rate = growth.per_second(0);
            match tenth {
                ..=10 => assert!((rate - 100.0).abs() < 1.0, "{tenth}: {rate}"),
                20.. => assert!((rate - 200.0).abs() < 1.0, "{tenth}: {rate}"),
                _ => assert!((100.0..201.0).contains(&rate), "{tenth}: {rate}"),
            }
            assert!(growth.seconds < 1.01);
        }
    }

    #[test]
    fn a_name_that_is_given_again_begins_anew() {
        let begin = Instant::now();
        let mut lately = Lately::<2>::default();
        lately.look(begin, [100, 5]);
        assert_eq!(lately.look(begin + SPAN, [3, 5]), None);
        let growth = lately.look(begin + 2 * SPAN, [4, 7]).unwrap();
        assert_eq!(growth.by, [1, 2]);
        assert_eq!(growth.ratio(0, 1), Some(1.0 / 3.0));
    }

    #[test]
    fn however_often_it_is_looked_at_it_is_bounded() {
        let begin = Instant::now();
        let mut lately = Lately::<1>::default();
        for step in 0..10_000 {
            lately.look(begin + Duration::from_millis(step), [step]);
        }
        assert!(lately.looks.len() <= MOST && lately.looks.capacity() <= 2 * MOST);
    }
}
