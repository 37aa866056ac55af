//! Options of `weir report`.

use std::path::PathBuf;

use clap::Args;

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  weir report monday.json
      What was found, as tables.
  weir report monday.json --report monday.html
      The same, and as a page with its charts, which needs nothing else to be looked at.
  weir report monday.json --charts pictures
      Each chart as a picture, for a document.
  weir report monday.json tuesday.json
      Which measures differ, by how much, and whether that is more than noise.
  weir report before.json after.json --fail-on-worse
      The same, for a script: status 1 if something got worse.
  weir report day.recording -o day.html
      Of a recording: each disk's rates and latencies over time, beside the limits that were in force, and when it was throttled.

Result files are those of `weir bench --result`, `weir tune` and `weir simulate --result`; recordings are those of `weir record` and of `record` in the config, several of which are read as one.
A measure differs where chance makes such a difference in less than one of twenty cases. What `weir bench` measures are seconds of one run: how much another run would differ they do not tell. What `weir simulate` computes differs wherever it is not the same.
Exit status: 0 shown, 1 failed, or something got worse and --fail-on-worse is given, 2 wrong use of the command line.";

/// Arguments of `weir report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// A result file, or a recording of `weir record`
    #[arg(value_name = "A.json|RECORDING")]
    pub(crate) a: PathBuf,
    /// A second result, to compare with the first; or a recording that is read with it
    #[arg(value_name = "B.json|RECORDING")]
    pub(crate) b: Option<PathBuf>,
    /// Further recordings
    #[arg(value_name = "RECORDING")]
    pub(crate) more: Vec<PathBuf>,
    /// Draw it on one page, which needs nothing else to be looked at (HTML)
    #[arg(short = 'o', long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// Write each chart to a separate file in this directory (SVG); not of a comparison
    #[arg(long, value_name = "DIR")]
    pub(crate) charts: Option<PathBuf>,
    /// Draw the limits of this file of `weir serve` in the charts of a recording, instead of those
    /// that were in force when it was made
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "fail_on_worse"])]
    pub(crate) config: Option<PathBuf>,
    /// Print a JSON object: medians, their intervals, and differences; not of a recording, for
    /// which `weir trace info --json` does
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit with status 1 if a measure of the second is worse than that of the first
    #[arg(long, requires = "b")]
    pub(crate) fail_on_worse: bool,
}
