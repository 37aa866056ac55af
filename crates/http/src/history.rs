//! History at decreasing resolution, in a fixed amount of memory for each disk and group.
//!
//! ```text
//!   a second ─► 1 s, for 10 min ─► the oldest ten ─► 10 s, to 2 h ─► the oldest six ─► 1 min, to 2 days
//!          ├──► latencies ─► columns of 15 s, 3 min and 1 h ─► requests by latency
//!          └──► changed limits ─► lines
//! ```
//!
//! A query for a long span returns recent values at that span's resolution too. All memory but that
//! of lines is allocated at a disk's first second: less than 42 KB, which a test checks.

use std::collections::{BTreeMap, VecDeque};

use api::{ActivityHistory, LatencyHeat};
use serde_json::Number;

use super::{
    limit_lines::{DrawnLimit, LimitLines},
    sample::{ActivitySample, BOUNDS, Latencies, PackedSample, ROWS, rounded},
};

/// Seconds of a step, and number of steps, of each level.
const LEVELS: [(u64, usize); 3] = [(1, 600), (10, 660), (60, 2760)];
/// Seconds of a column of latencies, and number of columns, of each span.
const COLUMNS: [(u64, usize); 3] = [(15, 40), (180, 40), (3600, 48)];
/// Bytes of a column.
const COLUMN_BYTES: usize = ROWS.div_ceil(2);
/// Highest of a cell's levels: all requests of the column. Each lower level is half as many; the
/// lowest is none.
const MAX_LEVEL: u8 = 15;

/// Span of a query, each with one of [`LEVELS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HistorySpan {
    TenMinutes,
    TwoHours,
    TwoDays,
}

impl HistorySpan {
    pub(super) const ALL: [(&str, Self); 3] =
        [("10m", Self::TenMinutes), ("2h", Self::TwoHours), ("2d", Self::TwoDays)];

    fn seconds(self) -> u64 {
        match self {
            Self::TenMinutes => 600,
            Self::TwoHours => 7200,
            Self::TwoDays => 172_800,
        }
    }
}

/// Ring buffer that is allocated at its full size.
struct HistoryRing<T> {
    values: VecDeque<T>,
    capacity: usize,
}

impl<T> HistoryRing<T> {
    fn new(capacity: usize) -> Self {
        let mut values = VecDeque::new();
        values.reserve_exact(capacity);
        Self { values, capacity }
    }

    /// Appends a value; returns the oldest one if the ring was full.
    fn push(&mut self, value: T) -> Option<T> {
        let oldest = (self.values.len() >= self.capacity).then(|| self.values.pop_front()).flatten();
        self.values.push_back(value);
        oldest
    }
}

/// History of one disk or group.
pub(super) struct ObjectHistory {
    levels: [HistoryRing<PackedSample>; 3],
    /// Steps that left a level and do not yet fill a step of the next.
    leaving: [Vec<PackedSample>; 2],
    heat: [LatencyColumns; 3],
    lines: LimitLines,
    /// Last second that was added, since the Epoch.
    second: u64,
}

/// Columns of one length.
struct LatencyColumns {
    columns: HistoryRing<[u8; COLUMN_BYTES]>,
    /// Counts of the current, incomplete column.
    counts: Latencies,
    /// Number of the current column since the Epoch.
    number: u64,
    seconds: u64,
}

impl ObjectHistory {
    pub(super) fn new() -> Self {
        let [_, (ten, _), (minute, _)] = LEVELS;
        Self {
            levels: LEVELS.map(|(_, capacity)| HistoryRing::new(capacity)),
            leaving: [ten, minute / ten].map(|capacity| Vec::with_capacity(capacity as usize)),
            heat: COLUMNS.map(|(seconds, capacity)| LatencyColumns::new(seconds, capacity)),
            lines: LimitLines::default(),
            second: 0,
        }
    }

