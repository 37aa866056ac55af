//! `weir trace convert`: traces of any format that is read, in any that is written.
//!
//! ```text
//!   traces ─► Merged ─► requests by time ─► sink.rs ─┬─► forms.rs, lines ─► gzip, zstd ─┬─► output.rs
//!                                                    └─► recording, blocks ─────────────┘
//! ```
//!
//! One recording that becomes weir's own CSV keeps how long each request took, which no other
//! format has a place for.

mod arguments;
mod forms;
mod live;
mod sink;

use std::path::Path;

use anyhow::{Context as _, anyhow};
use arguments::format_of;
pub use arguments::{ABOUT, Command, ConvertArgs};
use console::{Failure, figures, say};
use forms::Request;
pub use live::Transcript;
use sink::{Compression, Sink};

use super::{
    Format, Merged, Output, Source as _, error::TraceError, info, lines::Lines, reader, reader::Reader,
    recording::Blocks,
};

/// Runs `weir trace …`.
///
/// # Errors
/// Wrong use, or what could not be read or written. What was read before an error is written,
/// unless it is nothing.
pub fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Convert(arguments) => convert(&arguments),
        Command::Info(arguments) => info::run(&arguments),
    }
}

fn convert(arguments: &ConvertArgs) -> Result<(), Failure> {
    let (format, compression) = wanted(arguments).map_err(Failure::Usage)?;
    let mut source = Source::open(arguments, format).map_err(anyhow::Error::from)?;
    let cannot = || format!("{}: cannot be written", arguments.output.display());
    let out = match arguments.output.as_path() {
        path if path == Path::new("-") => Output::standard().with_context(cannot)?,
        path => Output::create("OUTPUT", path, &arguments.traces)?,
    };
    let mut sink = Sink::new(format, compression, out).with_context(cannot)?;
    let read = match &mut source {
        Source::Recording(lines) => with_times(lines, &mut sink, &cannot).map(|lost| {
            if lost > 0 {
                say(&format!(
                    "{}: lost while it was recorded: {}",
                    lines.name(),
                    figures::counted(lost, "request")
                ));
            }
        }),
        Source::Any(traces) => {
            if let Some(name) = traces.with_times() {
                say(&format!(
                    "{name}: left out: how long its requests waited and took (one recording that becomes weir's own CSV keeps it)"
                ));
            }
            without(traces, &mut sink, &cannot)
        }
    };
    let written = sink.written();
    if written == 0 {
        read?;
        let left_out = sink.left_out();
        let why = if left_out.is_empty() { "there is none".to_owned() } else { left_out.join(", ") };
        return Err(anyhow!("no request was written: {why}").into());
    }
    let left_out = sink.left_out();
    sink.finish().with_context(cannot)?;
    left_out.iter().for_each(|line| say(line));
    read.with_context(|| {
        format!("{} ends after {}", arguments.output.display(), figures::counted(written, "request"))
    })?;
    Ok(())
}

/// What is converted.
enum Source {
    /// With all that it tells.
    Recording(Lines),
    Any(Box<Merged>),
}

impl Source {
    fn open(arguments: &ConvertArgs, to: Format) -> Result<Self, TraceError> {
        let options = arguments.reading.options();
        let [only] = &arguments.traces[..] else {
            return Merged::open(&arguments.traces, &options).map(|merged| Self::Any(merged.into()));
        };
        let mut lines = reader::open(only)?;
        if to == Format::Weir && reader::is_recording(&mut lines, &options)? {
            return Ok(Self::Recording(lines));
        }
        let merged = Merged::new(vec![Reader::over(lines, &options)?], options.absolute_time)?;
        Ok(Self::Any(merged.into()))
    }
}

/// The format to write, and how it is compressed.
fn wanted(arguments: &ConvertArgs) -> anyhow::Result<(Format, Compression)> {
    let (named, compression) = named(&arguments.output);
    let format = arguments.to.or(named).ok_or_else(|| {
        anyhow!(
            "OUTPUT: {:?} does not say in which format (name it with --to)",
            arguments.output.display().to_string()
        )
    })?;
    Ok((format, if format == Format::Recording { Compression::None } else { compression }))
}

/// What a file's name says of how it is written.
fn named(path: &Path) -> (Option<Format>, Compression) {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let (compression, name) = Compression::of(&name);
    (format_of(name), compression)
}

/// Requests as every format has them.
fn without(source: &mut Merged, sink: &mut Sink, cannot: &dyn Fn() -> String) -> anyhow::Result<()> {
    while let Some(record) = source.next()? {
        let name = &source.disks()[record.disk.index()];
        let super::Record { time_ns, disk, op, offset, length, .. } = record;
        sink.put(Request { time_ns, disk, name, op, offset, length }).with_context(cannot)?;
    }
    Ok(())
}

/// A recording, with all that it tells; returns how many requests were lost while it was made.
fn with_times(lines: &mut Lines, sink: &mut Sink, cannot: &dyn Fn() -> String) -> anyhow::Result<u64> {
    let mut blocks = Blocks::default();
    sink.begin_with_times();
    while let Some(told) = blocks.next(lines)? {
        sink.put_with_times(&told).with_context(cannot)?;
        if blocks.is_between() {
            sink.flush().with_context(cannot)?;
        }
    }
    Ok(blocks.lost())
}
