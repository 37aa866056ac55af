//! Latencies of requests from arrival to completion: histograms that the daemon counts, and their
//! percentiles.
//!
//! Never queries the daemon itself.

use std::collections::BTreeMap;

use api::{DiskHistograms, HistogramBucket};
use policy::counter;
use serde::Deserialize as _;
use serde_json::Value;

/// Histograms of the requests of a disk or group: latencies, and waits for limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestTimes {
    pub(crate) latencies: Vec<HistogramBucket>,
    /// Waits for limits. Requests that did not wait are in the first bucket. Empty if the daemon
    /// does not count waits.
    pub(crate) waits: Vec<HistogramBucket>,
}

impl RequestTimes {
    /// Growth since an earlier moment; `None` if a count fell, as after a restart.
    pub(crate) fn since(&self, before: &Self) -> Option<Self> {
        let latencies = growth(&before.latencies, &self.latencies)?;
        Some(Self { latencies, waits: growth(&before.waits, &self.waits)? })
    }

    /// Adds the histograms of another disk.
    pub(crate) fn add(&mut self, other: &Self) {
        for (total, more) in [(&mut self.latencies, &other.latencies), (&mut self.waits, &other.waits)] {
            *total = sum(total.iter().chain(more));
        }
    }

    /// 99th percentile of the waits: 0 in the first bucket. `None` if there were no requests.
    pub(crate) fn wait_p99_ns(&self) -> Option<u64> {
        let bucket = quantile_bucket(&self.waits, 0.99)?;
        Some(if bucket.above_ns == 0 { 0 } else { bucket.midpoint_ns() })
    }
}

/// Histograms by disk name.
pub(crate) type DiskRequestTimes = BTreeMap<String, RequestTimes>;

/// Median and 99th percentile in nanoseconds, accurate to a tenth (the width of a bucket).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestLatency {
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
}

impl RequestLatency {
    /// `None` if there were no requests.
    pub(crate) fn of(buckets: &[HistogramBucket]) -> Option<Self> {
        Some(Self { p50_ns: quantile_ns(buckets, 0.5)?, p99_ns: quantile_ns(buckets, 0.99)? })
    }
}

/// Parses the response to `x-weir-query-latencies`.
///
/// # Errors
/// Fails if the response is malformed.
pub(crate) fn read(response: Value) -> Result<DiskRequestTimes, serde_json::Error> {
    let disks = Vec::<DiskHistograms>::deserialize(response)?;
    let times = |DiskHistograms { name, latencies, waits }| (name, RequestTimes { latencies, waits });
    Ok(disks.into_iter().map(times).collect())
}

/// Growth of each bucket; `None` if a count fell.
fn growth(before: &[HistogramBucket], now: &[HistogramBucket]) -> Option<Vec<HistogramBucket>> {
    let requests_in = |all: &[HistogramBucket], above_ns| {
        all.iter().find(|bucket| bucket.above_ns == above_ns).map_or(0, |one| one.requests)
    };
    // A bucket that disappeared counts as a fall too: the histograms belong to different runs.
    let has_fallen = before
        .iter()
        .any(|bucket| counter::growth(bucket.requests, requests_in(now, bucket.above_ns)).is_none());
    let grown = |bucket: &HistogramBucket| {
        Some(HistogramBucket {
            requests: counter::growth(requests_in(before, bucket.above_ns), bucket.requests)?,
            ..*bucket
        })
    };
    if has_fallen { None } else { now.iter().map(grown).collect() }
}

/// Sums buckets of several disks.
fn sum<'a>(all: impl IntoIterator<Item = &'a HistogramBucket>) -> Vec<HistogramBucket> {
    let mut sums: BTreeMap<u64, HistogramBucket> = BTreeMap::new();
    for bucket in all {
        let sum = sums.entry(bucket.above_ns).or_insert(HistogramBucket { requests: 0, ..*bucket });
        sum.requests = sum.requests.saturating_add(bucket.requests);
    }
    sums.into_values().collect()
}

/// Quantile `part` (0 to 1) of the times; `None` if there were no requests.
pub(crate) fn quantile_ns(buckets: &[HistogramBucket], part: f64) -> Option<u64> {
    quantile_bucket(buckets, part).map(HistogramBucket::midpoint_ns)
}

/// Bucket that contains the quantile.
fn quantile_bucket(buckets: &[HistogramBucket], part: f64) -> Option<&HistogramBucket> {
    let all = buckets.iter().fold(0_u64, |sum, bucket| sum.saturating_add(bucket.requests));
    // Nearest-rank definition of a quantile: no interpolation across buckets.
    let rank = (all as f64 * part).ceil() as u64;
    let mut seen = 0_u64;
    buckets.iter().find(|bucket| {
        seen = seen.saturating_add(bucket.requests);
        seen >= rank && all > 0
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Buckets with a width of one millisecond.
    fn buckets(all: &[(u64, u64)]) -> Vec<HistogramBucket> {
        let bucket = |&(ms, requests)| HistogramBucket {
            above_ns: ms * 1_000_000,
            at_most_ns: Some((ms + 1) * 1_000_000),
            requests,
        };
        all.iter().map(bucket).collect()
    }

    #[test]
    fn median_and_p99_of_a_histogram() {
        let response = json!([{ "name": "db", "latencies": [
            { "above-ns": 1_000_000, "at-most-ns": 2_000_000, "requests": 98 },
            { "above-ns": 9_000_000, "requests": 2 },
        ] }]);
        let counted = read(response).unwrap();
        let expect = Some(RequestLatency { p50_ns: 1_500_000, p99_ns: 9_000_000 });
        assert_eq!(RequestLatency::of(&counted["db"].latencies), expect);
        assert_eq!(counted["db"].wait_p99_ns(), None, "it does not count them");
        assert!(read(json!({})).is_err());
        assert_eq!(RequestLatency::of(&[]), None);
        assert_eq!(RequestLatency::of(&buckets(&[(1, 0)])), None);
    }

    #[test]
    fn growth_is_a_difference_and_falling_counts_have_none() {
        let (before, now) = (buckets(&[(1, 5)]), buckets(&[(1, 7), (3, 1)]));
        assert_eq!(growth(&before, &now), Some(buckets(&[(1, 2), (3, 1)])));
        assert_eq!(growth(&now, &before), None);
    }

    #[test]
    fn histograms_of_disks_are_summed() {
        let (a, b) = (buckets(&[(1, 5), (4, 1)]), buckets(&[(1, 7), (3, 1)]));
        assert_eq!(sum(a.iter().chain(&b)), buckets(&[(1, 12), (3, 1), (4, 1)]));
    }
}
