//! Checks latencies of each disk against a target, from histograms at both ends of the measurement.
//!
//! The target is that of `weir advise --keep p99=TIME`: from a request's arrival to its completion,
//! and not only its wait for limits. Never queries the daemon itself.

use console::figures;

use super::checker::{GuaranteeFinding, GuaranteeVerdict, RESTARTED};
use crate::client::latency::{self, DiskRequestTimes, RequestTimes};

/// Fraction of requests that must meet the target.
const QUANTILE: f64 = 0.99;

pub(super) struct LatencyCheck {
    target_ns: u64,
    first: Option<DiskRequestTimes>,
    last: DiskRequestTimes,
}

impl LatencyCheck {
    pub(super) fn new(target_ns: u64) -> Self {
        Self { target_ns, first: None, last: DiskRequestTimes::new() }
    }

    /// Adds a histogram. Only the first and the last one count.
    pub(super) fn add_histograms(&mut self, histograms: DiskRequestTimes) {
        self.last = histograms;
        self.first.get_or_insert_with(|| self.last.clone());
    }

    /// A finding for each wanted disk that is in both histograms.
    pub(super) fn findings(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<GuaranteeFinding> {
        let first = self.first.iter().flatten().filter(|(name, _)| is_wanted(name));
        let both = first.filter_map(|(name, before)| Some((name, before, self.last.get(name)?)));
        both.map(|(name, before, now)| self.finding(name, before, now)).collect()
    }

    fn finding(&self, name: &str, before: &RequestTimes, now: &RequestTimes) -> GuaranteeFinding {
        // `None` means that counters fell: the daemon or the disk was restarted.
        let p99 = now.since(before).map(|grown| latency::quantile_ns(&grown.latencies, QUANTILE));
        let (p99_ns, verdict) = match p99 {
            None => (0, GuaranteeVerdict::NotChecked(RESTARTED)),
            Some(None) => (0, GuaranteeVerdict::NoLoad),
            Some(Some(ns)) => (ns, GuaranteeVerdict::of(ns <= self.target_ns)),
        };
        GuaranteeFinding {
            kind: "disk",
            name: name.to_owned(),
            guarantee: "latency-p99".to_owned(),
            expected: figures::time(self.target_ns),
            measured: figures::time(p99_ns),
            figures: vec![("most-ns", self.target_ns as f64), ("latency-p99-ns", p99_ns as f64)],
            verdict,
        }
    }
}
