//! Growth of counters over the last second.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use policy::counter::{self, CounterGrowth};

/// Period of the rates.
const PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of stored readings: with more than ten readings in a second the oldest are
/// dropped.
const MAX_READINGS: usize = 16;

/// Recent readings of `N` monotonic counters.
#[derive(Clone, Debug)]
pub(super) struct RecentCounters<const N: usize> {
    /// Oldest first.
    readings: VecDeque<(Instant, [u64; N])>,
}

impl<const N: usize> Default for RecentCounters<N> {
    fn default() -> Self {
        Self { readings: VecDeque::new() }
    }
}

impl<const N: usize> RecentCounters<N> {
    /// Adds a reading. Returns the growth over the last second, or since the oldest reading if that
    /// is later; `None` for the first reading, and after a counter decreased.
    pub(super) fn add_reading(&mut self, at: Instant, counts: [u64; N]) -> Option<CounterGrowth<N>> {
        let has_fallen = |(_, before): &(Instant, [u64; N])| counter::growths(before, &counts).is_none();
        // A counter decreased: another disk of the same name. Older readings are meaningless.
        if self.readings.back().is_some_and(has_fallen) {
            self.readings.clear();
        }
        // Keeps one reading that is at least a second old.
        while self.readings.get(1).is_some_and(|(then, _)| at.saturating_duration_since(*then) >= PERIOD)
            || self.readings.len() >= MAX_READINGS
        {
            self.readings.pop_front();
        }
        let growth = self.readings.front().and_then(|(then, before)| {
            CounterGrowth::between(before, &counts, at.saturating_duration_since(*then))
        });
        self.readings.push_back((at, counts));
        growth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_last_second() {
        let begin = Instant::now();
        let mut lately = RecentCounters::<1>::default();
        assert_eq!(lately.add_reading(begin, [0]), None);
        for tenth in 1..=30_u64 {
            // Twice the rate, from the second second on.
            let count = 10 * tenth + 10 * tenth.saturating_sub(10);
            let growth = lately.add_reading(begin + Duration::from_millis(100 * tenth), [count]).unwrap();
            let rate = growth.per_second(0);
            match tenth {
                ..=10 => assert!((rate - 100.0).abs() < 1.0, "{tenth}: {rate}"),
                20.. => assert!((rate - 200.0).abs() < 1.0, "{tenth}: {rate}"),
                _ => assert!((100.0..201.0).contains(&rate), "{tenth}: {rate}"),
            }
            assert!(growth.elapsed < PERIOD + PERIOD / 100);
        }
    }

    #[test]
    fn decreased_counters_restart() {
        let begin = Instant::now();
        let mut lately = RecentCounters::<2>::default();
        lately.add_reading(begin, [100, 5]);
        assert_eq!(lately.add_reading(begin + PERIOD, [3, 5]), None);
        let growth = lately.add_reading(begin + 2 * PERIOD, [4, 7]).unwrap();
        assert_eq!(growth.by, [1, 2]);
        assert_eq!(growth.ratio(0, 1), Some(1.0 / 3.0));
    }

    #[test]
    fn readings_are_bounded() {
        let begin = Instant::now();
        let mut lately = RecentCounters::<1>::default();
        for step in 0..10_000 {
            lately.add_reading(begin + Duration::from_millis(step), [step]);
        }
        assert!(lately.readings.len() <= MAX_READINGS && lately.readings.capacity() <= 2 * MAX_READINGS);
    }
}
