//! Merges several traces by time; disks of the same name are one disk.
//!
//! Each trace begins at time 0, or all keep their distances on a shared clock, as recordings do.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    path::{Path, PathBuf},
};

use super::{
    disks::TraceDisks,
    error::TraceError,
    format::TraceFormat,
    limit_history::LimitHistory,
    outcome::{NumberedOutcome, RequestOutcome},
    reader::{TraceOptions, TraceReader},
    record::{DiskId, TraceRecord},
};

/// A source of records sorted by time.
pub trait RecordSource {
    /// Appends up to `count` records, including those before an error; none at the end.
    fn fill(&mut self, records: &mut Vec<TraceRecord>, count: usize) -> anyhow::Result<()>;
    /// Names of the disks so far; [`DiskId`] is the index.
    fn disks(&self) -> &[String];
    /// File and line of a record, for messages.
    fn place(&self, record: &TraceRecord) -> String;
    /// Recorded outcome of a request, if known. Must be called once for each record, if outcomes
    /// were requested.
    fn measured(&mut self, _record: &TraceRecord) -> Option<RecordedOutcome> {
        None
    }
}

/// Recorded outcome of a request.
#[derive(Clone, Copy, Debug)]
pub struct RecordedOutcome {
    /// Nanoseconds from arrival to completion.
    pub latency_ns: u64,
    /// True if a limit throttled it.
    pub was_held: bool,
}

/// Several traces, merged by time.
pub struct MergedTraces {
    /// 1 to 65,535 traces.
    sources: Vec<MergeInput>,
    /// Unused with a single trace.
    disks: TraceDisks,
    /// Next time of each source; at equal times the source that was named first wins.
    upcoming: BinaryHeap<Reverse<(u64, u16)>>,
    /// Reported after the record that was read before it.
    failed: Option<TraceError>,
    /// Error of a truncated recording. It is reported at the end, so that the recordings after it
    /// are still read.
    torn: Option<TraceError>,
    begun: bool,
    clock: TimeOrigin,
}

/// Definition of time 0.
enum TimeOrigin {
    /// The first record of the only trace, or of each trace.
    First,
    /// A time of the shared clock, in nanoseconds since 1970.
    Shared(u64),
    /// The first record of each trace; its absolute time is not reported.
    Zero,
}

struct MergeInput {
    reader: TraceReader,
    ids: Vec<DiskId>,
    head: Option<TraceRecord>,
}

impl RecordSource for MergedTraces {
    fn fill(&mut self, records: &mut Vec<TraceRecord>, count: usize) -> anyhow::Result<()> {
        for _ in 0..count {
            let Some(record) = self.next()? else { break };
            records.push(record);
        }
        Ok(())
    }

    fn disks(&self) -> &[String] {
        match &self.sources[..] {
            [only] => only.reader.disks(),
            _ => self.disks.names(),
        }
    }

    fn measured(&mut self, record: &TraceRecord) -> Option<RecordedOutcome> {
        let numbered = self.outcome(record)?;
        let outcome = self.outcome_with_names(record, numbered)?;
        Some(RecordedOutcome { latency_ns: outcome.times.latency_ns(), was_held: outcome.limit.is_some() })
    }

    fn place(&self, record: &TraceRecord) -> String {
        let name = self.sources.get(usize::from(record.file)).map_or("", |source| source.reader.name());
        format!("{name}:{}", record.line)
    }
}

impl MergedTraces {
    /// Opens the files; `-` is standard input.
    ///
    /// # Errors
    /// A file cannot be opened, is not a trace, or the files cannot be merged.
    pub fn open(paths: &[PathBuf], options: &TraceOptions) -> Result<Self, TraceError> {
        let together =
            |file: &str, why: &str| TraceError::Whole { file: file.to_owned(), why: why.to_owned() };
        if paths.iter().filter(|path| path.as_path() == Path::new("-")).count() > 1 {
            return Err(together("-", "standard input can be read only once"));
        }
        let readers =
            paths.iter().map(|path| TraceReader::open(path, options)).collect::<Result<Vec<_>, _>>()?;
        Self::new(readers, options.absolute_time)
    }

    /// Merges readers from which nothing was read. Recordings share a clock unless `absolute_time`
    /// is `Some(false)`.
    pub fn new(mut readers: Vec<TraceReader>, absolute_time: Option<bool>) -> Result<Self, TraceError> {
        if readers.is_empty() || readers.len() > usize::from(u16::MAX) {
            let why = format!("between 1 and {} traces can be read as one", u16::MAX);
            return Err(TraceError::Whole { file: format!("{} traces", readers.len()), why });
        }
        let are_recordings = || readers.iter().all(|reader| reader.format == TraceFormat::Recording);
        let clock = match absolute_time {
            Some(false) => TimeOrigin::Zero,
            None if readers.len() == 1 || !are_recordings() => TimeOrigin::First,
            _ => TimeOrigin::Shared(share_clock(&mut readers)?),
        };
        let sources =
            readers.into_iter().map(|reader| MergeInput { reader, ids: Vec::new(), head: None }).collect();
        Ok(Self {
            sources,
            disks: TraceDisks::default(),
            upcoming: BinaryHeap::new(),
            failed: None,
            torn: None,
            begun: false,
            clock,
        })
    }

