//! A value over time in bounded memory: sums or peaks of equal intervals, whose length doubles as
//! needed.
//!
//! Used for charts of rates. An interval with few events shows a fluctuating rate even if the true
//! one is steady, so [`TimeSeries::rates`] is applied to series whose intervals were joined until
//! each has enough events ([`TimeSeries::joined_for_rates`]).

const INTERVALS: usize = 1024;
// The first interval is 2 to this power in nanoseconds: about a millisecond.
const FIRST_BITS: u32 = 20;
// Mean number of events in an interval whose rate is shown: a steady rate then appears steady
// within a twentieth.
const MIN_EVENTS: u64 = 25;
// With fewer intervals a chart shows no course over time, so this precedes `MIN_EVENTS`.
const MIN_INTERVALS: usize = 12;

/// A value over time, in intervals of equal length that double as needed.
#[derive(Clone, Debug, PartialEq)]
pub struct TimeSeries {
    bits: u32,
    values: Vec<u64>,
    join_rule: JoinRule,
    /// Current level of a series of peaks; 0 for sums.
    level: u64,
    /// Time of the last note, in nanoseconds.
    last_ns: u64,
}

/// Rule for joining two intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JoinRule {
    Sum,
    Peak,
}

impl JoinRule {
    fn join(self, first: u64, second: u64) -> u64 {
        match self {
            Self::Sum => first.saturating_add(second),
            Self::Peak => first.max(second),
        }
    }
}

impl TimeSeries {
    /// Series of the sum of the values in each interval.
    pub fn sums() -> Self {
        let values = Vec::with_capacity(INTERVALS);
        Self { bits: FIRST_BITS, values, join_rule: JoinRule::Sum, level: 0, last_ns: 0 }
    }

    /// Series of the highest level in each interval.
    pub(crate) fn peaks() -> Self {
        Self { join_rule: JoinRule::Peak, ..Self::sums() }
    }

    /// Records a level that lasts until the next one; for [`peaks`](Self::peaks).
    pub(crate) fn set_level(&mut self, at: u64, level: u64) {
        self.note(at, level);
        self.level = level;
    }

    /// Adds a value at a time in nanoseconds.
    pub fn note(&mut self, at: u64, value: u64) {
        let interval = self.interval(at);
        self.values[interval] = self.join_rule.join(self.values[interval], value);
    }

    /// Adds the nanoseconds of a period to the intervals that it covers.
    pub fn add_span(&mut self, from_ns: u64, to_ns: u64) {
        let Some(last_ns) = to_ns.checked_sub(1).filter(|last_ns| *last_ns >= from_ns) else { return };
        let last = self.interval(last_ns);
        let first = (from_ns >> self.bits) as usize;
        for interval in first..=last {
            let begins_ns = (interval as u64) << self.bits;
            let ends_ns = begins_ns.saturating_add(1 << self.bits);
            let inside_ns = to_ns.min(ends_ns) - from_ns.max(begins_ns);
            self.values[interval] = self.join_rule.join(self.values[interval], inside_ns);
        }
    }

    /// Adds another series of sums.
    pub fn add(&mut self, other: &Self) {
        let mut other = other.clone();
        while self.bits < other.bits {
            self.halve();
        }
        while other.bits < self.bits {
            other.halve();
        }
        self.values.resize(self.values.len().max(other.values.len()), 0);
        for (sum, added) in self.values.iter_mut().zip(&other.values) {
            *sum = self.join_rule.join(*sum, *added);
        }
        self.last_ns = self.last_ns.max(other.last_ns);
    }

    /// Index of the interval of a time, which is created if necessary.
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

    /// Extends the series to this time.
    pub fn extend_to(&mut self, at: u64) {
        if at > self.last_ns {
            self.note(at, 0);
        }
        // `interval` fills new intervals of a series of peaks with the current level.
    }

    fn halve(&mut self) {
        let joins = self.join_rule;
        let pairs = self.values.chunks(2).map(|pair| pair.iter().copied().fold(0, |a, b| joins.join(a, b)));
        let halved: Vec<u64> = pairs.collect();
        self.values.clear();
        self.values.extend(halved);
        self.bits += 1;
    }

    /// Length of an interval in seconds.
    pub fn interval_s(&self) -> f64 {
        (1_u64 << self.bits) as f64 / 1e9
    }

    /// The series with at most `max_intervals` intervals.
    pub fn with_at_most(&self, max_intervals: usize) -> Self {
        let mut series = self.clone();
        while series.values.len() > max_intervals {
            series.halve();
        }
        series
    }

    /// Middle of each interval in seconds, and its value.
    pub fn points(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let interval = self.interval_s();
        let point = move |(index, value): (usize, &u64)| ((index as f64 + 0.5) * interval, *value);
        self.values.iter().enumerate().map(point)
    }

