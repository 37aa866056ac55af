//! Whether requests were answered in time: of each disk, what the daemon counted meanwhile.
//!
//! This is what `weir advise --keep p99=TIME` aims at: the whole time from a request's arrival to
//! its answer, not that which a limit held it back. Never asks the daemon itself.

use std::collections::BTreeMap;

use console::figures;
use serde::Deserialize;
use serde_json::Value;

use super::judge::{Finding, RESTARTED, Verdict};

/// The part of requests that has to be in time.
const PART: f64 = 0.99;

/// An answer to `x-weir-query-latencies`: one disk of it.
#[derive(Deserialize)]
struct Disk {
    name: String,
    latencies: Vec<Bucket>,
}

/// Requests that took longer than this and no longer than that; as long as may be where that is
/// absent.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Bucket {
    above_ns: u64,
    at_most_ns: Option<u64>,
    requests: u64,
}

impl Bucket {
    /// What it tells of a request: known to a tenth.
    fn middle_ns(&self) -> u64 {
        self.at_most_ns.map_or(self.above_ns, |most| self.above_ns.midpoint(most))
    }
}

/// Of disks, by their names.
type Counted = BTreeMap<String, Vec<Bucket>>;

pub(super) struct Latencies {
    most_ns: u64,
    first: Option<Counted>,
    last: Counted,
}

impl Latencies {
    pub(super) fn new(most_ns: u64) -> Self {
        Self { most_ns, first: None, last: Counted::new() }
    }

    /// What is judged is between the first answer and the last.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub(super) fn take(&mut self, answer: Value) -> Result<(), serde_json::Error> {
        let disks = Vec::<Disk>::deserialize(answer)?;
        self.last = disks.into_iter().map(|disk| (disk.name, disk.latencies)).collect();
        self.first.get_or_insert_with(|| self.last.clone());
        Ok(())
    }

    /// A line for each disk that is wanted and was there from the first answer to the last.
    pub(super) fn findings(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<Finding> {
        let first = self.first.iter().flatten().filter(|(name, _)| is_wanted(name));
        let both = first.filter_map(|(name, before)| Some((name, before, self.last.get(name)?)));
        both.map(|(name, before, now)| self.finding(name, before, now)).collect()
    }

    fn finding(&self, name: &str, before: &[Bucket], now: &[Bucket]) -> Finding {
        let p99 = difference(before, now).map(|grown| rank(&grown));
        let (p99_ns, verdict) = match p99 {
            None => (0, Verdict::NotJudged(RESTARTED)),
            Some(None) => (0, Verdict::NotAsked),
            Some(Some(ns)) => (ns, Verdict::of(ns <= self.most_ns)),
        };
        Finding {
            kind: "disk",
            name: name.to_owned(),
            promise: "latency-p99".to_owned(),
            asked: figures::time(self.most_ns),
            measured: figures::time(p99_ns),
            figures: vec![("most-ns", self.most_ns as f64), ("latency-p99-ns", p99_ns as f64)],
            verdict,
        }
    }
}

/// What came to each; `None` where some have gone.
fn difference(before: &[Bucket], now: &[Bucket]) -> Option<Vec<Bucket>> {
    let of = |all: &[Bucket], above_ns| {
        all.iter().find(|one| one.above_ns == above_ns).map_or(0, |one| one.requests)
    };
    let is_less = before.iter().any(|one| of(now, one.above_ns) < one.requests);
    let grown = now.iter().map(|one| Bucket { requests: one.requests - of(before, one.above_ns), ..*one });
    (!is_less).then(|| grown.collect())
}

/// How long the slowest of the quickest 99 of 100 took; `None` where there were none.
fn rank(buckets: &[Bucket]) -> Option<u64> {
    let all: u64 = buckets.iter().map(|bucket| bucket.requests).sum();
    let rank = (all as f64 * PART).ceil() as u64;
    let mut seen = 0;
    let place = buckets.iter().find(|bucket| {
        seen += bucket.requests;
        seen >= rank && all > 0
    });
    place.map(Bucket::middle_ns)
}
