//! A value over time in bounded memory: sums or peaks of equal intervals, whose length doubles as
//! needed.
//!
//! Charts of rates are made of such intervals. An interval with few events shows a rate that jumps
//! although the true one is steady, so [`OverTime::rates`] joins intervals until each has enough.

const INTERVALS: usize = 1024;
/// The first interval is 2 to this power in nanoseconds: about a millisecond.
const FIRST_BITS: u32 = 20;
/// Events in an interval of a rate, on average: a steady rate is then shown within a twentieth.
const LEAST_EVENTS: u64 = 25;
/// Fewer intervals than these show nothing over time, however few events there are.
const LEAST_INTERVALS: usize = 12;

/// A value over time, in intervals of equal length that double as needed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OverTime {
    bits: u32,
    values: Vec<u64>,
    joins: JoinRule,
    /// The level that holds from the last note on, until the next one.
    level: u64,
    /// The last instant of a note, in nanoseconds.
    last_ns: u64,
}

/// How two intervals become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JoinRule {
    Sum,
    Peak,
}

impl JoinRule {
    fn join(self, one: u64, other: u64) -> u64 {
        match self {
            Self::Sum => one.saturating_add(other),
            Self::Peak => one.max(other),
        }
    }
}

impl OverTime {
    pub(crate) fn sums() -> Self {
        let values = Vec::with_capacity(INTERVALS);
        Self { bits: FIRST_BITS, values, joins: JoinRule::Sum, level: 0, last_ns: 0 }
    }

    /// The highest level of each interval.
    pub(crate) fn peaks() -> Self {
        Self { joins: JoinRule::Peak, ..Self::sums() }
    }

    /// A level that holds until the next; there are [`peaks`](Self::peaks) of levels.
    pub(crate) fn turn(&mut self, at: u64, level: u64) {
        self.note(at, level);
        self.level = level;
    }

    pub(crate) fn note(&mut self, at: u64, value: u64) {
        let interval = self.interval(at);
        self.values[interval] = self.joins.join(self.values[interval], value);
    }

    /// Adds the nanoseconds of a stretch of time to the intervals that it lies in.
    pub(crate) fn note_stretch(&mut self, from_ns: u64, to_ns: u64) {
        let Some(last_ns) = to_ns.checked_sub(1).filter(|last_ns| *last_ns >= from_ns) else { return };
        let last = self.interval(last_ns);
        let first = (from_ns >> self.bits) as usize;
        for interval in first..=last {
            let begins_ns = (interval as u64) << self.bits;
            let ends_ns = begins_ns.saturating_add(1 << self.bits);
            let inside_ns = to_ns.min(ends_ns) - from_ns.max(begins_ns);
            self.values[interval] = self.joins.join(self.values[interval], inside_ns);
        }
    }

    /// Adds another series of sums.
    pub(crate) fn add(&mut self, other: &Self) {
        let mut other = other.clone();
        while self.bits < other.bits {
            self.halve();
        }
        while other.bits < self.bits {
            other.halve();
        }
        self.values.resize(self.values.len().max(other.values.len()), 0);
        for (ours, theirs) in self.values.iter_mut().zip(&other.values) {
            *ours = self.joins.join(*ours, *theirs);
        }
        self.last_ns = self.last_ns.max(other.last_ns);
    }

    /// The index of an instant's interval, which exists then.
    fn interval(&mut self, at: u64) -> usize {
        self.last_ns = self.last_ns.max(at);
        while at >> self.bits >= INTERVALS as u64 {
            self.halve();
        }
        let interval = (at >> self.bits) as usize;
        if self.values.len() <= interval {
            self.values.resize(interval + 1, self.level);
        }
        interval
    }

    fn halve(&mut self) {
        let joins = self.joins;
        let pairs = self.values.chunks(2).map(|pair| pair.iter().copied().fold(0, |a, b| joins.join(a, b)));
        let halved: Vec<u64> = pairs.collect();
        self.values.clear();
        self.values.extend(halved);
        self.bits += 1;
    }

    pub(crate) fn interval_s(&self) -> f64 {
        (1_u64 << self.bits) as f64 / 1e9
    }

    /// The same in at most `most` intervals.
    pub(crate) fn within(&self, most: usize) -> Self {
        let mut series = self.clone();
        while series.values.len() > most {
            series.halve();
        }
        series
    }

