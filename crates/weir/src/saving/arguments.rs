//! Whether the config file gets a change of a running daemon too.

use std::path::PathBuf;

use clap::Args;

/// Where a change is written to.
#[derive(Debug, Args)]
#[command(next_help_heading = "Keeping the change")]
pub(crate) struct SaveArgs {
    /// Also write the change into the config file, for the next start
    #[arg(long)]
    pub(crate) save: bool,
    /// The config file [default: the one that the daemon was started with]
    #[arg(long, value_name = "FILE", requires = "save")]
    pub(crate) config: Option<PathBuf>,
}
