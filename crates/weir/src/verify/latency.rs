//! Whether requests were answered in time: of each disk, what the daemon counted meanwhile.
//!
//! This is what `weir advise --keep p99=TIME` aims at: the whole time from a request's arrival to
//! its answer, not that which a limit held it back. Never asks the daemon itself.

use console::figures;

use super::judge::{Finding, RESTARTED, Verdict};
use crate::client::latency::{self, Counted, RequestTimes};

/// The part of requests that has to be in time.
const PART: f64 = 0.99;

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
    pub(super) fn take(&mut self, counted: Counted) {
        self.last = counted;
        self.first.get_or_insert_with(|| self.last.clone());
    }

    /// A line for each disk that is wanted and was there from the first answer to the last.
    pub(super) fn findings(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<Finding> {
        let first = self.first.iter().flatten().filter(|(name, _)| is_wanted(name));
        let both = first.filter_map(|(name, before)| Some((name, before, self.last.get(name)?)));
        both.map(|(name, before, now)| self.finding(name, before, now)).collect()
    }

    fn finding(&self, name: &str, before: &RequestTimes, now: &RequestTimes) -> Finding {
        let p99 = now.since(before).map(|grown| latency::rank_ns(&grown.latencies, PART));
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
