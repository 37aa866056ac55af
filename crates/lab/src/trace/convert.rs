//! `weir trace convert`: converts traces between formats.
//!
//! ```text
//!   traces ─► MergedTraces ─► requests by time ─► sink.rs ─┬─► text_formats.rs ─► gzip, zstd ─┬─► output.rs
//!                                                          └─► recording, blocks ─────────────┘
//! ```
//!
//! Only recordings and weir's own CSV can store latencies. A single recording is converted to these
//! block by block, in its own order and with its own clock; all other input is sorted by time
//! first.

mod arguments;
mod live;
mod sink;
mod text_formats;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use arguments::format_of;
pub use arguments::{ABOUT, ConvertArgs, TraceCommand};
use console::{CommandFailure, figures, print_notice};
pub use live::LiveConversion;
use recording::{
    MergedTraces, RecordSource as _, RequestOutcome, TraceFormat, TraceOptions,
    disks::TraceDisks,
    error::TraceError,
    file::RecordingReader,
    lines::LineReader,
    reader::{self, TraceReader},
};
use sink::{ConvertSink, TraceCompression};
use text_formats::{TraceRequest, TraceStart};

use super::{TraceOutput, info};

/// Runs `weir trace …`.
///
/// # Errors
/// Fails on wrong usage, and on errors of reading or writing. Requests read before an error are
/// written, unless there are none.
pub fn run(command: TraceCommand) -> Result<(), CommandFailure> {
    match command {
        TraceCommand::Convert(arguments) => convert(&arguments),
        TraceCommand::Info(arguments) => info::run(&arguments),
    }
}

fn convert(arguments: &ConvertArgs) -> Result<(), CommandFailure> {
    let Some((output, traces)) = arguments.files.split_last().filter(|(_, traces)| !traces.is_empty()) else {
        return Err(CommandFailure::Usage(anyhow!(
            "OUTPUT: missing (write it behind the traces; - is standard output)"
        )));
    };
    let (format, compression) = output_format(output, arguments.to).map_err(CommandFailure::Usage)?;
    let options = TraceOptions { outcomes: true, ..arguments.reading.options() };
    // Inputs are opened before the output is created: an unreadable trace leaves no file.
    let mut source = ConvertSource::open(traces, &options, format).map_err(anyhow::Error::from)?;
    let cannot = || format!("{}: cannot be written", output.display());
    let out = match output.as_path() {
        path if path == Path::new("-") => TraceOutput::standard().with_context(cannot)?,
        path => TraceOutput::create("OUTPUT", path, traces)?,
    };
    // The header needs the clock, which is known after the first block.
    let start = source.start().map_err(anyhow::Error::from)?;
    let mut sink = ConvertSink::new(format, compression, out, start).with_context(cannot)?;
    let read = match &mut source {
        ConvertSource::Recording(lines, blocks) => convert_recording(lines, blocks, &mut sink, &cannot),
        ConvertSource::Any(traces) => convert_sorted(traces, &mut sink, &cannot),
    };
    if let ConvertSource::Any(traces) = &source {
        info::report_empty(traces.empty());
    }
    if sink.lost() > 0 {
        print_notice(&format!("lost while it was recorded: {}", figures::counted(sink.lost(), "request")));
    }
    let written = sink.written();
    // Without a request the unfinished output is dropped, and an existing file stays.
    if written == 0 {
        read?;
        let left_out = sink.left_out();
        let why = if left_out.is_empty() { "the traces have none".to_owned() } else { left_out.join(", ") };
        return Err(anyhow!("no request was written: {why}").into());
    }
    let left_out = sink.left_out();
    // The requests before an error are kept, and the error is reported afterwards.
    sink.finish().with_context(cannot)?;
    left_out.iter().for_each(|line| print_notice(line));
    read.with_context(|| {
        format!("{} ends after {}", output.display(), figures::counted(written, "request"))
    })?;
    Ok(())
}

/// Input of the conversion.
enum ConvertSource {
    /// A single recording, converted block by block.
    Recording(Box<LineReader>, Box<RecordingReader>),
    Any(Box<MergedTraces>),
}

