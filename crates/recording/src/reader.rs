//! Reads one trace: from bytes to records in order.

use std::{io::Read, path::Path};

use super::{
    disks::TraceDisks,
    error::TraceError,
    file::{LimitChange, RecordedRequest, RecordingReader, is_beginning},
    format::{
        Alibaba, Blkparse, ByColumns, CloudPhysics, ColumnSpec, Fio, LineParser, Mqsim, Msr, RecordOutput,
        Spc, TraceFormat, WeirCsv, detect, has_outcomes,
    },
    input::TraceInput,
    limit_history::LimitHistory,
    lines::LineReader,
    outcome::{self, NumberedOutcome, Outcomes, RequestOutcome},
    record::TraceRecord,
    window::ReorderWindow,
};

// 2.5 MiB of records.
pub(crate) const DEFAULT_WINDOW: usize = 65_536;
/// Limit of [`TraceOptions::window`]: 640 MiB of records.
pub const MAX_WINDOW: usize = 1 << 24;
// Records that are read at a time beyond the window.
const BATCH: usize = 1024;

/// Options for reading a trace.
#[derive(Clone, Debug)]
pub struct TraceOptions {
    /// Format; `None` detects it from each file's beginning.
    pub format: Option<TraceFormat>,
    /// Meaning of the columns of every file, instead of a format.
    pub columns: Option<ColumnSpec>,
    /// Number of records that are buffered for reordering; at most [`MAX_WINDOW`].
    pub window: usize,
    /// Keep the distance between several traces on their common clock; `None`: if all are
    /// recordings.
    pub absolute_time: Option<bool>,
    /// Store the outcome of each request, if the trace contains it, until it is fetched.
    pub outcomes: bool,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self { format: None, columns: None, window: DEFAULT_WINDOW, absolute_time: None, outcomes: false }
    }
}

/// Reader of one trace.
pub struct TraceReader {
    lines: LineReader,
    pub(crate) format: TraceFormat,
    parser: TraceParser,
    disks: TraceDisks,
    window: ReorderWindow,
    /// Outcomes of the records in the window.
    outcomes: Option<Outcomes>,
    /// Limits of a recording whose outcomes are requested; times are nanoseconds since 1970.
    limits: LimitHistory,
    /// Number of skipped requests of length 0.
    empty: u64,
    /// Detected format, if it differs from the requested one.
    detected_format: Option<TraceFormat>,
    held: usize,
    /// The trace's clock at time 0; `None` before the first record.
    origin_ns: Option<u64>,
    ended: bool,
    /// Reported after the buffered records were returned.
    failed: Option<TraceError>,
}

enum TraceParser {
    Weir(WeirCsv),
    Fio(Fio),
    Blkparse(Blkparse),
    Msr(Msr),
    Alibaba(Alibaba),
    CloudPhysics(CloudPhysics),
    Spc(Spc),
    Mqsim(Mqsim),
    ByColumns(ByColumns),
    Recording(Box<RecordingReader>),
}

impl TraceReader {
    pub(crate) fn open(path: &Path, options: &TraceOptions) -> Result<Self, TraceError> {
        Self::over(open(path)?, options)
    }

    /// Reads a trace, compressed or not. `name` is for errors.
    pub(crate) fn new(
        name: &str,
        bytes: Box<dyn Read + Send>,
        options: &TraceOptions,
    ) -> Result<Self, TraceError> {
        let failed = |why| TraceError::File { file: name.to_owned(), why };
        Self::over(LineReader::new(TraceInput::new(name.to_owned(), bytes).map_err(failed)?), options)
    }

    /// Creates a reader over lines from which nothing was read.
    pub fn over(mut lines: LineReader, options: &TraceOptions) -> Result<Self, TraceError> {
        let file = lines.name().to_owned();
        if options.window > MAX_WINDOW {
            let why = format!("the window of {} records is above the largest, {MAX_WINDOW}", options.window);
            return Err(TraceError::Whole { file, why });
        }
        let ahead = lines.ahead()?;
        if ahead.trim_ascii().is_empty() {
            return Err(TraceError::Empty { file });
        }
        let format = match (options.format, &options.columns) {
            (_, Some(_)) => TraceFormat::Columns,
            (Some(format), None) => format,
            (None, None) => detect(ahead).map_err(|hint| TraceError::Unknown { file: file.clone(), hint })?,
        };
        // Only for the message: an explicit format is used even if the detection disagrees.
        let otherwise = options.format.and_then(|_| detect(ahead).ok()).filter(|seen| *seen != format);
        let with_outcomes = match format {
            TraceFormat::Recording => true,
            TraceFormat::Weir => has_outcomes(ahead),
            _ => false,
        };
        let parser = match format {
            TraceFormat::Weir => TraceParser::Weir(WeirCsv::default()),
            TraceFormat::FioV2 => TraceParser::Fio(Fio::new(2)),
            TraceFormat::FioV3 => TraceParser::Fio(Fio::new(3)),
            TraceFormat::Blkparse => TraceParser::Blkparse(Blkparse::new(ahead)),
            TraceFormat::Msr => TraceParser::Msr(Msr::default()),
            TraceFormat::Alibaba => TraceParser::Alibaba(Alibaba::default()),
            TraceFormat::CloudPhysics => TraceParser::CloudPhysics(CloudPhysics::new(&file)),
            TraceFormat::Spc => TraceParser::Spc(Spc),
            TraceFormat::Mqsim => TraceParser::Mqsim(Mqsim),
            TraceFormat::Recording => TraceParser::Recording(Box::default()),
            TraceFormat::Columns => {
                let columns = options.columns.clone();
                let columns = columns.expect("the format is chosen only with columns");
                TraceParser::ByColumns(ByColumns::new(columns, &file))
            }
        };
        Ok(Self {
            lines,
            format,
            parser,
            disks: TraceDisks::default(),
            window: ReorderWindow::new(options.window),
            outcomes: (with_outcomes && options.outcomes).then(Outcomes::new),
            limits: LimitHistory::default(),
            empty: 0,
            detected_format: otherwise,
            held: options.window,
            origin_ns: None,
            ended: false,
            failed: None,
        })
    }