    /// The series with at most `max_intervals` intervals, joined until each has enough events for a
    /// rate; `counts` is the number of events.
    pub fn joined_for_rates(&self, counts: &Self, max_intervals: usize) -> Self {
        let mut counts = counts.with_at_most(max_intervals);
        let events: u64 = counts.values.iter().sum();
        while counts.values.len() >= 2 * MIN_INTERVALS
            && events < MIN_EVENTS.saturating_mul(counts.values.len() as u64)
        {
            counts.halve();
        }
        let mut series = self.clone();
        while series.bits < counts.bits {
            series.halve();
        }
        series
    }

    /// Rates per second: middle of each interval in seconds, and its rate. The last interval
    /// counts with its actual length, and is omitted if that is less than half.
    pub fn rates(&self) -> Vec<(f64, f64)> {
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

/// Latencies over time, in intervals like those of [`TimeSeries`], with a precision of a sixteenth.
#[derive(Clone, Debug)]
pub struct LatencySeries {
    bits: u32,
    /// Histogram of latencies of each interval.
    intervals: Vec<Vec<u32>>,
}

// At most half a mebibyte of counters.
const LATENCY_INTERVALS: usize = 128;
// Each doubling has 2 to this power steps.
const STEP_BITS: u32 = 4;
const STEPS: usize = (65 - STEP_BITS as usize) << STEP_BITS;
// Mean number of requests in an interval whose p99 is shown.
const MIN_LATENCIES: u64 = 50;

impl Default for LatencySeries {
    fn default() -> Self {
        Self { bits: FIRST_BITS, intervals: Vec::new() }
    }
}

impl LatencySeries {
    /// Adds a latency at a time; both in nanoseconds.
    pub fn note(&mut self, at: u64, ns: u64) {
        // The length of an interval is a power of two, so that joining pairs keeps all counts.
        while at >> self.bits >= LATENCY_INTERVALS as u64 {
            self.halve();
        }
        let interval = (at >> self.bits) as usize;
        if self.intervals.len() <= interval {
            self.intervals.resize(interval + 1, Vec::new());
        }
        let counts = &mut self.intervals[interval];
        if counts.is_empty() {
            counts.resize(STEPS, 0);
        }
        let count = &mut counts[step_of(ns)];
        *count = count.saturating_add(1);
    }

    fn halve(&mut self) {
        let mut halved: Vec<Vec<u32>> = Vec::with_capacity(LATENCY_INTERVALS);
        for pair in self.intervals.chunks_mut(2) {
            let mut counts = std::mem::take(&mut pair[0]);
            match pair.get(1) {
                Some(other) if counts.is_empty() => counts.clone_from(other),
                Some(other) => {
                    counts.iter_mut().zip(other).for_each(|(sum, added)| *sum = sum.saturating_add(*added));
                }
                None => {}
            }
            halved.push(counts);
        }
        self.intervals = halved;
        self.bits += 1;
    }

    /// Middle of each interval with requests in seconds, with its median and p99 in nanoseconds.
    pub fn points(&self) -> Vec<(f64, u64, u64)> {
        let mut series = self.clone();
        let count = |counts: &Vec<u32>| counts.iter().map(|count| u64::from(*count)).sum::<u64>();
        let all: u64 = series.intervals.iter().map(count).sum();
        while series.intervals.len() >= 2 * MIN_INTERVALS
            && all < MIN_LATENCIES.saturating_mul(series.intervals.len() as u64)
        {
            series.halve();
        }
        let interval_s = (1_u64 << series.bits) as f64 / 1e9;
        let point = |(index, counts): (usize, &Vec<u32>)| {
            let all = count(counts);
            let at = (index as f64 + 0.5) * interval_s;
            (all > 0).then(|| (at, quantile(counts, all.div_ceil(2)), quantile(counts, all - all / 100)))
        };
        series.intervals.iter().enumerate().filter_map(point).collect()
    }
}

/// Middle of the step that contains the request with this rank.
fn quantile(counts: &[u32], rank: u64) -> u64 {
    let mut sum = 0;
    let step = counts.iter().position(|count| {
        sum += u64::from(*count);
        sum >= rank
    });
    middle_of(step.unwrap_or(0))
}

/// Step of a latency: exact below 2 to the power of [`STEP_BITS`], then the same number of steps
/// in each doubling.
fn step_of(ns: u64) -> usize {
    // Log-linear steps, as in HdrHistogram: the relative error is bounded at every magnitude.
    let shift = (63 - ns.max(1).leading_zeros()).saturating_sub(STEP_BITS);
    ((shift as usize) << STEP_BITS) + (ns >> shift) as usize
}

fn middle_of(step: usize) -> u64 {
    let shift = (step >> STEP_BITS).saturating_sub(1);
    let lower_bound = ((step - (shift << STEP_BITS)) as u64) << shift;
    lower_bound + ((1 << shift) >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_series_of_any_length_keeps_its_sum() {
        let mut series = TimeSeries::sums();
        (0..100_000).for_each(|number| series.note(number * S, 1));
        let series = series.with_at_most(100);
        let points: Vec<_> = series.points().collect();
        assert!(points.len() <= 100 && points.len() >= 50, "{}", points.len());
        assert_eq!(points.iter().map(|(_, value)| value).sum::<u64>(), 100_000);
        assert!(points.iter().skip(1).all(|(at, _)| *at > series.interval_s()));
        let mut peaks = TimeSeries::peaks();
        (0..5000).for_each(|number| peaks.note(number * S, number % 7));
        assert!(peaks.with_at_most(10).points().all(|(_, value)| value == 6));
    }

    #[test]
    fn level_lasts_until_the_next() {
        let mut waiting = TimeSeries::peaks();
        for (at, level) in [(0, 2300), (5, 2299), (9, 0), (12, 1), (14, 1)] {
            waiting.set_level(at << FIRST_BITS, level);
        }
        let levels: Vec<_> = waiting.points().map(|(_, level)| level).collect();
        let mut expected = vec![2300; 6];
        expected.extend([2299; 4]);
        expected.extend([0, 0, 1, 1, 1]);
        assert_eq!(levels, expected);
    }

    #[test]
    fn constant_rate_has_a_flat_series() {
        for (iops, seconds) in [(15, 60), (2, 600), (10_000, 3)] {
            let mut done = TimeSeries::sums();
            (0..iops * seconds).for_each(|number| done.note(number * S / iops, 1));
            let rates = done.joined_for_rates(&done, 512).rates();
            assert!(rates.len() >= MIN_INTERVALS, "{} points", rates.len());
            for (at, rate) in &rates {
                let times = rate / iops as f64;
                assert!((0.9..1.1).contains(&times), "{iops} a second: {rate} at {at}");
            }
        }
    }

    #[test]
    fn span_is_divided_over_its_intervals() {
        let mut waited = TimeSeries::sums();
        let interval = 1 << FIRST_BITS;
        waited.add_span(interval / 2, 3 * interval);
        waited.add_span(5, 5);
        let values: Vec<_> = waited.points().map(|(_, ns)| ns).collect();
        assert_eq!(values, [interval / 2, interval, interval]);
        waited.add_span(0, 100_000 * S);
        let sum: u64 = waited.points().map(|(_, ns)| ns).sum();
        assert_eq!(sum, 100_000 * S + 5 * interval / 2);
    }

    #[test]
    fn latency_is_accurate_to_a_sixteenth() {
        let mut last = 0;
        for ns in
            (0..64).flat_map(|bit| [1_u64 << bit, (1_u64 << bit) | (1_u64 << bit >> 1)]).chain([u64::MAX])
        {
            let step = step_of(ns);
            assert!(step < STEPS && step >= last, "{ns}: {step}");
            last = step;
            assert!(middle_of(step).abs_diff(ns) <= ns / 16, "{ns}: {}", middle_of(step));
        }
        for ns in 0..4096 {
            assert!(middle_of(step_of(ns)).abs_diff(ns) <= ns / 16, "{ns}");
        }
    }

    #[test]
    fn slow_requests_show_only_in_their_intervals() {
        let mut latency = LatencySeries::default();
        for number in 0..60_000_u64 {
            let is_slow = number >= 30_000 && number % 20 == 0;
            latency.note(number * S / 1000, if is_slow { 80_000_000 } else { 1_000_000 });
        }
        let points = latency.points();
        assert!(points.len() >= 30, "{}", points.len());
        let is_near = |ns: u64, expected: u64| ns.abs_diff(expected) <= expected / 16;
        for (at, p50, p99) in points {
            assert!(is_near(p50, 1_000_000), "{p50} at {at}");
            if !(29.0..31.0).contains(&at) {
                assert!(is_near(p99, if at < 30.0 { 1_000_000 } else { 80_000_000 }), "{p99} at {at}");
            }
        }
    }

    #[test]
    fn several_series_are_added() {
        let (mut first, mut second) = (TimeSeries::sums(), TimeSeries::sums());
        (0..4000).for_each(|number| first.note(number << 20, 1));
        (0..100).for_each(|number| second.note(number << 20, 2));
        second.add(&first);
        assert_eq!(second.points().map(|(_, value)| value).sum::<u64>(), 4200);
        first.add(&TimeSeries::sums());
        assert_eq!(first.points().map(|(_, value)| value).sum::<u64>(), 4000);
    }
}