    /// Adds a second. Skipped seconds are recorded as unknown.
    pub(super) fn add(
        &mut self,
        second: u64,
        sample: &ActivitySample,
        latencies: Option<&Latencies>,
        drawn: Vec<DrawnLimit>,
    ) {
        // The clock of seconds is monotonic, but two collections may fall into one second.
        if self.second != 0 && second <= self.second {
            return;
        }
        let missed = if self.second == 0 { 0 } else { second - self.second - 1 };
        // Bounded by the finest level. A longer gap is stored as that many seconds.
        for _ in 0..missed.min(LEVELS[0].1 as u64) {
            self.push(0, ActivitySample::default().pack());
        }
        self.second = second;
        self.push(0, sample.pack());
        for heat in &mut self.heat {
            heat.add(second, latencies);
        }
        self.lines.add(second, drawn);
    }

    fn push(&mut self, level: usize, step: PackedSample) {
        // Only values that leave a full level move to the next.
        let Some(oldest) = self.levels[level].push(step) else { return };
        let Some(leaving) = self.leaving.get_mut(level) else { return };
        leaving.push(oldest);
        // One step of the next level is complete.
        if leaving.len() as u64 == LEVELS[level + 1].0 / LEVELS[level].0 {
            let together = ActivitySample::merge(leaving.iter()).pack();
            leaving.clear();
            self.push(level + 1, together);
        }
    }

    /// Steps of a level, oldest first, completed from finer levels; and the number of seconds in
    /// the last one.
    fn steps(&self, level: usize) -> (Vec<PackedSample>, u64) {
        let mut steps: Vec<PackedSample> = self.levels[level].values.iter().copied().collect();
        let Some(below) = level.checked_sub(1) else { return (steps, LEVELS[0].0) };
        let (finer, newest) = self.steps(below);
        let mut all = self.leaving[below].clone();
        all.extend(finer);
        let (step, part) = (LEVELS[level].0, LEVELS[below].0);
        let together = all.chunks((step / part) as usize);
        // The last chunk may be partial: its newest step counts only its own seconds.
        let of_last = together.clone().last().map_or(step, |last| (last.len() as u64 - 1) * part + newest);
        steps.extend(together.map(|together| ActivitySample::merge(together.iter()).pack()));
        (steps, of_last)
    }

    /// History for the page and the API, from the first step that begins at or after `since_ms`.
    ///
    /// Times in and out are by the wall clock, which was set forward by `set_s` seconds since
    /// counting began; values from before that step are converted to the new time as well. Limits
    /// of the whole span are returned, since a limit may begin before `since_ms` and continue.
    pub(super) fn report(&self, span: HistorySpan, since_ms: u64, set_s: i64) -> ActivityHistory {
        // To the internal clock.
        let since_ms = since_ms.saturating_add_signed(set_s.saturating_mul(-1000));
        let clock_ms = |seconds: u64| seconds.saturating_add_signed(set_s) * 1000;
        let level = span as usize;
        let step = LEVELS[level].0;
        let (steps, of_last) = self.steps(level);
        let max_steps = (span.seconds() / step) as usize;
        // Begin of the newest step.
        let newest = (self.second + 1).saturating_sub(of_last);
        // Number of steps that begin after it, including the newest.
        let wanted = newest.saturating_sub(since_ms.div_ceil(1000)) / step + 1;
        let wanted = if newest * 1000 < since_ms { 0 } else { wanted };
        let max_steps = max_steps.min(usize::try_from(wanted).unwrap_or(max_steps));
        let steps: Vec<_> =
            steps[steps.len().saturating_sub(max_steps)..].iter().map(ActivitySample::unpack).collect();
        let start = (newest + step).saturating_sub(step * steps.len() as u64);
        let series = |get: &dyn Fn(&ActivitySample) -> Option<f64>| -> Vec<Option<Number>> {
            steps.iter().map(|sample| get(sample).map(rounded)).collect()
        };
        ActivityHistory {
            step_ms: step * 1000,
            start_ms: clock_ms(start),
            series: BTreeMap::from([
                ("read-iops", series(&|sample| sample.rates[0])),
                ("write-iops", series(&|sample| sample.rates[1])),
                ("read-bps", series(&|sample| sample.rates[2])),
                ("write-bps", series(&|sample| sample.rates[3])),
                ("latency-p50-ns", series(&|sample| sample.latency_ns[0])),
                ("latency-p99-ns", series(&|sample| sample.latency_ns[1])),
                ("waiting-requests", series(&|sample| sample.waiting)),
                ("wait-ratio", series(&|sample| sample.ratios[0])),
                ("burst-balance-ratio", series(&|sample| sample.ratios[1])),
                ("read-ahead-hit-rate", series(&|sample| sample.ratios[2])),
                ("l2-cache-hit-rate", series(&|sample| sample.ratios[3])),
            ]),
            latency_heat: self.heat[level].report(since_ms, clock_ms),
            limits: self.lines.intervals(self.second.saturating_sub(span.seconds()), clock_ms),
        }
    }
}