    pub(crate) fn name(&self) -> &str {
        self.lines.name()
    }

    /// Names of disks by [`DiskId`](super::DiskId); may include disks of records that are still
    /// buffered.
    pub fn disks(&self) -> &[String] {
        self.disks.names()
    }

    /// Next record. An error is returned once, after all records before it.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "reading may fail, and an iterator would hide that")]
    pub fn next(&mut self) -> Result<Option<TraceRecord>, TraceError> {
        // More records than the window has places are buffered: only then is the earliest one
        // final.
        if self.window.len() <= self.held && !self.ended {
            self.refill();
        }
        match self.window.pop() {
            Some(mut record) => {
                // The earliest record defines time 0, unless `count_from` has set it.
                record.time_ns -= *self.origin_ns.get_or_insert(record.time_ns);
                Ok(Some(record))
            }
            None => self.failed.take().map_or(Ok(None), Err),
        }
    }

    /// True if the trace contains outcomes and they were requested.
    pub fn has_outcomes(&self) -> bool {
        self.outcomes.is_some()
    }

    /// Outcome of a request that [`next`](Self::next) returned, if known. Must be called once for
    /// each.
    pub fn outcome(&mut self, record: &TraceRecord) -> Option<NumberedOutcome> {
        self.outcomes.as_mut()?.remove(record)
    }

    /// The outcome with the name of its limit.
    pub fn named(&self, numbered: NumberedOutcome) -> Option<RequestOutcome<'_>> {
        Some(self.outcomes.as_ref()?.with_limit_names(numbered))
    }

    /// Number of requests that the recording lost, in the part that was read.
    pub(super) fn lost(&self) -> u64 {
        match &self.parser {
            TraceParser::Recording(blocks) => blocks.lost(),
            _ => 0,
        }
    }

    /// Removes and returns the changes of limits, with times relative to time 0, and the number of
    /// dropped ones. Limits that were in force before the first record get its time.
    pub(super) fn take_limits(&mut self) -> (impl Iterator<Item = LimitChange> + use<>, u64) {
        let (origin_ns, dropped) = (self.origin_ns.unwrap_or(0), self.limits.dropped());
        let relative = move |change: LimitChange| LimitChange {
            at_ns: change.at_ns.saturating_sub(origin_ns),
            ..change
        };
        (self.limits.drain().map(relative), dropped)
    }

    /// Number of skipped requests of length 0, in the part that was read.
    pub fn empty(&self) -> u64 {
        self.empty
    }

    /// Time of the first record in the trace's clock. Must be called before [`next`](Self::next).
    pub(super) fn first_ns(&mut self) -> Option<u64> {
        if self.window.len() <= self.held && !self.ended {
            self.refill();
        }
        self.window.first_ns()
    }

    /// Sets time 0, which must not be later than the first record.
    pub(super) fn count_from(&mut self, origin_ns: u64) {
        self.origin_ns = Some(origin_ns);
    }

    #[cold]
    fn refill(&mut self) {
        // Parses a batch, so that the dispatch over the formats is paid once for many records.
        let enough = self.held + BATCH;
        let Self { lines, disks, window, outcomes, limits, empty, .. } = self;
        let limits = outcomes.is_some().then_some(limits);
        // weir's own formats contain no requests of length 0: there they are errors.
        let empty = (!matches!(self.format, TraceFormat::Weir | TraceFormat::Recording)).then_some(empty);
        let mut into = ParseOutput { disks, window, outcomes: outcomes.as_mut(), empty };
        let into = &mut into;
        let more = match &mut self.parser {
            TraceParser::Weir(parser) => read(parser, lines, into, enough),
            TraceParser::Fio(parser) => read(parser, lines, into, enough),
            TraceParser::Blkparse(parser) => read(parser, lines, into, enough),
            TraceParser::Msr(parser) => read(parser, lines, into, enough),
            TraceParser::Alibaba(parser) => read(parser, lines, into, enough),
            TraceParser::CloudPhysics(parser) => read(parser, lines, into, enough),
            TraceParser::Spc(parser) => read(parser, lines, into, enough),
            TraceParser::Mqsim(parser) => read(parser, lines, into, enough),
            TraceParser::Recording(blocks) => read_recording(blocks, lines, into, limits, enough),
            TraceParser::ByColumns(parser) => read(parser, lines, into, enough),
        };
        match more {
            Ok(more) => self.ended = !more,
            Err(error) => {
                self.ended = true;
                // Records that were read prove that the requested format is right.
                let is_first = self.window.len() == 0 && self.origin_ns.is_none();
                let is_content = matches!(error, TraceError::Line { .. } | TraceError::Whole { .. });
                self.failed = Some(match self.detected_format {
                    Some(seen) if is_first && is_content => {
                        format_mismatch(self.name(), self.format, seen, &error.to_string())
                    }
                    _ => error,
                });
            }
        }
    }
}

