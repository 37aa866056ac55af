//! Converts a recording while it is being made.

use std::{fs::File, io::Read, path::Path};

use anyhow::Context as _;
use console::print_notice;
use recording::{
    MergedTraces, TraceFormat, TraceOptions, file::RecordingReader, input::TraceInput, lines::LineReader,
    reader::TraceReader,
};

use super::{
    convert_recording, convert_sorted, format_by_name,
    sink::{ConvertSink, TraceCompression},
    text_formats::TraceStart,
};
use crate::trace::TraceOutput;

/// Requests are recorded on completion: this many may precede one that arrived earlier.
const WINDOW: usize = 1 << 20;

/// Output format of a live conversion.
#[derive(Clone, Copy, Debug)]
pub struct LiveConversion {
    format: TraceFormat,
    compression: TraceCompression,
}

impl LiveConversion {
    /// The format by the file's name, as in `weir trace convert`. `None` for an unconverted
    /// recording.
    pub fn named(path: &Path) -> Option<Self> {
        let (format, compression) = format_by_name(path);
        let format = format.filter(|format| *format != TraceFormat::Recording)?;
        Some(Self { format, compression })
    }

    /// Returns when `recording` ends and all of it is written, or with an error.
    ///
    /// # Errors
    /// Fails on errors of reading or writing; requests read before are written.
    pub fn write(self, recording: impl Read + Send + 'static, to: File) -> anyhow::Result<()> {
        let cannot = || "cannot be written".to_owned();
        let out = TraceOutput::InPlace(to);
        let mut lines = LineReader::new(TraceInput::new("the recording".to_owned(), Box::new(recording))?);
        let new = |start| ConvertSink::new(self.format, self.compression, out, start).with_context(cannot);
        let (sink, read) = if self.format == TraceFormat::Weir {
            let mut blocks = RecordingReader::default();
            let clock_ns = blocks.clock_ns(&mut lines)?;
            let mut sink = new(TraceStart { clock_ns, with_outcomes: true })?;
            let read = convert_recording(&mut lines, &mut blocks, &mut sink, &cannot);
            (sink, read)
        } else {
            let options = TraceOptions {
                format: Some(TraceFormat::Recording),
                window: WINDOW,
                ..TraceOptions::default()
            };
            let mut source = MergedTraces::new(vec![TraceReader::over(lines, &options)?], None)?;
            let clock_ns = source.clock_ns();
            let mut sink = new(TraceStart { clock_ns, with_outcomes: false })?;
            let read = convert_sorted(&mut source, &mut sink, &cannot);
            (sink, read)
        };
        let left_out = sink.left_out();
        sink.finish().with_context(cannot)?;
        left_out.iter().for_each(|line| print_notice(line));
        read
    }
}