    /// The middles of the intervals in seconds, and their values.
    pub(crate) fn points(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let interval = self.interval_s();
        let point = move |(index, value): (usize, &u64)| ((index as f64 + 0.5) * interval, *value);
        self.values.iter().enumerate().map(point)
    }

    /// The same in at most `most` intervals that have enough events, which `counts` has, for a
    /// rate.
    pub(crate) fn steady(&self, counts: &Self, most: usize) -> Self {
        let mut counts = counts.within(most);
        let events: u64 = counts.values.iter().sum();
        while counts.values.len() >= 2 * LEAST_INTERVALS
            && events < LEAST_EVENTS.saturating_mul(counts.values.len() as u64)
        {
            counts.halve();
        }
        let mut series = self.clone();
        while series.bits < counts.bits {
            series.halve();
        }
        series
    }

    /// Values a second: the middles of intervals in seconds, and the rates. The last interval
    /// counts as long as it lasted, and not at all if that is less than half.
    pub(crate) fn rates(&self) -> Vec<(f64, f64)> {
        let interval = self.interval_s();
        let mut rates: Vec<_> = self.points().map(|(at, sum)| (at, sum as f64 / interval)).collect();
        let begins = self.values.len().saturating_sub(1) as f64 * interval;
        let lasted = (self.last_ns as f64 / 1e9 - begins) / interval;
        if rates.len() > 1 && lasted < 1.0 {
            let (_, last) = rates.last_mut().expect("there are several");
            *last /= lasted.max(0.5);
            if lasted < 0.5 {
                rates.pop();
            }
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_series_of_any_length_keeps_its_sum() {
        let mut series = OverTime::sums();
        (0..100_000).for_each(|number| series.note(number * S, 1));
        let series = series.within(100);
        let points: Vec<_> = series.points().collect();
        assert!(points.len() <= 100 && points.len() >= 50, "{}", points.len());
        assert_eq!(points.iter().map(|(_, value)| value).sum::<u64>(), 100_000);
        assert!(points.iter().skip(1).all(|(at, _)| *at > series.interval_s()));
        let mut peaks = OverTime::peaks();
        (0..5000).for_each(|number| peaks.note(number * S, number % 7));
        assert!(peaks.within(10).points().all(|(_, value)| value == 6));
    }

    #[test]
    fn a_level_is_drawn_until_the_next_one() {
        let mut waiting = OverTime::peaks();
        for (at, level) in [(0, 2300), (5, 2299), (9, 0), (12, 1), (14, 1)] {
            waiting.turn(at << FIRST_BITS, level);
        }
        let levels: Vec<_> = waiting.points().map(|(_, level)| level).collect();
        let mut expected = vec![2300; 6];
        expected.extend([2299; 4]);
        expected.extend([0, 0, 1, 1, 1]);
        assert_eq!(levels, expected);
    }

    #[test]
    fn a_steady_rate_is_drawn_steady_however_low_it_is() {
        for (iops, seconds) in [(15, 60), (2, 600), (10_000, 3)] {
            let mut done = OverTime::sums();
            (0..iops * seconds).for_each(|number| done.note(number * S / iops, 1));
            let rates = done.steady(&done, 512).rates();
            assert!(rates.len() >= LEAST_INTERVALS, "{} points", rates.len());
            for (at, rate) in &rates {
                let times = rate / iops as f64;
                assert!((0.9..1.1).contains(&times), "{iops} a second: {rate} at {at}");
            }
        }
    }

    #[test]
    fn a_stretch_is_divided_over_its_intervals() {
        let mut waited = OverTime::sums();
        let interval = 1 << FIRST_BITS;
        waited.note_stretch(interval / 2, 3 * interval);
        waited.note_stretch(5, 5);
        let values: Vec<_> = waited.points().map(|(_, ns)| ns).collect();
        assert_eq!(values, [interval / 2, interval, interval]);
        waited.note_stretch(0, 100_000 * S);
        let sum: u64 = waited.points().map(|(_, ns)| ns).sum();
        assert_eq!(sum, 100_000 * S + 5 * interval / 2);
    }

    #[test]
    fn several_series_are_added() {
        let (mut one, mut other) = (OverTime::sums(), OverTime::sums());
        (0..4000).for_each(|number| one.note(number << 20, 1));
        (0..100).for_each(|number| other.note(number << 20, 2));
        other.add(&one);
        assert_eq!(other.points().map(|(_, value)| value).sum::<u64>(), 4200);
        one.add(&OverTime::sums());
        assert_eq!(one.points().map(|(_, value)| value).sum::<u64>(), 4000);
    }
}
