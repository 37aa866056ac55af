//! Results of a load: latencies, and requests completed in each second. Recording a request
//! allocates nothing.

use std::fmt;

use policy::time::{Duration, Instant};
use simulator::over_time::TimeSeries;

use crate::latencies::{self, Counts, Latencies};

const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read,
    Write,
    Flush,
}

/// A request; the offset of a flush is meaningless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SentRequest {
    pub(super) kind: RequestKind,
    pub(super) offset: u64,
}

impl fmt::Display for SentRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            RequestKind::Read => write!(f, "a read at {}", self.offset),
            RequestKind::Write => write!(f, "a write at {}", self.offset),
            RequestKind::Flush => f.write_str("a flush"),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Measured {
    /// Time from the due time of a request to its completion.
    pub(crate) reads: Latencies,
    pub(crate) writes: Latencies,
    pub(crate) flushes: Latencies,
    /// Complete seconds only.
    pub(crate) seconds: Vec<SecondCounts>,
    /// Completions over time, for a chart.
    pub(crate) reads_over_time: TimeSeries,
    pub(crate) writes_over_time: TimeSeries,
    /// Delay between due time and submission; empty for a closed loop.
    pub(crate) late: Latencies,
    pub(crate) behind: Duration,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SecondCounts {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) reads_ns: u64,
    pub(crate) writes_ns: u64,
    /// Latencies of the reads completed in this second.
    pub(crate) read_latencies: Counts,
    pub(crate) write_latencies: Counts,
}

impl Default for Measured {
    fn default() -> Self {
        let [reads, writes, flushes, late] = [(); 4].map(|()| latencies::new());
        let [reads_over_time, writes_over_time] = [(); 2].map(|()| TimeSeries::sums());
        Self {
            reads,
            writes,
            flushes,
            seconds: Vec::new(),
            reads_over_time,
            writes_over_time,
            late,
            behind: Duration::ZERO,
        }
    }
}

impl Measured {
    pub(crate) fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.reads, &other.reads),
            (&mut self.writes, &other.writes),
            (&mut self.flushes, &other.flushes),
            (&mut self.late, &other.late),
        ];
        for (ours, theirs) in pairs {
            ours.add(theirs).expect("all have the same bounds");
        }
        self.seconds.resize(self.seconds.len().max(other.seconds.len()), SecondCounts::default());
        for (ours, theirs) in self.seconds.iter_mut().zip(&other.seconds) {
            ours.reads += theirs.reads;
            ours.writes += theirs.writes;
            ours.reads_ns = ours.reads_ns.saturating_add(theirs.reads_ns);
            ours.writes_ns = ours.writes_ns.saturating_add(theirs.writes_ns);
            // Equal latencies may occur twice in the list, which `from_counts` adds up.
            ours.read_latencies.extend(&theirs.read_latencies);
            ours.write_latencies.extend(&theirs.write_latencies);
        }
        self.reads_over_time.add(&other.reads_over_time);
        self.writes_over_time.add(&other.writes_over_time);
        self.behind = self.behind.max(other.behind);
    }

    pub(crate) fn answered(&self) -> u64 {
        self.reads.len() + self.writes.len()
    }
}

/// Records completions. Requests due before `from` (the ramp) are ignored, even if they complete
/// later.
#[derive(Debug)]
pub(super) struct LoadRecorder {
    from: Instant,
    second_ends: Instant,
    second: SecondCounts,
    reads: Latencies,
    writes: Latencies,
    measured: Measured,
}

impl LoadRecorder {
    pub(super) fn new(from: Instant) -> Self {
        let [reads, writes] = [(); 2].map(|()| latencies::one_second());
        let (second, measured) = (SecondCounts::default(), Measured::default());
        Self { from, second_ends: from + SECOND, second, reads, writes, measured }
    }

