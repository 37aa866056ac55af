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
mod sink;

use std::path::Path;

use anyhow::{Context as _, anyhow};
use arguments::format_of;
pub use arguments::{ABOUT, Command, ConvertArgs};
use console::{Failure, say};
use forms::Request;
use sink::{Compression, Sink};

use super::{Format, Merged, Output, Source as _, input::Input, lines::Lines, recording::Blocks};

/// Runs `weir trace …`.
///
/// # Errors
/// Wrong use, or what could not be read or written. What was read before an error is written,
/// unless it is nothing.
pub fn run(command: Command) -> Result<(), Failure> {
    let Command::Convert(arguments) = command;
    convert(&arguments)
}

fn convert(arguments: &ConvertArgs) -> Result<(), Failure> {
    let (format, compression) = wanted(arguments).map_err(Failure::Usage)?;
    let mut source =
        Merged::open(&arguments.traces, &arguments.reading.options()).map_err(anyhow::Error::from)?;
    let cannot = || format!("{}: cannot be written", arguments.output.display());
    let out = match arguments.output.as_path() {
        path if path == Path::new("-") => Output::standard().with_context(cannot)?,
        path => Output::create("OUTPUT", path, &arguments.traces)?,
    };
    let mut sink = Sink::new(format, compression, out).with_context(cannot)?;
    let only = Some(&arguments.traces).filter(|traces| traces.len() == 1).map(|traces| &traces[0]);
    let has_more = source.only_format() == Some(Format::Recording) && format == Format::Weir;
    let read = match only.filter(|path| has_more && path.as_path() != Path::new("-")) {
        Some(path) => with_times(path, &mut sink, &cannot),
        None => without(&mut source, &mut sink, &cannot),
    };
    let written = sink.written();
    if written == 0 {
        read?;
        return Err(anyhow!("no request was written: {}", sink.left_out().join(", ")).into());
    }
    let left_out = sink.left_out();
    sink.finish().with_context(cannot)?;
    left_out.iter().for_each(|line| say(line));
    read.with_context(|| format!("{} ends after {written} requests", arguments.output.display()))?;
    Ok(())
}

/// The format to write, and how it is compressed.
fn wanted(arguments: &ConvertArgs) -> anyhow::Result<(Format, Compression)> {
    let name = arguments.output.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let (compression, name) = Compression::of(&name);
    let format = arguments.to.or_else(|| format_of(name)).ok_or_else(|| {
        anyhow!(
            "OUTPUT: {:?} does not say in which format (name it with --to)",
            arguments.output.display().to_string()
        )
    })?;
    Ok((format, if format == Format::Recording { Compression::None } else { compression }))
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

/// A recording, with all that it tells.
fn with_times(path: &Path, sink: &mut Sink, cannot: &dyn Fn() -> String) -> anyhow::Result<()> {
    let input = Input::open(path).map_err(|(name, error)| anyhow!("{name}: {error}"))?;
    let (mut lines, mut blocks) = (Lines::new(input), Blocks::default());
    sink.begin_with_times();
    while let Some(told) = blocks.next(&mut lines)? {
        sink.put_with_times(&told).with_context(cannot)?;
    }
    if blocks.lost() > 0 {
        say(&format!("{}: {} requests were lost while it was recorded", path.display(), blocks.lost()));
    }
    Ok(())
}
