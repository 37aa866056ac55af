//! What `weir report` is told.

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

Result files are those of `weir bench --result`, `weir tune` and `weir simulate --result`.
A measure differs where chance makes such a difference in less than one of twenty cases. What `weir bench` measures are seconds of one run: how much another run would differ they do not tell. What `weir simulate` computes differs wherever it is not the same.
Exit status: 0 shown, 1 failed, or something got worse and --fail-on-worse is given, 2 wrong use of the command line.";

/// What `weir report` is told.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// A result file
    #[arg(value_name = "A.json")]
    pub(crate) a: PathBuf,
    /// Another, to compare with the first
    #[arg(value_name = "B.json")]
    pub(crate) b: Option<PathBuf>,
    /// Draw it on one page, which needs nothing else to be looked at (HTML)
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// Draw each chart into a file of its own in this directory (SVG)
    #[arg(long, value_name = "DIR", conflicts_with = "b")]
    pub(crate) charts: Option<PathBuf>,
    /// Print a JSON object: medians, their intervals, and differences
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit with status 1 if a measure of the second is worse than that of the first
    #[arg(long, requires = "b")]
    pub(crate) fail_on_worse: bool,
}
