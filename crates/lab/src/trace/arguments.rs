//! Options of every command that reads traces.

use clap::Args;
use recording::{ColumnSpec, TraceFormat, TraceOptions, reader::MAX_WINDOW};

/// Options for reading traces.
#[derive(Debug, Args)]
pub(crate) struct ReadingArgs {
    /// The traces' format [default: seen from how each begins]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<TraceFormat>,
    /// Which columns of a text are what: time=N[:ns|us|ms|s], offset=N[:bytes|sectors|KiB|pages],
    /// length=N[:…], op=N, disk=N, reads=WORD, writes=WORD,
    /// separator=comma|semicolon|tab|blanks, skip=LINES
    #[arg(long, value_name = "KEY=N,…", value_parser = settings::parse::<ColumnSpec>, conflicts_with = "format")]
    pub(crate) columns: Option<ColumnSpec>,
    /// How many records are held back to put them in order, up to 16777216
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..=MAX_WINDOW as i64))]
    pub(crate) window: u32,
    /// Traces keep the distance that they have in the clock of their times, instead of each
    /// beginning at 0 [default: true if all are recordings]
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
