//! Options of `weir trace`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use recording::TraceFormat;

use crate::trace::{
    ReadingArgs,
    info::{EXAMPLES as INFO_EXAMPLES, InfoArgs},
};

/// Shown below the commands.
pub const ABOUT: &str = "\
A trace is a list of requests: when, to which disk, which operation. `weir simulate` replays it.";

pub(crate) const CONVERT_EXAMPLES: &str = "\
Examples:
  weir trace convert day.recording day.csv.zst
      A recording as text, with the waiting time and the service time of each request.
  weir trace convert web.spc.gz web.iolog --to fio-v3
      For fio to replay: fio --read_iolog.
  weir trace convert a.csv b.csv both.recording --absolute-time
      Two traces as one recording, at their absolute times.
  weir trace convert vendor.txt vm.csv --columns time=1:us,disk=2,op=3,offset=4:sectors,length=5,skip=1
      Any text with a line for each request.

Without --to the extension of OUTPUT determines the format: .recording, .csv (weir's own), .iolog (fio-v3), .spc; a further .gz or .zst compresses. Requests that a format cannot represent are left out and reported.
Exit status: 0 converted, 1 failed, or a trace was not read to the end, 2 wrong use of the command line.";

/// Actions on traces.
#[derive(Debug, Subcommand)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub enum TraceCommand {
    /// Write traces in another format
    #[command(after_help = CONVERT_EXAMPLES)]
    Convert(ConvertArgs),
    /// Summarize traces; for recordings also waiting times and service times
    #[command(after_help = INFO_EXAMPLES)]
    Info(InfoArgs),
}

/// Arguments of `weir trace convert`.
#[derive(Debug, Args)]
#[command(override_usage = "weir trace convert [OPTIONS] <TRACE>... <OUTPUT>")]
pub struct ConvertArgs {
    /// Traces to merge by time, and last the file to write; - is standard input, or standard output
    /// as the last argument
    // One list for inputs and output: with a separate positional OUTPUT, clap would reject an
    // option between the inputs and OUTPUT.
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Format to write [default: by the extension of OUTPUT]
    #[arg(long, value_name = "FORMAT")]
    pub(crate) to: Option<TraceFormat>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
}

/// Format by the extension of `name`, from which that of a compression was removed.
pub(super) fn format_of(name: &str) -> Option<TraceFormat> {
    let (_, ending) = name.rsplit_once('.')?;
    Some(match ending {
        "recording" => TraceFormat::Recording,
        "csv" => TraceFormat::Weir,
        "iolog" => TraceFormat::FioV3,
        "spc" => TraceFormat::Spc,
        _ => return TraceFormat::from_str(ending, false).ok(),
    })
}
