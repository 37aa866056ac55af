//! What `weir top` is told.

use std::time::Duration;

use clap::Args;
use console::keys;

use crate::client::Target;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir top
      Every disk and group, live; `?` shows the keys, `t` changes a limit, `q` ends.
  weir top --qmp unix:/run/weir/tenant.sock --interval 250ms
      Of another daemon, four times a second.

Needs a terminal of 80×24 or more; where there is none, `weir status` says the same.";

/// What `weir top` is told.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// How often to look, from 100ms
    #[arg(long, value_name = "TIME", value_parser = keys::interval, default_value = "1s")]
    pub(crate) interval: Duration,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<Target>,
}