    /// Nanoseconds since 1970 at time 0, or 0 if the traces do not contain it. Must be called
    /// before [`next`](Self::next).
    pub fn clock_ns(&mut self) -> u64 {
        match (&self.clock, &mut self.sources[..]) {
            (TimeOrigin::Shared(ns), _) => *ns,
            // Several traces that each begin at time 0 have no common absolute time.
            (TimeOrigin::First, [only]) if only.reader.format.is_absolute() => {
                only.reader.first_ns().unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// True if a trace contains the outcomes of its requests.
    pub fn has_outcomes(&self) -> bool {
        self.sources.iter().any(|source| source.reader.has_outcomes())
    }

    /// See [`TraceReader::outcome`].
    pub fn outcome(&mut self, record: &TraceRecord) -> Option<NumberedOutcome> {
        self.sources[usize::from(record.file)].reader.outcome(record)
    }

    /// The outcome with the name of its limit.
    pub fn outcome_with_names(
        &self,
        record: &TraceRecord,
        numbered: NumberedOutcome,
    ) -> Option<RequestOutcome<'_>> {
        self.sources[usize::from(record.file)].reader.named(numbered)
    }

    /// Number of requests that were lost by recordings, in the part that was read.
    pub fn lost(&self) -> u64 {
        self.sources.iter().map(|source| source.reader.lost()).sum()
    }

    /// Removes and returns the limits of recordings, with times relative to time 0. Must be called
    /// after all records were read, if outcomes were requested.
    pub fn take_limits(&mut self) -> LimitHistory {
        let mut all = LimitHistory::default();
        for source in &mut self.sources {
            let (changes, dropped) = source.reader.take_limits();
            changes.for_each(|change| all.note(change));
            all.drop_further(dropped);
        }
        all.sort();
        all
    }

    /// Number of skipped requests of length 0, in the part that was read.
    pub fn empty(&self) -> u64 {
        self.sources.iter().map(|source| source.reader.empty()).sum()
    }

    /// Next record by time. An error of one trace ends all, except for a truncated recording,
    /// which merely ends early.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "reading may fail, and an iterator would hide that")]
    pub fn next(&mut self) -> Result<Option<TraceRecord>, TraceError> {
        match &mut self.sources[..] {
            // A single trace needs neither a heap nor a translation of disk numbers.
            [only] => only.reader.next(),
            _ => self.next_of_several(),
        }
    }

    fn next_of_several(&mut self) -> Result<Option<TraceRecord>, TraceError> {
        if !self.begun {
            self.begun = true;
            for index in 0..self.sources.len() {
                self.advance(index)?;
            }
        }
        if let Some(error) = self.failed.take() {
            // Ends the iteration: no record follows an error.
            self.upcoming.clear();
            return Err(error);
        }
        let Some(Reverse((_, index))) = self.upcoming.pop() else {
            return self.torn.take().map_or(Ok(None), Err);
        };
        let index = usize::from(index);
        let record = self.sources[index].head.take();
        // The record was read before the error, so it is returned first.
        self.failed = self.advance(index).err();
        Ok(record)
    }

    fn advance(&mut self, index: usize) -> Result<(), TraceError> {
        let MergeInput { reader, ids, head } = &mut self.sources[index];
        let mut record = match reader.next() {
            Ok(Some(record)) => record,
            Ok(None) => return Ok(()),
            Err(torn @ TraceError::Torn { .. }) => {
                self.torn.get_or_insert(torn);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for name in &reader.disks()[ids.len()..] {
            let why = |why| TraceError::Whole { file: reader.name().to_owned(), why };
            // New names of this reader get their numbers in the merged traces.
            ids.push(self.disks.id(name.as_bytes()).map_err(why)?);
        }
        record.disk = ids[record.disk.index()];
        record.file = u16::try_from(index).expect("bounded when they were opened");
        self.upcoming.push(Reverse((record.time_ns, record.file)));
        *head = Some(record);
        Ok(())
    }
}

/// Makes times count from the earliest record of all readers, which is returned.
pub fn share_clock(readers: &mut [TraceReader]) -> Result<u64, TraceError> {
    if let Some(other) = readers.iter().find(|reader| !reader.format.is_absolute()) {
        let why = format!(
            "times of the format {} count from the start of the trace, so their distance to other \
             traces is unknown (leave out --absolute-time)",
            other.format.name()
        );
        return Err(TraceError::Whole { file: other.name().to_owned(), why });
    }
    // Reads ahead in each trace, but returns no record.
    let origin_ns = readers.iter_mut().filter_map(TraceReader::first_ns).min().unwrap_or(0);
    readers.iter_mut().for_each(|reader| reader.count_from(origin_ns));
    Ok(origin_ns)
}
