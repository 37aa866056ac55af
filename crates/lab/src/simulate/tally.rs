//! What is noted of a simulation while it runs: latencies, rates over time, who waited and for what.
//!
//! All of it takes the same memory however long the simulation lasts: histograms with steps of a hundredth, and series whose intervals are joined
//! two by two when there are too many. Noting a request allocates nothing but where a histogram grows to a longer time than any before.
//!
//! Never decides anything.

use hdrhistogram::Histogram;

/// Significant figures of a latency: right within a hundredth.
const FIGURES: u8 = 2;
/// What takes longer, 146 years, counts as that.
const LONGEST_NS: u64 = 1 << 62;

/// Times, in nanoseconds.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    /// Those that were no time at all: of limits that do not bind they are most.
    zeroes: u64,
    others: Histogram<u64>,
}

impl Default for Times {
    fn default() -> Self {
        Self { zeroes: 0, others: Histogram::new(FIGURES).expect("between 0 and 5 figures") }
    }
}

impl Times {
    pub(crate) fn note(&mut self, ns: u64) {
        if ns == 0 {
            self.zeroes += 1;
        } else {
            self.others.record(ns.min(LONGEST_NS)).expect("it grows as it has to");
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.zeroes += other.zeroes;
        self.others.add(&other.others).expect("it resizes itself");
    }

    pub(crate) fn count(&self) -> u64 {
        self.zeroes + self.others.len()
    }

    /// The time within which this share of all lies, right within a hundredth; 0 without any.
    pub(crate) fn quantile(&self, share: f64) -> u64 {
        let rank = (share * self.count() as f64).ceil() as u64;
        match rank.checked_sub(self.zeroes) {
            None | Some(0) => 0,
            Some(rank) => {
                self.others.value_at_quantile(rank as f64 / self.others.len() as f64).min(self.longest())
            }
        }
    }

    /// The longest, right within a hundredth.
    pub(crate) fn longest(&self) -> u64 {
        if self.others.is_empty() { 0 } else { self.others.max() }
    }

    pub(crate) fn mean(&self) -> f64 {
        let all = self.count();
        if all == 0 { 0.0 } else { self.others.mean() * (self.others.len() as f64 / all as f64) }
    }

    /// Points of the distribution: the time, above 0, and the share of all that took no longer; both rising.
    pub(crate) fn distribution(&self) -> Vec<(f64, f64)> {
        let (all, mut below) = (self.count() as f64, self.zeroes as f64);
        let mut points = Vec::new();
        for step in self.others.iter_recorded() {
            below += step.count_at_value() as f64;
            points.push((step.value_iterated_to() as f64, below / all));
        }
        points
    }
}

/// Most intervals of a series.
const INTERVALS: usize = 1024;
/// The first length of an interval is 2 to this power, in nanoseconds: about a millisecond.
const FIRST_BITS: u32 = 20;

/// Something over time: as many intervals of equal length as fit, by their number.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    bits: u32,
    values: Vec<u64>,
    join: fn(u64, u64) -> u64,
}

impl Series {
    /// How many times something happened in each interval.
    pub(crate) fn sums() -> Self {
        Self { bits: FIRST_BITS, values: Vec::with_capacity(INTERVALS), join: u64::saturating_add }
    }

    /// The highest that something was in each interval.
    pub(crate) fn peaks() -> Self {
        Self { join: |one, other| one.max(other), ..Self::sums() }
    }

    pub(crate) fn note(&mut self, at: u64, value: u64) {
        let mut interval = at >> self.bits;
        while interval >= INTERVALS as u64 {
            self.halve();
            interval = at >> self.bits;
        }
        let interval = interval as usize;
        if self.values.len() <= interval {
            self.values.resize(interval + 1, 0);
        }
        self.values[interval] = (self.join)(self.values[interval], value);
    }

    fn halve(&mut self) {
        let join = self.join;
        let pairs = self.values.chunks(2).map(|pair| pair.iter().copied().fold(0, join));
        let halved: Vec<u64> = pairs.collect();
        self.values.clear();
        self.values.extend(halved);
        self.bits += 1;
    }

    /// Seconds of an interval.
    pub(crate) fn interval_s(&self) -> f64 {
        (1_u64 << self.bits) as f64 / 1e9
    }

    /// The middle of each of at most `most` intervals in seconds, and its value.
    pub(crate) fn points(&self, most: usize) -> (Vec<(f64, u64)>, f64) {
        let mut series = self.clone();
        while series.values.len() > most {
            series.halve();
        }
        let interval = series.interval_s();
        let point = |(index, value): (usize, &u64)| ((index as f64 + 0.5) * interval, *value);
        (series.values.iter().enumerate().map(point).collect(), interval)
    }
}

/// How many wait at a disk or in a group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Queue {
    waiting: u64,
    since: u64,
    /// Most that ever waited.
    pub(crate) longest: u64,
    /// Nanoseconds during which somebody waited.
    pub(crate) throttled_ns: u64,
}