/// Opens the lines of a trace of any format.
pub fn open(path: &Path) -> Result<LineReader, TraceError> {
    TraceInput::open(path).map(LineReader::new).map_err(|(file, why)| TraceError::File { file, why })
}

/// True if the lines are a recording, which contains more than a [`TraceReader`] returns.
pub fn is_recording(lines: &mut LineReader, options: &TraceOptions) -> Result<bool, TraceError> {
    match (options.format, &options.columns) {
        (_, Some(_)) => Ok(false),
        (Some(TraceFormat::Recording), None) => {
            let ahead = lines.ahead()?;
            // A file of unknown kind is left to the decoder, whose message is more precise.
            if let (false, Ok(seen)) = (is_beginning(ahead), detect(ahead)) {
                let why = "the header of a recording is missing";
                return Err(format_mismatch(lines.name(), TraceFormat::Recording, seen, why));
            }
            Ok(true)
        }
        (Some(_), None) => Ok(false),
        (None, None) => Ok(is_beginning(lines.ahead()?)),
    }
}

/// Error for a file that is not of the requested format.
fn format_mismatch(file: &str, requested: TraceFormat, seen: TraceFormat, why: &str) -> TraceError {
    let (requested, seen) = (requested.name(), seen.name());
    let why = format!("--format is {requested}, but the file looks like {seen} (leave --format out): {why}");
    TraceError::Whole { file: file.to_owned(), why }
}

/// Destination of parsed requests.
struct ParseOutput<'a> {
    disks: &'a mut TraceDisks,
    window: &'a mut ReorderWindow,
    outcomes: Option<&'a mut Outcomes>,
    empty: Option<&'a mut u64>,
}

impl ParseOutput<'_> {
    /// Destination for the requests of a line.
    #[inline]
    fn found(&mut self, line: u64) -> RecordOutput<'_> {
        let (outcomes, empty) = (self.outcomes.as_deref_mut(), self.empty.as_deref_mut());
        RecordOutput { disks: self.disks, window: self.window, outcomes, empty, line }
    }
}

/// Parses lines until the window has `enough` records; false if there are no more lines.
fn read(
    parser: &mut impl LineParser,
    lines: &mut LineReader,
    into: &mut ParseOutput<'_>,
    enough: usize,
) -> Result<bool, TraceError> {
    while into.window.len() < enough {
        let number = lines.number() + 1;
        let Some(line) = lines.next()? else { return Ok(false) };
        if line.is_empty() {
            continue;
        }
        let mut found = into.found(number);
        if let Err(why) = parser.line(line, &mut found) {
            return Err(lines.line_error(why));
        }
    }
    Ok(true)
}

/// Like [`read`], for a recording: its requests count as lines.
fn read_recording(
    blocks: &mut RecordingReader,
    lines: &mut LineReader,
    into: &mut ParseOutput<'_>,
    mut limits: Option<&mut LimitHistory>,
    enough: usize,
) -> Result<bool, TraceError> {
    let clock_ns = blocks.clock_ns(lines)?;
    let mut note = |change: LimitChange| {
        if let Some(limits) = &mut limits {
            limits.note(LimitChange { at_ns: clock_ns.saturating_add(change.at_ns), ..change });
        }
    };
    while into.window.len() < enough {
        let Some(RecordedRequest { entry, arrival_ns, disk, limit, number }) =
            blocks.next(lines, &mut note)?
        else {
            return Ok(false);
        };
        let mut found = into.found(number);
        let mut read = found.push(arrival_ns, disk.as_bytes(), entry.op, entry.offset, entry.length);
        if let (Some(outcomes), Some(times)) = (&mut found.outcomes, entry.times) {
            let (has_failed, limit) = (entry.has_failed, limit.map(str::as_bytes));
            read = read
                .and_then(|()| outcomes.push(number, outcome::ParsedOutcome { times, has_failed, limit }));
        }
        if let Err(why) = read {
            return Err(lines.line_error_at(number, why));
        }
    }
    Ok(true)
}
