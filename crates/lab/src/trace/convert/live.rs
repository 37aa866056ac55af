//! Converts a recording while it is being made.

use std::{fs::File, io::Read, path::Path};

use anyhow::Context as _;
use console::say;
use recording::{Format, Merged, Options, file::Blocks, input::Input, lines::Lines, reader::Reader};

use super::{
    as_it_is,
    forms::Start,
    in_order, named,
    sink::{Compression, Sink},
};
use crate::trace::Output;

/// Requests are recorded on completion: this many may precede one that arrived earlier.
const WINDOW: usize = 1 << 20;

/// Output format of a live conversion.
#[derive(Clone, Copy, Debug)]
pub struct Transcript {
    format: Format,
    compression: Compression,
}

impl Transcript {
    /// The format by the file's name, as in `weir trace convert`. `None` for an unconverted
    /// recording.
    pub fn named(path: &Path) -> Option<Self> {
        let (format, compression) = named(path);
        let format = format.filter(|format| *format != Format::Recording)?;
        Some(Self { format, compression })
    }

    /// Returns when `recording` ends and all of it is written, or with an error.
    ///
    /// # Errors
    /// Errors of reading or writing; requests read before are written.
    pub fn write(self, recording: impl Read + Send + 'static, to: File) -> anyhow::Result<()> {
        let cannot = || "cannot be written".to_owned();
        let out = Output::InPlace(to);
        let mut lines = Lines::new(Input::new("the recording".to_owned(), Box::new(recording))?);
        let new = |start| Sink::new(self.format, self.compression, out, start).with_context(cannot);
        let (sink, read) = if self.format == Format::Weir {
            let mut blocks = Blocks::default();
            let clock_ns = blocks.clock_ns(&mut lines)?;
            let mut sink = new(Start { clock_ns, with_outcomes: true })?;
            let read = as_it_is(&mut lines, &mut blocks, &mut sink, &cannot);
            (sink, read)
        } else {
            let options = Options { format: Some(Format::Recording), window: WINDOW, ..Options::default() };
            let mut source = Merged::new(vec![Reader::over(lines, &options)?], None)?;
            let clock_ns = source.clock_ns();
            let mut sink = new(Start { clock_ns, with_outcomes: false })?;
            let read = in_order(&mut source, &mut sink, &cannot);
            (sink, read)
        };
        let left_out = sink.left_out();
        sink.finish().with_context(cannot)?;
        left_out.iter().for_each(|line| say(line));
        read
    }
}