#[cfg(test)]
impl ObjectHistory {
    /// Size in bytes, empty or full, without its lines.
    pub(super) fn size_bytes(&self) -> usize {
        let levels: usize =
            self.levels.iter().map(|ring| ring.values.capacity() * size_of::<PackedSample>()).sum();
        let leaving: usize =
            self.leaving.iter().map(|steps| steps.capacity() * size_of::<PackedSample>()).sum();
        let heat: usize = self.heat.iter().map(|heat| heat.columns.values.capacity() * COLUMN_BYTES).sum();
        size_of_val(self) + levels + leaving + heat
    }
}

impl LatencyColumns {
    fn new(seconds: u64, capacity: usize) -> Self {
        Self { columns: HistoryRing::new(capacity), counts: [0; ROWS], number: 0, seconds }
    }

    fn add(&mut self, second: u64, latencies: Option<&Latencies>) {
        let number = second / self.seconds;
        if number != self.number {
            let previous = self.number;
            if previous != 0 {
                // Columns without any second are stored as empty.
                let missed = (number - previous - 1).min(self.columns.capacity as u64);
                self.columns.push(column(&self.counts));
                for _ in 0..missed {
                    self.columns.push(column(&[0; ROWS]));
                }
            }
            (self.number, self.counts) = (number, [0; ROWS]);
        }
        for (count, more) in self.counts.iter_mut().zip(latencies.into_iter().flatten()) {
            *count = count.saturating_add(*more);
        }
    }

    /// Rows for the page, one for each column from that time on.
    ///
    /// A row has the share of the column's requests in each latency bucket, the last one above all
    /// bounds; null without requests.
    fn report(&self, since_ms: u64, clock_ms: impl Fn(u64) -> u64) -> LatencyHeat {
        let newest = column(&self.counts);
        let columns: Vec<_> = self.columns.values.iter().chain([&newest]).collect();
        let start = (self.number + 1).saturating_sub(columns.len() as u64) * self.seconds;
        // Columns that begin before `since_ms` are omitted.
        let before =
            since_ms.saturating_sub(start * 1000).div_ceil(self.seconds * 1000).min(columns.len() as u64);
        let row = |column: &&[u8; COLUMN_BYTES]| -> Option<Vec<Number>> {
            // Even rows are in the low half of a byte.
            let darkness = |row: usize| column[row / 2] >> (row % 2 * 4) & MAX_LEVEL;
            if (0..ROWS).all(|row| darkness(row) == 0) {
                return None;
            }
            let part = |darkness: u8| match darkness {
                0 => 0.into(),
                _ => rounded(0.5_f64.powi(i32::from(MAX_LEVEL - darkness))),
            };
            Some((0..ROWS).map(|row| part(darkness(row))).collect())
        };
        LatencyHeat {
            step_ms: self.seconds * 1000,
            start_ms: clock_ms(start + before * self.seconds),
            bounds_ns: BOUNDS.to_vec(),
            rows: columns[before as usize..].iter().map(row).collect(),
        }
    }
}

