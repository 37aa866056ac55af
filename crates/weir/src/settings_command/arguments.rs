//! Options that save a change in the config file.

use std::path::PathBuf;

use clap::Args;

/// Options for saving a change.
#[derive(Debug, Args)]
#[command(next_help_heading = "Saving the change")]
pub(crate) struct SaveArgs {
    /// Save the change in the config file too, for the next start
    #[arg(long)]
    pub(crate) save: bool,
    /// The config file [default: the one that the daemon was started with]
    #[arg(long, value_name = "FILE", requires = "save")]
    pub(crate) config: Option<PathBuf>,
}
