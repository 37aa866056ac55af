//! Options of `weir report`.

use std::path::PathBuf;

use clap::Args;

/// Shown below the options.
pub const EXAMPLES: &str = "\
Examples:
  weir report monday.json
      The results as tables.
  weir report monday.json --report monday.html
      Also as a self-contained page with charts.
  weir report monday.json --charts pictures
      Each chart as an SVG file, for a document.
  weir report monday.json tuesday.json
      Which measures differ, by how much, and whether that is more than noise.
  weir report before.json after.json --fail-on-worse
      The same, for a script: status 1 if something got worse.
  weir report day.recording -o day.html
      A recording: each disk's rates and latencies over time, with the limits in force, and its throttled periods.

Result files are those of `weir bench --result`, `weir tune` and `weir simulate --result`; recordings are those of `weir record` and of `record` in the config, several of which are read as one.
A measure differs if chance alone causes such a difference in less than one of twenty cases. Samples of `weir bench` are the seconds of one run and do not show the variation between runs. Results of `weir simulate` are exact, so any difference counts.
Exit status: 0 shown, 1 failed, or something got worse and --fail-on-worse is given, 2 wrong use of the command line.";

/// Arguments of `weir report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// A result file, or a recording of `weir record`
    #[arg(value_name = "A.json|RECORDING")]
    pub(crate) a: PathBuf,
    /// Second result, compared with the first; or a recording that is read together with it
    #[arg(value_name = "B.json|RECORDING")]
    pub(crate) b: Option<PathBuf>,
    /// Further recordings
    #[arg(value_name = "RECORDING")]
    pub(crate) more: Vec<PathBuf>,
    /// Write a self-contained page with charts (HTML)
    #[arg(short = 'o', long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// Write each chart to a separate file in this directory (SVG); not for a comparison
    #[arg(long, value_name = "DIR")]
    pub(crate) charts: Option<PathBuf>,
    /// Draw the limits of this config file of `weir serve` in the charts of a recording, instead of
    /// the recorded ones
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "fail_on_worse"])]
    pub(crate) config: Option<PathBuf>,
    /// Print a JSON object: medians, their intervals, and differences; for a recording use
    /// `weir trace info --json`
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit with status 1 if a measure of the second result is worse than in the first
    #[arg(long, requires = "b")]
    pub(crate) fail_on_worse: bool,
}