impl ConvertSource {
    fn open(traces: &[PathBuf], options: &TraceOptions, to: TraceFormat) -> Result<Self, TraceError> {
        // Several traces must be merged by time, so they are not converted block by block.
        let [only] = traces else {
            return MergedTraces::open(traces, options).map(|merged| Self::Any(merged.into()));
        };
        let mut lines = reader::open(only)?;
        let keeps_all =
            // Other formats lose information anyway. Times in a block are absolute; for
            // relative times a recording is read like any trace.
            matches!(to, TraceFormat::Weir | TraceFormat::Recording) && options.absolute_time != Some(false);
        if keeps_all && reader::is_recording(&mut lines, options)? {
            return Ok(Self::Recording(lines.into(), Box::default()));
        }
        let merged = MergedTraces::new(vec![TraceReader::over(lines, options)?], options.absolute_time)?;
        Ok(Self::Any(merged.into()))
    }

    fn start(&mut self) -> Result<TraceStart, TraceError> {
        match self {
            Self::Recording(lines, blocks) => {
                Ok(TraceStart { clock_ns: blocks.clock_ns(lines)?, with_outcomes: true })
            }
            Self::Any(traces) => {
                Ok(TraceStart { clock_ns: traces.clock_ns(), with_outcomes: traces.has_outcomes() })
            }
        }
    }
}

/// The format and the compression to write.
fn output_format(output: &Path, to: Option<TraceFormat>) -> anyhow::Result<(TraceFormat, TraceCompression)> {
    let (named, compression) = format_by_name(output);
    let format = to.or(named).ok_or_else(|| {
        let name = output.display().to_string();
        anyhow!("OUTPUT: {name:?} does not end in the name of a format (give --to FORMAT)")
    })?;
    Ok((format, if format == TraceFormat::Recording { TraceCompression::None } else { compression }))
}

/// Format and compression according to a file's name.
fn format_by_name(path: &Path) -> (Option<TraceFormat>, TraceCompression) {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let (compression, name) = TraceCompression::of(&name);
    (format_of(name), compression)
}

/// Converts requests sorted by time.
fn convert_sorted(
    source: &mut MergedTraces,
    sink: &mut ConvertSink,
    cannot: &dyn Fn() -> String,
) -> anyhow::Result<()> {
    let read = loop {
        let record = match source.next() {
            Ok(Some(record)) => record,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error.into()),
        };
        let numbered = source.outcome(&record);
        let outcome = numbered.and_then(|numbered| source.outcome_with_names(&record, numbered));
        let name = &source.disks()[record.disk.index()];
        let recording::TraceRecord { time_ns, disk, op, offset, length, .. } = record;
        sink.write_request(TraceRequest { time_ns, disk, name, op, offset, length, outcome })
            .with_context(cannot)?;
    };
    // Losses and limits are complete only at the end of all traces.
    sink.add_lost(source.lost());
    let mut limits = source.take_limits();
    sink.drop_limit_changes(limits.dropped());
    for change in limits.drain() {
        sink.change_limits(change).with_context(cannot)?;
    }
    read
}

/// Converts a recording block by block, each when it is available.
fn convert_recording(
    lines: &mut LineReader,
    blocks: &mut RecordingReader,
    sink: &mut ConvertSink,
    cannot: &dyn Fn() -> String,
) -> anyhow::Result<()> {
    let mut disks = TraceDisks::default();
    let mut changes = Vec::new();
    let read = loop {
        // Limit changes precede the request that they were read with.
        let next_request = blocks.next(lines, &mut |change| changes.push(change));
        for change in changes.drain(..) {
            sink.change_limits(change).with_context(cannot)?;
        }
        let request = match next_request {
            Ok(Some(request)) => request,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error.into()),
        };
        let disk =
            disks.id(request.disk.as_bytes()).map_err(|why| lines.line_error_at(request.number, why))?;
        let (entry, name, limit) = (request.entry, request.disk, request.limit);
        let outcome = entry.times.map(|times| RequestOutcome { times, has_failed: entry.has_failed, limit });
        let (time_ns, op, offset, length) = (entry.arrival_ns, entry.op, entry.offset, entry.length);
        sink.write_request(TraceRequest { time_ns, disk, name, op, offset, length, outcome })
            .with_context(cannot)?;
        // Between blocks the reader may wait for a live recording: write out all complete blocks.
        if blocks.is_between_blocks() {
            sink.flush().with_context(cannot)?;
        }
    };
    sink.add_lost(blocks.lost());
    read
}