impl Queue {
    pub(crate) fn join(&mut self, now: u64) -> u64 {
        if self.waiting == 0 {
            self.since = now;
        }
        self.waiting += 1;
        self.longest = self.longest.max(self.waiting);
        self.waiting
    }

    pub(crate) fn leave(&mut self, now: u64) {
        self.waiting -= 1;
        if self.waiting == 0 {
            self.throttled_ns += now - self.since;
        }
    }

    /// Up to `now`, for whoever still waits.
    pub(crate) fn settle(&mut self, now: u64) {
        if self.waiting > 0 {
            self.throttled_ns += now.saturating_sub(self.since);
            self.since = now;
        }
    }
}

/// What became of a disk's requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Requests that are done, and their bytes.
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// From coming to being done.
    pub(crate) latency: Times,
    /// From coming to passing all limits.
    pub(crate) waited: Times,
    /// From there to being done.
    pub(crate) served: Times,
    /// When the first came, and when the last was done; in nanoseconds.
    pub(crate) first: Option<u64>,
    pub(crate) last: u64,
    /// Done over time, and most that waited over time; of the disks that are drawn.
    pub(crate) drawn: Option<Box<Drawn>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub(crate) done: Series,
    pub(crate) waiting: Series,
}

impl Tally {
    /// Of a disk that is to be drawn, too.
    pub(crate) fn drawn() -> Self {
        let drawn = Drawn { done: Series::sums(), waiting: Series::peaks() };
        Self { drawn: Some(Box::new(drawn)), ..Self::default() }
    }

    pub(crate) fn note(&mut self, came: u64, admitted: u64, done: u64, bytes: u64) {
        self.requests += 1;
        // Lengths are what a trace says.
        self.bytes = self.bytes.saturating_add(bytes);
        self.first.get_or_insert(came);
        self.last = self.last.max(done);
        let (waited, served) = (admitted - came, done - admitted);
        self.waited.note(waited);
        self.served.note(served);
        // Most neither wait nor are served by anything that takes time.
        self.latency.note(waited + served);
        if let Some(drawn) = &mut self.drawn {
            drawn.done.note(done, 1);
        }
    }

    /// The same of several disks together.
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.latency.add(&other.latency);
        self.waited.add(&other.waited);
        self.served.add(&other.served);
        self.first = self.first.into_iter().chain(other.first).min();
        self.last = self.last.max(other.last);
    }

    /// Seconds from the first request to the last answer.
    pub(crate) fn seconds(&self) -> f64 {
        self.last.saturating_sub(self.first.unwrap_or(self.last)) as f64 / 1e9
    }

    /// So many a second, over that time; 0 where it took none.
    pub(crate) fn a_second(&self, count: u64) -> f64 {
        let seconds = self.seconds();
        if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_count_those_that_took_no_time() {
        let mut times = Times::default();
        (0..90).for_each(|_| times.note(0));
        (1..=10).for_each(|number| times.note(number * 1_000_000));
        assert_eq!((times.quantile(0.5), times.quantile(0.9)), (0, 0));
        let near = |quantile: f64, ms: f64| {
            let value = times.quantile(quantile) as f64 / 1e6;
            assert!((value / ms - 1.0).abs() < 0.01, "{quantile}: {value} ms");
        };
        near(0.91, 1.0);
        near(0.99, 9.0);
        near(1.0, 10.0);
        assert!((times.mean() / 550_000.0 - 1.0).abs() < 0.01, "{}", times.mean());
        assert_eq!(times.distribution().last().unwrap().1, 1.0);
        assert_eq!(Times::default().quantile(0.99), 0);
    }

    #[test]
    fn times_of_any_length_are_noted() {
        let mut times = Times::default();
        for ns in [1, 1 << 20, 1 << 40, 1 << 60] {
            times.note(ns);
        }
        assert_eq!(times.count(), 4);
        assert!(times.longest() as f64 > 0.99 * (1_u64 << 60) as f64);
    }

    #[test]
    fn a_series_of_any_length_keeps_its_sum() {
        let mut series = Series::sums();
        (0..100_000).for_each(|number| series.note(number * 1_000_000_000, 1));
        let (points, interval) = series.points(100);
        assert!(points.len() <= 100 && points.len() >= 50, "{}", points.len());
        assert_eq!(points.iter().map(|(_, value)| value).sum::<u64>(), 100_000);
        assert!(points.iter().skip(1).all(|(at, _)| *at > interval));
        let mut peaks = Series::peaks();
        (0..5000).for_each(|number| peaks.note(number * 1_000_000_000, number % 7));
        assert!(peaks.points(10).0.iter().all(|(_, value)| *value == 6));
    }

    #[test]
    fn a_queue_knows_how_long_somebody_waited() {
        let mut queue = Queue::default();
        queue.join(10);
        queue.join(20);
        queue.leave(30);
        queue.leave(50);
        queue.join(100);
        queue.settle(105);
        assert_eq!((queue.longest, queue.throttled_ns), (2, 45));
    }
}
