//! Records of a running simulation: latencies, rates over time, who waited for what.
//!
//! Memory is bounded: histograms have steps of a hundredth, and series join intervals pairwise when
//! there are too many. Recording allocates only where a histogram grows.

use crate::latencies::{self, Latencies};

const INTERVALS: usize = 1024;
/// The first interval is 2 to this power in nanoseconds: about a millisecond.
const FIRST_BITS: u32 = 20;

/// A value over time, in intervals of equal length that double as needed.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    bits: u32,
    values: Vec<u64>,
    join: fn(u64, u64) -> u64,
    /// What holds from the last note on, until the next: the number of those that wait.
    level: u64,
}

impl Series {
    pub(crate) fn sums() -> Self {
        Self { bits: FIRST_BITS, values: Vec::with_capacity(INTERVALS), join: u64::saturating_add, level: 0 }
    }

    /// The highest level of each interval.
    pub(crate) fn peaks() -> Self {
        Self { join: |one, other| one.max(other), ..Self::sums() }
    }

    /// A level that holds until the next; there are [`peaks`](Self::peaks) of levels.
    pub(crate) fn turn(&mut self, at: u64, level: u64) {
        self.note(at, level);
        self.level = level;
    }

    pub(crate) fn note(&mut self, at: u64, value: u64) {
        let mut interval = at >> self.bits;
        while interval >= INTERVALS as u64 {
            self.halve();
            interval = at >> self.bits;
        }
        let interval = interval as usize;
        if self.values.len() <= interval {
            self.values.resize(interval + 1, self.level);
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

    pub(crate) fn interval_s(&self) -> f64 {
        (1_u64 << self.bits) as f64 / 1e9
    }

    /// The middles of at most `most` intervals in seconds, their values, and the interval's length.
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

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Queue {
    waiting: u64,
    since: u64,
    pub(crate) longest: u64,
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

    pub(crate) fn leave(&mut self, now: u64) -> u64 {
        self.waiting -= 1;
        if self.waiting == 0 {
            self.throttled_ns += now - self.since;
        }
        self.waiting
    }

    pub(crate) fn settle(&mut self, now: u64) -> u64 {
        if self.waiting > 0 {
            self.throttled_ns += now.saturating_sub(self.since);
            self.since = now;
        }
        self.waiting
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) latency: Latencies,
    pub(crate) waited: Latencies,
    pub(crate) served: Latencies,
    /// In nanoseconds.
    pub(crate) first: Option<u64>,
    pub(crate) last: u64,
    /// Series of the disks that are drawn.
    pub(crate) drawn: Option<Box<Drawn>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub(crate) done: Series,
    pub(crate) waiting: Series,
}

impl Default for Tally {
    fn default() -> Self {
        let [latency, waited, served] = [(); 3].map(|()| latencies::growing());
        Self { requests: 0, bytes: 0, latency, waited, served, first: None, last: 0, drawn: None }
    }
}

impl Tally {
    pub(crate) fn drawn() -> Self {
        let drawn = Drawn { done: Series::sums(), waiting: Series::peaks() };
        Self { drawn: Some(Box::new(drawn)), ..Self::default() }
    }

    pub(crate) fn note(&mut self, came: u64, admitted: u64, done: u64, bytes: u64) {
        self.requests += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.first.get_or_insert(came);
        self.last = self.last.max(done);
        let (waited, served) = (admitted - came, done - admitted);
        latencies::note(&mut self.waited, waited);
        latencies::note(&mut self.served, served);
        latencies::note(&mut self.latency, waited + served);
        if let Some(drawn) = &mut self.drawn {
            drawn.done.note(done, 1);
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes = self.bytes.saturating_add(other.bytes);
        for (ours, theirs) in [
            (&mut self.latency, &other.latency),
            (&mut self.waited, &other.waited),
            (&mut self.served, &other.served),
        ] {
            ours.add(theirs).expect("it grows as it has to");
        }
        self.first = self.first.into_iter().chain(other.first).min();
        self.last = self.last.max(other.last);
    }

    /// From the first request to the last answer.
    pub(crate) fn seconds(&self) -> f64 {
        self.last.saturating_sub(self.first.unwrap_or(self.last)) as f64 / 1e9
    }

    /// As a share of [`seconds`](Self::seconds), 0 to 1.
    pub(crate) fn share(&self, ns: u64) -> f64 {
        let seconds = self.seconds();
        if seconds > 0.0 { (ns as f64 / 1e9 / seconds).min(1.0) } else { 0.0 }
    }

    /// 0 where it took no time.
    pub(crate) fn a_second(&self, count: u64) -> f64 {
        let seconds = self.seconds();
        if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn those_that_wait_are_drawn_until_they_pass_also_where_nobody_comes() {
        let mut waiting = Series::peaks();
        for (at, level) in [(0, 2300), (5, 2299), (9, 0), (12, 1), (14, 1)] {
            waiting.turn(at << FIRST_BITS, level);
        }
        let levels: Vec<_> = waiting.points(INTERVALS).0.into_iter().map(|(_, level)| level).collect();
        let mut expected = vec![2300; 6];
        expected.extend([2299; 4]);
        expected.extend([0, 0, 1, 1, 1]);
        assert_eq!(levels, expected);
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
