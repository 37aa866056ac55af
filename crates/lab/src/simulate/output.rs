//! A simulation's result as tables and as JSON.
//!
//! A group's figures cover all disks below it. Percentiles are right within 1 %, the resolution of
//! the histograms.

use console::{
    figures,
    table::{ColumnAlignment, TextTable, columns},
};
use serde::Serialize;
use simulator::tally::{QueueStatistics, RequestStatistics};

use super::drive::{SimulatedDisk, SimulationOutcome};
use crate::latencies::Percentiles;

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct SimulationSummary {
    /// All disks together, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) all: Option<AllDisks>,
    pub(crate) disks: Vec<SummaryLine>,
    pub(crate) groups: Vec<SummaryLine>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) remarks: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) partial: Option<String>,
    #[serde(skip)]
    is_limited: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AllDisks {
    pub(crate) before: Option<SimulationFigures>,
    pub(crate) after: SimulationFigures,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct SummaryLine {
    pub(crate) name: String,
    /// Without limits, on the same device; absent if it would be the same.
    pub(crate) before: Option<SimulationFigures>,
    pub(crate) after: SimulationFigures,
    /// Share of time in which requests were throttled, 0 to 1.
    pub(crate) throttled: f64,
    pub(crate) longest_queue: u64,
    /// Share of time in which each limit throttled requests; the longest first.
    pub(crate) held_by: Vec<ThrottleCauseShare>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prefetch: Option<PrefetchSummary>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct SimulationFigures {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    pub(crate) iops: f64,
    pub(crate) bps: f64,
    pub(crate) latency_ns: Percentiles,
    pub(crate) waited_ns: Percentiles,
    pub(crate) served_ns: Percentiles,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ThrottleCauseShare {
    pub(crate) limit: String,
    pub(crate) seconds: f64,
    pub(crate) share: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct PrefetchSummary {
    pub(crate) hit_rate: Option<f64>,
    pub(crate) accuracy: Option<f64>,
    pub(crate) read_ahead_bytes: u64,
}

impl SimulationFigures {
    fn of(statistics: &RequestStatistics) -> Self {
        Self {
            requests: statistics.requests,
            bytes: statistics.bytes,
            seconds: statistics.seconds(),
            iops: statistics.per_second(statistics.requests),
            bps: statistics.per_second(statistics.bytes),
            latency_ns: Percentiles::of(&statistics.latency),
            waited_ns: Percentiles::of(&statistics.waited),
            served_ns: Percentiles::of(&statistics.served),
        }
    }
}

impl SummaryLine {
    fn new(
        name: &str,
        after: &RequestStatistics,
        before: Option<&RequestStatistics>,
        queue: &QueueStatistics,
    ) -> Self {
        Self {
            name: name.to_owned(),
            before: before.map(SimulationFigures::of),
            after: SimulationFigures::of(after),
            throttled: after.share(queue.throttled_ns),
            longest_queue: queue.longest,
            held_by: Vec::new(),
            prefetch: None,
        }
    }

    fn of_disk(name: &str, disk: &SimulatedDisk, is_compared: bool) -> Self {
        let before = disk.before.as_ref().filter(|_| is_compared);
        let mut line = Self::new(name, &disk.after, before, &disk.queue);
        let cause_share = |(limit, ns): &(String, u64)| ThrottleCauseShare {
            limit: limit.clone(),
            seconds: *ns as f64 / 1e9,
            share: disk.after.share(*ns),
        };
        line.held_by = disk.throttled.iter().map(cause_share).collect();
        line.prefetch = disk.prefetch.map(|stats| PrefetchSummary {
            hit_rate: stats.hit_rate(),
            accuracy: stats.accuracy(),
            read_ahead_bytes: stats.read_ahead_bytes,
        });
        line
    }
}

impl SimulationSummary {
    pub(crate) fn new(outcome: &SimulationOutcome, remarks: &[String]) -> Self {
        let SimulationOutcome { world, disks, groups, partial } = outcome;
        let is_limited = world.is_limited();
        let reads_ahead =
            |disk: &SimulatedDisk| disk.prefetch.is_some_and(|stats| stats.read_ahead_bytes > 0);
        // Without limits or prefetching both runs are identical, and the comparison is omitted.
        let is_compared =
            (is_limited || disks.iter().any(reads_ahead)) && disks.iter().any(|disk| disk.before.is_some());
        // Disks of the config file without requests are omitted.
        let used = disks.iter().zip(&world.disks).filter(|(disk, _)| disk.after.requests > 0);
        let lines: Vec<_> =
            used.map(|(disk, named)| SummaryLine::of_disk(&named.name, disk, is_compared)).collect();
        let sum = |statistics_of: fn(&SimulatedDisk) -> Option<&RequestStatistics>| {
            let mut sum = RequestStatistics::default();
            disks.iter().filter_map(statistics_of).for_each(|statistics| sum.add(statistics));
            SimulationFigures::of(&sum)
        };
        let all = (lines.len() > 1).then(|| AllDisks {
            before: is_compared.then(|| sum(|disk| disk.before.as_ref())),
            after: sum(|disk| Some(&disk.after)),
        });
        let of_group = |(index, queue): (usize, &QueueStatistics)| {
            let (mut after, mut before) = (RequestStatistics::default(), RequestStatistics::default());
            // A group's figures cover all disks below it, directly or through other groups.
            for (disk, result) in world.disks.iter().zip(disks) {
                if world.groups_above(disk).any(|group| group == index) {
                    after.add(&result.after);
                    result.before.iter().for_each(|one| before.add(one));
                }
            }
            SummaryLine::new(&world.groups[index].name, &after, is_compared.then_some(&before), queue)
        };
        let groups = groups.iter().enumerate().map(of_group).filter(|line| line.after.requests > 0).collect();
        Self { all, disks: lines, groups, remarks: remarks.to_vec(), partial: partial.clone(), is_limited }
    }

    /// Differences between the two runs of a comparison: one run has neither limits nor
    /// prefetching.
    pub(crate) fn compared(&self) -> &'static str {
        let reads_ahead =
            |line: &SummaryLine| line.prefetch.as_ref().is_some_and(|prefetch| prefetch.read_ahead_bytes > 0);
        match (self.is_limited, self.disks.iter().any(reads_ahead)) {
            (false, true) => "prefetch",
            (true, true) => "limits and prefetch",
            (_, false) => "limits",
        }
    }

    pub(crate) fn text(&self) -> String {
        let tables = [Some(self.latencies()), self.parts(), self.limits(), self.prefetched()];
        let tables = tables.into_iter().flatten();
        let mut text: Vec<String> = tables.map(|table| table.render(false)).collect();
        if self.disks.is_empty() {
            text = vec!["no requests\n".to_owned()];
        }
        text.extend(self.remarks.iter().map(|remark| format!("{remark}\n")));
        if let Some(why) = &self.partial {
            text.push(format!("Incomplete: {why}. The figures cover the part before.\n"));
        }
        text.join("\n")
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = (&'static str, &SummaryLine)> {
        self.disks.iter().map(|line| ("disk", line)).chain(self.groups.iter().map(|line| ("group", line)))
    }

    fn latencies(&self) -> TextTable {
        let numbers = ["REQUESTS", "BYTES", "IOPS", "BYTES/S", "P50", "P90", "P99", "P99.9", "MAX"];
        let compared = self.compared().to_uppercase();
        let mut table = TextTable::new(columns(&["DISK", &compared], &numbers));
        let lines = self.lines().map(|(kind, line)| (shown(kind, line), line.before.as_ref(), &line.after));
        let all = self.all.iter().map(|all| ("all disks".to_owned(), all.before.as_ref(), &all.after));
        for (name, before, after) in lines.chain(all) {
            let with = before.map_or("none", |_| "with");
            let rows = before.into_iter().map(|before| ("without", before)).chain([(with, after)]);
            for (when, figures) in rows {
                let mut row = vec![name.clone(), when.to_owned()];
                row.extend([
                    figures.requests.to_string(),
                    figures::bytes(figures.bytes as f64),
                    figures::count(figures.iops),
                    figures::bytes(figures.bps),
                ]);
                row.extend(figures.latency_ns.shown());
                table.row(row);
            }
        }
        table
    }

    /// Disks and groups with throttled requests.
    fn waited(&self) -> impl Iterator<Item = (&'static str, &SummaryLine)> {
        self.lines().filter(|(_, line)| line.after.waited_ns.max > 0)
    }

    /// `None` if no request was throttled.
    fn parts(&self) -> Option<TextTable> {
        let mut table =
            TextTable::new(columns(&["DISK", "TIME"], &["P50", "P90", "P99", "P99.9", "MAX", "MEAN"]));
        for (kind, line) in self.waited() {
            for (part, percentiles) in [("waited", &line.after.waited_ns), ("served", &line.after.served_ns)]
            {
                let mut row = vec![shown(kind, line), part.to_owned()];
                row.extend(percentiles.shown());
                row.push(figures::time(percentiles.mean as u64));
                table.row(row);
            }
        }
        self.waited().next().is_some().then_some(table)
    }

    /// `None` if there is no limit.
    fn limits(&self) -> Option<TextTable> {
        let mut table = TextTable::new([
            ("DISK", ColumnAlignment::Left),
            ("THROTTLED", ColumnAlignment::Right),
            ("LONGEST QUEUE", ColumnAlignment::Right),
            ("HELD BY", ColumnAlignment::Left),
        ]);
        for (kind, line) in self.lines() {
            let held =
                line.held_by.iter().map(|held| format!("{} {}", held.limit, figures::share(held.share)));
            let held: Vec<_> = held.collect();
            table.row(vec![
                shown(kind, line),
                figures::share(line.throttled),
                line.longest_queue.to_string(),
                if held.is_empty() { "-".to_owned() } else { held.join(", ") },
            ]);
        }
        self.is_limited.then_some(table)
    }

    fn prefetched(&self) -> Option<TextTable> {
        let mut table = TextTable::new(columns(&["DISK"], &["HITS", "ACCURACY", "READ AHEAD"]));
        let ahead = self.disks.iter().filter_map(|line| Some((line, line.prefetch.as_ref()?)));
        let ahead = ahead.filter(|(_, prefetch)| prefetch.read_ahead_bytes > 0);
        let mut any = false;
        for (line, prefetch) in ahead {
            any = true;
            let share = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), figures::share);
            table.row(vec![
                line.name.clone(),
                share(prefetch.hit_rate),
                share(prefetch.accuracy),
                figures::bytes(prefetch.read_ahead_bytes as f64),
            ]);
        }
        any.then_some(table)
    }
}

fn shown(kind: &str, line: &SummaryLine) -> String {
    if kind == "disk" { line.name.clone() } else { format!("{kind} {}", line.name) }
}
