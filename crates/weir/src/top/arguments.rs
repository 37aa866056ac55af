//! Arguments of `weir top`.

use std::time::Duration;

use clap::Args;
use console::keys;

use crate::client::ControlAddress;

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir top
      All disks and groups, live; `?` shows the keys, `t` changes a limit, `q` quits.
  weir top --qmp unix:/run/weir/tenant.sock --interval 250ms
      Another daemon, four times a second.

Needs a terminal of at least 80×24. `weir status` prints the same without one.";

/// Arguments of `weir top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Interval between updates, at least 100ms
    #[arg(long, value_name = "TIME", value_parser = keys::interval, default_value = "1s")]
    pub(crate) interval: Duration,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: Option<ControlAddress>,
}
