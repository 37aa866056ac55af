//! Measurements of a running simulation: latencies, rates over time, queues.
//!
//! Memory is bounded: histograms have a precision of a hundredth, and [`TimeSeries`] has a fixed
//! number of intervals. Recording allocates only when a histogram grows.

use crate::{
    latencies::{self, Latencies},
    over_time::TimeSeries,
};

/// Waiting requests of a disk or group.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueueStatistics {
    waiting: u64,
    since: u64,
    /// Largest number of waiting requests.
    pub longest: u64,
    /// Nanoseconds during which at least one request waited.
    pub throttled_ns: u64,
}

impl QueueStatistics {
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

/// Measurements of the requests of a disk.
#[derive(Clone, Debug)]
pub struct RequestStatistics {
    /// Number of completed requests.
    pub requests: u64,
    /// Total length of the completed requests in bytes.
    pub bytes: u64,
    /// Nanoseconds from arrival to completion.
    pub latency: Latencies,
    /// Nanoseconds from arrival to admission.
    pub waited: Latencies,
    /// Nanoseconds from admission to completion.
    pub served: Latencies,
    /// Arrival of the first request in nanoseconds.
    pub(crate) first: Option<u64>,
    pub(crate) last: u64,
    /// Series for charts, of disks that are drawn.
    pub chart: Option<Box<DiskChart>>,
}

/// Series of a disk for charts.
#[derive(Clone, Debug)]
pub struct DiskChart {
    /// Completed requests.
    pub done: TimeSeries,
    /// Bytes of completed requests.
    pub done_bytes: TimeSeries,
    /// Number of waiting requests.
    pub waiting: TimeSeries,
}

impl Default for RequestStatistics {
    fn default() -> Self {
        let [latency, waited, served] = [(); 3].map(|()| latencies::growing());
        Self { requests: 0, bytes: 0, latency, waited, served, first: None, last: 0, chart: None }
    }
}

impl RequestStatistics {
    pub(crate) fn with_chart() -> Self {
        let [done, done_bytes] = [(); 2].map(|()| TimeSeries::sums());
        let chart = DiskChart { done, done_bytes, waiting: TimeSeries::peaks() };
        Self { chart: Some(Box::new(chart)), ..Self::default() }
    }

    pub(crate) fn record(&mut self, arrived: u64, admitted: u64, done: u64, bytes: u64) {
        self.requests += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.first.get_or_insert(arrived);
        self.last = self.last.max(done);
        let (waited, served) = (admitted - arrived, done - admitted);
        latencies::note(&mut self.waited, waited);
        latencies::note(&mut self.served, served);
        latencies::note(&mut self.latency, waited + served);
        if let Some(chart) = &mut self.chart {
            chart.done.note(done, 1);
            chart.done_bytes.note(done, bytes);
        }
    }

    /// Adds the measurements of another disk.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes = self.bytes.saturating_add(other.bytes);
        for (histogram, added) in [
            (&mut self.latency, &other.latency),
            (&mut self.waited, &other.waited),
            (&mut self.served, &other.served),
        ] {
            histogram.add(added).expect("it grows as it has to");
        }
        self.first = self.first.into_iter().chain(other.first).min();
        self.last = self.last.max(other.last);
    }

    /// Seconds from the first request to the last completion.
    pub fn seconds(&self) -> f64 {
        self.last.saturating_sub(self.first.unwrap_or(self.last)) as f64 / 1e9
    }

    /// Share of [`seconds`](Self::seconds), 0 to 1.
    pub fn share(&self, ns: u64) -> f64 {
        let seconds = self.seconds();
        if seconds > 0.0 { (ns as f64 / 1e9 / seconds).min(1.0) } else { 0.0 }
    }

    /// Rate per second; 0 if no time passed.
    pub fn per_second(&self, count: u64) -> f64 {
        let seconds = self.seconds();
        if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_measures_time_with_waiting_requests() {
        let mut queue = QueueStatistics::default();
        queue.join(10);
        queue.join(20);
        queue.leave(30);
        queue.leave(50);
        queue.join(100);
        queue.settle(105);
        assert_eq!((queue.longest, queue.throttled_ns), (2, 45));
    }
}
