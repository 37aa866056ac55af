//! How long requests took, from their arrival to their answer: what the daemon counted by bucket,
//! and which part of them took how long.
//!
//! Never asks the daemon itself.

use std::collections::BTreeMap;

use policy::counter;
use serde::Deserialize;
use serde_json::Value;

/// Requests that took longer than this and no longer than that; as long as may be where that is
/// absent.
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
    /// Those of requests that did not wait are in the first bucket. Empty from a daemon that does
    /// not count them.
    #[serde(default)]
    pub(crate) waits: Vec<Bucket>,
}

impl RequestTimes {
    /// Growth since an earlier moment; `None` where some counts fell.
    pub(crate) fn since(&self, before: &Self) -> Option<Self> {
        let latencies = grown(&before.latencies, &self.latencies)?;
        Some(Self { latencies, waits: grown(&before.waits, &self.waits)? })
    }

    /// Adds those of another disk.
    pub(crate) fn add(&mut self, other: &Self) {
        for (own, more) in [(&mut self.latencies, &other.latencies), (&mut self.waits, &other.waits)] {
            *own = sum(own.iter().chain(more));
        }
    }

    /// Time that 99 of 100 requests waited at most: 0 in the first bucket. `None` where there were
    /// no requests.
    pub(crate) fn wait_p99_ns(&self) -> Option<u64> {
        let bucket = rank(&self.waits, 0.99)?;
        Some(if bucket.above_ns == 0 { 0 } else { bucket.middle_ns() })
    }
}

/// Of disks, by their names.
pub(crate) type Counted = BTreeMap<String, RequestTimes>;

/// Nanoseconds that half of the requests, and 99 of 100, took at most; known to a tenth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Latency {
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
}

impl Bucket {
    /// What it tells of a request: known to a tenth.
    fn middle_ns(&self) -> u64 {
        self.at_most_ns.map_or(self.above_ns, |most| self.above_ns.midpoint(most))
    }
}

impl Latency {
    /// `None` where there were no requests.
    pub(crate) fn of(buckets: &[Bucket]) -> Option<Self> {
        Some(Self { p50_ns: rank_ns(buckets, 0.5)?, p99_ns: rank_ns(buckets, 0.99)? })
    }
}

/// The answer to `x-weir-query-latencies`.
///
/// # Errors
/// Where it cannot be read.
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

/// What came to each; `None` where some have gone.
fn grown(before: &[Bucket], now: &[Bucket]) -> Option<Vec<Bucket>> {
    let of = |all: &[Bucket], above_ns| {
        all.iter().find(|one| one.above_ns == above_ns).map_or(0, |one| one.requests)
    };
    let has_fallen = before.iter().any(|one| counter::growth(one.requests, of(now, one.above_ns)).is_none());
    let grown = |one: &Bucket| {
        Some(Bucket { requests: counter::growth(of(before, one.above_ns), one.requests)?, ..*one })
    };
    if has_fallen { None } else { now.iter().map(grown).collect() }
}

/// The buckets of several disks as one's.
fn sum<'a>(all: impl IntoIterator<Item = &'a Bucket>) -> Vec<Bucket> {
    let mut sums: BTreeMap<u64, Bucket> = BTreeMap::new();
    for bucket in all {
        let sum = sums.entry(bucket.above_ns).or_insert(Bucket { requests: 0, ..*bucket });
        sum.requests = sum.requests.saturating_add(bucket.requests);
    }
    sums.into_values().collect()
}

/// How long the slowest of such a part of the quickest took, from 0 to 1; `None` where there were
/// no requests.
pub(crate) fn rank_ns(buckets: &[Bucket], part: f64) -> Option<u64> {
    rank(buckets, part).map(Bucket::middle_ns)
}

/// The bucket of that rank.
fn rank(buckets: &[Bucket], part: f64) -> Option<&Bucket> {
    let all = buckets.iter().fold(0_u64, |sum, bucket| sum.saturating_add(bucket.requests));
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

    /// Of buckets of a millisecond each.
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
