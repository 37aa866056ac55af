//! Options of the measuring and predicting commands for the files of their results.

use std::path::PathBuf;

use clap::Args;

/// Files of the results.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Keeping the results")]
pub(crate) struct ResultArgs {
    /// Save all results to this file (JSON), for `weir report`
    #[arg(long, value_name = "FILE.json")]
    pub(crate) result: Option<PathBuf>,
    /// Write a self-contained page with charts (HTML)
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
}
