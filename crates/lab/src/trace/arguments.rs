//! Options of every command that reads traces.

use clap::Args;
use recording::{ColumnSpec, TraceFormat, TraceOptions, reader::MAX_WINDOW};

/// Options for reading traces.
#[derive(Debug, Args)]
pub(crate) struct ReadingArgs {
    /// Format of the traces [default: detected for each trace]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<TraceFormat>,
    /// Columns of a text format, counted from 1: time=N[:ns|us|ms|s],
    /// offset=N[:bytes|sectors|KiB|pages], length=N[:…], op=N, disk=N, reads=WORD, writes=WORD,
    /// separator=comma|semicolon|tab|blanks, skip=LINES
    #[arg(long, value_name = "KEY=N,…", value_parser = settings::parse::<ColumnSpec>, conflicts_with = "format")]
    pub(crate) columns: Option<ColumnSpec>,
    /// Number of records buffered to sort them by time, up to 16777216
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..=MAX_WINDOW as i64))]
    pub(crate) window: u32,
    /// Keep the traces' absolute times, instead of starting each at 0 [default: true if all are
    /// recordings]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) absolute_time: Option<bool>,
}

impl ReadingArgs {
    pub(crate) fn options(&self) -> TraceOptions {
        TraceOptions {
            format: self.format,
            columns: self.columns.clone(),
            window: self.window as usize,
            absolute_time: self.absolute_time,
            outcomes: false,
        }
    }
}