    pub(super) fn answered(&mut self, kind: RequestKind, due: Instant, at: Instant) {
        if due < self.from {
            return;
        }
        // Closes every second that has ended, including seconds without completions.
        while at >= self.second_ends {
            self.second.read_latencies = latencies::take_counts(&mut self.reads);
            self.second.write_latencies = latencies::take_counts(&mut self.writes);
            self.measured.seconds.push(std::mem::take(&mut self.second));
            self.second_ends += SECOND;
        }
        // From the due time: includes the time that a late request waited for a free task.
        let took_ns = at.nanos_since(due);
        let since_ns = at.nanos_since(self.from);
        let latencies = match kind {
            RequestKind::Read => {
                self.second.reads += 1;
                self.second.reads_ns = self.second.reads_ns.saturating_add(took_ns);
                self.reads.saturating_record(took_ns);
                self.measured.reads_over_time.note(since_ns, 1);
                &mut self.measured.reads
            }
            RequestKind::Write => {
                self.second.writes += 1;
                self.second.writes_ns = self.second.writes_ns.saturating_add(took_ns);
                self.writes.saturating_record(took_ns);
                self.measured.writes_over_time.note(since_ns, 1);
                &mut self.measured.writes
            }
            RequestKind::Flush => &mut self.measured.flushes,
        };
        latencies.saturating_record(took_ns);
    }

    pub(super) fn sent(&mut self, due: Instant, at: Instant) {
        if due >= self.from {
            self.measured.late.saturating_record(at.nanos_since(due));
        }
    }

    pub(super) fn end(self, behind: Duration) -> Measured {
        Measured { behind, ..self.measured }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Instant {
        Instant::from_nanos(milliseconds * 1_000_000)
    }

    #[test]
    fn each_second_counts_its_completions() {
        let mut recorder = LoadRecorder::new(at(1000));
        for answered in [900, 1099, 1100, 1999, 2000, 4500] {
            recorder.answered(RequestKind::Read, at(answered - 100), at(answered));
        }
        let measured = recorder.end(Duration::ZERO);
        let reads: Vec<_> = measured.seconds.iter().map(|second| second.reads).collect();
        assert_eq!(reads, [2, 1, 0], "the first two are of the warming up, the last second is not complete");
        assert_eq!((measured.reads.len(), measured.writes.len()), (4, 0));
        assert!(measured.reads.equivalent(measured.reads.max(), 100_000_000));
    }

    #[test]
    fn results_of_jobs_are_summed() {
        let result_of = |kinds: &[RequestKind], seconds| {
            let mut recorder = LoadRecorder::new(at(0));
            for &kind in kinds {
                recorder.answered(kind, at(1), at(2));
            }
            recorder.answered(RequestKind::Write, at(0), at(seconds * 1000));
            recorder.end(Duration::from_millis(seconds))
        };
        let mut sum = result_of(&[RequestKind::Read, RequestKind::Flush], 1);
        sum.add(&result_of(&[RequestKind::Read, RequestKind::Write], 2));
        assert_eq!((sum.reads.len(), sum.writes.len(), sum.flushes.len()), (2, 3, 1));
        let drawn = |series: &TimeSeries| series.points().map(|(_, count)| count).sum::<u64>();
        assert_eq!((drawn(&sum.reads_over_time), drawn(&sum.writes_over_time)), (2, 3));
        let [first, second] = sum.seconds.as_slice() else { panic!("{:?}", sum.seconds) };
        assert_eq!((first.reads, first.writes), (2, 1));
        assert_eq!((first.reads_ns, first.writes_ns), (2_000_000, 1_000_000));
        let read_latencies = latencies::from_counts(&first.read_latencies);
        assert!(
            read_latencies.len() == 2 && read_latencies.equivalent(read_latencies.max(), 1_000_000),
            "{:?}",
            first.read_latencies
        );
        assert_eq!(*second, SecondCounts::default());
        assert_eq!(sum.behind, Duration::from_millis(2));
    }
}
