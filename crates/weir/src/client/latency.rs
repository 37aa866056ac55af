//! Latencies of requests from arrival to completion: histograms that the daemon counts, and their
//! percentiles.
//!
//! Never queries the daemon itself.

use std::collections::BTreeMap;

use policy::counter;
use serde::Deserialize;
use serde_json::Value;

/// Requests slower than `above_ns` and not slower than `at_most_ns`; unbounded if that is absent.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Bucket {
    above_ns: u64,
    at_most_ns: Option<u64>,
    requests: u64,
}

/// Histograms of the requests of a disk or group: latencies, and waits for limits.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
pub(crate) struct RequestTimes {
    pub(crate) latencies: Vec<Bucket>,
    /// Waits for limits. Requests that did not wait are in the first bucket. Empty if the daemon
    /// does not count waits.
    #[serde(default)]
    pub(crate) waits: Vec<Bucket>,
}

impl RequestTimes {
    /// Growth since an earlier moment; `None` if a count fell, as after a restart.
    pub(crate) fn since(&self, before: &Self) -> Option<Self> {
        let latencies = grown(&before.latencies, &self.latencies)?;
        Some(Self { latencies, waits: grown(&before.waits, &self.waits)? })
    }

    /// Adds the histograms of another disk.
    pub(crate) fn add(&mut self, other: &Self) {
        for (own, more) in [(&mut self.latencies, &other.latencies), (&mut self.waits, &other.waits)] {
            *own = sum(own.iter().chain(more));
        }
    }

    /// 99th percentile of the waits: 0 in the first bucket. `None` if there were no requests.
    pub(crate) fn wait_p99_ns(&self) -> Option<u64> {
        let bucket = rank(&self.waits, 0.99)?;
        Some(if bucket.above_ns == 0 { 0 } else { bucket.middle_ns() })
    }
}

/// Histograms by disk name.
pub(crate) type Counted = BTreeMap<String, RequestTimes>;

/// Median and 99th percentile in nanoseconds, accurate to a tenth (the width of a bucket).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Latency {
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
}

impl Bucket {
    /// Value that stands for all requests of the bucket.
    fn middle_ns(&self) -> u64 {
        self.at_most_ns.map_or(self.above_ns, |most| self.above_ns.midpoint(most))
    }
}

impl Latency {
    /// `None` if there were no requests.
    pub(crate) fn of(buckets: &[Bucket]) -> Option<Self> {
        Some(Self { p50_ns: rank_ns(buckets, 0.5)?, p99_ns: rank_ns(buckets, 0.99)? })
    }
}

/// Parses the response to `x-weir-query-latencies`.
///
/// # Errors
/// If it is malformed.
pub(crate) fn read(answer: Value) -> Result<Counted, serde_json::Error> {
    #[derive(Deserialize)]
    struct Disk {
        name: String,
        #[serde(flatten)]
        times: RequestTimes,
    }
    let disks = Vec::<Disk>::deserialize(answer)?;
    Ok(disks.into_iter().map(|disk| (disk.name, disk.times)).collect())
}

/// Growth of each bucket; `None` if a count fell.
fn grown(before: &[Bucket], now: &[Bucket]) -> Option<Vec<Bucket>> {
    let of = |all: &[Bucket], above_ns| {
        all.iter().find(|one| one.above_ns == above_ns).map_or(0, |one| one.requests)
    };
    // A bucket that disappeared counts as a fall too: the histograms belong to different runs.
    let has_fallen = before.iter().any(|one| counter::growth(one.requests, of(now, one.above_ns)).is_none());
    let grown = |one: &Bucket| {
        Some(Bucket { requests: counter::growth(of(before, one.above_ns), one.requests)?, ..*one })
    };
    if has_fallen { None } else { now.iter().map(grown).collect() }
}

/// Sums buckets of several disks.
fn sum<'a>(all: impl IntoIterator<Item = &'a Bucket>) -> Vec<Bucket> {
    let mut sums: BTreeMap<u64, Bucket> = BTreeMap::new();
    for bucket in all {
        let sum = sums.entry(bucket.above_ns).or_insert(Bucket { requests: 0, ..*bucket });
        sum.requests = sum.requests.saturating_add(bucket.requests);
    }
    sums.into_values().collect()
}

/// Quantile `part` (0 to 1) of the times; `None` if there were no requests.
pub(crate) fn rank_ns(buckets: &[Bucket], part: f64) -> Option<u64> {
    rank(buckets, part).map(Bucket::middle_ns)
}

/// Bucket that contains the quantile.
fn rank(buckets: &[Bucket], part: f64) -> Option<&Bucket> {
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
    fn buckets(all: &[(u64, u64)]) -> Vec<Bucket> {
        let bucket = |&(ms, requests)| Bucket {
            above_ns: ms * 1_000_000,
            at_most_ns: Some((ms + 1) * 1_000_000),
            requests,
        };
        all.iter().map(bucket).collect()
    }

    #[test]
    fn half_and_nearly_all() {
        let answer = json!([{ "name": "db", "latencies": [
            { "above-ns": 1_000_000, "at-most-ns": 2_000_000, "requests": 98 },
            { "above-ns": 9_000_000, "requests": 2 },
        ] }]);
        let counted = read(answer).unwrap();
        let expect = Some(Latency { p50_ns: 1_500_000, p99_ns: 9_000_000 });
        assert_eq!(Latency::of(&counted["db"].latencies), expect);
        assert_eq!(counted["db"].wait_p99_ns(), None, "it does not count them");
        assert!(read(json!({})).is_err());
        assert_eq!(Latency::of(&[]), None);
        assert_eq!(Latency::of(&buckets(&[(1, 0)])), None);
    }

    #[test]
    fn what_came_is_a_difference_and_nothing_goes() {
        let (before, now) = (buckets(&[(1, 5)]), buckets(&[(1, 7), (3, 1)]));
        assert_eq!(grown(&before, &now), Some(buckets(&[(1, 2), (3, 1)])));
        assert_eq!(grown(&now, &before), None);
    }

    #[test]
    fn several_disks_are_one() {
        let (a, b) = (buckets(&[(1, 5), (4, 1)]), buckets(&[(1, 7), (3, 1)]));
        assert_eq!(sum(a.iter().chain(&b)), buckets(&[(1, 12), (3, 1), (4, 1)]));
    }
}