/// Packs counts into a column, two cells in a byte.
fn column(counts: &Latencies) -> [u8; COLUMN_BYTES] {
    let sum: u64 = counts.iter().map(|count| u64::from(*count)).sum();
    let mut column = [0; COLUMN_BYTES];
    for (row, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let halvings = (sum as f64 / f64::from(count)).log2().round();
        // At least 1, so that a rare latency differs from none.
        let darkness = (f64::from(MAX_LEVEL) - halvings).max(1.0) as u8;
        column[row / 2] |= darkness << (row % 2 * 4);
    }
    column
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::limit_lines::drawn_limits, *};

    fn of_rate(rate: f64) -> ActivitySample {
        ActivitySample { rates: [Some(rate); 4], ..ActivitySample::default() }
    }

    fn limited(iops: u64) -> Vec<DrawnLimit> {
        let object = json!({ "limits": { "iops-total": iops } });
        drawn_limits(object.as_object().unwrap(), &BTreeMap::new())
    }

    /// Value, begin and end of each line.
    fn lines(report: &ActivityHistory) -> Vec<(u64, u64, Option<u64>)> {
        report.limits.iter().map(|line| (line.value, line.start_ms, line.end_ms)).collect()
    }

    #[test]
    fn memory_never_grows() {
        let mut history = ObjectHistory::new();
        let empty = history.size_bytes();
        let counts = [u32::MAX / 3600; ROWS];
        for second in 1_000_000..1_200_000 {
            history.add(second, &of_rate(second as f64), Some(&counts), Vec::new());
        }
        assert_eq!(history.size_bytes(), empty);
        assert_eq!(
            history.levels.each_ref().map(|ring| ring.values.len()),
            LEVELS.map(|(_, capacity)| capacity)
        );
    }

    #[test]
    fn each_span_has_means_of_its_steps() {
        let mut history = ObjectHistory::new();
        let (begin, end) = (1_000_000, 1_000_000 + 9_000);
        for second in begin..end {
            history.add(second, &of_rate((second - begin + 1) as f64), None, Vec::new());
        }
        for (name, span) in HistorySpan::ALL {
            let report = history.report(span, 0, 0);
            let (step, start) = (report.step_ms / 1000, report.start_ms / 1000);
            let rates = &report.series["read-iops"];
            let seconds = span.seconds().min(end - begin);
            assert!((rates.len() as u64 * step).abs_diff(seconds) <= step, "{name}: {} steps", rates.len());
            assert!(
                start + step * (rates.len() as u64 - 1) < end && start + step * rates.len() as u64 >= end,
                "{name}"
            );
            for (index, rate) in rates.iter().enumerate() {
                let from = start + index as u64 * step;
                let until = (from + step).min(end);
                // The mean of the values put in. The oldest step may lack some.
                let expected = (from + until + 1) as f64 / 2.0 - begin as f64;
                let rate = rate.as_ref().and_then(Number::as_f64).unwrap();
                assert!(
                    (rate / expected - 1.0).abs() < 0.04 || index == 0,
                    "{name} {index}: {rate} for {expected}"
                );
            }
        }
    }

    #[test]
    fn skipped_seconds_are_unknown() {
        let mut history = ObjectHistory::new();
        for second in [100, 101, 104, 104, 103, 105] {
            history.add(second, &of_rate(64.0), None, Vec::new());
        }
        let report = history.report(HistorySpan::TenMinutes, 0, 0);
        let known: Vec<_> = report.series["write-bps"].iter().map(Option::is_some).collect();
        assert_eq!(known, [true, true, false, false, true, true]);
        assert_eq!(report.start_ms, 100_000);
    }

    #[test]
    fn limits_of_the_whole_span_are_returned() {
        let mut history = ObjectHistory::new();
        for second in 1_000_000..1_009_000 {
            history.add(second, &ActivitySample::default(), None, limited(1 + second / 1000));
            // A second that was added already is ignored.
            history.add(second, &ActivitySample::default(), None, limited(5));
        }
        let values = |span| lines(&history.report(span, 0, 0)).iter().map(|line| line.0).collect::<Vec<_>>();
        assert_eq!(values(HistorySpan::TenMinutes), [1009]);
        assert_eq!(values(HistorySpan::TwoHours), (1002..=1009).collect::<Vec<_>>());
        assert_eq!(values(HistorySpan::TwoDays), (1001..=1009).collect::<Vec<_>>());
    }

    #[test]
    fn latencies_are_parts_of_their_column() {
        let mut history = ObjectHistory::new();
        let mut counts = [0; ROWS];
        (counts[3], counts[5], counts[ROWS - 1]) = (800, 190, 1);
        for second in 150..180 {
            // No requests in the second column.
            history.add(second, &ActivitySample::default(), (second < 165).then_some(&counts), Vec::new());
        }
        let LatencyHeat { step_ms, start_ms, bounds_ns, rows } =
            history.report(HistorySpan::TenMinutes, 0, 0).latency_heat;
        assert_eq!((start_ms, step_ms), (150_000, 15_000));
        assert_eq!((rows.len(), &rows[1]), (2, &None));
        let row: Vec<_> = rows[0].iter().flatten().filter_map(Number::as_f64).collect();
        assert_eq!(row.len(), bounds_ns.len() + 1);
        assert_eq!(row[3..6], [1.0, 0.0, 0.25]);
        let last = row[ROWS - 1];
        assert!(last > 0.0 && last < 0.002, "{last}");
    }

    #[test]
    fn times_follow_a_clock_step() {
        let mut history = ObjectHistory::new();
        for second in 100_000..100_100 {
            let drawn = limited(if second < 100_050 { 7 } else { 8 });
            history.add(second, &of_rate(second as f64), Some(&[1; ROWS]), drawn);
        }
        for set_s in [-7200, -1, 0, 3, 10_800] {
            let now_ms = 100_000_u64.saturating_add_signed(set_s) * 1000;
            let report = history.report(HistorySpan::TenMinutes, 0, set_s);
            assert_eq!(report.start_ms, now_ms);
            let heat = report.latency_heat.start_ms;
            assert_eq!(heat, 99_990_u64.saturating_add_signed(set_s) * 1000);
            let change_ms = now_ms + 50_000;
            assert_eq!(lines(&report), [(7, now_ms, Some(change_ms)), (8, change_ms, None)]);
            // Query by a program that has the wall clock's time of the last five seconds.
            let report = history.report(HistorySpan::TenMinutes, now_ms + 95_000, set_s);
            let last = report.series["read-iops"].len();
            assert_eq!((report.start_ms, last), (now_ms + 95_000, 5), "{set_s}");
        }
    }

    #[test]
    fn since_limits_the_steps() {
        let mut history = ObjectHistory::new();
        for second in 100..200 {
            history.add(second, &of_rate(second as f64), None, limited(second / 150));
        }
        for (since_ms, start, steps) in [
            (0, 100, 100),
            (99_000, 100, 100),
            (150_000, 150, 50),
            (149_001, 150, 50),
            (199_000, 199, 1),
            (199_001, 200, 0),
        ] {
            let report = history.report(HistorySpan::TenMinutes, since_ms, 0);
            let all = &report.series["read-iops"];
            assert_eq!((report.start_ms, all.len()), (start * 1000, steps), "since {since_ms}");
            // A limit's begin is reported even if it precedes the queried time.
            assert_eq!(lines(&report), [(1, 150_000, None)], "since {since_ms}");
        }
    }
}
